"""MLA decode kernels that vLLM installs, as peers: its Triton kernel, FlashMLA and FA3 of its wheel."""

from __future__ import annotations

import importlib
import inspect
import os
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch

from staleproof import device
from staleproof.cases.machine import VLLM_TRITON_MLA
from staleproof.device import Provenance
from staleproof.kernels.adapter import RANK, Launch, Peer, Result, new_out, pages_in_use
from staleproof.kernels.vllm_sources import UnavailableError, load
from staleproof.vllm.sources import vllm_file

FA3_LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
FLASHMLA_LIBRARY, FLASHMLA_VARIABLE = "_flashmla_C.abi3.so", "STALEPROOF_FLASHMLA_SO"
# Beside it in the wheel.
FLASHMLA_FP8_LIBRARY = "_flashmla_extension_C.abi3.so"


@cache
def vllm_triton_mla_module() -> types.ModuleType:
    """Execute the Triton MLA source file of an importable vLLM, and return its module.

    The package is not imported; :mod:`staleproof.kernels.vllm_sources` has stand-ins for the rest of it.

    Raises:
        UnavailableError: Triton or such a vLLM is missing, or the file does not load.
    """
    if not device.has_triton():
        raise UnavailableError("Triton is not installed")
    for path in VLLM_TRITON_MLA:
        file = vllm_file(path)
        if file is not None:
            device.load_triton()
            name = f"vllm.{path.removesuffix('.py').replace('/', '.')}"
            return load(file.parents[path.count("/")], name)[0]
    raise UnavailableError("no vllm with a Triton MLA kernel is installed")


def vllm_splits(max_seq_len: int, processors: int) -> int:
    """The parts that vLLM's Triton MLA splits the keys into, from 0.20.0 on; before that always 4.

    Args:
        max_seq_len: longest request of the batch. In a captured graph it is the longest that the
            server takes, whatever the batch holds.
        processors: multiprocessors of the GPU.

    >>> [vllm_splits(tokens, 132) for tokens in (1, 512, 4096, 40000, 1_000_000)]
    [1, 1, 8, 128, 264]
    """
    wanted = max(1, max_seq_len // 512)
    return min(1 << (wanted - 1).bit_length(), 2 * processors)


def _prepare_vllm_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    decode = vllm_triton_mla_module().decode_attention_fwd
    batch, heads = q.shape[:2]
    result = new_out(q, out)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    splits = num_kv_splits or 4
    partial = torch.empty(batch, heads, splits, RANK + 1, dtype=torch.float32, device=q.device)
    cache_4d = kv_cache.unsqueeze(2)
    # vLLM passes these keywords. Older releases do not have all of them.
    extra: dict[str, Any] = {
        "k_scale": torch.ones(1, dtype=torch.float32, device=q.device),
        "v_scale": torch.ones(1, dtype=torch.float32, device=q.device),
        "is_mla": True,
    }
    known = inspect.signature(decode).parameters
    extra = {name: value for name, value in extra.items() if name in known}

    def launch() -> Result:
        decode(
            q,
            cache_4d,
            cache_4d[..., :RANK],
            result,
            lse,
            block_table,
            seq_lens,
            partial,
            splits,
            softmax_scale,
            kv_cache.shape[1],
            **extra,
        )
        return result, lse

    return launch


def _triton_unavailable_reason() -> str | None:
    try:
        vllm_triton_mla_module()
    except UnavailableError as error:
        return str(error)
    return None


def _vllm() -> str:
    return f"vLLM {device.version_of('vllm') or ''}".strip()


def vllm_triton() -> Peer:
    """vLLM's Triton MLA, whether it can run here or not.

    >>> vllm_triton().name.endswith("Triton MLA")
    True
    """
    return Peer(f"{_vllm()} Triton MLA", _triton_unavailable_reason(), _prepare_vllm_triton)


def _needs_sm90() -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    return device.needs_sm90()


def fa3_unavailable_reason() -> str | None:
    """Why FA3 of vLLM's wheel cannot run here, in one line, or ``None``."""
    found = vllm_file(FA3_LIBRARY)
    return _needs_sm90() or (None if found else f"no vllm with {FA3_LIBRARY} is installed")


def _prepare_fa3(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    # As vLLM calls it (v1/attention/backends/mla/flashattn_mla.py): the rotary part is q and k, the
    # latent is v, and its part of the query is q_v.
    attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    result = new_out(q, out)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)

    def launch() -> Result:
        attend(
            q=q[..., RANK:],
            k=kv_cache[..., RANK:].unsqueeze(-2),
            v=kv_cache[..., :RANK].unsqueeze(-2),
            q_v=q[..., :RANK],
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=block_table.shape[1] * kv_cache.shape[1],
            seqused_k=seq_lens,
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=True,
            num_splits=num_kv_splits or 0,
            fa_version=3,
            out=result,
        )
        return result, None

    return launch


def vllm_fa3() -> Peer:
    """FA3 of vLLM's wheel, the kernel behind its FLASH_ATTN_MLA backend, whether it can run here or not.

    >>> vllm_fa3().name.endswith("FA3 MLA")
    True
    """
    return Peer(f"{_vllm()} FA3 MLA", fa3_unavailable_reason(), _prepare_fa3)


def flashmla_library() -> Path | None:
    """vLLM's compiled FlashMLA: the file that the variable names, or that of an installed vLLM."""
    named = os.environ.get(FLASHMLA_VARIABLE)
    found = Path(named) if named else vllm_file(FLASHMLA_LIBRARY)
    return found if found is not None and found.is_file() else None


def _flashmla_unavailable_reason() -> str | None:
    if why := _needs_sm90():
        return why
    if flashmla_library() is None:
        return f"{FLASHMLA_VARIABLE} does not name the {FLASHMLA_LIBRARY} of a vLLM wheel"
    return None


def _prepare_flashmla(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    # As vLLM calls it (third_party/flashmla/flash_mla_interface.py).
    library = flashmla_library()
    assert library is not None
    result = new_out(q, out)
    single = q.ndim == 3
    query = q.unsqueeze(1) if single else q
    # All query tokens' heads are one axis of what it writes.
    target = result.view(q.shape[0], 1, -1, RANK)
    # Its loads follow every entry of the table, so entries after a request's last page are page 0.
    _, used = pages_in_use(block_table, seq_lens, kv_cache.shape[1])
    table = torch.where(used, block_table, 0)
    if kv_cache.dtype == torch.float8_e4m3fn:
        return _prepared_flashmla_fp8(library, query, kv_cache, seq_lens, table, softmax_scale, result)
    torch.ops.load_library(str(library))
    decode = torch.ops._flashmla_C.dense_decode_fwd
    given = query, kv_cache.unsqueeze(2), RANK, seq_lens, table, softmax_scale, not single
    # The first call plans the work of each program from the lengths; vLLM does that once a step.
    *_, plan, splits = decode(*given, None, None, target)

    def launch() -> Result:
        _, lse, *_ = decode(*given, plan, splits, target)
        return result, lse.squeeze(2) if single else None

    return launch


def _prepared_flashmla_fp8(
    library: Path,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
) -> Launch:
    """FlashMLA for an E4M3 cache, whose queries are E4M3 too (v1/attention/ops/flashmla.py).

    Rounding the queries, and the copy to ``out``, are not part of the closure's launch that is timed: the
    kernel returns memory of its own.
    """
    torch.ops.load_library(str(library.with_name(FLASHMLA_FP8_LIBRARY)))
    kernels = torch.ops._flashmla_extension_C
    query, one = q.to(kv_cache.dtype), torch.ones(1, device=q.device)
    plan = kernels.get_mla_decoding_metadata_dense_fp8(seq_lens, q.shape[1] * q.shape[2], 1)
    given = query, kv_cache.unsqueeze(2), RANK, seq_lens, table, softmax_scale, q.shape[1] > 1
    first, _ = kernels.fwd_kvcache_mla_fp8(*given, *plan, one, one)
    out.copy_(first.view(out.shape))

    def launch() -> Result:
        result, _ = kernels.fwd_kvcache_mla_fp8(*given, *plan, one, one)
        return result.view(out.shape), None

    return launch


def flashmla() -> Peer:
    """Dense FlashMLA of vLLM's wheel, whether it can run here or not.

    >>> flashmla().name
    'FlashMLA of vLLM'
    """
    return Peer("FlashMLA of vLLM", _flashmla_unavailable_reason(), _prepare_flashmla)
