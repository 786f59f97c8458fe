"""Digests of source code: has anything changed that a result depends on?

A result depends on the incident's cases and on every module of staleproof that they import, also inside
functions, on what those import, and so on. Three kinds of text decide no verdict and are left out:

- comments, docstrings and blank lines, in every file;
- strings given as :data:`PROSE`, e.g. what a patch costs: sentences for a reader;
- :data:`BOOKKEEPING`, the modules that ask, keep and show. :data:`MACHINERY` is their number: raise it when
  a change there could have changed a verdict. Instruments stay in: what captures a graph, compares with a
  reference or chooses a device decides verdicts.

Import statements are read from the source, and nothing is imported. Two limits: an import by a computed name
is not seen, and the ``__init__`` of a package counts only if a name is taken from it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
MACHINERY = 1
# Modules below staleproof, without their suffix; a folder stands for all its files.
BOOKKEEPING = (
    *("cases/case", "cases/run", "cases/finding", "cases/words", "cases/store", "cases/digest"),
    *("cases/children", "cases/predictions", "report", "cli", "triage"),
)
# Keyword arguments.
PROSE = ("cost", "mechanism", "summary")
# Only import statements are parsed: parsing whole files takes half a second for all incidents.
_IMPORT = re.compile(r"^[ \t]*((?:from|import) staleproof\b[^\n(]*(?:\([^)]*\))?)", re.MULTILINE)
# A file that a module reads beside itself decides what it does, too.
_BESIDE = re.compile(r"""Path\(__file__\)\.with_name\(["']([^"']+)["']\)""")
_LAYOUT = frozenset({tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.ENDMARKER})


@cache
def source_digest(incident: str) -> str:
    """Digest of an incident's cases and all that they depend on: 12 hex digits of a SHA-256.

    >>> len(source_digest("mla_padding"))
    12
    """
    # A room of its own, such as staleproof.engine, is named like an incident.
    return _digest(closure([f"staleproof.{room}{incident}.cases" for room in ("incidents.", "")]))


@cache
def file_digest(path: Path) -> str:
    """The same of a file outside the package, e.g. a benchmark, and all it imports of staleproof."""
    return _digest({path} | closure(_imports(path)))


def closure(modules: Iterable[str]) -> set[Path]:
    """The files that these modules depend on: theirs, and those of every module of staleproof they import.

    >>> sorted(path.name for path in closure(["staleproof.check"]))
    ['check.py']
    """
    todo, found = [*modules], set()
    while todo:
        path = _file(todo.pop())
        if path is not None and path not in found and not _is_bookkeeping(path):
            found.add(path)
            found |= _beside(path)
            todo += _imports(path)
    return found


def _beside(path: Path) -> set[Path]:
    return {path.with_name(name) for name in _BESIDE.findall(path.read_text("utf-8"))}


# Most files are in the closures of several incidents.
@cache
def code(text: str) -> str:
    """The text of a Python file without comments, docstrings, prose and blank lines.

    It is cut at the positions of tokens, not put together from them: tokens of an f-string, and what
    ``ast`` prints, differ between releases of Python.

    >>> print(code('def f(x):  # twice\\n    "Twice."\\n\\n    return 2 * x'))
    def f(x):
        return 2 * x
    >>> print(code('Patch(name="a", cost="one launch")'))
    Patch(name="a", cost=)
    """
    lines = text.splitlines()
    statement: list[tokenize.TokenInfo] = []
    # Place of the sign before it -> begin and end.
    prose: dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
        elif token.type == tokenize.NEWLINE:
            if all(one.type == tokenize.STRING for one in statement):
                first, last = statement[0].start[0], statement[-1].end[0]
                lines[first - 1 : last] = [""] * (last - first + 1)
            statement = []
        elif token.type == tokenize.STRING and _is_prose(statement):
            sign = statement[-1].start
            prose[sign] = prose.get(sign, (token.start, token.end))[0], token.end
        elif token.type not in _LAYOUT:
            statement.append(token)
    for (first, begin), (last, end) in reversed(prose.values()):
        lines[first - 1] = lines[first - 1][:begin] + lines[last - 1][end:]
        lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_prose(before: list[tokenize.TokenInfo]) -> bool:
    """Whether a string behind these tokens of a statement is an argument of :data:`PROSE`."""
    if len(before) < 2 or before[-1].string != "=":
        return False
    # An assignment has a blank there.
    return before[-2].string in PROSE and before[-2].end == before[-1].start


def _is_bookkeeping(path: Path) -> bool:
    if not path.is_relative_to(PACKAGE):
        return False
    module = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return any(module == part or module.startswith(part + "/") for part in BOOKKEEPING)


def _digest(paths: set[Path]) -> str:
    names = {
        path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name: path
        for path in paths
    }
    digest = hashlib.sha256()
    for name, path in sorted(names.items()):
        text = path.read_text("utf-8")
        digest.update(f"{name}\0{code(text) if path.suffix == '.py' else text}\0".encode())
    return digest.hexdigest()[:12]


def bookkeeping_digest() -> str:
    """Digest of :data:`BOOKKEEPING` in ``cases``. A test holds it beside :data:`MACHINERY`."""
    files = {PACKAGE / f"{part}.py" for part in BOOKKEEPING if part.startswith("cases/")}
    return _digest(files | {beside for file in files for beside in _beside(file)})


def _file(module: str) -> Path | None:
    """The file of a module of staleproof; ``None`` if there is none."""
    place = PACKAGE.joinpath(*module.split(".")[1:])
    files = place / "__init__.py", place.with_suffix(".py")
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
                elif isinstance(node, ast.ImportFrom):
                    inner = [f"{node.module}.{alias.name}" for alias in node.names]
                    found += [name if _file(name) else str(node.module) for name in inner]
    return tuple(found)
