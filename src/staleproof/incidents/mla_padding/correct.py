"""Whether a fix of incident 1 computes the right thing: the detectors look for NaN only."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from staleproof.cases.compare import other_bits, too_far
from staleproof.evidence.canary import plant
from staleproof.incidents.mla_padding.scene import KV_LORA_RANK, LATENT, SCALE, Batch, make_call
from staleproof.incidents.mla_padding.setups import ClearEmptyRows, Setup, quantise_live_rows
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference.fp8 import quantize_fp8_per_tensor
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode

# Shares of the largest magnitude. bf16 keeps 8 bits; e4m3 keeps 4, so an element is off by up to a
# sixteenth, and sums of elements by less.
BF16_BUDGET, FP8_BUDGET = 2**-6, 2**-4
LIVE = 3


def wrong(setup: Setup, device: str) -> str | None:
    """What a setup computes wrongly, in one line, or ``None``."""
    return next(filter(None, _comparisons(setup, device)), None)


def _comparisons(setup: Setup, device: str) -> Iterator[str | None]:
    yield from _step(setup, device)
    if setup.kernel is mla_decode:
        yield from _decode(device)
    if setup.remedy is ClearEmptyRows:
        yield from _clear(device)
    if setup.quantise is quantise_live_rows:
        yield from _quantise(device)


def _step(setup: Setup, device: str) -> Iterator[str | None]:
    """One served step: attention and what the quantiser hands on, live rows and padding rows."""
    engine = setup.engine("torch.max", device)
    engine.set_batch(Batch(LIVE))
    engine.replay()
    c, taps, w = engine.config, engine.taps[0], engine.weights[0]
    live = engine.live_rows
    q = (engine.hidden @ w.q).view(c.batch, c.q_len, c.heads, LATENT)
    want, _ = reference_decode(
        q, engine.kv_cache[0], engine.block_table, engine.seq_lens, softmax_scale=SCALE
    )
    attended = taps["attention"]
    yield too_far("attention, live rows", attended[:live], want.reshape(attended.shape)[:live], BF16_BUDGET)
    if setup.quantise is None:
        yield other_bits("attention, padding rows", attended[live:], torch.zeros_like(attended[live:]))
    projected = attended[:live].float() @ w.o.float()
    yield too_far("projection after fp8, live rows", taps["projection"][:live], projected, FP8_BUDGET)
    if not engine.invariant():
        yield "live rows change with the content of padding"


def _decode(device: str) -> Iterator[str | None]:
    for q_len in (None, 2):
        call = make_call(device, rows=8, live=LIVE, tokens=84, q_len=q_len)
        out, lse = mla_decode(*call, softmax_scale=SCALE)
        want, want_lse = reference_decode(*call, softmax_scale=SCALE)
        yield too_far("mla_decode, live rows", out[:LIVE], want[:LIVE], BF16_BUDGET)
        yield too_far("lse, live rows", lse[:LIVE], want_lse[:LIVE], BF16_BUDGET)
        yield other_bits("mla_decode, padding rows", out[LIVE:], torch.zeros_like(out[LIVE:]))
        yield other_bits("lse, padding rows", lse[LIVE:], torch.full_like(lse[LIVE:], -torch.inf))


def _clear(device: str) -> Iterator[str | None]:
    call = make_call(device, rows=8, live=LIVE, tokens=20)
    out = plant(call.q.new_empty(*call.q.shape[:-1], KV_LORA_RANK))
    lse = plant(torch.empty(out.shape[:-1], device=device))
    before = out.clone(), lse.clone()
    clear_empty_rows(out, call.seq_lens, lse=lse)
    for name, got, old, empty in (("out", out, before[0], 0.0), ("lse", lse, before[1], -torch.inf)):
        yield other_bits(f"{name}, live rows", got[:LIVE], old[:LIVE])
        yield other_bits(f"{name}, padding rows", got[LIVE:], torch.full_like(got[LIVE:], empty))


def _quantise(device: str) -> Iterator[str | None]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 64, generator=generator).to(device, torch.bfloat16)
    live = torch.arange(8, device=device) < LIVE
    x[LIVE:] = torch.nan
    (values, scale), (want, want_scale) = (q(x, live) for q in (quantise_live_rows, _reference_fp8))
    yield too_far("scale", scale, want_scale, 2**-20)
    yield too_far("fp8, live rows", values[:LIVE].float(), want[:LIVE].float(), FP8_BUDGET)


def _reference_fp8(x: torch.Tensor, live_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_fp8_per_tensor(x, live_rows=live_rows)
