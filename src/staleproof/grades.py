"""Whose code gave an answer: third parties' code, their source, our replica of it, or arithmetic."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from staleproof import device
from staleproof.check import require


class Grade(StrEnum):
    """What a question was put to, from the strongest evidence to the weakest.

    >>> [grade.value for grade in Grade]
    ['real', 'source', 'replica', 'arithmetic']
    """

    REAL = "real"
    """Third-party code ran: vLLM's, FlashInfer's, torch's."""
    SOURCE = "source"
    """What shipped source or a shipped binary says, by file and line; nothing ran."""
    REPLICA = "replica"
    """Our code ran, which follows a cited source."""
    ARITHMETIC = "arithmetic"
    """Computed from sizes or from bits; no server or kernel took part."""


@dataclass(frozen=True)
class Evidence:
    """The grade of an answer, and whose code gave it.

    Attributes:
        grade: see :class:`Grade`.
        of: for :attr:`Grade.REAL` the package and version that ran, e.g. ``"vLLM 0.20.2"``.
    """

    grade: Grade
    of: str = ""

    def __post_init__(self) -> None:
        named = bool(self.of) or self.grade is not Grade.REAL
        require(named, "of", "the package and version whose code ran", repr(self.of))


REPLICA, ARITHMETIC = Evidence(Grade.REPLICA), Evidence(Grade.ARITHMETIC)
# Distribution -> how its project spells itself.
_SPELLING = {"flashinfer-python": "FlashInfer", "vllm": "vLLM"}


def real(distribution: str, what: str = "") -> Evidence:
    """Third-party code, named with its installed version.

    Args:
        distribution: name on the package index.
        what: which part of it, or in which way it was changed.

    >>> real("torch", "SDPA").of == f"torch {device.version_of('torch')} SDPA"
    True
    """
    name = _SPELLING.get(distribution, distribution)
    return Evidence(Grade.REAL, " ".join(filter(None, (name, device.version_of(distribution), what))))


def real_file(distribution: str, file: Path) -> Evidence:
    """Third-party code in a file, which need not be of the installed release.

    Args:
        distribution: name on the package index, and of the folder that the file is in.
        file: e.g. a compiled library. Its release is that of the distribution beside its folder.

    >>> real_file("vllm", Path("somewhere/_C.abi3.so")).of
    'vLLM, unknown release, _C'
    """
    file = file.resolve()
    name, what = _SPELLING.get(distribution, distribution), file.name.partition(".")[0]
    for folder in file.parents:
        if folder.name == distribution:
            for found in importlib.metadata.distributions(name=distribution, path=[str(folder.parent)]):
                return Evidence(Grade.REAL, f"{name} {found.version} {what}")
    return Evidence(Grade.REAL, f"{name}, unknown release, {what}")
