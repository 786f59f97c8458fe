"""The hooks of incident 4's patches on plain objects; tests/vllm has them in the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace as Space

import pytest
import torch

from staleproof.ops import zero_segments
from staleproof.vllm import single
from staleproof.vllm.patches import kv_reuse as patch


class _OfType:
    """vLLM's manager of one kind of layer, as far as new ids go."""

    def __init__(self) -> None:
        self.new_block_ids: list[int] = []
        self.taken = 0

    def take_new_block_ids(self) -> list[int]:
        ids, self.new_block_ids, self.taken = self.new_block_ids, [], self.taken + 1
        return ids


def _scheduler(zeroing: bool) -> tuple[Space, list[_OfType]]:
    managers = [_OfType(), _OfType()]
    manager = Space(
        coordinator=Space(single_type_managers=managers),
        take_new_block_ids=lambda: [i for each in managers for i in each.take_new_block_ids()],
    )
    return Space(needs_kv_cache_zeroing=zeroing, kv_cache_manager=manager), managers


def test_ids_that_nobody_reads_are_kept_in_no_step():
    scheduler, managers = _scheduler(zeroing=False)
    for _ in range(3):
        for each in managers:
            each.new_block_ids.extend(i for i in (1, 2))
            each.new_block_ids.append(3)
        assert patch._drain("result", (scheduler,), {}) == "result"
        assert [len(each.new_block_ids) for each in managers] == [0, 0]
    # Once, and then vLLM's allocation does not even run its generator.
    assert [each.taken for each in managers] == [1, 1]
    managers[0].new_block_ids.extend(1 // 0 for _ in range(1))
    # Another manager: its list has ids, and is vLLM's.
    scheduler.kv_cache_manager = _scheduler(zeroing=False)[0].kv_cache_manager
    other = scheduler.kv_cache_manager.coordinator.single_type_managers
    other[1].new_block_ids.append(4)
    patch._drain(None, (scheduler,), {})
    assert other[1].new_block_ids == []


def test_ids_to_zero_are_left_to_schedule():
    scheduler, managers = _scheduler(zeroing=True)
    managers[1].new_block_ids.extend([1, 2])
    patch._drain(None, (scheduler,), {})
    assert scheduler.kv_cache_manager.take_new_block_ids() == [1, 2]


class MLAAttentionSpec:
    """Known by its name alone."""


class FullAttentionSpec:
    """Recorded by vLLM itself."""


def _manager(spec: object) -> Space:
    blocks = [Space(block_id=i) for i in (4, 5, 8, 9)]
    of_requests = {"req_to_blocks": {"r": blocks}, "num_cached_block": {"r": 2}}
    return Space(kv_cache_spec=spec, new_block_ids=[], _staleproof_record=True, **of_requests)


@pytest.mark.parametrize(
    ("spec", "external", "recorded"),
    [
        (MLAAttentionSpec(), 32, [8, 9]),
        (MLAAttentionSpec(), 1, [8, 9]),
        (MLAAttentionSpec(), 0, []),
        (FullAttentionSpec(), 32, []),
    ],
)
def test_blocks_for_external_tokens_are_recorded_behind_the_prefix_hits(spec, external, recorded):
    manager = _manager(spec)
    assert patch._record_external("result", (manager, "r", [], 16, external), {}) == "result"
    assert manager.new_block_ids == recorded
    manager = _manager(spec)
    names = {"num_external_computed_tokens": external, "request_id": "r"}
    patch._record_external(None, (manager,), names)
    assert manager.new_block_ids == recorded


@pytest.mark.parametrize(
    ("spec", "taken"), [(MLAAttentionSpec(), True), (MLAAttentionSpec(), False), (FullAttentionSpec(), True)]
)
def test_blocks_of_mla_groups_are_recorded_if_somebody_takes_them(monkeypatch, spec, taken):
    """Only a manager that records has hooks, and has them once."""
    manager, hooked = _manager(spec), []
    monkeypatch.setattr(single, "hook", lambda *given: hooked.append(given))
    coordinator = Space(single_type_managers=[manager])
    scheduler = Space(needs_kv_cache_zeroing=taken, kv_cache_manager=Space(coordinator=coordinator))
    for _ in range(3):
        patch._allow_recording((scheduler,), {})
    records = taken and isinstance(spec, MLAAttentionSpec)
    assert hooked == [("mla_recording", manager)] * records
    blocks = [Space(block_id=7)]
    assert patch._record_new(blocks, (manager, "r", 16), {}) is blocks
    assert manager.new_block_ids == [7] * records


@pytest.mark.parametrize("listed", [True, False], ids=["a list up to 0.18.1", "a tensor"])
def test_mla_layers_are_zeroed_beside_vllms_own(device, listed):
    caches = {name: torch.ones(8, 4, 16, device=device) for name in ("mla.0", "mla.1", "skipped", "full")}
    layers = {name: Space(kv_cache=[cache] if listed else cache) for name, cache in caches.items()}
    specs = MLAAttentionSpec(), FullAttentionSpec()
    groups = [
        Space(kv_cache_spec=specs[0], kv_cache_group_id=0, layer_names=["mla.0", "mla.1", "skipped"]),
        Space(kv_cache_spec=specs[1], kv_cache_group_id=1, layer_names=["full"]),
    ]
    specs[0].block_size = 8
    zeroer, seen = Space(), []
    # vLLM passes an iterator and reads it; two of the cache's blocks are one of the scheduler's.
    args, kwargs = patch._keep_groups((zeroer, iter(groups), [4, 4], "auto", {"skipped"}, layers), {})
    seen += list(args[1])
    assert patch._add_zeroer("made", args, kwargs) == "made"
    assert patch._zero_mla("zeroed", (zeroer, [2, 2]), {}) == "zeroed"
    assert patch._zero_mla("zeroed", (zeroer, []), {}) == "zeroed"
    assert patch._zero_mla("zeroed", (Space(), [2]), {}) == "zeroed"
    # A group behind those with sizes is no cache of this worker.
    none, names = Space(), {"attn_groups_iter": groups, "kernel_block_sizes": []}
    args, kwargs = patch._keep_groups((none,), names)
    patch._add_zeroer(None, args, kwargs | {"runner_only_attn_layers": (), "static_forward_context": layers})
    assert not hasattr(none, "_staleproof_zeroer")
    assert seen == groups
    zeroed = {name: [i for i, block in enumerate(cache) if not block.any()] for name, cache in caches.items()}
    assert zeroed == {"mla.0": [4, 5], "mla.1": [4, 5], "skipped": [], "full": []}


def test_a_dummy_run_that_raises_leaves_no_trace():
    runner = Space()
    buffer = torch.arange(8)
    result = {0: buffer[:4]}, {}
    assert patch._no_slots(result, (runner,), {}) is result
    assert buffer.tolist() == [*range(8)]

    def dummy_run():
        with patch._dummy_run((runner, 4), {}):
            patch._no_slots(result, (runner,), {})
            raise KeyError

    with pytest.raises(KeyError):
        dummy_run()
    assert buffer.tolist() == [-1] * 8
    buffer.copy_(torch.arange(8))
    patch._no_slots(result, (runner,), {})
    assert buffer.tolist() == [*range(8)]
    # Before there is a cache, vLLM hands out none.
    with patch._dummy_run((runner, 4), {}):
        assert patch._no_slots((None, None), (runner,), {}) == (None, None)


def test_each_call_stages_through_memory_of_its_own():
    zeroer = Space(_ids_pinned=torch.zeros(4, dtype=torch.int64), pin_memory=False)
    first = zeroer._ids_pinned
    assert patch._fresh_staging((zeroer, [1]), {}) is None
    assert zeroer._ids_pinned is not first
    assert zeroer._ids_pinned.shape == first.shape
    zeroer._ids_pinned = None
    patch._fresh_staging((zeroer, [1]), {})
    assert zeroer._ids_pinned is None


def _zeroer(cache: torch.Tensor) -> Space:
    """vLLM's zeroer over one cache with K and V outermost."""
    segments = torch.tensor([part.data_ptr() for part in cache], dtype=torch.uint64)
    words = cache.stride(1) * cache.element_size() // 4
    # It says cuda, and interpreted kernels write to the host.
    return Space(_meta=(segments, words, 4, len(cache)), device=Space(type="cuda"))


def _zeroed(cache: torch.Tensor) -> list[int]:
    return [block for block in range(cache.shape[1]) if not cache[:, block].any()]


@pytest.mark.skipif(not zero_segments.INTERPRET, reason="the cache is on the host")
def test_the_replacement_zeroes_what_vllm_would():
    cache = torch.ones(2, 8, 16, 4)
    zeroer = _zeroer(cache)
    assert patch._zero_through_ring((zeroer, [6, 3]), {}) is None
    assert _zeroed(cache) == [3, 6]
    kept = zeroer._staleproof_segments[1]
    patch._zero_through_ring((zeroer,), {"block_ids": [1]})
    assert _zeroed(cache) == [1, 3, 6]
    assert zeroer._staleproof_segments[1] is kept
    # Another table: vLLM has allocated the caches again.
    other = torch.ones(2, 8, 16, 4)
    zeroer._meta = _zeroer(other)._meta
    patch._zero_through_ring((zeroer, [2]), {})
    assert (_zeroed(cache), _zeroed(other)) == ([1, 3, 6], [2])


@pytest.mark.parametrize(
    ("ids", "change"),
    [
        ([], {}),
        # What our kernel refuses, as it refuses a stream that is capturing.
        ([3, 0], {}),
        ([*range(1, 9000)], {}),
        ([3], {"_meta": None}),
        ([3], {"device": Space(type="cpu")}),
    ],
)
def test_what_the_replacement_does_not_take_is_left_to_vllm(ids, change):
    cache = torch.ones(2, 8, 16, 4)
    zeroer = _zeroer(cache)
    vars(zeroer).update(change)
    if zero_segments.INTERPRET:
        assert patch._zero_through_ring((zeroer, ids), {}) is NotImplemented
    assert _zeroed(cache) == []
