"""The ``>>>`` examples of package, tools and benchmarks run; every public function and detector has one."""

from __future__ import annotations

import dataclasses
import doctest
import enum
import importlib
import inspect
from pathlib import Path

import pytest

import staleproof
from staleproof import device, evidence

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
    for folder, files in ((ROOT / "src", "**/*.py"), (ROOT, "tools/*.py"), (ROOT, "benchmarks/*.py"))
    for path in folder.glob(files)
    if ">>> " in path.read_text()
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Examples build CPU tensors. Compiled kernels cannot read those.
pytestmark = pytest.mark.skipif(not device.interpreting(), reason="examples run kernels on a CPU")


def _import(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        if device.has_triton():
            raise
        pytest.skip(device.TRITON_MISSING)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_say_the_truth(name, capsys):
    module = _import(name)
    failed, tried = doctest.testmod(module, optionflags=OPTIONS)
    assert failed == 0, capsys.readouterr().out
    assert tried > 0


@pytest.mark.parametrize("package", [staleproof, evidence])
def test_every_public_function_has_an_example(package):
    _import("staleproof.evidence.counters")
    public = {name: getattr(package, name) for name in package.__all__}
    # Dataclasses and enumerations are results: the example of the function that returns them shows them.
    called = {
        name: value
        for name, value in public.items()
        if inspect.isfunction(value)
        or (
            inspect.isclass(value)
            and not dataclasses.is_dataclass(value)
            and not issubclass(value, enum.Enum)
        )
    }
    assert called
    assert [name for name, value in called.items() if ">>> " not in (inspect.getdoc(value) or "")] == []
