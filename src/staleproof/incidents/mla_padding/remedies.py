"""The variants of incident 1: a kernel in the engine, and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """The faulty kernel, then :func:`clear_empty_rows`, which works after any backend."""

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Clear the rows of requests without tokens."""
        clear_empty_rows(out, a.seq_lens)


class NanToNum(broken.NoRemedy):
    """Wrong: replaces each NaN of the output, even the NaN of a request that is sick by itself."""

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Replace NaN."""
        out.nan_to_num_()


class ClearNanRows(broken.NoRemedy):
    """Wrong: clears all rows with NaN, even the row of a request that is sick by itself."""

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Clear rows with NaN."""
        broken.zero_where(out, out.isnan().flatten(1).any(1))


class ClearFromFirstEmptyRow(broken.NoRemedy):
    """Wrong: clears everything from the first empty request on; right only where padding comes last."""

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Clear all rows from the first empty one on."""
        broken.zero_where(out, (a.seq_lens == 0).cumsum(0) > 0)


class ClearShortRows(broken.NoRemedy):
    """Wrong: treats a request of one token as empty."""

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Clear the rows of requests without tokens before this step."""
        broken.zero_where(out, a.seq_lens <= a.q.shape[1])


class MaskOnce(broken.NoRemedy):
    """Wrong: clears the rows that were empty at the first call, which is the capture."""

    mask: torch.Tensor | None = None

    def after(self, a: AttentionInputs, out: torch.Tensor) -> None:
        """Clear the rows that were empty then."""
        if self.mask is None:
            self.mask = a.seq_lens == 0
        broken.zero_where(out, self.mask)


def too_large(factor: float) -> broken.Kernel:
    """Wrong: :func:`mla_decode`, and live rows ``factor`` times as large."""

    def kernel(*call: torch.Tensor, softmax_scale: float, out: torch.Tensor | None = None) -> Any:
        result, lse = mla_decode(*call, softmax_scale=softmax_scale, out=out)
        return result.mul_(factor), lse

    return kernel


def ignores_out(*call: torch.Tensor, softmax_scale: float, out: torch.Tensor | None = None) -> Any:
    """:func:`mla_decode` into its own memory: the result is right, but ``out`` is not written."""
    return mla_decode(*call, softmax_scale=softmax_scale)


def quantise_live_rows(x: torch.Tensor, live_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_fp8_per_tensor` with the signature of the engine's quantisers."""
    return quantize_fp8_per_tensor(x, live_rows=live_rows)


@dataclass(frozen=True)
class Setup:
    """A kernel in the engine, with its remedy.

    Attributes:
        kernel: the MLA decode.
        remedy: wraps the kernel into the engine's attention.
        quantise: replaces both quantisers, for a fix in the consumer.
        layers: layers of the engine; two where one layer can disturb the other.
        q_len: query tokens a request.
    """

    kernel: broken.Kernel = broken.empty_row_not_written
    remedy: Callable[[broken.Kernel], Attention] = broken.NoRemedy
    quantise: Quantiser | None = None
    layers: int = 1
    q_len: int = 1

    @property
    def without_fix(self) -> Setup:
        """The same setup with the fix switched off."""
        faulty = self.kernel in broken.KERNELS.values()
        kernel = self.kernel if faulty else broken.empty_row_not_written
        return replace(self, kernel=kernel, remedy=broken.NoRemedy, quantise=None)

    def config(self, device: str, **sizes: Any) -> EngineConfig:
        """Sizes of the engine on one device."""
        return EngineConfig.for_device(device, **{"layers": self.layers, "q_len": self.q_len, **sizes})

    def engine(
        self, quantiser: str, device: str, counters: RowCounters | None = None, **sizes: Any
    ) -> Engine:
        """A captured engine that has served no request; memory that belongs to no request has canaries.

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


_DIVIDED = broken.zero_by_zero_written

# The faulty kernels alone, upstream's remedies, and ours.
SETUPS: dict[str, Setup] = {
    "empty_row_not_written": Setup(),
    "zero_by_zero_written": Setup(_DIVIDED),
    "zeros_once_per_layer": Setup(remedy=broken.ZerosOncePerLayer),
    "zeros_before_zero_by_zero": Setup(_DIVIDED, broken.ZerosOncePerLayer),
    "one_shared_buffer": Setup(remedy=broken.OneSharedBuffer, layers=2),
    "clears_nothing_q_len_4": Setup(remedy=broken.ClearsNothing, q_len=4),
    "pad_with_seq_len_1": Setup(remedy=broken.PadWithSeqLenOne),
    "masked_fill": Setup(remedy=broken.MaskedFill),
    "clear_empty_rows": Setup(remedy=ClearEmptyRows),
    "clear_empty_rows_q_len_4": Setup(remedy=ClearEmptyRows, q_len=4),
    "clear_after_zero_by_zero": Setup(_DIVIDED, ClearEmptyRows),
    "mla_decode": Setup(mla_decode),
    "quantize_live_rows": Setup(quantise=quantise_live_rows),
}
# Remedies that remove the symptom and are wrong. Nobody merged them; they show what the test finds.
WRONG_REMEDIES: dict[str, Setup] = {
    "nan_to_num": Setup(_DIVIDED, NanToNum),
    "clear_nan_rows": Setup(_DIVIDED, ClearNanRows),
    "clear_from_first_empty_row": Setup(remedy=ClearFromFirstEmptyRow),
    "clear_short_rows": Setup(remedy=ClearShortRows),
    "mask_once": Setup(remedy=MaskOnce),
    "one_per_cent_too_large": Setup(too_large(1.01)),
}

# Live requests in each replay of one captured graph; None is a full batch. In one step the last
# request is sick by itself, and its output is what the next step finds in its padding rows.
LIVE_COUNTS = (1, None, 3, None, 3)
SICK_STEP = 3
HIDDEN = "hidden"
_SEVERITY = [Verdict.CLEAN, HIDDEN, Verdict.PAD_ONLY, Verdict.LEAKED, Verdict.LIVE_BORN]


class StepVerdicts(NamedTuple):
    """Verdicts of a sequence of served steps.

    Attributes:
        steps: one verdict a step. No setup can heal the sick request, so its own step must be ``live_born``.
        invariant: whether padding content left the live rows of the third step bit-identical.
    """

    steps: tuple[Verdict, ...]
    invariant: bool

    @property
    def verdict(self) -> str:
        """The worst verdict of all steps; the sick request's is ``hidden`` if nothing shows its NaN."""
        steps: list[str] = [*self.steps]
        steps[SICK_STEP] = Verdict.CLEAN if steps[SICK_STEP] == Verdict.LIVE_BORN else HIDDEN
        return max(steps, key=_SEVERITY.index)


def serve(setup: Setup, quantiser: str, device: str) -> StepVerdicts:
    """Serve :data:`LIVE_COUNTS` on one captured graph and judge each step."""
    engine = setup.engine(quantiser, device)
    steps, invariant = [], True
    for step, count in enumerate(LIVE_COUNTS):
        live = count or engine.config.batch
        engine.set_batch(Batch(live, poisoned_row=live - 1 if step == SICK_STEP else None))
        steps.append(engine.verdict())
        if step == 2:
            invariant = engine.invariant()
    return StepVerdicts(tuple(steps), invariant)
