"""Checks without running it that an adapter's calls fit the package's real signatures.

The files of the package are read, not imported, so that a kernel for a GPU that is not here can be
checked too. Only calls of functions and classes that the adapter imports by ``from ... import`` are
checked, and methods of what such a class returns.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from staleproof.kernels.packages import Release
from staleproof.kernels.subject import Subject


def _parameters(function: ast.FunctionDef, *, method: bool) -> inspect.Signature:
    """Its signature, with None for each default: they are not computed here."""
    arguments = copy.deepcopy(function.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [value and ast.Constant(None) for value in arguments.kw_defaults]
    signature = inspect.signature(eval(f"lambda {ast.unparse(arguments)}: None"))
    parameters = [*signature.parameters.values()][int(method) :]
    return signature.replace(parameters=parameters)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _file(module: str, release: Release) -> Path | None:
    """The source of a module; ``None`` if the release has none."""
    first, *rest = module.split(".")
    root = release.folder
    if root is None:
        spec = importlib.util.find_spec(first)
        if spec is None or spec.origin is None:
            return None
        root = Path(spec.origin).parents[1]
    path = root.joinpath(first, *rest)
    # Python takes a package before a module of its name.
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.exists()), None)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under ``try`` and ``if`` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.Try | ast.If):
            yield from _statements(statement.body)


def _defined(module: str, name: str, release: Release, depth: int = 4) -> ast.stmt | None:
    """The statement that defines a name, followed through the imports of other names' modules."""
    file = _file(module, release)
    if file is None or not depth:
        return None
    tree = _tree(file)
    # Overloads stand before the definition that counts.
    for statement in reversed([*_statements(tree.body)]):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            return statement
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in (name, "*"):
                    base = package[: len(package) - node.level + 1] if node.level else []
                    target = ".".join([*base, *([node.module] if node.module else [])])
                    found = _defined(target, name if alias.name == "*" else alias.name, release, depth - 1)
                    if found is not None:
                        return found
    return None


def _mismatch(call: ast.Call, function: ast.FunctionDef, *, method: bool) -> str:
    keywords = {word.arg or "": None for word in call.keywords}
    # What * and ** hand on is not known here.
    if "" in keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
        return ""
    try:
        _parameters(function, method=method).bind(*call.args, **keywords)
    except TypeError as error:
        return f"{function.name}: {error}"
    return ""


def problem(subject: Subject, release: Release) -> str:
    """Why the calls of an adapter do not fit a release, or ``""``.

    Args:
        subject: whose adapter is read.
        release: whose files are read.
    """
    nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(subject.function))))]
    imported: dict[str, ast.stmt] = {}
    for node in nodes:
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if isinstance(node, ast.ImportFrom) and module and not module.startswith(("torch", "staleproof")):
            for alias in node.names:
                found = _defined(module, alias.name, release)
                if found is None:
                    return f"no file of it that was found defines {module}.{alias.name}"
                imported[alias.asname or alias.name] = found
    made: dict[str, ast.ClassDef] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            maker = imported.get(getattr(node.value.func, "id", ""))
            if isinstance(maker, ast.ClassDef) and isinstance(node.targets[0], ast.Name):
                made[node.targets[0].id] = maker
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        function, method = imported.get(getattr(node.func, "id", "")), False
        if isinstance(function, ast.ClassDef):
            function, method = _method(function, "__init__"), True
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner = made.get(node.func.value.id)
            if owner is not None:
                function, method = _method(owner, node.func.attr), True
                if function is None:
                    return f"{owner.name} has no {node.func.attr}"
        if isinstance(function, ast.FunctionDef) and (wrong := _mismatch(node, function, method=method)):
            return wrong
    return ""


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    found = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None
