"""Verdicts predicted before a machine was available that can check them, and their outcome.

They are in ``workbook/predictions.json``, for SM100 GPUs, which none of our recorded runs has.
``python -m staleproof.cases.predictions`` registers them again, after the code that will check them has
changed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from staleproof import check
from staleproof.cases import store
from staleproof.cases.digest import source_digest
from staleproof.cases.finding import Finding, Key, RunFileError

NAME = "predictions.json"
CAPABILITIES = ("sm_100", "sm_103")
# In the order in which they are shown.
STATES = REFUTED, CONFIRMED, OPEN = "refuted", "confirmed", "open"


@dataclass(frozen=True)
class Prediction:
    """One predicted verdict.

    Attributes:
        incident, question, variant: of the finding that will answer.
        predicted: the verdict.
        why: what the prediction rests on.
        refuted_by: the verdicts that would refute it, and what they would mean.
        date: UTC day on which it was registered, ISO.
        source_digest: of the incident's code on that day, which will ask.
    """

    incident: str
    question: str
    variant: str
    predicted: str
    why: str
    refuted_by: str
    date: str
    source_digest: str

    @property
    def key(self) -> Key:
        """The key of the finding that will answer."""
        return Key(self.incident, self.question, self.variant)

    @property
    def stale(self) -> bool:
        """Whether the code that will ask has changed since the prediction was registered."""
        return self.source_digest != source_digest(self.incident)


@dataclass(frozen=True)
class Outcome:
    """What became of a prediction: ``refuted``, ``confirmed``, or ``open`` if nobody answered."""

    prediction: Prediction
    state: str
    verdict: str | None

    @property
    def text(self) -> str:
        """One line."""
        at = self.prediction
        got = f", got {self.verdict}" if self.state == REFUTED else ""
        changed = "; the code has changed since" if at.stale else ""
        line = f"{self.state:<10} {at.key.text}: predicted {at.predicted}{got}"
        return f"{line} ({at.date}{changed})" + (f": {at.refuted_by}" if got else "")


def read(path: Path | None = None) -> list[Prediction]:
    """The predictions, in the order of the file.

    Args:
        path: instead of ``workbook/predictions.json``.

    Raises:
        RunFileError: staleproof is installed without its checkout.
        ValueError: a prediction lacks a field or has an unknown one.
    """
    rows = json.loads((path or store.checkout() / "workbook" / NAME).read_text())
    fields = set(Prediction.__annotations__)
    for number, row in enumerate(rows, 1):
        check.require(set(row) == fields, f"prediction {number}", f"the fields {sorted(fields)}", sorted(row))
    return [Prediction(**row) for row in rows]


def outcomes(predictions: Sequence[Prediction], findings: Iterable[Finding]) -> list[Outcome]:
    """What the findings of an SM100 GPU say about the predictions, the refuted first.

    >>> from staleproof.cases.finding import Key, finding
    >>> told = Prediction("a", "empty row", "theirs", "unwritten", "its source", "zero", "2026-11-21", "")
    >>> outcomes([told], [finding(Key("a", "empty row", "theirs"), "empty row", "zero")])[0].state
    'refuted'
    """
    verdicts = {found.key: found.verdict for found in findings if found.ran}

    def judge(prediction: Prediction) -> Outcome:
        verdict = verdicts.get(prediction.key)
        if verdict is None:
            return Outcome(prediction, OPEN, None)
        return Outcome(prediction, CONFIRMED if verdict == prediction.predicted else REFUTED, verdict)

    return sorted(map(judge, predictions), key=lambda one: STATES.index(one.state))


def of_run(predictions: Sequence[Prediction], run: store.Run) -> list[Outcome]:
    """The same for a recorded run.

    Raises:
        RunFileError: the run is of another GPU, about which nothing was predicted.
    """
    capability = run.environment["machine"].get("capability")
    if capability not in CAPABILITIES:
        expected = " and ".join(CAPABILITIES)
        raise RunFileError(
            f"{run.folder}: the predictions are for {expected}, this is {capability or 'a CPU'}"
        )
    return outcomes(predictions, run.findings)


def register(path: Path | None = None) -> None:
    """Give those whose code has changed today's date and digest. Not to be done once an SM100 GPU answered.

    Args:
        path: instead of ``workbook/predictions.json``.
    """
    path = path or store.checkout() / "workbook" / NAME
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = [
        replace(one, date=today, source_digest=source_digest(one.incident)) if one.stale else one
        for one in read(path)
    ]
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    register()
