"""Calls that a hook does not know, reloaded modules, and what others ask of our loader."""

from __future__ import annotations

import importlib
import importlib.util
import logging

import pytest

from staleproof.vllm import hooks
from staleproof.vllm.hooks import Target
from staleproof.vllm.sources import PatchError, Sources

MODULE = "vllm.ops"
TEXT = "def double(x, y=0):\n    return 2 * x + y\n\n\nclass Impl:\n    def run(self, x):\n        return x\n"
TEXT += "\n\ndef local(x, y=0, extra=0):\n    return 2 * x + y + extra\n"


@pytest.fixture(name="package")
def package_fixture(made_up):
    """A vllm whose ``ops`` nobody has imported yet."""
    yield made_up({"ops": TEXT})
    hooks.unwrap("p")


def _fails(args, kwargs):
    raise RuntimeError(f"shape {args}")


def test_a_failure_is_one_line_whatever_its_text(package, caplog):
    hooks.wrap("p", Target(MODULE, "double", ("x",), before=_fails))
    ops = importlib.import_module(MODULE)
    with caplog.at_level(logging.WARNING):
        assert [ops.double(x) for x in range(200)] == [2 * x for x in range(200)]
    assert len(caplog.records) == 1
    assert len(hooks._warned) == 1


def test_a_call_with_unknown_arguments_is_vllms(package):
    hooks.wrap("p", Target(MODULE, "double", ("x", "y"), instead=lambda a, k: "ours"))
    double = importlib.import_module(MODULE).double
    assert double(1, y=2) == "ours"
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        double(1, z=2)
    with pytest.raises(TypeError, match="positional arguments"):
        double(1, 2, 3)


def test_a_replacement_is_refused_where_the_signature_has_grown(package, caplog):
    grown = Target(MODULE, "local", ("x", "y"), instead=lambda a, k: "ours")
    with pytest.raises(PatchError, match=r"local takes \(x, y, extra\), not what was expected"):
        grown.check(Sources(package))
    hooks.wrap("p", grown)
    assert importlib.import_module(MODULE).local(1, extra=3) == 5
    assert "p leaves local alone" in caplog.text
    # Hooks around vLLM's call pass on what they do not know.
    hooks.wrap("p", Target(MODULE, "local", ("x", "y"), after=lambda r, a, k: -r))
    assert importlib.import_module(MODULE).local(1, extra=3) == -5


def test_a_reloaded_module_is_patched_again(package):
    hooks.wrap("p", Target(MODULE, "double", ("x",), after=lambda r, a, k: -r))
    hooks.wrap("p", Target(MODULE, "Impl.run", ("self",), after=lambda r, a, k: -r))
    ops = importlib.import_module(MODULE)
    for _ in range(2):
        importlib.reload(ops)
        # Once, not twice.
        assert (ops.double(1), ops.Impl().run(1)) == (-2, -1)
    hooks.unwrap("p")
    assert (ops.double(1), ops.Impl().run(1)) == (2, 1)


def test_the_loader_answers_for_the_one_it_stands_for(package):
    hooks.wrap("p", Target(MODULE, "double", ("x",), after=lambda r, a, k: -r))
    loader = importlib.util.find_spec(MODULE).loader
    assert isinstance(loader, hooks._Loader)
    assert loader.get_source(MODULE) == TEXT
    assert loader.get_code(MODULE).co_filename == str(package / "ops.py")
    assert loader.is_package(MODULE) is False
    with pytest.raises(AttributeError):
        loader.no_such_thing  # noqa: B018
