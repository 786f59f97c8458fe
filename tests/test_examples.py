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
# By their folder: one test each, so that one process imports what they share.
WITH_EXAMPLES: dict[str, list[str]] = {}
for folder, files in ((ROOT / "src", "**/*.py"), (ROOT, "tools/*.py"), (ROOT, "benchmarks/*.py")):
    for path in sorted(folder.glob(files)):
        if ">>> " in path.read_text():
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            WITH_EXAMPLES.setdefault(".".join(parts[:-1][:2]), []).append(name)
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


@pytest.mark.parametrize("folder", WITH_EXAMPLES)
def test_examples_say_the_truth(folder, capsys):
    found = {name: doctest.testmod(_import(name), optionflags=OPTIONS) for name in WITH_EXAMPLES[folder]}
    assert [name for name, (failed, _) in found.items() if failed] == [], capsys.readouterr().out
    assert all(tried for _, tried in found.values())


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
