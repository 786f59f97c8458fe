"""A small counterexample of a broken clause, as a script of under 30 lines that runs alone.

Its first lines say what to install. It holds the adapter as it is, a small input that shows the case,
and an assertion of the clause: it ends with an AssertionError that says what was expected and what came while
the kernel breaks it, and quietly once it is mended. Each is run before it is handed on, and one that does not
show its break is not. ``tests/contract/alone.py`` runs recorded ones in environments of their own.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from staleproof.cases import children
from staleproof.cases.case import Reading
from staleproof.contract import environments
from staleproof.contract.contract import CLAUSES, TIMED_OUT
from staleproof.contract.scenes import attention_shape
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import ARGUMENTS, Subject

LINES = 29
# Kind of kernel -> templates/<kind>.jinja: the lines that show a case, or none.
_SCENES = Environment(
    loader=PackageLoader("staleproof.contract"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
KINDS = {name.removesuffix(".jinja") for name in _SCENES.list_templates()}
_FIRST = "def first(result): return result[0] if isinstance(result, tuple) else result"
_LINES = {
    "first": _FIRST,
    "same": 'assert torch.equal(got, clean), f"expected {clean.flatten()[:4]}, got {got.flatten()[:4]}"',
    "dirty": "torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN",
}
# Clause -> cases of its probe, where the kernel raises or its process ends and no probe is left to name one.
CASES = {
    "B": (("table", "-1"), ("table", "end"), ("table", "far")),
    "D": (("repeated",),),
    "X": (("range", "-1"), ("range", "experts")),
}


def _import(function: Callable[..., Any]) -> list[str]:
    """The lines that import a function of a user's module, wherever the script is run from."""
    file = Path(inspect.getfile(function)).resolve()
    name = function.__module__.removeprefix("audited_")
    if name == "__init__":
        name = file.parent.name
    root = file.parents[name.count(".") + (file.name == "__init__.py")]
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    # Whoever runs it has this package, for its decorators.
    here = root in installed or name.startswith("staleproof.")
    place = [] if here else [f"import sys; sys.path.insert(0, {str(root)!r})"]
    # A kernel that writes to ``out`` may return nothing.
    first = _FIRST
    if "out" in inspect.signature(function).parameters:
        first = first.replace("return result", "return out if result is None else result")
    return [*place, f"from {name} import {function.__name__}", first]


def _source(subject: Subject, *, short: bool = False) -> list[str]:
    """The adapter without its decorators; an import, if it is a function of a module of the user's.

    With ``short`` each of its statements is on one line.
    """
    function = subject.function
    if not subject.package:
        name = function.__name__
        # A kernel that writes to x may return nothing.
        returns = f"def {name}(x, run={name}, **more): y = run(x=x, **more); return x if y is None else y"
        return [*_import(function), *[returns] * bool(subject.shape.get("in_place"))]
    text = textwrap.dedent(inspect.getsource(function))
    if short:
        definition = ast.parse(text).body[0]
        assert isinstance(definition, ast.FunctionDef), subject.name
        definition.decorator_list = []
        text = ast.unparse(definition)
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("def "))
    # The script imports torch at its top.
    kept = [line for line in lines[start:] if line.strip() not in ("", "import torch")]
    return [line for line in kept if not line.strip().startswith("#")]


def _call(subject: Subject, **renamed: str) -> str:
    given = {name: repr(value) for name, value in subject.given.items()} | renamed
    arguments = [name for name in _named(subject) if name in ARGUMENTS[subject.kind] or name in given]
    words = ", ".join(f"{name}={given.get(name, name)}" for name in arguments)
    call = f"{subject.function.__name__}({words})"
    returns_launch = subject.shape.get("planned") or subject.shape.get("prepared")
    return call + "()" if returns_launch else call


def _named(subject: Subject) -> list[str]:
    return [*inspect.signature(subject.function).parameters]


def _returns_pair(subject: Subject) -> bool:
    """Whether an adapter of ours returns ``out, lse``, by its last statement."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(subject.function))).body[0]
    assert isinstance(definition, ast.FunctionDef), subject.name
    last = definition.body[-1]
    return isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple)


def _scene(subject: Subject, case: Sequence[str]) -> list[str]:
    """The lines of the script after the adapter; none where its template shows no such case."""
    named = _named(subject)

    def assigned(line: str, **values: object) -> str:
        chosen = {name: str(value) for name, value in values.items() if name in named}
        return line.format(names=", ".join(chosen), values=", ".join(chosen.values())) if chosen else ""

    given = {"named": named, "assigned": assigned, "call": partial(_call, subject), **_LINES}
    if subject.kind == "attention":
        given["sizes"] = attention_shape(subject.shape)
        given["returns_pair"] = bool(subject.package) and _returns_pair(subject)
    return _rendered(subject.kind, subject, case=[*case], **given)


def _rendered(template: str, subject: Subject, **given: Any) -> list[str]:
    known = {"package": subject.package, "needs": subject.needs, "shape": subject.shape}
    text = _SCENES.get_template(f"{template}.jinja").render(**known, **given)
    return [line for line in text.splitlines() if line]


def counterexample(subject: Subject, release: Release, clause: str, case: Sequence[str]) -> str:
    """The script, or ``""`` where none of under 30 lines shows the case.

    Args:
        subject: the kernel.
        release: of its package.
        clause: that it breaks.
        case: the input that shows it, as the probe names it.
    """
    scene = _scene(subject, case) if case and subject.kind in KINDS else []
    if not scene:
        return ""
    begin = _rendered(
        "prologue",
        subject,
        gpu=subject.needs in ("cuda", "sm90", "sm100"),
        plain=subject.package in environments.PLAIN,
    )
    sentence = f"Clause {clause}: {CLAUSES[clause]}"
    head = environments.head(subject, release.version, sentence, environments.here())
    for short in (False, True):
        lines = [*head, *begin, *_source(subject, short=short), "torch.manual_seed(0)", *scene]
        if len(lines) <= LINES:
            return "\n".join(lines) + "\n"
    return ""


def counterexamples(
    subject: Subject, release: Release, clause: str, case: Sequence[str] = ()
) -> tuple[str, ...]:
    """Scripts that may show a break: that of the case, or without one those of :data:`CASES`."""
    cases = (case,) if case else CASES.get(clause, ())
    made = (counterexample(subject, release, clause, one) for one in cases)
    return tuple(text for text in made if text)


# --- Running them


def run_alone(text: str, folders: Sequence[str]) -> None:
    """In a child: run a script as the main program, from a folder of its own.

    Args:
        text: of the script.
        folders: put first on ``sys.path``, before installed packages.
    """
    installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
    sys.path[:] = [*folders, *(p for p in sys.path if any(p.startswith(place) for place in installed))]
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        file = Path(folder, "counterexample.py")
        file.write_text(text)
        exec(compile(text, str(file), "exec"), {"__name__": "__main__"})


def shows(note: str, ended: children.Ended) -> bool:
    """Whether a script shows what the note of its row says."""
    if ended.code is None:
        return note.startswith(TIMED_OUT)
    if ended.code < 0:
        return "ended its process" in note
    said = re.search(r"raises (\w+)", note)
    # torch writes advice behind an error of CUDA.
    raised = said is not None and re.search(rf"^[\w.]*\b{said[1]}: ", ended.stderr, re.MULTILINE)
    return bool(ended.code) and bool(raised or "\nAssertionError: expected " in ended.stderr)


def tried(said: Reading, texts: Sequence[str], subject: Subject, release: Release, limit_s: float) -> Reading:
    """Run these scripts, and return the answer with the first one that shows it.

    A script that lacks a module here is kept with a remark; its first lines say what it needs. If none shows
    it, and one raised an error of its own, the note says which.
    """
    folders = [] if release.folder is None else [str(release.folder)]
    if subject.package in ("", "staleproof"):
        folders.append(str(Path(__file__).parents[2]))
    wrong = ""
    for text in texts:
        ended = children.call(run_alone, text, folders, timeout_s=limit_s + 60)
        if shows(said.note, ended):
            return replace(said, script=text)
        if ended.code and re.match(r"(ModuleNotFound|Import)Error: ", ended.last_line) and subject.package:
            first, rest = text.split("\n", 1)
            return replace(said, script=f"{first} Not run where it was made.\n{rest}")
        if ended.code and ended.code > 0:
            wrong = wrong or f"; its script fails: {ended.last_line[:120]}"
    return replace(said, note=said.note + wrong) if wrong else said
