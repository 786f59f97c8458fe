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
        q = (engine.hidden @ w["q"]).view(c.batch, c.q_len, c.heads, LATENT).double()
        call = q, engine.kv_cache[0], engine.block_table, engine.seq_lens
        want, _ = reference_decode(*call, softmax_scale=SCALE)
        attended = taps["attention"]
        yield too_far("attention, live rows", attended[live], want.view_as(attended)[live], budget)
        if setup.quantise is None:
            yield other_bits("attention, padding rows", attended[~live], torch.zeros_like(attended[~live]))
        projected = attended[live].float() @ w["o"].float()
        yield too_far("projection after fp8", taps["projection"][live], projected, FP8_BUDGET + budget)
        if batch.spread and not engine.invariant():
            yield "live rows change with the content of padding"
