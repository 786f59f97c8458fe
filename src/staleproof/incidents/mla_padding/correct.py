"""Whether a fix of incident 1 computes the right thing: the detectors look for NaN only.

The operations alone are compared with their references in ``tests/ops``; here, what the engine serves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from staleproof.cases.compare import other_bits, rounding, too_far
from staleproof.incidents.mla_padding.scene import LATENT, SCALE, Batch, compared_dtype, decode_budget
from staleproof.incidents.mla_padding.setups import Setup
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode

FP8_BUDGET = rounding(torch.float8_e4m3fn)
LIVE = 3


def wrong(setup: Setup, device: str) -> str | None:
    """What a setup computes wrongly, in one line, or ``None``."""
    return next(filter(None, _comparisons(setup, device)), None)


def _comparisons(setup: Setup, device: str) -> Iterator[str | None]:
    """Served steps: attention and what the quantiser hands on, live rows and padding rows, in two layers.

    A full batch; then empty requests between the live ones; then requests that end inside a page, and as
    short as can be. Batch and context are larger than where the verdict was found.
    """
    dtype, usual = compared_dtype(device), setup.config(device)
    rows, context = usual.batch + 4, usual.context + usual.page_size // 2
    engine = setup.engine("torch.max", device, dtype=dtype, layers=2, batch=rows, context=context)
    c = engine.config
    budget = decode_budget(dtype, c.context)
    lengths = (c.context, c.context // 2, c.q_len)
    for batch in (Batch(c.batch), *(Batch(LIVE, seq_len=n, spread=True) for n in lengths)):
        engine.set_batch(batch)
        engine.replay()
        live, x = engine.live, engine.hidden
        for taps, kv_cache, w in zip(engine.taps, engine.kv_cache, engine.weights, strict=True):
            q = (x @ w["q"]).view(c.batch, c.q_len, c.heads, LATENT).double()
            call = q, kv_cache, engine.block_table, engine.seq_lens
            want, _ = reference_decode(*call, softmax_scale=SCALE)
            attended, x = taps["attention"], taps["experts"]
            yield too_far("attention, live rows", attended[live], want.view_as(attended)[live], budget)
            if setup.quantise is None:
                pads = attended[~live]
                yield other_bits("attention, padding rows", pads, torch.zeros_like(pads))
            projected = attended[live].float() @ w["o"].float()
            yield too_far("projection after fp8", taps["projection"][live], projected, FP8_BUDGET + budget)
        if batch.spread and not engine.invariant():
            yield "live rows change with the content of padding"
