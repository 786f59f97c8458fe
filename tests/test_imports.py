"""Which part of the package may import which, read with ``ast``, imports inside functions included."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/staleproof"

LIGHT = {"check", "device", "interpreter"}
# How a question is asked, and how its answer is kept.
LAB = {"lab", "runs", "grades", "child", "graph", "measure", "machine"}
SERVER = {"ops", "vllm", "evidence", *LIGHT}
# First part of a module's name -> what it may import of ours. "" is the package's own __init__.
ALLOWED = {
    "": {"ops"},
    "__main__": {"cli"},
    "audit": {"check"},
    "check": set(),
    "device": {"interpreter"},
    "interpreter": set(),
    "ops": {"ops", *LIGHT},
    "evidence": {"evidence", *LIGHT},
    "vllm": {"vllm", "ops", "evidence", "check"},
    "sglang": {"vllm"},
    # From a symptom to what to do: light, as what an operator installs.
    "triage": {"triage", "vllm", "check"},
    "child": {"device", "check"},
    "graph": {"device", "check"},
    "machine": {"device", "vllm"},
    "grades": {"device", "check"},
    "lab": {"child", "grades", "machine", "device", "check"},
    "runs": {"lab", "machine", "device", "check"},
    "measure": {"lab", "machine", "ops", "device", "check"},
    "kernels": {"kernels", *LAB, *SERVER},
    "contract": {"contract", "audit", "kernels", *LAB, *SERVER},
    # A whole vLLM in a child process; an incident says what it serves and what comes out.
    "whole": {"whole", *LAB, *SERVER},
    # A real model behind the kernels of the incidents, whose questions use it.
    "words": {"words", "kernels", "lab", *LAB, *SERVER},
    "incidents": {
        "sglang",
        "whole",
        "words",
        "kernels",
        *LAB,
        *SERVER,
    },  # and their own folder, see _may_import
    "report": {"report", *LAB, "kernels", "incidents", "contract", "triage", *SERVER, ""},
    "cli": {"cli", "report", *LAB, "kernels", "incidents", "contract", "triage", *SERVER, ""},
}
# What a server installs may need no other package than these. Imports of vllm are for vLLM's processes.
THIRD_PARTY = {"ops": {"torch", "triton", "numpy"}, "evidence": {"torch", "triton", "matplotlib", "seaborn"}}


def _imported(tree: ast.Module, module: str, package: Path) -> Iterator[tuple[int, str]]:
    """(line, full name) of every module that a module imports, by statement or ``import_module``."""
    is_package = (package.joinpath(*module.split(".")[1:]) / "__init__.py").exists()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")[: None if is_package else -1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # A name that is no module of the package is an attribute of one.
                path = package.joinpath(*name.split(".")[1:], alias.name)
                ours = name.split(".")[0] == "staleproof" and (
                    path.is_dir() or path.with_suffix(".py").exists()
                )
                yield node.lineno, f"{name}.{alias.name}" if ours else name
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value).rstrip(".")


def _may_import(module: str, target: str) -> bool:
    """Whether the rules let one module import another; both are full names."""
    parts, theirs = module.split(".")[1:] or [""], target.split(".")[1:] or [""]
    if target.split(".")[0] != "staleproof":
        allowed = THIRD_PARTY.get(parts[0])
        return allowed is None or target.split(".")[0] in allowed | sys.stdlib_module_names
    if parts[0] == theirs[0] == "incidents":
        # The registry knows every incident. An incident knows its own folder only.
        return parts[1:2] == ["registry"] or parts[:2] == theirs[:2]
    return theirs[0] in ALLOWED[parts[0]]


class Import(NamedTuple):
    """A line of a module that imports another one; both by their full names."""

    file: Path
    line: int
    module: str
    target: str


def imports(package: Path) -> list[Import]:
    """Every import in a package's tree."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        module = ".".join(
            ["staleproof", *(part for part in file.with_suffix("").parts if part != "__init__")]
        )
        told = _imported(ast.parse(path.read_text()), module, package)
        found += [Import(file, line, module, target) for line, target in told]
    return found


def forbidden(found: list[Import]) -> list[str]:
    """``file:line: imports name`` for every import against the rules."""
    wrong = (each for each in found if not _may_import(each.module, each.target))
    return [f"{each.file}:{each.line}: imports {each.target}" for each in wrong]


@pytest.fixture(scope="module")
def ours():
    """The imports of our package."""
    return imports(PACKAGE)


def test_imports_point_one_way(ours):
    assert forbidden(ours) == []


def circle(found: list[Import]) -> set[str]:
    """Modules that import each other in a circle, within and between folders: the first such circle."""
    needs: dict[str, set[str]] = {}
    for each in found:
        needs.setdefault(each.module, set()).update({each.target} - {each.module})
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return {*error.args[1]}
    return set()


def test_no_modules_import_each_other_in_a_circle(ours):
    assert circle(ours) == set()


def _printed(program: str) -> list[str]:
    """The lines that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_the_package_loads_no_torch():
    program = "import sys, staleproof, staleproof.cli.app; print(*{'torch', 'triton'} & set(sys.modules), "
    program += "set(staleproof.__all__) <= set(dir(staleproof)))"
    assert _printed(program) == ["True"]


def test_importing_what_a_server_calls_loads_nothing_else():
    """Importing an operation or a patch must not load the code that asks questions, nor wait for dynamo.

    Importing that takes longer than all else before a first result. Inductor and vLLM import it anyway.
    """
    names = {
        room: [f"staleproof.{room}.{path.stem}".removesuffix(".__init__") for path in files]
        for room, files in ((room, sorted((PACKAGE / room).glob("*.py"))) for room in ("ops", "vllm"))
    }
    assert "staleproof.ops.zero_blocks" in names["ops"]
    # vLLM itself imports this one, when a server selects it.
    names["vllm"].remove("staleproof.vllm.mla_backend")
    statements = (
        "from staleproof import device; device.select(); from staleproof import *",
        "import " + ", ".join(names["ops"]),
        "import " + ", ".join(names["vllm"]),
    )
    say = "print(*(m for m in sys.modules if m.startswith('staleproof.') or m == 'torch._dynamo'))"
    by_name, ops, vllm = map(
        str.split, _printed("\n".join(["import sys", *(f"{s}\n{say}" for s in statements)]))
    )
    assert "staleproof.ops.zero_blocks" in by_name
    assert "torch._dynamo" not in by_name
    for loaded, allowed in ((ops, {"ops", *LIGHT}), (vllm, {"vllm", "ops", "evidence", *LIGHT})):
        ours = {name.split(".")[1] for name in loaded if name != "torch._dynamo"}
        assert ours - {"_kernels_loaded"} <= allowed
