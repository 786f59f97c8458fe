"""The one runner: it puts the cases of a table, one after the other, and yields a finding for each.

It does what every case needs: lines of progress, ``not run`` with its reason, one thread of torch, off / on /
off, time limits, and the end of every child process, also after an error or Ctrl-C.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases import words as families
from staleproof.cases.case import Case, Fix, Reading, Scene
from staleproof.cases.children import ChildError
from staleproof.cases.finding import FIX, Finding, Three, finding, not_run, three_of
from staleproof.cases.words import NOT_RUN, Outcome
from staleproof.check import require
from staleproof.lab import MissingError

Progress = Callable[[str], None]

# Names a folder, if the processes of one command put each case of an incident's table once, whoever needs it
# first: ``report --execute`` runs incidents and notebooks, which ask the same. It lasts as long as that.
SHARED = "STALEPROOF_SHARED_FINDINGS"


def silent(line: str) -> None:
    """Prints no progress."""


@contextmanager
def sharing() -> Iterator[None]:
    """Put each case of an incident once, here and in processes started here, for a ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="staleproof-") as folder:
        before = os.environ.setdefault(SHARED, folder)
        try:
            yield
        finally:
            if before == folder:
                del os.environ[SHARED]


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for the length of a ``with``: for operations of microseconds.

    A second thread gains these nothing, and on a busy machine they would wait for it.

    >>> import torch
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Table:
    """The cases of one incident.

    Args:
        incident: folder name; every case gets it.
        rows: cases, or lists of cases, in the order in which they are asked.

    Raises:
        ValueError: two cases of one key, or an expected verdict of a variant that no case has.
    """

    def __init__(self, incident: str, *rows: Case | Iterable[Case]) -> None:
        flat = [case for row in rows for case in ((row,) if isinstance(row, Case) else row)]
        self.incident = incident
        self.cases = [replace(case, key=case.key._replace(incident=incident)) for case in flat]
        twice = [key.text for key, n in Counter(case.key for case in self.cases).items() if n > 1]
        require(not twice, "table", "one case of each key", f"several of {twice}")
        # Questions share a mapping of expected verdicts, which may name variants of the others.
        variants = {case.key.variant for case in self.cases}
        for case in self.cases:
            unknown = sorted(map(str, case.named - variants))
            require(not unknown, f"expect of {case.key.text}", f"variants of {incident}", unknown)

    def run(self, device: str, progress: Progress = silent) -> Generator[Finding]:
        """Put every case; see :func:`run`."""
        return run(self.cases, device, progress, shared=True)

    def ask(self, question: str, *variants: str, device: str | None = None) -> list[Finding]:
        """Put the cases of one question; for notebooks and tests.

        Args:
            question: all cases of this question.
            variants: some of its variants; all by default.
            device: ``"cpu"``, ``"cuda"``, or ``None`` for the device of this process.

        Raises:
            ValueError: no such question, or no such variant.
        """
        device = devices.select() if device is None else device
        mine = [case for case in self.cases if case.key.question == question]
        known = sorted({case.key.question for case in self.cases})
        require(bool(mine), "question", f"one of {known}", repr(question))
        names = [case.key.variant for case in mine]
        require(set(variants) <= set(names), "variants", f"some of {names}", list(variants))
        asked = [case for case in mine if not variants or case.key.variant in variants]
        return [*run(asked, device, shared=True)]


def run(
    cases: Sequence[Case], device: str, progress: Progress = silent, *, shared: bool = False
) -> Generator[Finding]:
    """Put cases, yielding each finding as soon as it is there, in the order of the cases.

    However this ends (the last answer, an error, Ctrl-C, a caller that stops listening), no child process
    is left.

    Args:
        cases: of one table.
        device: ``"cpu"`` or ``"cuda"``.
        progress: takes one line about the step that begins.
        shared: the cases are an incident's, whose keys name them in every process; see :data:`SHARED`.
    """
    kept = {case.key: file for case in cases if shared and (file := _shared_file(case, device))}
    told = _Scenes(cases, device)
    try:
        for number, case in enumerate(cases, 1):
            step = case.key._replace(incident="").text
            progress(f"{case.key.incident} {number}/{len(cases)}: {step}")
            # The caller runs between two findings, and must find its own number of threads then.
            with one_thread(), children.within(case.limit_s):
                found = _put_once(case, device, told, kept.get(case.key))
            told.release(case)
            yield found
    finally:
        children.end_all()


class _Scenes:
    """The result of each scene, kept until the last case that uses it was asked."""

    def __init__(self, cases: Sequence[Case], device: str) -> None:
        self._device = device
        self._left = Counter(case.scene for case in cases if case.scene is not None)
        self._told: dict[Scene, Any] = {}
        for scene in self._left:
            # A scene that no case can use here is not begun.
            users = [case for case in cases if case.scene is scene]
            if scene.early and any(_missing(case, device) is None for case in users):
                self._begin(scene)

    def _begin(self, scene: Scene) -> None:
        with one_thread(), children.within(scene.limit_s):
            try:
                self._told[scene] = scene.tell(self._device)
            except ChildError as error:
                self._told[scene] = error

    def arguments(self, case: Case) -> tuple[Any, ...]:
        """The arguments of :attr:`Case.ask` after subject and device.

        Raises:
            ChildError: the scene failed; the text says how.
        """
        if case.scene is None:
            return ()
        if case.scene not in self._told:
            self._begin(case.scene)
        told = self._told[case.scene]
        if isinstance(told, ChildError):
            raise ChildError(f"{case.scene.name}: {told}") from told
        return (told,)

    def release(self, case: Case) -> None:
        """Call this after a case was asked, or skipped: the last case of a scene frees its result."""
        if case.scene is not None:
            self._left[case.scene] -= 1
            if not self._left[case.scene]:
                self._told.pop(case.scene, None)


def _missing(case: Case, device: str) -> str | None:
    """Why a case cannot be asked here, or ``None``."""
    subjects = (case.off, case.subject) if isinstance(case, Fix) else (case.subject,)
    return next((why for subject in subjects if (why := case.needs(subject, device))), None)


def _shared_file(case: Case, device: str) -> Path | None:
    """Where the finding of a case lies for other processes of this command, if they share any."""
    folder = os.environ.get(SHARED)
    name = hashlib.sha256(repr((tuple(case.key), device)).encode()).hexdigest()
    return Path(folder, name) if folder else None


def _put_once(case: Case, device: str, scenes: _Scenes, file: Path | None) -> Finding:
    """Ask a case, or take the finding of another process of this command; ``not run`` is never shared."""
    if file is not None and file.exists():
        return pickle.loads(file.read_bytes())
    found = _put(case, device, scenes)
    if file is not None and found.ran:
        # Renamed when it is whole, since another process may be looking.
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(file)
    return found


def _put(case: Case, device: str, scenes: _Scenes) -> Finding:
    words = FIX if isinstance(case, Fix) else case.words
    if why := _missing(case, device):
        return not_run(case.key, words, why)
    try:
        told = scenes.arguments(case)
        if isinstance(case, Fix):
            return _put_fix(case, device, told)
        return _found(case, words, _read(case.ask(case.subject, device, *told)), device)
    except (MissingError, ChildError) as error:
        return not_run(case.key, words, str(error))
    except ModuleNotFoundError as error:
        # A release may import a package that is not installed. A missing module of an installed one is a bug.
        package = (error.name or "").partition(".")[0]
        if not package or package == "staleproof" or importlib.util.find_spec(package) is not None:
            raise
        return not_run(case.key, words, f"{package} is not installed")


def _read(said: Reading | str) -> Reading:
    return said if isinstance(said, Reading) else Reading(str(said))


def _found(case: Case, words: str, said: Reading, device: str, three: Three | None = None) -> Finding:
    absent = said.verdict == NOT_RUN
    found = finding(
        case.key,
        words,
        said.verdict,
        expected=None if absent else case.expected(device),
        note=said.note,
        script=said.script,
        three=None if absent else three,
        evidence=said.evidence or case.grade(),
        provenance=said.provenance,
    )
    return replace(found, numbers=said.numbers)


def _put_fix(case: Fix, device: str, told: tuple[Any, ...]) -> Finding:
    """Ask without the remedy, with it, and without it again."""
    # The last run shows that the remedy made the difference, and not something that it left behind.
    asked: list[Reading] = []
    for subject in (case.off, case.subject, case.off if case.again is None else case.again):
        asked.append(_read(case.ask(subject, device, *told)))
        if asked[-1].verdict == NOT_RUN:
            return not_run(case.key, FIX, asked[-1].note)
    off, on, again = asked
    wrong, right = "", None
    if families.outcome(case.words, on.verdict) is Outcome.GOOD:
        assert case.wrong is not None
        found = case.wrong(case.subject, device, *told)
        is_text = found is None or isinstance(found, str)
        require(is_text, f"wrong of {case.key.text}", "None, or a text that says what is wrong", repr(found))
        wrong = found or ""
        right = not wrong
    three = three_of(case.words, off.verdict, on.verdict, again.verdict, right, wrong)
    numbers = {
        f"{name}_{state}": value
        for state, said in zip(("off", "on", "again"), asked, strict=True)
        for name, value in said.numbers.items()
    }
    said = Reading(three.verdict, numbers, wrong or on.note, on.script, on.evidence, on.provenance)
    return _found(case, FIX, said, device, three)
