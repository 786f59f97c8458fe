"""``pytest --padding-contract my_module.py``: one test for each kernel that a module registers and clause.

A broken clause fails with its counterexample; one that was not run, or that the kernel's documentation
leaves to the caller, is skipped with the reason. Kernels run in processes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from staleproof.contract.contract import Outcome
    from staleproof.kernels.subject import Subject

# Other files of a run are not imported a second time.
_REGISTERS = re.compile(
    r"^\s*(from staleproof import .*\baudit\b|(from|import) staleproof\.audit\b)", re.MULTILINE
)


class BrokenClauseError(Exception):
    """A kernel breaks a clause; the text is the report of the test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("staleproof", "the padding contract")
    group.addoption("--padding-contract", action="store_true", help="audit the kernels that modules register")
    group.addoption(
        "--padding-contract-device", default="auto", help="cpu, cuda, or auto: the best this machine has"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not parent.config.getoption("--padding-contract") or file_path.suffix != ".py":
        return None
    if not _REGISTERS.search(file_path.read_text(errors="replace")):
        return None
    return ContractFile.from_parent(parent, path=file_path)


class ContractFile(pytest.File):
    """A module that registers kernels."""

    _answers: dict[str, dict[str, Outcome]] | None = None
    subjects: list[Subject]

    def collect(self) -> Iterable[pytest.Item]:
        from staleproof.cases.children import ChildError
        from staleproof.contract import runner

        try:
            self.subjects = runner.subjects_in(str(self.path))
        except ChildError as error:
            raise self.CollectError(f"{self.path.name} does not import: {error}") from error
        for subject in self.subjects:
            for clause in subject.clauses:
                name = f"{subject.name}[{clause}]"
                yield ContractItem.from_parent(self, name=name, subject=subject, clause=clause)

    def answer(self, subject: Subject, clause: str) -> Outcome:
        """The answers of all kernels of the file come together, at the first test."""
        if self._answers is None:
            from staleproof import device as devices
            from staleproof.contract import runner
            from staleproof.kernels.packages import Release

            device = devices.select(self.config.getoption("--padding-contract-device"))
            self._answers = runner.answers(str(self.path), self.subjects, Release(""), device)
        return self._answers[subject.name][clause]


class ContractItem(pytest.Item):
    """One clause of one kernel."""

    def __init__(self, *, subject: Subject, clause: str, **given: Any) -> None:
        super().__init__(**given)
        self.subject, self.clause = subject, clause

    def runtest(self) -> None:
        from staleproof.contract.contract import CLAUSES, Verdict

        assert isinstance(self.parent, ContractFile)
        outcome = self.parent.answer(self.subject, self.clause)
        if outcome.verdict is Verdict.BREAKS:
            script = f"\n\n{outcome.script}" if outcome.script else ""
            raise BrokenClauseError(f"clause {self.clause}: {CLAUSES[self.clause]}\n{outcome.note}{script}")
        if outcome.verdict is not Verdict.HOLDS:
            pytest.skip(outcome.note)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, BrokenClauseError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"padding contract: {self.name}"
