"""Digests of source code: has the code changed since a result was recorded?

A result depends on more than the file it came from: on every module of staleproof that this file
imports, also inside functions, on what those import, and so on. The import statements are read from
the source, and nothing is imported. Two limits: an import by a computed name is not seen, and the
``__init__`` of a package counts only if a name is taken from it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# Only import statements are parsed: parsing whole files takes half a second for all incidents.
_IMPORT = re.compile(r"^[ \t]*((?:from|import) staleproof\b[^\n(]*(?:\([^)]*\))?)", re.MULTILINE)


@cache
def source_digest(incident: str) -> str:
    """Digest of an incident's questions and all they import: 12 hex digits of a SHA-256.

    >>> len(source_digest("mla_padding"))
    12
    """
    # A room of its own, such as staleproof.engine, is named like an incident.
    return _digest(closure([f"staleproof.{room}{incident}.questions" for room in ("incidents.", "")]))


@cache
def file_digest(path: Path) -> str:
    """The same of a file outside the package, e.g. a benchmark, and all it imports of staleproof."""
    return _digest({path} | closure(_imports(path)))


def closure(modules: Iterable[str]) -> set[Path]:
    """The files of these modules and of every module of staleproof they import.

    >>> sorted(path.name for path in closure(["staleproof.cases.digest"]))
    ['digest.py']
    """
    todo, found = [*modules], set()
    while todo:
        path = _file(todo.pop())
        if path is not None and path not in found:
            found.add(path)
            todo += _imports(path)
    return found


def _digest(paths: set[Path]) -> str:
    names = {
        path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name: path
        for path in paths
    }
    digest = hashlib.sha256()
    for name, path in sorted(names.items()):
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _file(module: str) -> Path | None:
    """The file of a module of staleproof; ``None`` if it is another package's, or no module."""
    root, *parts = module.split(".")
    place = PACKAGE.joinpath(*parts)
    files = (place / "__init__.py", place.with_suffix(".py")) if root == "staleproof" else ()
    return next((file for file in files if file.is_file()), None)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The modules that a file imports; for ``from package import name`` the module of that name."""
    found = []
    for text in _IMPORT.findall(path.read_text("utf-8")):
        with contextlib.suppress(SyntaxError):  # a line of prose that begins like an import
            for node in ast.parse(text).body:
                if isinstance(node, ast.Import):
                    found += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    inner = [f"{node.module}.{alias.name}" for alias in node.names]
                    found += [name if _file(name) else node.module for name in inner]
    return tuple(found)
