"""FlashInfer's MLA decode kernels as peers, and the keywords of its calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.kernels.adapter import RANK, ROPE, Launch, Peer, Result, new_out, pages_in_use

WORKSPACE_BYTES = 128 * 2**20


def flashinfer_plan_args(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
) -> dict[str, Any]:
    """Return the keywords for ``BatchMLAPagedAttentionWrapper.plan``.

    ``q`` is (batch, heads, 576) or (batch, q_len, heads, 576).

    >>> q, kv_cache = torch.ones(2, 16, 576), torch.ones(3, 64, 576)
    >>> block_table = torch.tensor([[2, 1], [0, 0]], dtype=torch.int32)
    >>> plan = flashinfer_plan_args(q, kv_cache, block_table, torch.tensor([65, 64]), 0.1)
    >>> plan["kv_indptr"].tolist(), plan["kv_indices"].tolist()
    ([0, 2, 3], [2, 1, 0])
    """
    counts, used = pages_in_use(block_table, seq_lens, kv_cache.shape[1])
    q_len = q.shape[1] if q.ndim == 4 else 1
    return {
        "qo_indptr": torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q_len,
        "kv_indptr": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        "kv_indices": block_table[used].int(),
        "kv_len_arr": seq_lens,
        "num_heads": q.shape[-2],
        "head_dim_ckv": RANK,
        "head_dim_kpe": ROPE,
        "page_size": kv_cache.shape[1],
        "causal": q_len > 1,
        "sm_scale": softmax_scale,
        "q_data_type": q.dtype,
        "kv_data_type": kv_cache.dtype,
    }


def flashinfer_run_args(
    backend: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the keywords for ``BatchMLAPagedAttentionWrapper.run``.

    Only the CUTLASS backend takes lengths and block table here; the others took them in ``plan``.
    """
    # Query tokens of all requests, one after another.
    rows = q.flatten(0, -3)
    args: dict[str, Any] = {
        "q_nope": rows[..., :RANK],
        "q_pe": rows[..., RANK:],
        "ckv_cache": kv_cache[..., :RANK],
        "kpe_cache": kv_cache[..., RANK:],
        "out": None if out is None else out.flatten(0, -3),
    }
    if backend == "cutlass":
        return args | {"kv_len": seq_lens, "page_table": _whole_tiles(block_table, kv_cache)}
    lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=q.device)
    return args | {"lse": lse, "return_lse": True, "return_lse_base_on_e": True}


def _whole_tiles(block_table: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """The block table up to a whole tile of 128 keys, without which FlashInfer's SM100 kernels refuse it.

    The entries added name page 0.
    """
    return torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % (128 // kv_cache.shape[1])))


def flashinfer_trtllm_args(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the keywords for ``trtllm_batch_decode_with_kv_cache_mla``, as vLLM passes them.

    ``q`` is (batch, heads, 576) or (batch, q_len, heads, 576).
    """
    block_table = _whole_tiles(block_table, kv_cache)
    return {
        "query": q if q.ndim == 4 else q.unsqueeze(1),
        "kv_cache": kv_cache.unsqueeze(1),
        "workspace_buffer": workspace,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "block_tables": block_table,
        "seq_lens": seq_lens,
        "max_seq_len": block_table.shape[1] * kv_cache.shape[1],
        "out": out,
        "bmm1_scale": softmax_scale,
        "bmm2_scale": 1.0,
    }


def _workspace(q: torch.Tensor) -> torch.Tensor:
    # trtllm-gen keeps semaphores in the workspace, and they must start at zero.
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _prepare_flashinfer(backend: str) -> Callable[..., Launch]:
    def prepare(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        num_kv_splits: int | None,
        out: torch.Tensor | None,
    ) -> Launch:
        mla = importlib.import_module("flashinfer.mla")
        wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(q), backend=backend)
        result = new_out(q, out)
        run_args = flashinfer_run_args(backend, q, kv_cache, block_table, seq_lens, result)
        if backend != "cutlass":
            # The plan reads the lengths on the host, so it cannot be part of the captured launch.
            wrapper.plan(**flashinfer_plan_args(q, kv_cache, block_table, seq_lens, softmax_scale))

        def launch() -> Result:
            wrapper.run(**run_args)
            lse = run_args.get("lse")
            return result, lse if lse is None else lse.view(q.shape[:-1])

        return launch

    return prepare


def _prepare_trtllm(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache_mla
    # vLLM passes no out and FlashInfer allocates it with torch.empty. Here the caller may pass one,
    # so that a test knows what an unwritten row contained before.
    result = new_out(q, out)
    target = result if q.ndim == 4 else result.unsqueeze(1)
    args = flashinfer_trtllm_args(q, kv_cache, block_table, seq_lens, softmax_scale, _workspace(q), target)

    def launch() -> Result:
        decode(**args)
        return result, None

    return launch


def _unavailable_reason(*, sm100: bool) -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if why := device.flashinfer_missing():
        return why
    if sm100 and not device.is_sm100():
        return f"needs an SM100 GPU (B200, GB200); this is {device.machine().capability}"
    return None


def flashinfer_peers() -> dict[str, Peer]:
    """Its kernels by their short keys, whether they can run here or not.

    >>> print(*flashinfer_peers())
    flashinfer_fa2 flashinfer_fa3 flashinfer_trtllm flashinfer_cutlass
    """
    flashinfer = f"FlashInfer {device.version_of('flashinfer-python') or ''}".strip()
    fa2, sm100 = (_unavailable_reason(sm100=needed) for needed in (False, True))
    fa3 = fa2 or device.needs_sm90()
    return {
        "flashinfer_fa2": Peer(f"{flashinfer} MLA fa2", fa2, _prepare_flashinfer("fa2")),
        "flashinfer_fa3": Peer(f"{flashinfer} MLA fa3", fa3, _prepare_flashinfer("fa3")),
        "flashinfer_trtllm": Peer(f"{flashinfer} trtllm-gen MLA", sm100, _prepare_trtllm),
        "flashinfer_cutlass": Peer(f"{flashinfer} CUTLASS MLA", sm100, _prepare_flashinfer("cutlass")),
    }
