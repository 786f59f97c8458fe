"""Kernels that want to be audited: the decorators that register them, and where to find them.

A decorated function stays as it is. It is called with the arguments that it names, from those that its
kind has; :mod:`staleproof.audit` lists them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from staleproof.check import fail, require
from staleproof.contract.contract import KINDS

_MARK = "__padding_contract__"
NEEDS = ("", "cpu", "cuda", "sm90", "sm100")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Subject:
    """One kernel and backend, and what it needs.

    Attributes:
        name: whose, which.
        kind: key of :data:`staleproof.contract.contract.KINDS`.
        call: the adapter, or the kernel itself.
        shape: sizes it is asked with, by name.
        package: distribution that it comes from; ``""`` for a module of the user's.
        versions: releases to ask; by default the one installed, or those in the cache.
        needs: the device: ``cpu``, ``cuda``, ``sm90``, ``sm100``, or ``""`` for any.
        files: modules of the package that are executed with stand-ins for its others.
        documented: clause -> what its documentation says about the case.
        skip: clause -> why it is not put to it.
        asked: the clauses that it is asked; all of its kind by default.
    """

    name: str
    kind: str
    call: Callable[..., Any]
    shape: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    versions: tuple[str, ...] = ()
    needs: str = ""
    files: tuple[str, ...] = ()
    documented: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[str, ...] = ()

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses that it is asked."""
        return self.asked or KINDS[self.kind]


def _decorator(kind: str) -> Callable[..., Any]:
    def register(
        *,
        name: str = "",
        package: str = "",
        versions: tuple[str, ...] = (),
        needs: str = "",
        files: tuple[str, ...] = (),
        documented: Mapping[str, str] | None = None,
        skip: Mapping[str, str] | None = None,
        **shape: Any,
    ) -> Callable[[F], F]:
        require(needs in NEEDS, "needs", " or ".join(map(repr, NEEDS)), repr(needs))
        for given, text in (("documented", documented), ("skip", skip)):
            for clause in text or {}:
                require(clause in KINDS[kind], given, f"clauses of {kind}: {', '.join(KINDS[kind])}", clause)
        unknown = sorted(set(shape) - SIZES[kind])
        if unknown:
            fail(unknown[0], f"a size of {kind}: {', '.join(sorted(SIZES[kind]))}", "another name")

        def mark(function: F) -> F:
            subject = Subject(
                name or function.__name__,
                kind,
                function,
                shape,
                package,
                versions,
                needs,
                files,
                documented or {},
                skip or {},
            )
            function.__dict__.setdefault(_MARK, []).append(subject)
            return function

        return mark

    return register


_ATTENTION = "layout heads kv_heads head_dim value_dim page_size dtype q_len planned empty_lse"
# Kind -> the sizes that its decorator takes.
SIZES = {
    "attention": set(_ATTENTION.split()),
    "merge": {"head_dim"},
    "routing": {"experts", "top_k", "grouped", "padding_id"},
    "rows": {"hidden", "dtype", "in_place", "reference", "live_rows"},
    "ragged": {"hidden", "dtype"},
    "experts": {"experts", "hidden", "inner", "top_k"},
    "kv_write": {"kv_heads", "head_dim", "pad_slot"},
    "state": {"dim", "width", "pad_index"},
}
assert set(SIZES) == set(KINDS)

attention, merge, routing, rows, ragged, experts, kv_write, state = (_decorator(kind) for kind in KINDS)


def load_module(module: str) -> ModuleType:
    """Import a module by its name, or a file by its path.

    Raises:
        Exception: whatever the module raises.
    """
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).resolve()
    name = f"audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path} is no Python file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(loaded)
    return loaded


def subjects_of(module: ModuleType) -> list[Subject]:
    """The subjects that a module registered, in its order, each once."""
    found: dict[str, Subject] = {}
    for value in vars(module).values():
        for subject in getattr(value, "__dict__", {}).get(_MARK, ()):
            found.setdefault(subject.name, subject)
    return [*found.values()]
