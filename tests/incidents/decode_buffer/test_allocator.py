"""The simulated device counts bytes as torch's caching allocator does."""

import random
import subprocess
import sys

import pytest
import torch

from staleproof.incidents.decode_buffer import allocator
from staleproof.incidents.decode_buffer.allocator import GIB, MIB, SimulatedAllocator, SimulatedMemory


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # What is left over is at most 1 MiB, and so it is not split off.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (256 * MIB, 256 * MIB, 256 * MIB),
    ],
)
def test_request_of_each_size_takes_what_torch_takes(nbytes, allocated, reserved):
    device = SimulatedAllocator(GIB)
    block = device.malloc(nbytes)
    assert (device.allocated, device.reserved) == (allocated, reserved)
    device.free(block)
    assert (device.allocated, device.reserved) == (0, reserved)
    device.empty_cache()
    assert device.reserved == 0


def test_full_device_gives_back_empty_segments_but_no_private_pool():
    device = SimulatedAllocator(100 * MIB)
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


def test_error_has_the_fields_of_torchs_error():
    device = SimulatedAllocator(8 * GIB, outside=GIB)
    device.malloc(5 * GIB)
    device.malloc(3 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.malloc(3 * GIB)
    assert allocator.oom_fields(str(caught.value)) == {
        "tried": "3.00 GiB",
        "total": "8.00 GiB",
        "free": "1.98 GiB",
        "in_use": "6.02 GiB",
        "allocated": "5.00 GiB",
        "unallocated": "17.00 MiB",
    }


@pytest.mark.gpu
def test_random_walk_counts_as_torchs_own_allocator():
    # In a process of its own: segments of other tests would be shared.
    walk = f"import runpy; runpy.run_path({__file__!r})['walk_both_allocators']('cuda')"
    done = subprocess.run([sys.executable, "-c", walk], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def walk_both_allocators(device):
    sizes = [512, 3000, MIB, MIB + 1, 5 * MIB, 10 * MIB, 33 * MIB, 70 * MIB]
    assert torch.cuda.memory_reserved() == 0
    ours, live, draw = SimulatedAllocator(8 * GIB), [], random.Random(0)
    for step in range(400):
        if live and draw.random() < 0.45:
            tensor, block = live.pop(draw.randrange(len(live)))
            del tensor
            ours.free(block)
        else:
            size = draw.choice(sizes) - draw.randrange(200)
            tensor = torch.empty(size, dtype=torch.uint8, device=device)
            live.append((tensor, ours.malloc(size)))
            del tensor
        assert ours.allocated == torch.cuda.memory_allocated(), step
        assert ours.reserved == torch.cuda.memory_reserved(), step


def test_peak_counts_what_was_added_and_a_graph_keeps_its_pool():
    simulated = SimulatedMemory(GIB)

    def use(mib):
        torch.empty(mib * MIB, device="meta", dtype=torch.uint8)

    with simulated:
        kept = torch.empty(3 * MIB, device="meta", dtype=torch.uint8)
        assert simulated.peak_of(lambda: [use(12), use(30), use(20)]) == 30 * MIB
        assert simulated.usage() == (20 * MIB, 20 * MIB, 3 * MIB, 0)
        # An earlier peak is none of this one.
        assert simulated.peak_of(lambda: use(12)) == 12 * MIB
        calls = []
        graph = simulated.capture(lambda: calls.append(use(40)))
        simulated.allocator.empty_cache()
        # Its pool is empty, and no other request gets it.
        assert simulated.usage() == (60 * MIB, 60 * MIB, 3 * MIB, 0)
        graph.replay()
        use(40)
        assert simulated.usage().reserved == 100 * MIB
        with pytest.raises(ZeroDivisionError):
            simulated.capture(lambda: 1 / 0)
        use(40)
        assert simulated.usage().reserved == 100 * MIB
    assert (len(calls), len(kept)) == (1, 3 * MIB)


def test_dead_storage_gives_its_block_back():
    simulated = SimulatedMemory(GIB)
    with simulated:
        x = torch.empty(3, MIB, device="meta", dtype=torch.uint8)
        view = x[1]
        del x
        assert simulated.usage().allocated == 3 * MIB
        del view
    assert simulated.usage().allocated == 0
