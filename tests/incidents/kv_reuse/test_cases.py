"""What the verdicts of incident 4 rest on, and that a broken remedy changes them."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from staleproof.cases.words import NOT_RUN
from staleproof.incidents.kv_reuse import cases, scene
from staleproof.incidents.kv_reuse.broken import OnChange
from staleproof.incidents.kv_reuse.host_memory import HostMemory
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, Step


def test_zeroing_on_change_takes_a_block_once_for_each_way_from_mamba_to_attention():
    def step(attention, mamba):
        return Step((), {ATTENTION: attention, MAMBA: mamba}, (), (), ())

    pick = OnChange()
    steps = [step([1], [2, 3]), step([2], [1]), step([2, 1], []), step([1, 3], [2])]
    assert [pick(one) for one in steps] == [[], [2], [1], [3]]


@pytest.mark.parametrize(("traced", "seen"), [(8_200, True), (500, False), (0, False)])
def test_a_list_is_seen_if_its_own_bytes_are_and_not_a_few_of_others(traced, seen):
    assert HostMemory(1000, 8_056, traced, gc_sees=False).tracemalloc_sees is seen


@pytest.mark.parametrize(
    "ask",
    [
        cases.served,
        cases.cured_late,
        lambda load, device: cases.served_with(load, scene.ZeroNewBlocks, device),
        lambda load, device: cases.wrong_on(load, scene.ZeroNewBlocks, device),
        lambda load, device: [seen.numbers for seen in cases._policies(load).tell(device).values()],
        lambda load, device: cases._sick(load).tell(device),
    ],
)
def test_a_load_is_served_on_the_device_that_is_asked_about(device, ask):
    nowhere, here = (scene.brief(where, steps=20) for where in ("nowhere", device))
    assert ask(nowhere, device) == ask(here, device)


def test_libraries_of_another_release_are_a_reason_not_to_ask():
    said = cases._sleep_and_wake(True)
    why = "vLLM's cumem_allocator does not load: No module named 'vllm'"
    assert (said.verdict, said.note) == (NOT_RUN, why)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    ("zeroed", "verdict", "number"),
    [
        ([3, 5], "right", 16),
        ([], "wrong, silent", 0),
        ([3, 5, 6], "wrong, silent", 24),
        ([3, 6], "wrong, silent", 16),
        (None, "illegal memory access", None),
    ],
)
def test_a_zeroer_is_asked_after_sleep_mode_has_taken_the_memory(
    monkeypatch, outside, zeroed, verdict, number
):
    happened = []

    class Zeroer:
        def __init__(self, caches):
            self.caches = caches
            happened.append(("zeroer", self))

        def zero(self, ids):
            happened.append((ids, self))
            if zeroed is None:
                raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore")
            for cache in self.caches:
                cache[zeroed] = 0

    @contextlib.contextmanager
    def pool(tag):
        happened.append(tag)
        yield
        happened.append("end")

    memory = SimpleNamespace(
        use_memory_pool=pool,
        sleep=lambda offload_tags: happened.append(("sleep", offload_tags)),
        wake_up=lambda: happened.append("wake up"),
    )
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(get_instance=lambda: memory))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setattr(cases, "BlockZeroer", Zeroer)
    found = cases._sleep_and_wake(outside)
    assert (found.verdict, found.numbers) == (verdict, {} if zeroed is None else {"zeroed": number})
    assert zeroed is not None or found.note == "CUDA error: an illegal memory access"
    first, *second = (each[1] for each in happened if each[0] == "zeroer")
    last = second[0] if outside else first
    assert len(second) == outside
    expected = ["kv_cache", ("zeroer", first), "end", *(("zeroer", one) for one in second)]
    assert happened == [*expected, ("sleep", ()), "wake up", ([3, 5], last)]


def test_a_late_cure_tells_which_later_requests_are_hurt_through_cached_blocks_alone(monkeypatch):
    """In 9 steps the cure begins at 6: requests 4 to 7 begin later, and 3 has begun before."""
    owners = torch.tensor([[1, 2, 3]] * 6 + [[3, 4, 5], [3, 6, 7], [3, 6, 7]])
    suspects = {3: [True], 4: [True, True], 5: [True, False], 6: [False]}
    monkeypatch.setattr(cases, "trace_of", lambda scene: SimpleNamespace(owners=owners))
    monkeypatch.setattr(
        cases, "judge", lambda scene, remedy: SimpleNamespace(corrupted={*suspects}, served=0)
    )
    log = SimpleNamespace(explain=lambda r: [SimpleNamespace(via=via) for via in suspects[r]])
    monkeypatch.setattr(cases, "tenancies", lambda scene, served: log)
    found = cases.cured_late(cases.brief("cpu", steps=9), "cpu")
    assert found.verdict == cases.NAN
    assert found.numbers == {"corrupted": 3, "began": 4, "through_cached_blocks_alone": 1}
