"""vLLM's MLA decode kernels: the Triton source, executed unchanged, and those that its wheel compiled."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.kernels.adapter import RANK, Peer, pages_in_use, peer
from staleproof.kernels.vllm_sources import UnavailableError, load
from staleproof.machine import VLLM_TRITON_MLA
from staleproof.vllm.sources import vllm_file

_DECODE = "vllm.v1.attention.ops.triton_decode_attention"
FA3_LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
FLASHMLA_LIBRARY, FLASHMLA_VARIABLE = "_flashmla_C.abi3.so", "STALEPROOF_FLASHMLA_SO"
# In the same folder of the wheel.
FLASHMLA_FP8_LIBRARY = "_flashmla_extension_C.abi3.so"


def decode_mla(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, num_kv_splits=4, **more):
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    parts = torch.empty(*q.shape[:2], num_kv_splits, out.shape[-1] + 1, device=q.device)
    kv = kv_cache.unsqueeze(2)
    given = out, lse, block_table, seq_lens, parts, num_kv_splits, softmax_scale, kv.shape[1]
    return lambda: (decode_attention_fwd(q, kv, kv[..., : out.shape[-1]], *given, **more), (out, lse))[1]


@cache
def vllm_triton_mla_module() -> types.ModuleType:
    """Execute the Triton MLA source file of an importable vLLM, and return its module.

    The package is not imported; :mod:`staleproof.kernels.vllm_sources` has stubs for its other modules.

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


def _triton_unavailable_reason() -> str | None:
    try:
        vllm_triton_mla_module()
    except UnavailableError as error:
        return str(error)
    return None


def _vllm() -> str:
    return f"vLLM {device.version_of('vllm') or ''}".strip()


@wraps(decode_mla)
def _of_installed_source(**arguments: Any) -> Callable[[], Any]:
    module = vllm_triton_mla_module()
    one = torch.ones(1, dtype=torch.float32, device=arguments["q"].device)
    # vLLM passes these. Older releases do not have all of them.
    known = inspect.signature(module.decode_attention_fwd).parameters
    passed = {"k_scale": one, "v_scale": one, "is_mla": True}
    more = {name: value for name, value in passed.items() if name in known}
    # The adapter imports the module under its newest name.
    with mock.patch.dict(sys.modules, {_DECODE: module}):
        return decode_mla(**arguments, **more)


def vllm_triton() -> Peer:
    """vLLM's Triton MLA, whether it can run here or not.

    >>> vllm_triton().name.endswith("Triton MLA")
    True
    """
    return peer(
        f"{_vllm()} Triton MLA", _triton_unavailable_reason(), wraps(decode_mla)(_of_installed_source)
    )


def _needs_sm90() -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    return device.needs_sm90()


def fa3_unavailable_reason() -> str | None:
    """Why FA3 of vLLM's wheel cannot run here, in one line, or ``None``."""
    found = vllm_file(FA3_LIBRARY)
    return _needs_sm90() or (None if found else f"no vllm with {FA3_LIBRARY} is installed")


def mla_fa3(q, kv_cache, block_table, seq_lens, softmax_scale, max_seq_len, out, num_kv_splits=0):
    # As vLLM calls it (v1/attention/backends/mla/flashattn_mla.py): q and k are the rotary parts, v is the
    # latent, and q_v is the latent part of the query.
    attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    k, v = kv_cache[..., RANK:].unsqueeze(-2), kv_cache[..., :RANK].unsqueeze(-2)

    def launch():
        attend(
            q=q[..., RANK:], k=k, v=v, q_v=q[..., :RANK], max_seqlen_q=1, cu_seqlens_q=starts,
            max_seqlen_k=max_seq_len, seqused_k=seq_lens, block_table=block_table,
            softmax_scale=softmax_scale, causal=True, num_splits=num_kv_splits, fa_version=3, out=out,
        )  # fmt: skip
        return out

    return launch


def vllm_fa3() -> Peer:
    """FA3 of vLLM's wheel, the kernel behind its FLASH_ATTN_MLA backend, whether it can run here or not.

    >>> vllm_fa3().name.endswith("FA3 MLA")
    True
    """
    return peer(f"{_vllm()} FA3 MLA", fa3_unavailable_reason(), mla_fa3)


def flashmla_library() -> Path | None:
    """vLLM's compiled FlashMLA: the file that the environment variable names, or an installed vLLM's."""
    named = os.environ.get(FLASHMLA_VARIABLE)
    found = Path(named) if named else vllm_file(FLASHMLA_LIBRARY)
    return found if found is not None and found.is_file() else None


def _flashmla_unavailable_reason() -> str | None:
    if why := _needs_sm90():
        return why
    if flashmla_library() is None:
        return f"{FLASHMLA_VARIABLE} does not name the {FLASHMLA_LIBRARY} of a vLLM wheel"
    return None


def mla_flashmla(q, kv_cache, block_table, seq_lens, softmax_scale, out):
    """As vLLM calls its library (third_party/flashmla/flash_mla_interface.py)."""
    library = flashmla_library()
    assert library is not None
    query = q if q.ndim == 4 else q.unsqueeze(1)
    # The kernel follows every entry of the table, so set the entries after a request's last page to page 0.
    _, used = pages_in_use(block_table, seq_lens, kv_cache.shape[1])
    given = (
        kv_cache.unsqueeze(2),
        RANK,
        seq_lens,
        torch.where(used, block_table, 0),
        softmax_scale,
        q.ndim == 4,
    )
    if kv_cache.dtype == torch.float8_e4m3fn:
        return _flashmla_fp8(library, query, given, out)
    torch.ops.load_library(str(library))
    decode = torch.ops._flashmla_C.dense_decode_fwd
    # In the kernel's output the heads of all query tokens are one axis.
    target = out.view(len(q), 1, -1, RANK)
    # The first call plans the work of each program from the lengths; vLLM does that once a step.
    *_, plan, splits = decode(query, *given, None, None, target)

    def launch():
        _, lse, *_ = decode(query, *given, plan, splits, target)
        return out if q.ndim == 4 else (out, lse)

    return launch


def _flashmla_fp8(library: Path, q: torch.Tensor, given: tuple[Any, ...], out: torch.Tensor) -> Any:
    """FlashMLA for an E4M3 cache, whose queries are E4M3 too (v1/attention/ops/flashmla.py).

    The launch is timed. It includes neither the rounding of the queries nor the copy to ``out``, which is
    needed because the kernel returns its own memory.
    """
    torch.ops.load_library(str(library.with_name(FLASHMLA_FP8_LIBRARY)))
    kernels = torch.ops._flashmla_extension_C
    query, one = q.to(torch.float8_e4m3fn), torch.ones(1, device=q.device)
    plan = kernels.get_mla_decoding_metadata_dense_fp8(given[2], q.shape[1] * q.shape[2], 1)

    def launch() -> torch.Tensor:
        result, _ = kernels.fwd_kvcache_mla_fp8(query, *given, *plan, one, one)
        return result

    out.copy_(launch().view(out.shape))
    return launch


def flashmla() -> Peer:
    """Dense FlashMLA of vLLM's wheel, whether it can run here or not.

    >>> flashmla().name
    'FlashMLA of vLLM'
    """
    return peer("FlashMLA of vLLM", _flashmla_unavailable_reason(), mla_flashmla)
