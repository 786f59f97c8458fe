"""Checks the answers to a notebook's exercises, without giving them away.

A notebook calls ``check = exercises("01")`` once and then ``check(1, answer)``. What is right is computed
from the miniature when it is asked, so that an answer stays right when the miniature changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from staleproof.check import require
from staleproof.report.show import Printed

Form = tuple[str, Callable[[Any], bool]]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


INTEGER: Form = ("a whole number", lambda x: isinstance(x, int) and not isinstance(x, bool))
NUMBER: Form = ("a number", _is_number)
TEXT: Form = ("a text", lambda x: isinstance(x, str))
INTEGERS: Form = ("a set of whole numbers", lambda x: _set_of(x, int))
TEXTS: Form = ("a set of texts", lambda x: _set_of(x, str))


def _set_of(x: Any, kind: type) -> bool:
    plain = isinstance(x, Collection) and not isinstance(x, str | bytes | Mapping)
    return plain and all(isinstance(one, kind) and not isinstance(one, bool) for one in x)


def _list_of(count: int, kind: type, word: str) -> Form:
    def fits(x: Any) -> bool:
        return isinstance(x, Sequence) and len(x) == count and all(isinstance(one, kind) for one in x)

    return f"a list of {count} {word}", fits


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        form: what an answer must be, in words, and whether an object is one.
        truth: computes the right answer.
        look: where to look, said with every wrong answer.
        within: how far a number may be from the right one.
    """

    form: Form
    truth: Callable[[], Any]
    look: str
    within: float = 0.0

    def fault(self, answer: Any) -> str | None:
        """What is wrong with an answer, in words that do not hold the right one; ``None`` if it is right."""
        words, fits = self.form
        if not fits(answer):
            return f"expected {words}, got {_short(answer)}"
        right = self.truth()
        if isinstance(right, set):
            extra, missing = len(set(answer) - right), len(right - set(answer))
            parts = [f"{extra} of yours do not belong"] * bool(extra) + [f"{missing} missing"] * bool(missing)
            return ", ".join(parts) or None
        if isinstance(right, list):
            good = sum(a == b for a, b in zip(answer, right, strict=True))
            return None if good == len(right) else f"{good} of {len(right)} are right"
        if isinstance(right, str):
            return None if answer == right else "not that one"
        if abs(answer - right) <= self.within:
            return None
        return "too small" if answer < right else "too large"


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Exercises:
    """The exercises of one notebook; call it with a number and an answer."""

    by_number: Mapping[int, Exercise]

    def __call__(self, number: int, answer: Any) -> Printed:
        """Print whether an answer is right, and if not what is wrong with it.

        Returns:
            Whether it is right. ``...`` is no answer yet.

        Raises:
            ValueError: an exercise that the notebook does not have.
        """
        require(number in self.by_number, "number", f"one of {sorted(self.by_number)}", number)
        exercise = self.by_number[number]
        if answer is ...:
            print(f"exercise {number}: no answer yet; put {exercise.form[0]} in place of the dots")
            return Printed(False)
        fault = exercise.fault(answer)
        if fault is None:
            print(f"exercise {number}: right")
        else:
            print(f"exercise {number}: not yet: {fault}. {exercise.look}")
        return Printed(fault is None)


def exercises(notebook: str) -> Exercises:
    """The exercises of a notebook, by its two digits.

    Raises:
        ValueError: a notebook without exercises that can be checked.

    >>> _ = exercises("05")(1, 1.5)
    exercise 1: not yet: expected a whole number, got 1.5. Lines of 16 bytes: see "First bad stage".
    """
    known = ALL
    require(notebook in known, "notebook", f"one of {sorted(known)}", repr(notebook))
    return Exercises(known[notebook])


# What is right, by notebook. The imports are inside, because each notebook needs one incident only.


def _stale_rows() -> set[int]:
    from staleproof.report.show import ToyStep

    toy = ToyStep("cpu")
    toy.out.fill_(float("nan"))
    for step, live in enumerate((4, 2), 1):
        toy.x.fill_(step)
        toy.serve(live)
    return {row for row, said in enumerate(toy.out[:, 0].tolist()) if said == 1}


def _right_by_luck() -> float:
    from staleproof.report.show import ToyStep

    toy = ToyStep("cpu", amax="fmax")
    toy.out.fill_(0.5)
    toy.serve(3)
    return float(toy.scaled[2, 0])


def _sick_and_mixed() -> str:
    from staleproof.evidence import judge_rows
    from staleproof.report.show import ToyStep

    toy = ToyStep("cpu", writes_every_row=True, amax="torch.max")
    toy.x[0] = float("nan")
    toy.serve(3)
    return str(judge_rows(toy, toy.live))


def _padding_rows() -> int:
    from staleproof.cases.graph import padded_size

    return max(padded_size(live) - live for live in range(1, 513))


def _stages_with_nan() -> set[str]:
    from staleproof.incidents.mla_padding.pictures import stage_picture

    drawn = stage_picture("quantize_live_rows", "cpu")
    return {
        stage for stage, cells in zip(drawn.stages, zip(*drawn.cells, strict=True), strict=True) if any(cells)
    }


def _contents_that_decide() -> set[str]:
    from staleproof.evidence import pad_invariance
    from staleproof.incidents.mla_padding.scene import Batch
    from staleproof.incidents.mla_padding.setups import SETUPS

    engine = SETUPS["empty_row_not_written"].engine("fmax", "cpu")
    engine.set_batch(Batch(3))
    return set(pad_invariance(engine.run, engine.live).changed)


def _tests_that_notice() -> list[bool]:
    from staleproof.incidents.mla_padding.scene import Batch
    from staleproof.incidents.mla_padding.setups import SETUPS

    noticed = []
    for live, sick in ((3, None), (8, None), (8, 7)):
        engine = SETUPS["zeros_once_per_layer"].engine("torch.max", "cpu", batch=8)
        verdicts = []
        for batch in (Batch(3), Batch(live, poisoned_row=sick), Batch(3)):
            engine.set_batch(batch)
            verdicts.append(engine.verdict())
        noticed.append(verdicts[-1] == "leaked")
    return noticed


def _largest_graph() -> int:
    from staleproof.cases.graph import capture_sizes
    from staleproof.incidents.decode_buffer.model import decode_out_bytes

    return max(n for n in capture_sizes(2048) if 61 * decode_out_bytes(n, 128, rank=512) <= 2 * 2**30)


def _utilisation() -> float:
    from staleproof.incidents.decode_buffer.pictures import headroom

    percent = next(p for p in range(95, 50, -1) if headroom(2048, utilisation=p / 100).verdict == "lives")
    return percent / 100


def _owner_and_phase() -> list[str]:
    from staleproof.incidents.decode_buffer.setups import Case, run_servers

    (server,) = run_servers([Case("lazy_moe_workspace", watched=True)], "cpu")
    assert server.ready is not None
    after = [owner.name for owner in server.ready.owners if not owner.planned]
    return [after[0], str(server.died_in)]


def _ranks() -> int:
    from staleproof.incidents.moe_routing.consumer import takes_one_block

    return next(n for n in range(1, 1000) if not takes_one_block(2 * n, 8, 128))


def _holes() -> int:
    import torch

    from staleproof.incidents.moe_routing.consumer import build_map
    from staleproof.incidents.moe_routing.observation import holes

    ids = torch.tensor([[3, 5, 3, 3, 7, 5, 1, 2]], dtype=torch.int32)
    return int(holes(build_map(ids, 16, one_block=False), ids).sum())


def _lane() -> set[int]:
    from staleproof.incidents.moe_routing.broken import warp_columns

    return set(warp_columns(128, 2)[5].tolist())


def _bf16_nan() -> int:
    import torch

    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return int(bits.view(torch.bfloat16).isnan().sum())


def _judged() -> list[str]:
    from dataclasses import replace

    import torch

    from staleproof.incidents.kv_reuse.scene import Scene, judge

    return [judge(replace(Scene("cpu"), dtype=dtype)).verdict for dtype in (torch.bfloat16, torch.float32)]


def _reached() -> int:
    from staleproof.incidents.kv_reuse.scene import Scene, judge, tenancies

    scene = Scene("cpu")
    seen = judge(scene)
    log = tenancies(scene, seen.served)
    return sum(any(s.whose == 30 for s in log.explain(request)) for request in seen.corrupted)


def _head_hit() -> float:
    import torch

    share = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float().isnan().float().mean()
    return 100 * (1 - (1 - float(share)) ** 64)


def _byte() -> int:
    from staleproof.ops.nvfp4_layout import scale_offsets

    return int(scale_offsets(128, 4)[70, 2])


def _nobodys() -> float:
    from staleproof.ops.nvfp4_layout import scale_shape

    rows, columns = scale_shape(200, 7168)
    return 100 * (1 - 200 * 448 / (rows * columns))


def _birthdays() -> float:
    different = 1.0
    for taken in range(6):
        different *= 1 - taken / 160
    return 100 * (1 - different)


def _histories() -> set[str]:
    from staleproof.incidents.scale_padding.matrix import HISTORIES, serve
    from staleproof.incidents.scale_padding.remedies import IN_TORCH

    def wrong(remedy: str | None, name: str) -> int:
        return serve("empty rows", remedy, "cpu", HISTORIES[name], IN_TORCH)

    return {n for n in HISTORIES if wrong(None, n) and not wrong("zero_init_per_layer", n)}


_BOOLS, _TWO_TEXTS = _list_of(3, bool, "of True and False"), _list_of(2, str, "texts")

ALL: Mapping[str, Mapping[int, Exercise]] = {
    "00": {
        1: Exercise(INTEGERS, cache(_stale_rows), "Which step wrote each row last?"),
        2: Exercise(NUMBER, cache(_right_by_luck), "The scale is the largest magnitude of all rows.", 1e-3),
        3: Exercise(
            TEXT, cache(_sick_and_mixed), "One of the four verdicts: are the rows good over clean padding?"
        ),
    },
    "01": {
        1: Exercise(INTEGER, cache(_padding_rows), "The ladder of sizes is capture_sizes()."),
        2: Exercise(TEXTS, cache(_stages_with_nan), "Names are those of the picture's stages."),
        3: Exercise(TEXTS, cache(_contents_that_decide), "Names are those of pad_invariance's fills."),
        4: Exercise(_BOOLS, cache(_tests_that_notice), "Judge the third step: engine.verdict()."),
    },
    "02": {
        1: Exercise(INTEGER, cache(_largest_graph), "A size of the ladder; rows x heads x 512 x 2 bytes."),
        2: Exercise(NUMBER, cache(_utilisation), "Steps of 0.01: headroom(2048, utilisation=...).", 1e-6),
        3: Exercise(_TWO_TEXTS, cache(_owner_and_phase), "The owner as printed, then the phase."),
    },
    "03": {
        1: Exercise(INTEGER, cache(_ranks), "The kernel sees the rows of both ranks."),
        2: Exercise(INTEGER, cache(_holes), "An expert finds the first slot of a token that names it."),
        3: Exercise(INTEGERS, cache(_lane), "16 bytes are eight bf16 logits."),
        4: Exercise(INTEGER, cache(_bf16_nan), "Exponent all ones, and a fraction that is not 0."),
    },
    "04": {
        1: Exercise(_TWO_TEXTS, cache(_judged), "Verdicts are those of judge(scene).verdict."),
        2: Exercise(INTEGER, cache(_reached), "log.explain(request) lists suspects; see their whose."),
        3: Exercise(NUMBER, cache(_head_hit), "In percent, to 0.1.", 0.1),
    },
    "05": {
        1: Exercise(INTEGER, cache(_byte), 'Lines of 16 bytes: see "First bad stage".'),
        2: Exercise(NUMBER, cache(_nobodys), "In percent, to 0.1; rows are rounded up to 128.", 0.1),
        3: Exercise(NUMBER, cache(_birthdays), "In percent, to 0.1: 1 - prod(1 - i / experts).", 0.1),
        4: Exercise(TEXTS, cache(_histories), "Compare the two columns of empty rows above."),
    },
}
