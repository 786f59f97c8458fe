"""The calls that ``architectures.py`` compiles: DeepSeek's and Qwen's shapes, every public kernel.

For a process in which :mod:`tools.no_gpu` is installed. All tensors are without data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from staleproof.evidence.board import Board
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla import plan
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax, topk_softplus_sqrt
from staleproof.ops.zero_blocks import BlockZeroer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64
FP8 = torch.float8_e4m3fn


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _mla(
    batch: int,
    heads: int,
    q_len: int = 1,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    tokens: int = 4096,
) -> None:
    """DeepSeek-V3's MLA: latent rank 512 and 64 rotary elements; as many tokens fit into the table."""
    query = (batch, heads, 576) if q_len == 1 else (batch, q_len, heads, 576)
    mla_decode(
        _empty(*query, dtype=dtype),
        _empty(1000, page_size, 576, dtype=cache or dtype),
        _empty(batch, tokens // page_size, dtype=INT32),
        _empty(batch, dtype=INT32),
        softmax_scale=0.1,
    )


def _mla_e4m3(heads: int) -> None:
    # Refused on GPUs that do not convert it.
    if FP8 in plan.cache_dtypes(_empty(1)):
        _mla(256, heads, cache=FP8)


def _clear(q_len: int | None, heads: int, dtype: torch.dtype = BF16, lse: bool = False) -> None:
    """q_len None: requests with different numbers of query tokens."""
    rows = 256 * (q_len or 2)
    clear_empty_rows(
        _empty(rows, heads, 512, dtype=dtype),
        _empty(256, dtype=INT32),
        lse=_empty(rows, heads, dtype=FP32) if lse else None,
        query_start_loc=_empty(257, dtype=INT32) if q_len is None else None,
    )


def _fp8(rows: int, hidden: int, dtype: torch.dtype = BF16, live: str = "all") -> None:
    keywords: dict[str, dict[str, Any]] = {
        "all": {},
        "count": {"live_rows": 1},
        "tensor": {"live_rows": _empty(1, dtype=INT32)},
        "mask": {"live_rows": _empty(rows, dtype=torch.bool)},
        "padding": {"is_padding": _empty(rows, dtype=torch.bool)},
    }
    quantize_fp8_per_tensor(_empty(rows, hidden, dtype=dtype), **keywords[live])


def _topk(
    function: Callable[..., object],
    rows: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = BF16,
    *,
    bias: bool = False,
    padded: bool = False,
    **keywords: Any,
) -> None:
    function(
        _empty(rows, experts, dtype=dtype),
        top_k,
        bias=_empty(experts, dtype=FP32) if bias else None,
        is_padding=_empty(rows, dtype=torch.bool) if padded else None,
        **keywords,
    )


def _nvfp4(rows: int, columns: int, dtype: torch.dtype = BF16, swizzled: bool = True) -> None:
    quantize_nvfp4(_empty(rows, columns, dtype=dtype), _empty(1, dtype=FP32), swizzled=swizzled)


def _zero(page_bytes: int) -> None:
    BlockZeroer([_empty(128, page_bytes, dtype=torch.int8)])


def _distinct(top_k: int, dtype: torch.dtype = FP32, ids: torch.dtype = INT32) -> None:
    distinct_experts(_empty(256, top_k, dtype=dtype), _empty(256, top_k, dtype=ids))


def _watch(rows: int, columns: int, dtype: torch.dtype, top_k: int = 0, padding: bool = False) -> None:
    Board("cuda").count(
        7,
        _empty(rows, top_k or columns, dtype=dtype),
        _empty(rows, top_k, dtype=INT32) if top_k else None,
        _empty(rows, dtype=torch.bool) if padding else None,
    )


def _cases() -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}

    def add(name: str, function: Callable[..., object], *args: Any, **keywords: Any) -> None:
        cases[name] = partial(function, *args, **keywords)

    # Heads of one rank: DeepSeek's 128 at tensor parallelism 1, 4 and 8.
    for heads in (128, 32, 16):
        for batch in (256, 1):
            add(f"mla_decode, batch {batch}, {heads} heads", _mla, batch, heads)
    add("mla_decode, batch 128, 16 heads, 4 query tokens", _mla, 128, 16, 4)
    add("mla_decode, batch 128, 128 heads, 4 query tokens", _mla, 128, 128, 4)
    add("mla_decode, batch 25, 32 heads, 2 query tokens", _mla, 25, 32, 2, tokens=32768)
    add("mla_decode, batch 1, 128 heads, 2 query tokens", _mla, 1, 128, 2)
    add("mla_decode, batch 256, 128 heads, pages of 32", _mla, 256, 128, page_size=32)
    add("mla_decode, batch 1, 128 heads, pages of 16", _mla, 1, 128, page_size=16)
    add("mla_decode, batch 256, 128 heads, pages of 128", _mla, 256, 128, page_size=128)
    add("mla_decode, batch 128, 128 heads, 512 tokens", _mla, 128, 128, tokens=512)
    for heads in (128, 32, 16):
        add(f"mla_decode, batch 256, {heads} heads, E4M3 cache", _mla_e4m3, heads)
    add("mla_decode, batch 256, 128 heads, float16", _mla, 256, 128, dtype=FP16)
    add("mla_decode, batch 256, 128 heads, float32", _mla, 256, 128, dtype=FP32)
    add("mla_decode, batch 1, 16 heads, float32", _mla, 1, 16, dtype=FP32)

    for name, keywords in (
        ("", {}),
        (", lse", {"lse": True}),
        (", FP8", {"dtype": FP8}),
        (", float32", {"dtype": FP32}),
    ):
        add(f"clear_empty_rows, 128 heads{name}", _clear, 1, 128, **keywords)
    add("clear_empty_rows, 16 heads, 4 query tokens, lse", _clear, 4, 16, lse=True)
    add("clear_empty_rows, 128 heads, ragged, lse", _clear, None, 128, lse=True)

    for live in ("all", "count", "tensor", "mask", "padding"):
        add(f"quantize_fp8_per_tensor, 128 x 7168, {live}", _fp8, 128, 7168, live=live)
        add(f"quantize_fp8_per_tensor, 8 x 512, {live}", _fp8, 8, 512, live=live)
    for dtype in (FP16, FP32):
        add(f"quantize_fp8_per_tensor, 128 x 7168, {dtype}", _fp8, 128, 7168, dtype)
        add(f"quantize_fp8_per_tensor, 1 x 7168, {dtype}", _fp8, 1, 7168, dtype)
    add("quantize_fp8_per_tensor, 1 x 2048", _fp8, 1, 2048)
    add("quantize_fp8_per_tensor, 256 x 16384", _fp8, 256, 16384)

    for rows in (1, 256, 1024, 8192):
        add(f"topk_softmax, Qwen3, {rows} tokens", _topk, topk_softmax, rows, 128, 8, renormalize=True)
        add(f"topk_softmax, Qwen3, {rows} tokens, float32", _topk, topk_softmax, rows, 128, 8, FP32)
        add(
            f"grouped_topk, DeepSeek, {rows} tokens",
            *(_topk, grouped_topk, rows, 256, 8, FP32),
            bias=True,
            padded=rows == 256,
            num_expert_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
        )
        for function in (topk_sigmoid, topk_softplus_sqrt):
            add(f"{function.__name__}, 256 experts, {rows} tokens", _topk, function, rows, 256, 8, bias=True)
    add("topk_softmax, 512 experts, 256 tokens", _topk, topk_softmax, 256, 512, 10, renormalize=True)
    add("topk_softmax, 1024 experts, 256 tokens", _topk, topk_softmax, 256, 1024, 32, FP32)
    add("topk_softmax, Qwen3, padding", _topk, topk_softmax, 256, 128, 8, padded=True, topk_ids_dtype=INT64)
    add("topk_softmax, bias", _topk, topk_softmax, 256, 128, 8, FP32, bias=True, renormalize=True)

    for dtype in (BF16, FP16, FP32):
        for rows in (1, 33, 256, 512):
            add(f"quantize_nvfp4, {rows} x 7168, {dtype}", _nvfp4, rows, 7168, dtype)
    add("quantize_nvfp4, 33 x 7184, padded columns", _nvfp4, 33, 7184)
    add("quantize_nvfp4, 256 x 7168, linear", _nvfp4, 256, 7168, swizzled=False)

    add("BlockZeroer, aligned", _zero, 64 * 576 * 2)
    add("BlockZeroer, unaligned", _zero, 4099)

    for top_k in (6, 8):
        for dtype in (FP32, BF16):
            add(f"distinct_experts, top {top_k}, {dtype}", _distinct, top_k, dtype)
    add("distinct_experts, top 8, int64", _distinct, 8, ids=INT64)

    for dtype in (FP32, FP16, BF16, FP8, torch.float8_e5m2):
        add(f"watch, 256 x 8192, {dtype}", _watch, 256, 8192, dtype)
    add("watch, 50 x 2048, own mask", _watch, 50, 2048, BF16, padding=True)
    add("watch, router, top 6", _watch, 256, 6, FP32, 6)
    add("watch, router, top 8, own mask", _watch, 50, 8, BF16, 8, True)
    return {name.replace("torch.", ""): case for name, case in cases.items()}


CASES = _cases()
