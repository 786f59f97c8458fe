"""A checkout and an incident of their own for the tests of the commands."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from staleproof import device, runs, triage
from staleproof.incidents.registry import INCIDENTS, Incident
from staleproof.lab import Finding
from staleproof.report import conclusion

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A checkout of its own, so that no test touches this one."""
    for name in ("notebooks", "benchmarks", "workbook/runs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(runs, "checkout", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def kept(root: Path) -> Path:
    """Where findings are kept."""
    return root / "workbook/_build/findings.jsonl"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Puts the incidents back in their order, which the undoing of monkeypatch.delitem does not."""
    before = dict(INCIDENTS)
    yield
    INCIDENTS.clear()
    INCIDENTS.update(before)


@pytest.fixture
def incident(registry, monkeypatch) -> Callable[..., list[str]]:
    """Replaces the registry by one incident, ``fake``, with these answers.

    Returns a list that grows by the device each time the questions are asked.
    """

    def install(*answers: Callable[[], Finding]) -> list[str]:
        asked: list[str] = []

        def run(device_name: str, progress: Callable[[str], None]) -> Iterator[Finding]:
            asked.append(device_name)
            progress("the fake step")
            for answer in answers:
                yield answer()

        fake = types.ModuleType("staleproof.incidents.fake.questions")
        fake.incident = types.SimpleNamespace(name="fake", run=run)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        monkeypatch.setattr(device, "has_triton", lambda: True)
        for module in (conclusion, triage):
            monkeypatch.setattr(module, "symptom", lambda name: "it looks true")
        INCIDENTS.clear()
        # It has no folder.
        INCIDENTS.update(fake=Incident(1, "a fake", "01_fake.ipynb", "it lies"))
        return asked

    return install
