"""The faulty MLA decodes and quantisers, and upstream's remedies, each named after what it does.

The kernels share one small Triton body and differ in one thing each. They behave as the upstream
kernels do; their code is not upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from staleproof import device
from staleproof.incidents.mla_padding.scene import KV_LORA_RANK, SCALE, AttentionInputs

device.load_triton()

import triton
import triton.language as tl

# Called as staleproof.mla_decode is.
Kernel = Callable[..., tuple[torch.Tensor, Any]]
# What a kernel does with a row that has no keys.
_LEAVE, _DIVIDE, _ZERO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _faulty_mla_kernel(
    q_ptr, kv_ptr, table_ptr, seq_lens_ptr, out_ptr, lse_ptr,
    softmax_scale, heads, q_len, max_pages,
    PAGE: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr,
    EMPTY: tl.constexpr, MASK_V: tl.constexpr, FOLLOW_ALL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // q_len
    seq_len = tl.load(seq_lens_ptr + request)
    # The q_len tokens are causal. All rows of an empty request stay empty.
    limit = tl.where(seq_len > 0, seq_len - q_len + (row % q_len).to(tl.int32) + 1, 0)
    if EMPTY == _LEAVE and limit <= 0:
        return

    head = tl.arange(0, HEADS).to(tl.int64) + tl.program_id(1) * HEADS
    some = head < heads
    rank = tl.arange(0, RANK)
    rope = tl.arange(0, ROPE)
    q_row = q_ptr + (row * heads + head[:, None]) * (RANK + ROPE)
    q_nope = tl.load(q_row + rank[None, :], mask=some[:, None], other=0.0)
    q_rope = tl.load(q_row + RANK + rope[None, :], mask=some[:, None], other=0.0)

    if UPCAST:
        q_nope, q_rope = q_nope.to(tl.float32), q_rope.to(tl.float32)

    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, RANK), tl.float32)
    for start in range(0, limit, TILE):
        token = start + tl.arange(0, TILE)
        valid = token < limit
        page_index = token // PAGE
        if FOLLOW_ALL:
            # Reads the page of every table entry in the tile's range, even past the request's last page.
            followed = page_index < max_pages
        else:
            followed = page_index * PAGE < limit
        page = tl.load(table_ptr + request * max_pages + page_index, mask=followed, other=0)
        kv_row = kv_ptr + (page.to(tl.int64) * PAGE + token % PAGE) * (RANK + ROPE)
        loaded = valid if MASK_V else followed
        latent = tl.load(kv_row[:, None] + rank[None, :], mask=loaded[:, None], other=0.0)
        k_rope = tl.load(kv_row[:, None] + RANK + rope[None, :], mask=loaded[:, None], other=0.0)
        if UPCAST:
            latent, k_rope = latent.to(tl.float32), k_rope.to(tl.float32)
        score = tl.dot(q_nope, tl.trans(latent)) + tl.dot(q_rope, tl.trans(k_rope))
        score = tl.where(valid[None, :], score * softmax_scale, float("-inf"))
        # NaN is replaced first, because tl.max of NaN differs between Triton's versions, and between its
        # interpreter and its compiler.
        tile_best = tl.max(tl.where(score == score, score, float("-inf")), axis=1)
        new_best = tl.where(tile_best > best, tile_best, best)
        shrink = tl.exp(best - new_best)
        p = tl.exp(score - new_best[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        # Past the limit p is 0, and the product relies on 0 * v = 0. If v is NaN, 0 * v is NaN.
        acc = acc * shrink[:, None] + tl.dot(p.to(latent.dtype), latent)
        best = new_best

    if EMPTY == _ZERO and limit <= 0:
        total = total + 1.0
    # 0 / 0 for a row without keys.
    result = acc / total[:, None]
    out_row = out_ptr + (row * heads + head[:, None]) * RANK + rank[None, :]
    tl.store(out_row, result.to(out_ptr.dtype.element_ty), mask=some[:, None])
    lse = tl.where(limit > 0, best + tl.log(total), float("-inf"))
    tl.store(lse_ptr + row * heads + head, lse, mask=some)


def _launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    *,
    empty: int,
    mask_v: bool = True,
    tile: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, heads = (q.shape[0], 1, q.shape[1]) if q.ndim == 3 else q.shape[:3]
    if out is None:
        out = q.new_empty(*q.shape[:-1], KV_LORA_RANK)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    page = kv_cache.shape[1]
    _faulty_mla_kernel[(batch * q_len, triton.cdiv(heads, 16))](
        q,
        kv_cache,
        block_table,
        seq_lens,
        out,
        lse,
        softmax_scale,
        heads,
        q_len,
        block_table.shape[1],
        PAGE=page,
        TILE=tile or 16,
        HEADS=16,
        RANK=KV_LORA_RANK,
        ROPE=q.shape[-1] - KV_LORA_RANK,
        EMPTY=empty,
        MASK_V=mask_v,
        FOLLOW_ALL=tile is not None,
        # The interpreter's dot of bf16 operands multiplies their bit patterns.
        UPCAST=device.interpreting(),
        num_warps=4,
        num_stages=1,
    )
    return out, lse


def empty_row_not_written(q, kv_cache, block_table, seq_lens, *, softmax_scale, out=None, lse=None):
    """Returns at once for a row without keys, so that its output keeps what the memory held before.

    Stands for CUTLASS SM100 MLA and, at small ``max_seq_len``, FlashInfer trtllm-gen
    (vLLM #37442; FlashInfer #4975). Same arguments and results as ``mla_decode``.
    """
    return _launch(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, empty=_LEAVE.value)


def zero_by_zero_written(q, kv_cache, block_table, seq_lens, *, softmax_scale, out=None, lse=None):
    """Divides by a softmax sum that is 0 for a row without keys, and writes the NaN.

    Stands for vLLM's Triton MLA, ``_fwd_kernel_stage2`` (vLLM #57017), and FlashInfer trtllm-gen at
    large ``max_seq_len`` (FlashInfer #2883). Clearing the buffer before the launch does not help.
    Same arguments and results as ``mla_decode``.
    """
    return _launch(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, empty=_DIVIDE.value)


def tail_masked_by_multiplication(q, kv_cache, block_table, seq_lens, *, softmax_scale, out=None, lse=None):
    """Reads whole pages and multiplies values past ``seq_len`` by 0: a NaN there makes the output NaN.

    Stands for FA3 (flash-attention #1974, open; vLLM 0.20.2's FA3 does so). Same arguments and results
    as ``mla_decode``.
    """
    return _launch(
        q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, empty=_ZERO.value, mask_v=False
    )


def block_table_not_padded(q, kv_cache, block_table, seq_lens, *, softmax_scale, out=None, lse=None):
    """Reads 128-token tiles, with the page of every block-table entry in their range, used or not.

    Stands for the 128-row tiles of the SM100 kernels over pages of 32 or 64 (vLLM #37442). Entries
    past the last page must be valid page ids, or this reads out of bounds, and their pages must hold
    no NaN. Same arguments and results as ``mla_decode``.
    """
    return _launch(
        q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, empty=_ZERO.value, mask_v=False, tile=128
    )


KERNELS: dict[str, Kernel] = {
    kernel.__name__: kernel
    for kernel in (
        empty_row_not_written, zero_by_zero_written, tail_masked_by_multiplication, block_table_not_padded
    )
}  # fmt: skip


def quantise_amax_torch_max(
    x: torch.Tensor, live_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-tensor fp8 over *all* rows with ``torch.max``: one NaN anywhere makes every row NaN.

    Stands for vLLM ``QuantFP8.forward_native``, which torch.compile inlines when the custom op is
    off. Args: x (rows, hidden); ``live_rows`` is ignored, which is the fault. Returns e4m3 values
    and an fp32 scale (1,).
    """
    scale = (x.abs().max().float() / 448.0).reshape(1)
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def quantise_amax_fmax(
    x: torch.Tensor, live_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-tensor fp8 over all rows with fmax in amax and clamp: the scale ignores NaN, and NaN turns finite.

    Stands for vLLM's CUDA op ``dynamic_scaled_fp8_quant`` (``segmented_max_reduction_strided``
    starts at 0 and uses fmaxf; the conversion clamps with fmin, then fmax, so that a NaN becomes the largest
    number). It hides NaN, and *finite* stale rows still decide the scale of all rows. Arguments and results
    as above.
    """
    largest = x.new_full((), 448.0, dtype=torch.float32)
    scale = (x.abs().float().fmax(0 * largest).amax() / largest).reshape(1)
    scaled = (x.float() / scale).fmin(largest).fmax(-largest)
    return scaled.to(torch.float8_e4m3fn), scale


QUANTISERS = {"torch.max": quantise_amax_torch_max, "fmax": quantise_amax_fmax}


class NoRemedy:
    """New, uninitialised output memory for every call, as in vLLM before 0.18.0 and from 0.20.0 on.

    Remedies override :meth:`output` or :meth:`after`.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, a: AttentionInputs) -> torch.Tensor:
        """(batch, q_len, heads, 512)."""
        out = self.output(a)
        self.kernel(a.q, a.kv_cache, a.block_table, a.seq_lens, softmax_scale=SCALE, out=out)
        self.after(a, out)
        return out

    def output(self, a: AttentionInputs) -> torch.Tensor:
        """Memory for the output."""
        return a.q.new_empty(*a.q.shape[:-1], KV_LORA_RANK)

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Change the output after the launch, in place."""


class ZerosOncePerLayer(NoRemedy):
    """One zeroed buffer a layer, allocated at the first call and grown when a batch is larger.

    vLLM #37442 (0.18.0 to 0.19.1). It is zeroed only once, so rows keep what an earlier step wrote. ``free``
    is called with the old buffer when a larger one replaces it; a captured graph still writes to the old one.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.buffers: dict[int, torch.Tensor] = {}
        self.free: Callable[[torch.Tensor], object] = lambda _: None

    def output(self, a: AttentionInputs) -> torch.Tensor:
        """The first rows of the layer's buffer."""
        return self.buffer_of(a.layer, a.q)[: a.q.shape[0]]

    def buffer_of(self, key: int, q: torch.Tensor) -> torch.Tensor:
        """The buffer of layer ``key``, large enough for the output of ``q`` (batch, q_len, heads, 576)."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape[0] < q.shape[0] or buffer.dtype != q.dtype:
            if buffer is not None:
                self.free(buffer)
            self.buffers[key] = torch.zeros(*q.shape[:-1], KV_LORA_RANK, dtype=q.dtype, device=q.device)
        return self.buffers[key]


class OneSharedBuffer(ZerosOncePerLayer):
    """One such buffer for all layers, so that a layer also finds the stale rows of other layers.

    It takes less memory. vLLM #37799 (closed).
    """

    def output(self, a: AttentionInputs) -> torch.Tensor:
        """The first rows of the buffer."""
        return self.buffer_of(0, a.q)[: a.q.shape[0]]


class ClearsNothing(NoRemedy):
    """After the launch, zeroes ``out[num_decodes:]``: an empty slice, since num_decodes is padded.

    The branch of vLLM #37442 for ``q_len > 1``.
    """

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Zero the rows from ``num_decodes`` on."""
        out[a.num_decodes :].zero_()


class PadWithSeqLenOne(NoRemedy):
    """Gives every padding row one token, which it reads from the null block 0.

    SGLang #1779; vLLM #38436 (closed). The row is written, with whatever the null block holds.
    """

    def __call__(self, a: AttentionInputs) -> torch.Tensor:
        """(batch, q_len, heads, 512)."""
        seq_lens = torch.where(a.seq_lens > 0, a.seq_lens, a.q.shape[1])
        return super().__call__(replace(a, block_table=a.block_table.clamp(min=0), seq_lens=seq_lens))


class MaskedFill(NoRemedy):
    """``masked_fill_`` of the empty rows after the launch: correct, but it reads and writes every row.

    As TensorRT-LLM #15383 does for Helix context parallelism.
    """

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Clear the empty rows."""
        zero_where(out, a.seq_lens == 0)


def zero_where(out: torch.Tensor, requests: torch.Tensor) -> None:
    """Zero the rows of ``out`` (batch, q_len, heads, 512) of some requests, a (batch,) bool mask."""
    out.masked_fill_(requests[:, None, None, None], 0.0)
