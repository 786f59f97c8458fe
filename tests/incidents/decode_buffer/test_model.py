"""The sizes of a server, and what its profile run leaves."""

from dataclasses import replace

import pytest

from staleproof.incidents.decode_buffer.allocator import GIB, MIB, SimulatedMemory
from staleproof.incidents.decode_buffer.model import ServerConfig, decode_out_bytes, kv_cache_bytes
from staleproof.incidents.decode_buffer.scene import Server

TINY = ServerConfig(total_bytes=GIB, layers=3, batch=8, tokens=32, heads=2, rank=32, weight_bytes=64 * MIB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"utilisation": 1.1}, r"utilisation: expected a number in \(0, 1\], got 1.1"),
        ({"utilisation": float("nan")}, r"utilisation: expected a number in \(0, 1\], got nan"),
        ({"total_bytes": 70 * MIB}, r"total: expected utilisation x total of more than weights"),
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"batch": 64}, "batch: expected at most 32 tokens, got 64"),
    ],
)
def test_bad_size_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_reported_server_has_the_reported_sizes():
    assert decode_out_bytes(2048, 128) == 256 * MIB
    assert ServerConfig().workspace_bytes / GIB == 3.9375
    # A tenth of 184 GiB and the peak that was set aside, less the buffers.
    left = ServerConfig().headroom_bytes(int(15.25 * GIB))
    assert round(left / GIB, 2) == round(18.4 + 3.9375 - 15.25, 2)
    assert kv_cache_bytes(1000, 0.9, 400, 50, 30) == 420


def test_profile_that_leaves_no_kv_cache_is_refused():
    config = replace(TINY, total_bytes=84 * MIB)
    with pytest.raises(ValueError, match=r"utilisation x total of more than weights 64\.00 MiB"):
        Server(config, SimulatedMemory(config.total_bytes)).start()
