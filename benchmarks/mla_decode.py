"""MLA decode: ours, vLLM's Triton kernel, FlashInfer's, and what the machine allows.

Run: ``python benchmarks/mla_decode.py`` on a machine with a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.harness import measure
from staleproof.harness.peers import peers
from staleproof.ops.mla_decode import mla_decode
from staleproof.ops.reference import mla_decode as reference

BATCHES = (128, 16, 1)
TOKENS = (512, 4096)
HEADS, PAGE, RANK, ROPE = 128, 64, 512, 64
SCALE = (128 + 64) ** -0.5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(batch: int, tokens: int) -> Inputs:
    """Random q and cache, a shuffled block table, all requests ``tokens`` long."""
    pages = tokens // PAGE
    q = torch.randn(batch, HEADS, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    kv_cache = torch.randn(batch * pages, PAGE, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    block_table = torch.randperm(batch * pages, device="cuda").int().reshape(batch, pages)
    seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    return q, kv_cache, block_table, seq_lens


def rates() -> tuple[float, float]:
    """(bytes/us of a memset of 1 GiB, FLOP/us of a bf16 product of 8192 cubed), measured now."""
    target = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    memset = measure.graph_times([lambda: measure.memset_async(target)], launches=4)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = measure.graph_times([lambda: a @ b], launches=4, replays=10)
    return target.numel() / memset.p50, 2 * 8192**3 / product.p50


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    for peer in peers().values():
        if peer.unavailable_reason is not None:
            print(f"{peer.name}: not run, {peer.unavailable_reason}")
    memory_rate, matmul_rate = rates()
    found = []
    for batch in BATCHES:
        for tokens in TOKENS:
            mode = f"bf16 batch {batch} heads {HEADS} page {PAGE}"
            kv_bytes = batch * tokens * (RANK + ROPE) * 2
            io_bytes = kv_bytes + batch * HEADS * (RANK + ROPE + RANK) * 2
            count = measure.sets_beyond_l2(kv_bytes)
            sets = [make_inputs(batch, tokens) for _ in range(count)]
            want, _ = reference.mla_decode(*sets[0], softmax_scale=SCALE)

            def add(
                provider: str,
                prepare: Callable[..., Callable[[], tuple[torch.Tensor, Any]]],
                *,
                sets: list[Inputs] = sets,
                want: torch.Tensor = want,
                case: tuple[str, str, int] = (mode, "tokens", tokens),
                io_bytes: int = io_bytes,
            ) -> None:
                outs = [torch.full_like(want, torch.nan) for _ in sets]
                calls = [prepare(*s, out) for s, out in zip(sets, outs, strict=True)]
                calls[0]()
                error = (outs[0].float() - want.float()).norm() / want.float().norm()
                why = f"relative error {error.item():.1e}, batch {case[0]}, {case[2]} tokens"
                if not measure.checked(provider, error.item() < 1e-2, why):
                    return
                times = measure.graph_times(calls)
                found.append(measure.row("mla_padding", "mla_decode", provider, *case, times, io_bytes))

            def ours(q: Any, kv: Any, table: Any, lens: Any, out: Any) -> Callable[[], Any]:
                lse = torch.empty(q.shape[:-1], device=q.device)
                return lambda: mla_decode(q, kv, table, lens, softmax_scale=SCALE, out=out, lse=lse)

            add("staleproof", ours)
            for key, peer in peers().items():
                if peer.unavailable_reason is not None:
                    continue
                if key == "vllm_triton":
                    for splits in (1, 2, 4, 8):
                        add(
                            f"{peer.name}, {splits} splits",
                            lambda q, kv, table, lens, out, p=peer, n=splits: p.prepare(
                                q, kv, table, lens, SCALE, n, out
                            ),
                        )
                elif key.startswith("flashinfer"):
                    add(
                        peer.name,
                        lambda q, kv, table, lens, out, p=peer: p.prepare(
                            q, kv, table, lens, SCALE, None, out
                        ),
                    )
            flops = 2 * batch * tokens * HEADS * (RANK + ROPE + RANK)
            for name, floor in (
                ("limit: bytes at the memset rate", io_bytes / memory_rate),
                ("limit: FLOP at the matmul rate", flops / matmul_rate),
            ):
                times = measure.Times(p50=floor, p20=floor, p80=floor)
                found.append(
                    measure.row("mla_padding", "mla_decode", name, mode, "tokens", tokens, times, io_bytes)
                )
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
