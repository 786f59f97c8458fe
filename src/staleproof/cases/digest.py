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
import re
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
_STRING = "|".join(
    rf"{q * 3}(?:[^{q}\\]++|\\.|{q}(?!{q * 2}))*+{q * 3}|{q}(?:[^{q}\\\n]++|\\.)*+{q}" for q in "\"'"
)
# No alternative begins with a letter: with prefixes and names in it, the search takes six times as long.
_SIGNS = re.compile(rf"{_STRING}|#[^\n]*|[()\[\]{{}}\n]|\\\n", re.DOTALL)
_PREFIX = re.compile(r"(?:\b[rbufRBUF]{1,2})?$")
_PROSE = re.compile(rf"\b(?:{'|'.join(PROSE)})=$")


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

    One pattern finds strings, comments, brackets and line ends, and the text is cut there. :mod:`tokenize`
    takes six times as long, and its tokens, like what ``ast`` prints, differ between releases of Python.

    >>> print(code('def f(x):  # twice\\n    "Twice."\\n\\n    return 2 * x'))
    def f(x):
        return 2 * x
    >>> print(code('Patch(name="a", cost="one launch")'))
    Patch(name="a", cost=)
    """
    # What to leave out, as [begin, end). ``prose``: the last of them, if more strings of it may follow.
    cuts: list[list[int]] = []
    prose: list[int] | None = None
    # Of the statement: where its first string begins, whether there is anything else, and open brackets.
    first, others, depth, end = -1, False, 0, 0
    for sign in _SIGNS.finditer(text + "\n"):
        begin, kind = sign.start(), sign[0][0]
        if kind in "\"'":
            begin -= len(_PREFIX.search(text[end:begin])[0])  # type: ignore[index]  # it matches nothing, too
        if between := text[end:begin].strip():
            others, prose = True, [] if _PROSE.search(between) else None
        end = sign.end()
        if kind in "\"'":
            if prose is None:
                first = begin if first < 0 else first
            elif prose:
                prose[1] = end
            else:
                prose += begin, end
                cuts.append(prose)
        elif kind == "#":
            cuts.append([begin, end])
        elif kind in "([{)]}":
            others, prose = True, None
            depth += 1 if kind in "([{" else -1
        elif kind == "\n" and depth == 0:
            if first >= 0 and not others:
                cuts.append([text.rfind("\n", 0, first) + 1, begin])
            first, others, prose = -1, False, None
    kept, end = [], 0
    for begin, after in sorted(cuts):
        # A comment may be inside another cut.
        kept.append(text[end : max(begin, end)])
        end = max(after, end)
    lines = "".join([*kept, text[end:]]).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


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


@cache
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
