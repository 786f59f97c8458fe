"""The walk over a module tree, and the tracker that the CPU uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from staleproof.evidence.allocations import (
    UNOWNED,
    DispatchTracker,
    Usage,
    count_alike,
    group_by_owner,
    owned_tensors,
    size_text,
)


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
    names = [(name, path) for name, path, _ in owned_tensors(tree)]
    assert names == [
        (f"layers.*.{attribute}", f"layers.{i}")
        for i in range(2)
        for attribute in ("weight", "first", "again")
    ]
    assert count_alike(tree) == {"layers.0": 2, "layers.1": 2}


def test_live_allocations_find_their_owner_and_released_ones_are_gone():
    tracker = DispatchTracker()
    tracker.begin("serve")
    buffer = torch.zeros(64)
    stray = torch.zeros(32)
    torch.zeros(1024)
    buffer.add_(1)
    tracker.end()
    tree = nn.ModuleList([Layer(buffer), Layer(buffer)])
    groups = group_by_owner(tree, tracker)
    assert [(name, sum(group.by_layer.values())) for (name, _), group in groups.items()] == [
        ("*.first", buffer.nbytes),
        (UNOWNED, stray.nbytes),
    ]
    assert groups["*.first", ""].shared
    assert all(a.source.startswith("evidence/test_allocations.py:") for a in tracker.live.values())
    assert (tracker.now, tracker.peak) == (96 * 4, (96 + 1024) * 4)
    del stray
    assert tracker.now == buffer.nbytes


@pytest.mark.parametrize(
    ("nbytes", "text", "short"),
    [
        (0, "0 bytes", "0 B"),
        (1024, "1024 bytes", "1024 B"),
        (-3 * 2**19, "-1.50 MiB", "-1.5 MiB"),
        (10 * 2**30, "10.00 GiB", "10 GiB"),
    ],
)
def test_sizes_read_as_in_torchs_out_of_memory_error(nbytes, text, short):
    assert (size_text(nbytes), size_text(nbytes, short=True)) == (text, short)


def test_stuck_memory_is_neither_used_by_tensors_nor_releasable():
    assert Usage(used=9, reserved=8, allocated=4, releasable=1).stuck == 3
