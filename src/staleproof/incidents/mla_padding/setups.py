"""The variants of incident 1: a kernel in the engine, what is done about it, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from staleproof.evidence.canary import plant
from staleproof.evidence.counters import RowCounters
from staleproof.evidence.rows import Verdict
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.scene import (
    Attention,
    AttentionInputs,
    Batch,
    Engine,
    EngineConfig,
    Quantiser,
    Variant,
)
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla.decode import mla_decode


class ClearEmptyRows(broken.NoRemedy):
    """The faulty kernel, then :func:`clear_empty_rows`: works behind any backend."""

    def __call__(self, a: AttentionInputs) -> torch.Tensor:
        """(batch, q_len, heads, 512)."""
        out = super().__call__(a)
        clear_empty_rows(out, a.seq_lens)
        return out


def quantise_live_rows(x: torch.Tensor, live_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_fp8_per_tensor` with the signature of the engine's quantisers."""
    return quantize_fp8_per_tensor(x, live_rows=live_rows)


_LEAKS = (Verdict.LEAKED, Verdict.PAD_ONLY)
_CLEAN = (Verdict.CLEAN, Verdict.CLEAN)


@dataclass(frozen=True)
class Setup:
    """One row of the verdict matrix.

    Attributes:
        kernel: the MLA decode.
        remedy: wraps the kernel into the engine's attention.
        served: the verdicts that must come out of the served steps, with an amax by ``torch.max``
            and by fmax. If both are clean, padding content must not change live rows either.
        quantise: replaces both quantisers, for a fix in the consumer.
        layers: layers of the engine; two where one layer can disturb the other.
        q_len: query tokens a request.
        fix: whether it is one of ours, verified off / on / off.
    """

    kernel: broken.Kernel
    remedy: Callable[[broken.Kernel], Attention] = broken.NoRemedy
    served: tuple[Verdict, Verdict] = _LEAKS
    quantise: Quantiser | None = None
    layers: int = 1
    q_len: int = 1
    fix: bool = False

    @property
    def padding_content(self) -> str:
        """Whether padding content must be ``ignored`` or ``decides``."""
        return "ignored" if self.served == _CLEAN else "decides"

    @property
    def without_fix(self) -> Setup:
        """The same setup with the fix switched off."""
        kernel = broken.empty_row_not_written if self.kernel is mla_decode else self.kernel
        return replace(self, kernel=kernel, remedy=broken.NoRemedy, quantise=None)

    def config(self, device: str, **sizes: int) -> EngineConfig:
        """Sizes of the engine on one device."""
        return EngineConfig.for_device(device, **{"layers": self.layers, "q_len": self.q_len, **sizes})

    def engine(
        self, quantiser: str, device: str, counters: RowCounters | None = None, **sizes: int
    ) -> Engine:
        """A captured engine that has served nobody: the memory of no request holds canaries.

        Args:
            quantiser: a key of :data:`broken.QUANTISERS`.
            device: ``"cpu"`` or ``"cuda"``.
            counters: captured with the step.
            sizes: fields of the :class:`EngineConfig` to change.
        """
        remedy = self.remedy(self.kernel)
        variant = Variant(
            type(remedy).__name__,
            remedy,
            self.quantise or broken.QUANTISERS[quantiser],
            judged_from="quantise" if self.quantise else "attention",
            keeps_memory=isinstance(remedy, broken.ZerosOncePerLayer),
        )
        engine = Engine(variant, self.config(device, **sizes), counters)
        engine.poison(plant)
        return engine


_UNWRITTEN, _DIVIDED = broken.empty_row_not_written, broken.zero_by_zero_written

SETUPS: dict[str, Setup] = {
    "empty_row_not_written": Setup(_UNWRITTEN),
    "zero_by_zero_written": Setup(_DIVIDED),
    "zeros_once_per_layer": Setup(_UNWRITTEN, broken.ZerosOncePerLayer),
    "zeros_before_zero_by_zero": Setup(_DIVIDED, broken.ZerosOncePerLayer),
    # With fmax the second layer overwrites the sick request's NaN in the one buffer with finite rows
    # before the step is judged. The finite stale rows of the other layer remain.
    "one_shared_buffer": Setup(_UNWRITTEN, broken.OneSharedBuffer, (Verdict.LEAKED, Verdict.CLEAN), layers=2),
    "clears_nothing_q_len_4": Setup(_UNWRITTEN, broken.ClearsNothing, q_len=4),
    "pad_with_seq_len_1": Setup(_UNWRITTEN, broken.PadWithSeqLenOne),
    "masked_fill": Setup(_UNWRITTEN, broken.MaskedFill, _CLEAN),
    "clear_empty_rows": Setup(_UNWRITTEN, ClearEmptyRows, _CLEAN, fix=True),
    "clear_empty_rows_q_len_4": Setup(_UNWRITTEN, ClearEmptyRows, _CLEAN, q_len=4, fix=True),
    "clear_after_zero_by_zero": Setup(_DIVIDED, ClearEmptyRows, _CLEAN, fix=True),
    "mla_decode": Setup(mla_decode, broken.NoRemedy, _CLEAN, fix=True),
    "quantize_live_rows": Setup(_UNWRITTEN, broken.NoRemedy, _CLEAN, quantise_live_rows, fix=True),
}

# Live requests in each replay of one captured graph; None is a full batch. In one step the last
# request is sick by itself, and its output is what the next step finds in its padding rows.
LIVE_COUNTS = (1, None, 3, None, 3)
SICK_STEP = 3
_SEVERITY = [Verdict.CLEAN, Verdict.PAD_ONLY, Verdict.LEAKED, Verdict.LIVE_BORN]


@dataclass(frozen=True)
class Served:
    """What a sequence of served steps showed.

    Attributes:
        steps: one verdict a step; no setup can heal the sick request's own.
        invariant: whether padding content left the live rows of the third step bit-identical.
    """

    steps: tuple[Verdict, ...]
    invariant: bool

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the steps without a sick request."""
        healthy = [v for i, v in enumerate(self.steps) if i != SICK_STEP]
        return max(healthy, key=_SEVERITY.index)


def serve(setup: Setup, quantiser: str, device: str) -> Served:
    """Serve :data:`LIVE_COUNTS` on one captured graph and judge each step."""
    engine = setup.engine(quantiser, device)
    steps, invariant = [], True
    for step, count in enumerate(LIVE_COUNTS):
        live = count or engine.config.batch
        engine.set_batch(Batch(live, poisoned_row=live - 1 if step == SICK_STEP else None))
        steps.append(engine.verdict())
        if step == 2:
            invariant = engine.invariant()
    return Served(tuple(steps), invariant)
