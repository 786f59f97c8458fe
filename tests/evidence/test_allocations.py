"""The walk over a module tree, and the tracker that the CPU uses."""

import sys
from collections.abc import Mapping

import torch
from torch import nn

from staleproof.evidence import allocations


class Layer(nn.Module):
    """A weight, and two attributes that refer to one buffer."""

    def __init__(self, shared):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.first = {"deep": [shared]}
        self.again = shared


def test_every_way_to_a_tensor_is_walked_and_loops_end():
    buffer = torch.zeros(8)
    tree = nn.ModuleDict({"layers": nn.ModuleList(Layer(buffer) for _ in range(2))})
    tree.itself = [tree]
    tree.loop = {}
    tree.loop["loop"] = tree.loop
    pair = [buffer]
    tree.twice = [pair, pair]
    names = [(name, path) for name, path, _ in allocations.owned_tensors(tree)]
    # Also through a list that is in another one twice, once.
    assert names == [("twice", "")] + [
        (f"layers.*.{attribute}", f"layers.{i}")
        for i in range(2)
        for attribute in ("weight", "first", "again")
    ]
    assert allocations.count_alike(tree) == {"layers.0": 2, "layers.1": 2}


def test_live_allocations_find_their_owner_and_released_ones_are_gone():
    tracker = allocations.DispatchTracker()
    tracker.begin("serve")
    buffer = torch.zeros(64)
    stray = torch.zeros(32)
    own = torch.zeros(16)
    torch.zeros(1024)
    buffer.add_(1)
    tracker.end()
    tree = nn.ModuleList([Layer(buffer), Layer(buffer)])
    tree[1].first["own"] = own
    groups = allocations.group_by_owner(tree, tracker)
    expected = [("*.first", buffer.nbytes + own.nbytes), (allocations.UNOWNED, stray.nbytes)]
    assert [(name, sum(group.by_layer.values())) for (name, _), group in groups.items()] == expected
    # One tensor of an owner that layers share is enough.
    assert groups["*.first", ""].shared
    assert all(a.source.startswith("evidence/test_allocations.py:") for a in tracker.live.values())
    assert (tracker.now, tracker.peak) == (112 * 4, (112 + 1024) * 4)
    del stray
    assert tracker.now == buffer.nbytes + own.nbytes


def test_segments_of_a_graphs_private_pool_are_not_releasable(monkeypatch):
    """The allocator returns an empty segment of its own pool to the device, and none of a graph's.

    Nor one whose freed blocks another stream may still use: they are active, and allocated to nobody.
    """
    segments = [
        {"total_size": total, "allocated_size": used, "active_size": active, "segment_pool_id": pool}
        for total, used, active, pool in (
            *((8, 8, 8, (0, 0)), (4, 0, 0, (0, 0)), (16, 0, 3, (0, 0))),
            *((2, 0, 0, (0, 1)), (1, 0, 0, (3, 0))),
        )
    ]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (52, 100))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    usage = allocations.cuda_usage()
    assert usage == allocations.Usage(used=48, reserved=31, allocated=8, releasable=4)
    assert usage.stuck == 19


def test_globals_of_the_classes_modules_are_owned_by_their_module_and_torchs_are_left_out(monkeypatch):
    kept = torch.zeros(3)
    monkeypatch.setattr(sys.modules[__name__], "KEPT", kept, raising=False)
    found = {
        name: (layer, id(x))
        for name, layer, x in allocations.owned_tensors(Layer(torch.zeros(8)))
        if ":" in name
    }
    assert found == {f"{__name__}:KEPT": (__name__, id(kept))}


def test_the_cuda_tracker_reads_the_allocators_trace(monkeypatch):
    """Two phases: kept, passing and early memory; what was freed between them is not counted."""
    traces, recorded = [[]], []

    def block(address, state="active_allocated", line=7):
        frames = [
            {"filename": torch.__file__, "line": 1, "name": "zeros"},
            {"filename": "/a/b/model.py", "line": line, "name": "forward"},
        ]
        return {"address": address, "state": state, "frames": frames}

    def event(action, address, size=0):
        return {"action": action, "addr": address, "size": size}

    blocks = [block(1), block(2, line=8), block(9, "inactive")]
    segments = [{"blocks": blocks[:1]}, {"blocks": blocks[1:]}]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(
        torch.cuda.memory, "_snapshot", lambda: {"device_traces": traces, "segments": segments}
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *args, **how: recorded.append((args, how))
    )
    tracker = allocations.CudaTracker()
    assert (tracker.now, tracker.peak) == (0, 0)
    tracker.begin("profile")
    # Freeing 5, which was there before, changes nothing; 9 is freed again, and 6 as it is asked for.
    traces[0] = [
        *(event("alloc", 1, 100), event("free_requested", 5), event("alloc", 9, 50)),
        *(event("free_requested", 9), event("free_completed", 1), event("alloc", 2, 20)),
    ]
    tracker.end()
    assert tracker.live == {
        1: allocations.Allocation(100, "profile", "b/model.py:7"),
        2: allocations.Allocation(20, "profile", "b/model.py:8"),
    }
    assert (tracker.now, tracker.peak) == (120, 150)
    how = {"context": "state", "stacks": "python", "clear_history": True}
    assert recorded == [(("all",), how), ((None,), {})]
    # Block 2 is freed before the second phase, and waits for another stream.
    segments[1]["blocks"] = [block(2, "active_pending_free")]
    traces[0] = [event("alloc", 3, 8)]
    tracker.begin("serve")
    assert (tracker.now, tracker.peak) == (100, 100)
    tracker.end()
    expected = {1: (100, "profile"), 3: (8, "serve")}
    assert {key: (a.nbytes, a.phase) for key, a in tracker.live.items()} == expected
    x = torch.zeros(4)
    assert tracker.key(x[1:]) == x.data_ptr()


def test_a_mapping_that_computes_its_items_is_not_asked_for_them():
    """vLLM has such a mapping of activations; building one fails unless a model is being loaded."""

    class OnDemand(Mapping):
        def __init__(self):
            self.made = {"known": torch.ones(2)}

        def __getitem__(self, name):
            raise RuntimeError("no configuration is set")

        def __iter__(self):
            return iter(["gelu"])

        def __len__(self):
            return 1

    tree = nn.Module()
    tree.registry = OnDemand()
    assert [name for name, _, _ in allocations.owned_tensors(tree) if "registry" in name] == ["registry.made"]
