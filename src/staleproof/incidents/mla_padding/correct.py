"""Whether a fix of incident 1 computes the right thing: the detectors look for NaN only."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from staleproof.cases.compare import other_bits, rounding, too_far
from staleproof.evidence.canary import plant
from staleproof.incidents.mla_padding.scene import (
    KV_LORA_RANK,
    LATENT,
    SCALE,
    Batch,
    compared_dtype,
    decode_budget,
    make_call,
)
from staleproof.incidents.mla_padding.setups import ClearEmptyRows, Setup, quantise_live_rows
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference.fp8 import quantize_fp8_per_tensor
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode

FP8_BUDGET = rounding(torch.float8_e4m3fn)
LIVE = 3


def wrong(setup: Setup, device: str) -> str | None:
    """What a setup computes wrongly, in one line, or ``None``."""
    return next(filter(None, _comparisons(setup, device)), None)


def _comparisons(setup: Setup, device: str) -> Iterator[str | None]:
    yield from _steps(setup, device)
    if setup.kernel is mla_decode:
        yield from _decode(device)
    if setup.remedy is ClearEmptyRows:
        yield from _clear(device)
    if setup.quantise is quantise_live_rows:
        yield from _quantise(device)


def _steps(setup: Setup, device: str) -> Iterator[str | None]:
    """Served steps: attention and what the quantiser hands on, live rows and padding rows.

    A full batch; then empty requests between the live ones; then requests as short as can be.
    """
    dtype = compared_dtype(device)
    engine = setup.engine("torch.max", device, dtype=dtype)
    c, w = engine.config, engine.weights[0]
    budget = decode_budget(dtype, c.context)
    for batch in (Batch(c.batch), Batch(LIVE, spread=True), Batch(LIVE, seq_len=c.q_len, spread=True)):
        engine.set_batch(batch)
        engine.replay()
        taps, live = engine.taps[0], engine.live
        q = (engine.hidden @ w.q).view(c.batch, c.q_len, c.heads, LATENT).double()
        call = q, engine.kv_cache[0], engine.block_table, engine.seq_lens
        want, _ = reference_decode(*call, softmax_scale=SCALE)
        attended = taps["attention"]
        yield too_far("attention, live rows", attended[live], want.view_as(attended)[live], budget)
        if setup.quantise is None:
            yield other_bits("attention, padding rows", attended[~live], torch.zeros_like(attended[~live]))
        projected = attended[live].float() @ w.o.float()
        yield too_far("projection after fp8", taps["projection"][live], projected, FP8_BUDGET + budget)
        if batch.spread and not engine.invariant():
            yield "live rows change with the content of padding"


def _decode(device: str) -> Iterator[str | None]:
    dtype = compared_dtype(device)
    budget = decode_budget(dtype, tokens=84)
    for q_len in (None, 2):
        call = make_call(device, rows=8, live=LIVE, tokens=84, q_len=q_len, dtype=dtype, spread=True)
        live = call.seq_lens > 0
        out, lse = mla_decode(*call, softmax_scale=SCALE)
        want, want_lse = reference_decode(call.q.double(), *call[1:], softmax_scale=SCALE)
        yield too_far("mla_decode, live rows", out[live], want[live], budget)
        yield too_far("lse, live rows", lse[live], want_lse[live], budget)
        yield other_bits("mla_decode, padding rows", out[~live], torch.zeros_like(out[~live]))
        yield other_bits("lse, padding rows", lse[~live], torch.full_like(lse[~live], -torch.inf))


def _clear(device: str) -> Iterator[str | None]:
    call = make_call(device, rows=8, live=LIVE, tokens=20, spread=True)
    live = call.seq_lens > 0
    out = plant(call.q.new_empty(*call.q.shape[:-1], KV_LORA_RANK))
    lse = plant(torch.empty(out.shape[:-1], device=device))
    before = out.clone(), lse.clone()
    clear_empty_rows(out, call.seq_lens, lse=lse)
    for name, got, old, empty in (("out", out, before[0], 0.0), ("lse", lse, before[1], -torch.inf)):
        yield other_bits(f"{name}, live rows", got[live], old[live])
        yield other_bits(f"{name}, padding rows", got[~live], torch.full_like(got[~live], empty))


def _quantise(device: str) -> Iterator[str | None]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 64, generator=generator).to(device, torch.bfloat16)
    live = torch.arange(8, device=device) % 3 == 1
    x[~live] = torch.nan
    (values, scale), (want, want_scale) = (q(x, live) for q in (quantise_live_rows, _reference_fp8))
    yield too_far("scale", scale, want_scale, rounding(torch.float32, 4))
    yield too_far("fp8, live rows", values.float()[live], want.float()[live], FP8_BUDGET)


def _reference_fp8(x: torch.Tensor, live_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_fp8_per_tensor(x, live_rows=live_rows)
