"""Whether a fix of incident 1 computes the right thing: the detectors look for NaN only.

``tests/ops`` compares the operations with their references. Here the outputs of the engine are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from staleproof.evidence.compare import other_bits, rounding, too_far
from staleproof.incidents.mla_padding.remedies import Setup
from staleproof.incidents.mla_padding.scene import (
    LATENT,
    SCALE,
    AttentionInputs,
    Batch,
    compared_dtype,
    decode_budget,
)
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode

FP8_BUDGET = rounding(torch.float8_e4m3fn)


def wrong(setup: Setup, device: str) -> str | None:
    """What a setup computes wrongly, in one line, or ``None``."""
    return next(filter(None, _comparisons(setup, device)), None)


def _comparisons(setup: Setup, device: str) -> Iterator[str | None]:
    """Served steps: attention and the projection after the quantiser, live and padding rows, in two layers.

    First a full batch. Then empty requests between live ones, which fill a page, end inside one, or are as
    short as possible. Batch and context are larger than in the questions that gave the verdict.
    """
    dtype, usual = compared_dtype(device), setup.config(device)
    rows, context = usual.batch + 4, usual.context + usual.page_size // 2
    engine = setup.engine("torch.max", device, dtype=dtype, layers=2, batch=rows, context=context)
    c = engine.config
    budget = decode_budget(dtype, c.context)
    mixed = [max(n, c.q_len) for n in (c.context, c.context // 2, c.page_size - 1, 5, 2, 1)]
    for lengths in ([c.context] * c.batch, mixed):
        engine.set_batch(Batch(len(lengths), spread=lengths is mixed))
        live, x = engine.live, engine.hidden
        engine.seq_lens[engine.seq_lens > 0] = torch.tensor(lengths, dtype=torch.int32, device=device)
        engine.replay()
        for layer, (taps, w) in enumerate(zip(engine.taps, engine.weights, strict=True)):
            q = (x @ w["q"]).view(c.batch, c.q_len, c.heads, LATENT)
            call = engine.kv_cache[layer], engine.block_table, engine.seq_lens
            want, _ = reference_decode(q.double(), *call, softmax_scale=SCALE)
            attended, x = taps["attention"], taps["experts"]
            yield too_far("attention, live rows", attended[live], want.view_as(attended)[live], budget)
            if setup.quantise is None:
                zeros = torch.zeros_like(attended[~live])
                yield other_bits("attention, padding rows", attended[~live], zeros)
                # In a graph this layer's memory may be the memory that the previous layer filled with zeros.
                # So allocate NaN and free it at once: CUDA's allocator hands out that block next.
                torch.full_like(attended, torch.nan)
                again = engine.variant.attend(AttentionInputs(q, *call, c.batch, layer)).view_as(attended)
                yield other_bits("attention, padding rows in other memory", again[~live], zeros)
            projected = attended[live].float() @ w["o"].float()
            yield too_far("projection after fp8", taps["projection"][live], projected, FP8_BUDGET + budget)
        if lengths is mixed and not engine.invariant():
            yield "live rows change with the content of padding"
