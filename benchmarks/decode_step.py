"""A captured decode step with the fix of incident 1 against the same step without it.

One layer with DeepSeek-V3's attention: 128 heads, 512 + 64, and projections that read about as
many bytes as its absorbed ones (370 MB). Its experts are small, so the share of the fix in the time
of the step is larger than in the model. The graphs take turns, so that all see the same clock rate.

"fused quantiser, all rows" is our quantiser without the fix: what it gains over the step with eager
``torch.max`` is fusion. What "quantize live rows" gains beyond that is the fix.

Run: ``python benchmarks/decode_step.py`` on a machine with a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof import measure
from staleproof.evidence import RowCounters
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.remedies import ClearEmptyRows, quantise_live_rows
from staleproof.incidents.mla_padding.scene import Batch, Engine, EngineConfig, Variant
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla.decode import mla_decode

BATCH = 128
CONTEXTS = (512, 4096)
LIVE = (3, 100, 128)
REPLAYS = 200
SAME_BITS = ("clear_empty_rows", "masked_fill", "RowCounters on")


def fused_all_rows(x: torch.Tensor, live_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours over all rows, with the signature of the engine's quantisers."""
    return quantize_fp8_per_tensor(x)


def _paired(engines: dict[str, Engine]) -> dict[str, measure.Times]:
    """Microseconds a replay of each engine's step, replayed in turn."""
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in engines}
    for turn in range(REPLAYS + 10):
        for name, engine in engines.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            engine.graph.replay()
            end.record()
            if turn >= 10:
                marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: measure.times_between(pairs) for name, pairs in marks.items()}


def cases() -> Iterator[measure.Timing]:
    """One for each context and number of live rows."""
    for context in CONTEXTS:
        config = EngineConfig.for_device(
            "cuda", batch=BATCH, context=context, hidden=1344, inter=512, experts=8, top_k=2
        )
        counters = RowCounters(Engine.stage_names(config.layers), "cuda")
        decode, amax = mla_decode, broken.quantise_amax_torch_max
        without = Variant("without", broken.NoRemedy(decode), amax)
        variants = {
            "without": (without, None),
            "clear_empty_rows": (Variant("cleared", ClearEmptyRows(decode), amax), None),
            "masked_fill": (Variant("masked", broken.MaskedFill(decode), amax), None),
            "fused quantiser, all rows": (Variant("fused", broken.NoRemedy(decode), fused_all_rows), None),
            "quantize live rows": (Variant("live", broken.NoRemedy(decode), quantise_live_rows), None),
            "RowCounters on": (without, counters),
        }
        engines = {n: Engine(v, config, c) for n, (v, c) in variants.items()}
        # What every variant must read: the weights once, and the KV cache of the live requests.
        weights = sum(w.numel() * 2 for w in engines["without"].weights[0].values())
        for live in LIVE:
            for engine in engines.values():
                engine.set_batch(Batch(live))
            logits = {name: engine.replay()[:live].clone() for name, engine in engines.items()}

            def wrong(provider: str, logits: dict[str, torch.Tensor] = logits) -> str:
                same = torch.equal(logits[provider], logits["without"])
                # Quantising the live rows alone gives another scale, and so other logits.
                if provider in SAME_BITS and not same:
                    raise measure.WrongResult(f"{provider}: live rows differ from the step without it")
                return ""

            yield measure.Timing(
                *("mla_padding", "decode_step", f"batch {BATCH}, {context} tokens", "live rows", live),
                weights + live * context * 576 * 2,
                _paired(engines),
                None,
                wrong,
            )
        del engines
        torch.cuda.empty_cache()


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: a remedy changes live rows.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="without"))
