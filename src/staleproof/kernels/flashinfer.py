"""FlashInfer's MLA decode kernels, as peers of ours, and its paged prefill."""

from __future__ import annotations

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.kernels.adapter import Peer, peer


def mla(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, backend):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    wrapper = BatchMLAPagedAttentionWrapper(space, backend=backend)
    size, q_len = kv_cache.shape[1], q.shape[1] if q.ndim == 4 else 1
    counts = (seq_lens + size - 1) // size
    used = torch.arange(block_table.shape[1], device=q.device) < counts[:, None]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * q_len
    # plan() reads the lengths on the host, so it cannot be part of a captured launch.
    wrapper.plan(
        rows, starts, block_table[used].int(), seq_lens, q.shape[-2], 512, 64, size, q_len > 1,
        softmax_scale, q.dtype, kv_cache.dtype,
    )  # fmt: skip
    # The query tokens of all requests, one after another.
    q, out, lse = q.flatten(0, -3), out.flatten(0, -3), lse.flatten(0, -2)
    parts = q[..., :512], q[..., 512:], kv_cache[..., :512], kv_cache[..., 512:]
    return lambda: wrapper.run(*parts, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)


def prefill(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale, out, backend):
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
    counts, live = (seq_lens + 15) // 16, int(query_start_loc[-1])
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    # The last page of an empty request has 0 tokens: fa3 adds this number to the tokens of the pages before.
    last = seq_lens - (counts - 1).clamp(min=0) * 16
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    wrapper.plan(
        query_start_loc, starts, block_table[used], last, q.shape[1], k_cache.shape[2], 64, 16,
        causal=True, sm_scale=softmax_scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: (wrapper.run(q[:live], (k_cache, v_cache), out=out[:live]), out)[1]


def mla_trtllm(q, kv_cache, block_table, seq_lens, softmax_scale, out):
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    # It keeps semaphores in the workspace, which must start at zero.
    workspace = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    # The kernel refuses a table that is not whole tiles of 128 keys. The added entries name page 0.
    size = kv_cache.shape[1]
    table = torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % (128 // size)))
    rows = (q, out) if q.ndim == 4 else (q.unsqueeze(1), out.unsqueeze(1))

    def launch():
        trtllm_batch_decode_with_kv_cache_mla(
            rows[0], kv_cache.unsqueeze(1), workspace, 128, 512, 64, table, seq_lens,
            table.shape[1] * size, out=rows[1], bmm1_scale=softmax_scale, bmm2_scale=1.0,
        )  # fmt: skip
        return out

    return launch


def mla_cutlass(q, kv_cache, block_table, seq_lens, out):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    wrapper = BatchMLAPagedAttentionWrapper(space, backend="cutlass")
    # Padded as for trtllm-gen. The kernel's softmax scale is that of 192 dimensions.
    table = torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % (128 // kv_cache.shape[1])))
    q, out = q.flatten(0, -3), out.flatten(0, -3)
    parts = q[..., :512], q[..., 512:], kv_cache[..., :512], kv_cache[..., 512:]
    return lambda: wrapper.run(*parts, out=out, kv_len=seq_lens, page_table=table)


def _unavailable_reason(*, sm100: bool) -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if why := device.flashinfer_missing():
        return why
    if sm100 and not device.is_sm100():
        return f"needs an SM100 GPU (B200, GB200); this is {device.machine().capability}"
    return None


def flashinfer_peers() -> dict[str, Peer]:
    """Its MLA kernels by their short keys, whether they can run here or not.

    >>> print(*flashinfer_peers())
    flashinfer_fa2 flashinfer_fa3 flashinfer_trtllm flashinfer_cutlass
    """
    flashinfer = f"FlashInfer {device.version_of('flashinfer-python') or ''}".strip()
    fa2, sm100 = (_unavailable_reason(sm100=needed) for needed in (False, True))
    return {
        "flashinfer_fa2": peer(f"{flashinfer} MLA fa2", fa2, mla, backend="fa2"),
        "flashinfer_fa3": peer(f"{flashinfer} MLA fa3", fa2 or device.needs_sm90(), mla, backend="fa3"),
        "flashinfer_trtllm": peer(f"{flashinfer} trtllm-gen MLA", sm100, mla_trtllm),
        "flashinfer_cutlass": peer(f"{flashinfer} CUTLASS MLA", sm100, mla_cutlass),
    }
