"""How many kernels an operation compiles while only batch, tokens or page count change.

A kernel that compiles in the middle of serving stops a step for seconds. Tile sizes depend on the number
of rows in a few operations; each such size is compiled once, and the counts below are those.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from staleproof import (
    clear_empty_rows,
    grouped_topk,
    mla_decode,
    quantize_fp8_per_tensor,
    quantize_nvfp4,
    topk_sigmoid,
    topk_softmax,
)
from staleproof.ops.bad_logits import find_bad_logits
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.topk import topk_softplus_sqrt
from staleproof.ops.zero_blocks import BlockZeroer

pytestmark = pytest.mark.gpu
# One, primes, powers of two, and what is no multiple of 16.
SIZES = (1, 2, 7, 16, 31, 64, 100, 128, 250, 256)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _lengths(batch: int, length: int = 1) -> torch.Tensor:
    return torch.full((batch,), length, device="cuda", dtype=torch.int32)


def _flags(rows: int) -> torch.Tensor:
    return torch.empty(8 * rows, dtype=torch.uint8, device="cuda")


def _bias() -> torch.Tensor:
    return torch.zeros(256, device="cuda")


def _distinct(rows: int) -> None:
    distinct_experts(
        torch.rand(rows, 8, device="cuda"), torch.ones(rows, 8, dtype=torch.int32, device="cuda")
    )


def _decode(pages: int, tokens: int) -> None:
    """A batch of 4 with another number of pages in the pool and in the table, and other lengths."""
    table = torch.randint(0, pages, (4, -(-tokens // 64)), device="cuda", dtype=torch.int32)
    mla_decode(_bf16(4, 128, 576), _bf16(pages, 64, 576), table, _lengths(4, tokens), softmax_scale=0.1)


# (one call for each size, how many kernels they may compile together)
OPERATIONS: dict[str, tuple[Callable[[int], object], int]] = {
    "clear_empty_rows": (lambda n: clear_empty_rows(_bf16(n, 16, 512), _lengths(n)), 1),
    # One row is a launch, more are two.
    "quantize_fp8_per_tensor": (lambda n: quantize_fp8_per_tensor(_bf16(n, 7168), live_rows=n // 2), 3),
    # Up to 16, 64 and 256 rows, and 128 and 256 have no padding.
    "quantize_nvfp4": (lambda n: quantize_nvfp4(_bf16(n, 7168), torch.ones(1, device="cuda")), 4),
    "topk_softmax": (lambda n: topk_softmax(_bf16(n, 256), 8), 1),
    "topk_sigmoid": (lambda n: topk_sigmoid(_bf16(n, 256), 8, bias=_bias()), 1),
    "topk_softplus_sqrt": (lambda n: topk_softplus_sqrt(_bf16(n, 256), 6, bias=_bias()), 1),
    "grouped_topk": (
        lambda n: grouped_topk(_bf16(n, 256), 8, num_expert_group=8, topk_group=4, bias=_bias()),
        1,
    ),
    "distinct_experts": (_distinct, 1),
    "find_bad_logits": (lambda n: find_bad_logits(_bf16(n, 32000 + n), _flags(n)), 1),
}


@pytest.fixture(name="compiled")
def compiled_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the name of each kernel that Triton compiles, or loads from its cache on disk."""
    import triton

    found: list[str] = []

    def note(**given: object) -> None:
        found.append(str(getattr(given["fn"], "name", given["fn"])))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_batch_sizes_compile_nothing(name: str, compiled: list[str]) -> None:
    call, most = OPERATIONS[name]
    for size in SIZES:
        call(size)
    assert len(compiled) <= most, compiled
    before = len(compiled)
    for size in SIZES[::-1]:
        call(size + 1 if size not in (16, 64, 256, 128) else size)
    assert len(compiled) - before <= 1, compiled


def test_other_lengths_and_page_counts_compile_nothing(compiled: list[str]) -> None:
    _decode(100, 1000)
    before = len(compiled)
    for pages, tokens in ((101, 1000), (128, 999), (3000, 1024), (77, 1001)):
        _decode(pages, tokens)
    assert len(compiled) == before, compiled


def test_any_list_of_blocks_and_any_pool_compile_nothing(compiled: list[str]) -> None:
    # A zeroer does not keep its caches alive.
    caches = [_bf16(64, 4096)]
    BlockZeroer(caches).zero([1])
    before = len(compiled)
    for blocks in (17, 64, 100, 1000):
        caches = [_bf16(blocks, 4096), _bf16(blocks, 4096)]
        zeroer = BlockZeroer(caches)
        for count in (1, 2, 16):
            zeroer.zero([*range(1, count + 1)])
            zeroer.zero(torch.arange(count, device="cuda"))
    assert len(compiled) == before, compiled
