"""The cases of FlashInfer's ``cutlass_fused_moe``: batch, ids, what memory held, what must come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from staleproof.incidents.moe_routing.batch import MISREAD, RIGHT, SILENT, Batch

# Outcomes besides RIGHT and SILENT. The first is the text of CUDA's error.
CUDA_ILLEGAL_ACCESS = "illegal memory access"
REFUSED, TIMED_OUT, DIED = "refused", "timed out", "died"
# Kinds of ids besides those of IDS: NaN rows through a choice, ids out of range, and int64.
VIA_TOPK_SOFTMAX, VIA_WARP_ARGMAX = "NaN through topk_softmax", "NaN through the warp argmax"
NEGATIVE, PAST, INT64 = "negative", "past the last expert", "distinct, int64"
BYTES, ZEROS, PREVIOUS, FRESH = "0x7f bytes", "zeros", "previous map", "fresh"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        tokens, top_k: the batch.
        ids: one of :data:`IDS`; or, in a fifth of the rows, :data:`NEGATIVE`, :data:`PAST`, or NaN
            logits through a choice (:data:`VIA_TOPK_SOFTMAX`, :data:`VIA_WARP_ARGMAX`); or :data:`INT64`.
        experts: of the layer.
        check: whether the finalise kernel has its bounds check, as in FlashInfer since 0.6.10.
        tail: what the memory of the map contained: :data:`BYTES`, :data:`ZEROS`, :data:`PREVIOUS` (the
            map of an earlier call with other, distinct ids) or :data:`FRESH` (whatever the driver gave).
        all_to_all: rank 0 of two expert-parallel ranks behind an all-to-all.
    """

    tokens: int
    top_k: int
    ids: str
    experts: int = 128
    check: bool = True
    tail: str = BYTES
    all_to_all: bool = False

    @property
    def batch(self) -> Batch:
        """The shape of the call."""
        return Batch(self.tokens, self.top_k, self.experts)

    @property
    def name(self) -> str:
        """The case in words."""
        check = "checked" if self.check else "without check"
        parts = [str(self.batch), self.ids, check, self.tail]
        return ", ".join(parts + ["all-to-all"] * self.all_to_all)


@dataclass(frozen=True)
class CaseResult:
    """What became of one case.

    Attributes:
        case: the case.
        outcome: :data:`RIGHT`, :data:`CUDA_ILLEGAL_ACCESS`, :data:`NAN_ROWS`, :data:`SILENT`,
            :data:`REFUSED` (an error before the launch), :data:`TIMED_OUT` or :data:`DIED`.
        wrong_rows: tokens whose output is wrong.
        wrong_clean_rows: of these, tokens with distinct experts.
        nan_rows: tokens whose output has a NaN.
        error: what the process said, one line.
    """

    case: Case
    outcome: str
    wrong_rows: int = 0
    wrong_clean_rows: int = 0
    error: str = ""
    nan_rows: int = 0


def _table() -> Iterator[tuple[Case, str | None]]:
    for ids in ("distinct", "all equal", "partly equal"):
        yield Case(128, 8, ids), RIGHT
    yield Case(256, 8, "all equal", check=False), RIGHT
    yield Case(257, 8, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, "distinct", check=False), RIGHT
    yield Case(512, 8, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, "partly equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, "all equal", check=False, tail=FRESH), None
    yield Case(512, 8, "all equal", check=False, tail=ZEROS), SILENT
    yield Case(512, 8, "all equal", check=False, tail=PREVIOUS), SILENT
    yield Case(512, 8, "partly equal", check=False, tail=PREVIOUS), SILENT
    yield Case(512, 8, "all equal"), SILENT
    yield Case(512, 8, "partly equal"), SILENT
    yield Case(512, 8, "distinct", all_to_all=True), RIGHT
    yield Case(512, 8, "all equal", all_to_all=True), CUDA_ILLEGAL_ACCESS
    yield Case(1, 10, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(4, 10, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(4, 8, "all equal", experts=512, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(128, 8, "all equal", experts=256, check=False), RIGHT
    yield Case(129, 8, "all equal", experts=256, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, NEGATIVE, check=False), RIGHT
    yield Case(512, 8, PAST, check=False), RIGHT
    yield Case(128, 8, INT64), REFUSED
    # What of the revert's int64 ids: refused as they are; read as int32 they are duplicates.
    yield Case(257, 8, MISREAD, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(257, 8, MISREAD), SILENT
    yield Case(257, 8, MISREAD, tail=PREVIOUS), None
    yield Case(512, 8, VIA_WARP_ARGMAX, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, VIA_TOPK_SOFTMAX, check=False), RIGHT


# Each case and its expected outcome; None: no expected outcome, any is recorded.
MODULE_CASES = dict(_table())
