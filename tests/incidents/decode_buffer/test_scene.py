"""The budget of a serving engine, and the allocator arithmetic under it."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from staleproof.incidents.decode_buffer.scene import (
    DIES,
    GIB,
    LIVES,
    MIB,
    Attention,
    CachingAllocator,
    Experts,
    Server,
    ServerConfig,
    SimulatedMemory,
    decode_out_bytes,
    kv_cache_bytes,
    oom_fields,
)

TINY = ServerConfig(total_bytes=GIB, layers=3, batch=8, tokens=32, heads=2, rank=32, weight_bytes=64 * MIB)


class KeptPerLayer(Attention):
    """A buffer a layer, as in the incident."""

    kept: torch.Tensor | None = None

    def output(self, q, micro_batch):
        if self.kept is None or len(self.kept) < len(q):
            self.kept = torch.zeros_like(q)
        return self.kept[: len(q)]


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        # What is left over is at most 1 MiB, and so it is not split off.
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),
        (256 * MIB, 256 * MIB, 256 * MIB),
    ],
)
def test_requests_are_rounded_as_torch_rounds_them(asked, allocated, reserved):
    device = CachingAllocator(GIB)
    block = device.malloc(asked)
    assert (device.allocated, device.reserved) == (allocated, reserved)
    device.free(block)
    assert (device.allocated, device.reserved) == (0, reserved)
    device.empty_cache()
    assert device.reserved == 0


def test_freed_neighbours_join_and_the_best_fit_is_taken():
    device = CachingAllocator(GIB)
    blocks = [device.malloc(4 * MIB) for _ in range(5)]
    assert device.reserved == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2]):
        device.free(block)
    # Three joined neighbours hold what none of them alone could.
    whole = device.malloc(12 * MIB)
    assert (whole.segment, device.reserved) == (blocks[0].segment, 20 * MIB)
    device.free(whole)
    device.free(blocks[0])
    device.malloc(30 * MIB)
    assert device.malloc(2 * MIB).segment is blocks[4].segment


def test_segments_go_back_before_a_request_fails_and_private_pools_stay():
    device = CachingAllocator(100 * MIB)
    device.free(device.malloc(60 * MIB))
    assert device.usage().releasable == 60 * MIB
    kept = device.malloc(90 * MIB)
    assert device.reserved == 90 * MIB
    device.free(kept)
    device.empty_cache()
    device.free(device.malloc(60 * MIB, pool=1))
    assert device.usage() == (60 * MIB, 60 * MIB, 0, 0)
    with pytest.raises(torch.OutOfMemoryError):
        device.malloc(50 * MIB)


def test_a_pinned_fragment_keeps_its_segment():
    device = CachingAllocator(100 * MIB)
    large = device.malloc(40 * MIB)
    device.free(large)
    device.malloc(16 * MIB)
    assert device.reserved == 40 * MIB
    device.empty_cache()
    assert (device.reserved, device.usage().releasable) == (40 * MIB, 0)


def test_the_error_says_what_torchs_error_says():
    device = CachingAllocator(8 * GIB, outside=GIB)
    device.malloc(5 * GIB)
    device.malloc(3 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.malloc(3 * GIB)
    assert oom_fields(str(caught.value)) == {
        "tried": "3.00 GiB",
        "total": "8.00 GiB",
        "free": "1.98 GiB",
        "in_use": "6.02 GiB",
        "allocated": "5.00 GiB",
        "unallocated": "17.00 MiB",
    }


@pytest.mark.gpu
def test_the_allocator_counts_as_torchs_own_does():
    # In a process of its own: segments that other tests hold would be shared.
    walk = f"import runpy; runpy.run_path({__file__!r})['walk_both_allocators']('cuda')"
    done = subprocess.run([sys.executable, "-c", walk], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def walk_both_allocators(device):
    sizes = [512, 3000, MIB, MIB + 1, 5 * MIB, 10 * MIB, 33 * MIB, 70 * MIB]
    assert torch.cuda.memory_reserved() == 0
    ours, held, draw = CachingAllocator(8 * GIB), [], random.Random(0)
    for step in range(400):
        if held and draw.random() < 0.45:
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            ours.free(block)
        else:
            size = draw.choice(sizes) - draw.randrange(200)
            tensor = torch.empty(size, dtype=torch.uint8, device=device)
            held.append((tensor, ours.malloc(size)))
            del tensor
        assert ours.allocated == torch.cuda.memory_allocated(), step
        assert ours.reserved == torch.cuda.memory_reserved(), step


def test_the_kv_cache_gets_what_the_profile_left():
    assert kv_cache_bytes(1000, 0.9, 400, 50, 30) == 420
    simulated = SimulatedMemory(TINY.total_bytes)
    server = Server(TINY, simulated, KeptPerLayer)
    weights = simulated.usage().allocated
    server.profile()
    # Nothing but the workspace of 32 tokens and the query of one layer was in flight.
    assert server.peak_bytes >= TINY.workspace_bytes
    assert server.kv_bytes == int(0.9 * GIB) - weights - server.peak_bytes
    assert all(layer.attn.kept is None for layer in server.model.layers)
    server.allocate_kv_cache()
    server.warm_up()
    assert all(layer.attn.kept is not None for layer in server.model.layers)


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


def test_a_profile_that_leaves_no_kv_cache_is_refused():
    config = replace(TINY, total_bytes=84 * MIB)
    with pytest.raises(ValueError, match=r"utilisation x total of more than weights 64\.00 MiB"):
        Server(config, SimulatedMemory(config.total_bytes)).profile()


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


@pytest.mark.parametrize(
    ("attention", "batch", "verdict", "died_in"),
    [(Attention, 2048, LIVES, None), (KeptPerLayer, 2048, DIES, "serve"), (KeptPerLayer, 1024, LIVES, None)],
)
def test_the_reported_server(attention, batch, verdict, died_in):
    config = ServerConfig(batch=batch)
    outcome = Server(config, SimulatedMemory(config.total_bytes), attention).start()
    assert (outcome.verdict, outcome.died_in) == (verdict, died_in)
    if died_in:
        fields = oom_fields(outcome.error)
        assert (fields["tried"], fields["total"]) == ("3.94 GiB", "184.00 GiB")
    kept = 61 * config.decode_out_bytes if attention is KeptPerLayer else 0
    assert outcome.kept_bytes == kept
    assert outcome.taken_bytes() >= kept


def test_dead_storages_give_their_blocks_back():
    simulated = SimulatedMemory(GIB)
    with simulated:
        x = torch.empty(3, MIB, device="meta", dtype=torch.uint8)
        view = x[1]
        del x
        assert simulated.usage().allocated == 3 * MIB
        del view
    assert simulated.usage().allocated == 0


def test_the_workspace_is_freed_and_the_model_computes(device):
    config = replace(TINY, weight_bytes=1)
    experts = Experts(config, device)
    x = torch.arange(8, dtype=config.dtype, device=device)
    assert torch.equal(experts(x, False), x)
    attn = Attention(config, device)
    seq_lens = torch.ones(8, dtype=torch.int32, device=device)
    assert torch.equal(attn(x, seq_lens), x)
    assert torch.equal(attn(x, None), torch.zeros_like(x))
