"""The hooks of incident 4's patches on plain objects; tests/vllm has them in the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.vllm.patches import kv_reuse as patch


class MLAAttentionSpec:
    """Known by its name alone."""


class FullAttentionSpec:
    """Recorded by vLLM itself."""


def _manager(spec: object) -> SimpleNamespace:
    blocks = [SimpleNamespace(block_id=i) for i in (4, 5, 8, 9)]
    return SimpleNamespace(
        kv_cache_spec=spec,
        new_block_ids=[],
        req_to_blocks={"r": blocks},
        num_cached_block={"r": 2},
        _staleproof_record=True,
    )


@pytest.mark.parametrize(
    ("spec", "external", "recorded"),
    [(MLAAttentionSpec(), 32, [8, 9]), (MLAAttentionSpec(), 0, []), (FullAttentionSpec(), 32, [])],
)
def test_blocks_for_external_tokens_are_recorded_behind_the_prefix_hits(spec, external, recorded):
    manager = _manager(spec)
    assert patch._record_external(None, (manager, "r", [], 16, external), {}) is None
    assert manager.new_block_ids == recorded
    manager = _manager(spec)
    names = {"num_external_computed_tokens": external, "request_id": "r"}
    patch._record_external(None, (manager,), names)
    assert manager.new_block_ids == recorded


@pytest.mark.parametrize("zeroing", [False, True])
def test_the_list_is_drained_where_nobody_else_takes_it(zeroing):
    taken = []
    manager = SimpleNamespace(take_new_block_ids=lambda: taken.append("taken"))
    scheduler = SimpleNamespace(needs_kv_cache_zeroing=zeroing, kv_cache_manager=manager)
    assert patch._drain("scheduled", (scheduler,), {}) == "scheduled"
    assert taken == ([] if zeroing else ["taken"])


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("spec", [MLAAttentionSpec(), FullAttentionSpec()])
def test_blocks_of_mla_groups_are_recorded_if_somebody_takes_them(spec, taken):
    manager = _manager(spec)
    coordinator = SimpleNamespace(single_type_managers=[manager])
    scheduler = SimpleNamespace(
        needs_kv_cache_zeroing=taken, kv_cache_manager=SimpleNamespace(coordinator=coordinator)
    )
    patch._allow_recording((scheduler,), {})
    blocks = [SimpleNamespace(block_id=7)]
    assert patch._record_new(blocks, (manager, "r", 16), {}) is blocks
    assert manager.new_block_ids == ([7] if taken and isinstance(spec, MLAAttentionSpec) else [])


def test_mla_layers_are_zeroed_beside_vllms_own(device):
    caches = {name: torch.ones(8, 4, 16, device=device) for name in ("mla.0", "mla.1", "skipped", "full")}
    layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
    specs = MLAAttentionSpec(), FullAttentionSpec()
    groups = [
        SimpleNamespace(kv_cache_spec=spec, kv_cache_group_id=index, layer_names=names)
        for index, (spec, names) in enumerate(
            zip(specs, (["mla.0", "mla.1", "skipped"], ["full"]), strict=True)
        )
    ]
    specs[0].block_size = 8
    zeroer, seen = SimpleNamespace(), []
    # vLLM passes an iterator and reads it; two of the cache's blocks are one of the scheduler's.
    args, kwargs = patch._keep_groups((zeroer, iter(groups), [4, 4], "auto", {"skipped"}, layers), {})
    seen += list(args[1])
    patch._add_zeroer(None, args, kwargs)
    patch._zero_mla(None, (zeroer, [2, 2]), {})
    patch._zero_mla(None, (zeroer, []), {})
    assert seen == groups
    zeroed = {name: [i for i, block in enumerate(cache) if not block.any()] for name, cache in caches.items()}
    assert zeroed == {"mla.0": [4, 5], "mla.1": [4, 5], "skipped": [], "full": []}


def test_a_dummy_run_that_raises_leaves_no_trace():
    runner = SimpleNamespace()
    buffer = torch.arange(8)
    result = {0: buffer[:4]}, {}

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
    zeroer = SimpleNamespace(_ids_pinned=torch.zeros(4, dtype=torch.int64), pin_memory=False)
    first = zeroer._ids_pinned
    assert patch._fresh_staging((zeroer, [1]), {}) is None
    assert zeroer._ids_pinned is not first
    assert zeroer._ids_pinned.shape == first.shape
    zeroer._ids_pinned = None
    patch._fresh_staging((zeroer, [1]), {})
    assert zeroer._ids_pinned is None
