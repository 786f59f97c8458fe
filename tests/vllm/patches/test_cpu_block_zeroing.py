"""The patch cpu_block_zeroing on the CPU runner and the CPU backend of released vLLMs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace as Space
from typing import Any

import environment
import pytest
import torch

from staleproof.kernels.vllm_sources import executed
from staleproof.vllm.patches import kv_reuse as patch
from staleproof.vllm.plugin import patches
from staleproof.vllm.standing import registry

CPU_ATTENTION, BACKEND = "vllm.v1.attention.backends.cpu_attn", "vllm.v1.attention.backend"
# The first dimension of a cache is two, for keys and values, up to 0.22.1, and the blocks from 0.23.0 on.
RELEASES = ("0.19.1", "0.22.1", "0.24.0")
BLOCKS, HEADS, SIZE, HEAD, RATIO = 6, 2, 16, 8, 2


class FullAttentionSpec:
    block_size, num_kv_heads, head_size = RATIO * SIZE, HEADS, HEAD


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    block_size = RATIO * SIZE


@contextlib.contextmanager
def runner(version: str) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """A CPU runner of a release, over caches of ones; a block of the scheduler is two of a cache."""
    folder = environment.sources(version) / "vllm"
    with executed(folder, patch.CPU_RUNNER, CPU_ATTENTION, BACKEND):
        vars(importlib.import_module("vllm.tracing"))["instrument"] = lambda **options: (
            lambda function: function
        )
        backend = importlib.import_module(CPU_ATTENTION).CPUAttentionBackend
        shape = backend.get_kv_cache_shape(RATIO * BLOCKS, SIZE, HEADS, HEAD)
        caches = {name: torch.ones(shape) for name in ("full", "mla", "state", "later")}
        layers = {name: Space(kv_cache=cache) for name, cache in caches.items()}
        layers |= {"shares": layers["full"], "none yet": Space(kv_cache=[])}
        groups = [
            (FullAttentionSpec(), 0, ["full", "shares", "none yet", "of another worker"]),
            (MLAAttentionSpec(), 1, ["mla"]),
            (MambaSpec(), 2, ["state"]),
            # A group behind those with sizes is no cache of this worker.
            (FullAttentionSpec(), 3, ["later"]),
        ]
        groups = [
            Space(kv_cache_spec=spec, kv_cache_group_id=number, layer_names=names, backend=backend)
            for spec, number, names in groups
        ]
        made = object.__new__(importlib.import_module(patch.CPU_RUNNER).CPUModelRunner)
        made.compilation_config = Space(static_forward_context=layers)
        made.cache_config = Space(cache_dtype="auto")
        made._kernel_block_sizes = [SIZE] * 3
        made._kv_cache_spec_attn_group_iterator = lambda: iter(groups)
        yield made, caches


def zeroed(cache: torch.Tensor) -> list[int]:
    """The blocks of a cache that hold zeros alone; keys and values are one dimension more up to 0.22.1."""
    dim = cache.shape.index(RATIO * BLOCKS)
    return [block for block in range(RATIO * BLOCKS) if not cache.select(dim, block).any()]


@pytest.mark.parametrize("version", environment.also(*RELEASES))
def test_new_blocks_of_full_attention_are_zeroed_and_no_others(version):
    fix = patches()["cpu_block_zeroing"]
    assert fix.applies_to(version)
    for applied in (False, True, False):
        with runner(version) as (made, caches), fix.applied(version) if applied else contextlib.nullcontext():
            made._zero_block_ids([1, 4])
            made._zero_block_ids(block_ids=[])
        assert not registry.out_of_service()
        found = {name: zeroed(cache) for name, cache in caches.items()}
        new = [2, 3, 8, 9] if applied else []
        assert found == {"full": new, "mla": new, "state": [], "later": []}


def test_runner_of_another_form_makes_the_patch_step_back(caplog):
    """vLLM's own function, which does nothing, has run, and later steps go on without the patch."""
    with runner("0.24.0") as (made, caches), patches()["cpu_block_zeroing"].applied("0.24.0"):
        del made._kernel_block_sizes
        for _ in range(2):
            assert made._zero_block_ids([1]) is None
        assert [*registry.out_of_service()] == ["cpu_block_zeroing"]
    (line,) = [one.getMessage() for one in caplog.records if "cpu_block_zeroing" in one.getMessage()]
    assert "_kernel_block_sizes" in line
    assert zeroed(caches["full"]) == []
