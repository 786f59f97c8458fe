"""``pytest --padding-contract my_module.py``: one test for each kernel that a module registers and clause.

A broken clause fails with its reproducer; one that was not run, or that the kernel's documentation
leaves to the caller, is skipped with the reason. Kernels run in processes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from staleproof.contract.contract import Answer

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

    def collect(self) -> Iterable[pytest.Item]:
        from staleproof.child import ChildError
        from staleproof.contract.runner import subjects_in
        from staleproof.device import DeviceError, select

        try:
            # First: children on a CPU are then forked from a process that has imported torch.
            select(self.config.getoption("--padding-contract-device"))
            subjects = subjects_in(str(self.path))
        except DeviceError as error:
            raise self.CollectError(f"--padding-contract-device: {error}") from error
        except ChildError as error:
            raise self.CollectError(f"{self.path.name}: {error}") from error
        for subject in subjects:
            for clause in subject.clauses:
                name = f"{subject.name}[{clause}]"
                yield ContractItem.from_parent(self, name=name, case=(subject.name, clause))

    @cached_property
    def scripts(self) -> Path | None:
        """The folder for reproducers, in pytest's cache; ``None`` without one."""
        cache = getattr(self.config, "cache", None)
        return None if cache is None else Path(cache.mkdir("padding-contract"))

    @cached_property
    def answers(self) -> dict[tuple[str, str], Answer]:
        """The answers of all kernels of the file; they come together, at the first test."""
        from staleproof.contract.runner import audit

        device = self.config.getoption("--padding-contract-device")
        found = audit([str(self.path)], device, scripts=self.scripts)
        return {(one.kernel, one.clause): one for one in found}


class ContractItem(pytest.Item):
    """One clause of one kernel.

    Args:
        case: kernel and clause.
    """

    def __init__(self, *, case: tuple[str, str], **given: Any) -> None:
        super().__init__(**given)
        self.case = case

    def runtest(self) -> None:
        from staleproof.contract.contract import BREAKS, CLAUSES, HOLDS, NOT_TESTED
        from staleproof.contract.reproducer import name_of

        assert isinstance(self.parent, ContractFile)
        found = self.parent.answers[self.case]
        if found.verdict in (BREAKS, NOT_TESTED):
            shown = f"clause {found.clause}: {CLAUSES[found.clause]}\n{found.note}"
            if found.script:
                shown += f"\n\n{found.script}\n{self.parent.scripts}/{name_of(*self.case)}.py runs alone"
            raise BrokenClauseError(shown)
        if found.verdict != HOLDS:
            pytest.skip(found.note)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, BrokenClauseError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"padding contract: {self.name}"
