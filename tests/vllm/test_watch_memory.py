"""Memory that the profile did not see: the ledger over a start, and what happens if it fails."""

from types import SimpleNamespace as Space

import pytest
import torch
from made_up import planted
from torch import nn

from staleproof.evidence import AllocationLedger
from staleproof.vllm import watch_memory
from staleproof.vllm.watch_memory import CACHE, CAPTURE, OUTSIDE, POOLS, PROFILE, SINCE, Memory


class Layer(nn.Module):
    def forward(self, decode):
        if decode and not hasattr(self, "out"):
            self.out = torch.zeros(256, 1024)


def start(memory, layers):
    with memory.phase(PROFILE):
        layers[0](decode=False)
    with memory.phase(CACHE):
        cache = [torch.zeros(1024, 1024)]
    with memory.phase(CAPTURE):
        for layer in layers:
            layer(decode=True)
    memory.ready()
    return cache


def test_the_owner_of_what_capture_allocated_is_named_and_the_cache_is_planned():
    layers, now = nn.ModuleList(Layer() for _ in range(3)), [0]
    memory = Memory(AllocationLedger(layers), lambda: now[0])
    start(memory, layers)
    assert memory.latest == {"*.out": 3 * 2**20, POOLS: 0, OUTSIDE: 0, SINCE: 0}
    now[0] = 4096
    assert memory.unprofiled()[SINCE] == 4096
    # A scrape reads what a step has read.
    now[0] = 8192
    assert memory.latest[SINCE] == 4096
    # A block of the start that is given back is no less than nothing.
    now[0] = -512
    assert memory.unprofiled()[SINCE] == 0


def test_the_ledger_is_let_go_when_the_server_is_ready():
    layers = nn.ModuleList([Layer()])
    memory = Memory(AllocationLedger(layers), lambda: 0)
    start(memory, layers)
    assert memory._ledger is None


@pytest.mark.parametrize("where", ["phase", "read"])
def test_a_ledger_that_fails_costs_the_owners_only(monkeypatch, caplog, where):
    layers = nn.ModuleList([Layer()])
    ledger = AllocationLedger(layers)
    monkeypatch.setattr(ledger, where, planted)
    memory = Memory(ledger, lambda: 7)
    start(memory, layers)
    assert caplog.messages == ["staleproof: watch without owners of memory: RuntimeError: planted"]
    assert memory.latest[SINCE] == 0


def test_what_vllm_raises_goes_through_a_phase():
    memory = Memory(AllocationLedger(nn.ModuleList([Layer()])), lambda: 0)
    with pytest.raises(ValueError, match="vLLM's own"), memory.phase(PROFILE):
        raise ValueError("vLLM's own")
    with memory.phase(CACHE):
        pass


def test_without_a_gpu_there_is_nothing_to_record():
    assert watch_memory.of(Space(device="cpu")).unprofiled() == {}


@pytest.mark.parametrize(("pools", "outside"), [(-2, -3), (3, 4)])
def test_what_capture_left_outside_of_tensors_is_kept_and_no_negative_owner(pools, outside):
    class Ledger:
        def read(self):
            found = {PROFILE: (5, 6), CACHE: (7, 8), CAPTURE: (pools, outside)}
            phases = [Space(name=n, pools=p, outside=o) for n, (p, o) in found.items()]
            owners = [Space(name="out", bytes=n) for n in (1, 2)]
            return Space(surprises=owners, phases=phases)

    memory = Memory(Ledger(), lambda: 0)
    memory.ready()
    assert memory.latest == {"out": 3, POOLS: max(0, pools), OUTSIDE: max(0, outside), SINCE: 0}
