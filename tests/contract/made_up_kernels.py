"""Stand-ins for compiled kernels that need a GPU, right ones or with the fault that the H200 showed.

Counterexamples import them in place of the package's, on the CPU; see ``test_made_up_kernels``. ``FAULTY`` in
the environment chooses.
"""

from __future__ import annotations

import os

import torch

FAULTY = bool(os.environ.get("FAULTY"))


def cutlass_fused_moe(
    x, ids, weights, w1, w2, dtype, quant_scales, output, ep_size=1, ep_rank=0, enable_alltoall=False
):
    """FlashInfer's. Faulty, an id that comes twice spoils its row, and addresses other memory with ranks."""
    for token, row in enumerate(ids.tolist()):
        for expert, weight in zip(row, weights[token], strict=True):
            mine = expert - ep_rank * len(w1)
            if 0 <= mine < len(w1):
                up, gate = (w1[mine] @ x[token]).chunk(2)
                output[token] += weight * (w2[mine] @ (torch.nn.functional.silu(gate) * up))
        if FAULTY and len({*row}) < len(row):
            if enable_alltoall:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            output[token] = float("nan")


def moe_align_block_size(topk_ids, experts, size, tokens, blocks, count):
    """vLLM's: the slots of each expert in blocks. Faulty, an id of -1 takes a slot of another token."""
    ids, block = topk_ids.flatten().tolist(), 0
    tokens.fill_(len(ids))
    for expert in range(experts):
        mine = [slot for slot, one in enumerate(ids) if one == expert]
        if FAULTY and min(ids) < 0 and expert == experts - 1:
            mine = mine[1:]
        for start in range(0, len(mine), size):
            part = torch.tensor(mine[start : start + size], dtype=torch.int32)
            tokens[block * size : block * size + len(part)] = part
            blocks[block] = expert
            block += 1
    count.fill_(block * size)


def flash_attention_forward(
    q, k, v, starts, room_starts, max_q, max_k, dropout, causal, debug, *, scale, seqused_k
):
    """torch's, one query token a request. Faulty, rows past the end hold what the memory held."""
    out = torch.empty_like(q) if FAULTY else torch.zeros_like(q)
    for row, length in enumerate(seqused_k.tolist()):
        keys, values = (x[room_starts[row] :][:length].expand(-1, q.shape[1], -1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[row], keys) * scale
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return out, q.new_zeros(q.shape[1], len(q)), None, None, None
