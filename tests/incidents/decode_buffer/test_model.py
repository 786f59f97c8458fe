"""The sizes of a server, and a model that allocates what a large one does."""

from dataclasses import replace

import pytest
import torch

from staleproof.incidents.decode_buffer.allocator import GIB, MIB
from staleproof.incidents.decode_buffer.model import Attention, Experts, ServerConfig, decode_out_bytes

TINY = ServerConfig(total_bytes=GIB, layers=3, batch=8, tokens=32, heads=2, rank=32, weight_bytes=64 * MIB)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"utilisation": 0.0}, r"utilisation: expected a number in \(0, 1\], got 0.0"),
        ({"utilisation": 1.1}, r"utilisation: expected a number in \(0, 1\], got 1.1"),
        ({"utilisation": float("nan")}, r"utilisation: expected a number in \(0, 1\], got nan"),
        ({"total_bytes": 70 * MIB}, r"total: expected utilisation x total of more than weights"),
        ({"layers": 0}, "layers: expected at least 1, got 0"),
        ({"weight_bytes": -1}, "weight_bytes: expected at least 0, got -1"),
        ({"batch": 64}, "batch: expected at most 32 tokens, got 64"),
    ],
)
def test_bad_sizes_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(TINY, **changes)


def test_both_readings_of_the_report():
    assert decode_out_bytes(2048, 128) == 256 * MIB
    assert 61 * decode_out_bytes(2048, 128) == int(15.25 * GIB)
    assert decode_out_bytes(1024, 128) == 128 * MIB
    assert round(61 * decode_out_bytes(1024, 128) / GIB, 3) == 7.625
    assert decode_out_bytes(2048, 16) == 32 * MIB
    assert ServerConfig().workspace_bytes / GIB == 3.9375
    # A tenth of 184 GiB and the peak that was set aside, less the buffers.
    left = ServerConfig().headroom_bytes(int(15.25 * GIB))
    assert round(left / GIB, 2) == round(18.4 + 3.9375 - 15.25, 2)


def test_the_workspace_is_freed_and_the_model_computes(device):
    config = replace(TINY, weight_bytes=1)
    experts = Experts(config, device)
    x = torch.arange(8, dtype=config.dtype, device=device)
    assert torch.equal(experts(x, False), x)
    attn = Attention(config, device)
    seq_lens = torch.ones(8, dtype=torch.int32, device=device)
    assert torch.equal(attn(x, seq_lens), x)
    assert torch.equal(attn(x, None), torch.zeros_like(x))
