"""FA3 of vLLM's wheel as an MLA decode: the kernel behind vLLM's FLASH_ATTN_MLA backend."""

from __future__ import annotations

import importlib

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.harness.peers import RANK, Launch, Peer, Result
from staleproof.vllm.sources import vllm_file

LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"


def unavailable_reason() -> str | None:
    """Why it cannot run here, in one line, or ``None``."""
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if device.machine().capability != "sm_90":
        return f"needs an SM90 GPU (H100, H200); this is {device.machine().capability}"
    return None if vllm_file(LIBRARY) else f"no vllm with {LIBRARY} is installed"


def _prepare(
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
    result = torch.empty(*q.shape[:-1], RANK, dtype=q.dtype, device=q.device) if out is None else out
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


def peer() -> Peer:
    """The kernel, whether it can run here or not."""
    version = device.version_of("vllm") or ""
    return Peer(f"vLLM {version} FA3 MLA".replace("  ", " "), unavailable_reason(), _prepare)
