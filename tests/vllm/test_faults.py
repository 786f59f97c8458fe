"""A hook of any patch that raises: vLLM's own result comes through, and one line says what stepped back.

Each patch's hooks stand on a function of the name, the place and the leading arguments of vLLM's, that
doubles a tensor. Their bodies are replaced by faults.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from staleproof.harness.graph import capture
from staleproof.vllm import hooks, standing
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch, cache_key
from staleproof.vllm.plugin import patches

Fail = Callable[[], None]


def _targets() -> Iterator[tuple[Patch, Target]]:
    for patch in patches().values():
        for target in patch.targets:
            yield patch, target
        if patch.traced:
            yield patch, cache_key(patch.name)


TARGETS = [pytest.param(p, t, id=f"{p.name}-{t.name}") for p, t in _targets()]


def _text(target: Target) -> str:
    *path, name = target.name.split(".")
    lines = [f"def {name}({', '.join([*target.arguments, '*', 'tensor'])}):", "    return tensor * 2"]
    return "\n".join([f"class {path[0]}:", *("    " + line for line in lines)] if path else lines)


@pytest.fixture(name="function")
def function_fixture(tmp_path, monkeypatch):
    """Makes a package ``vllm`` with one target, puts a patch's hooks there, and returns the function."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks._warned.clear()
    hooks._places.clear()
    torch._dynamo.reset()

    def make(patch: Patch, target: Target, **faults: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        file = tmp_path / (target.module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True)
        for folder in [tmp_path / "vllm", *file.parents]:
            if tmp_path in folder.parents:
                (folder / "__init__.py").touch()
        file.write_text(_text(target))
        faulty = replace(target, arguments=(*target.arguments, "tensor"), probe=None, **faults)
        hooks.wrap(patch.name, faulty, requires=patch.requires)
        holder = importlib.import_module(target.module)
        arguments = [None] * len(target.arguments)
        for part in target.name.split(".")[:-1]:
            holder = getattr(holder, part)()
            arguments = arguments[1:]
        name = target.name.split(".")[-1]
        return lambda x: getattr(holder, name)(*arguments, tensor=x)

    yield make
    for name in patches():
        hooks.unwrap(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def _faults(target: Target, fail: Fail) -> dict[str, Any]:
    """The hooks that a target has, each with a body that calls ``fail`` and changes nothing."""

    def around(args: Any, kwargs: Any) -> Any:
        fail()
        return contextlib.nullcontext()

    def before(args: Any, kwargs: Any) -> None:
        fail()

    def instead(args: Any, kwargs: Any) -> Any:
        fail()
        return NotImplemented

    def after(result: Any, args: Any, kwargs: Any) -> Any:
        fail()
        return result

    bodies = {"around": around, "before": before, "instead": instead, "after": after}
    return {name: body for name, body in bodies.items() if getattr(target, name) is not None}


def _raising(error: Exception, at: int = 1) -> Fail:
    calls = itertools.count(1)

    def fail() -> None:
        if next(calls) >= at:
            raise error

    return fail


def _always() -> None:
    raise RuntimeError("planted")


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("planted")


def _stepped_back(patch: Patch, caplog: pytest.LogCaptureFixture, error: str = "RuntimeError") -> None:
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"staleproof: {patch.name}: ")
    assert (
        f"vLLM's own code runs: {error}: planted; out of service: {patch.name}; in service: nothing" in line
    )
    assert [*standing.stepped_back] == [patch.name]


@pytest.mark.parametrize("at", [1, 100])
@pytest.mark.parametrize(("patch", "target"), TARGETS)
def test_a_call(function, caplog, patch, target, at):
    double = function(patch, target, **_faults(target, _raising(RuntimeError("planted"), at)))
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        assert [double(torch.tensor(i)).item() for i in range(at + 3)] == [2 * i for i in range(at + 3)]
    _stepped_back(patch, caplog)


@pytest.mark.parametrize(("patch", "target"), TARGETS)
def test_no_memory(function, caplog, patch, target):
    double = function(patch, target, **_faults(target, _out_of_memory))
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        assert double(torch.tensor(4)).item() == 8
    _stepped_back(patch, caplog, "OutOfMemoryError")


@pytest.mark.parametrize(("patch", "target"), TARGETS)
def test_capture(function, caplog, patch, target):
    double = function(patch, target, **_faults(target, _always))
    x, out = torch.ones(3), torch.zeros(3)
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        graph = capture(lambda: out.copy_(double(x)), "cpu")
        x.fill_(5)
        graph.replay()
    assert out.tolist() == [10.0] * 3
    _stepped_back(patch, caplog)


@pytest.mark.parametrize("fail", [_always, _out_of_memory])
@pytest.mark.parametrize(("patch", "target"), TARGETS)
def test_tracing(function, caplog, patch, target, fail):
    double = function(patch, target, **_faults(target, fail))
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        traced = torch.compile(lambda x: double(x + 1), fullgraph=True, backend="eager")
        assert traced(torch.ones(3)).tolist() == [4.0] * 3
    assert not caplog.records
    assert not standing.stepped_back


@pytest.mark.parametrize(("patch", "target"), TARGETS)
def test_threads(function, caplog, patch, target):
    double = function(patch, target, **_faults(target, _always))
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.extend(double(torch.tensor(i)).item() for i in range(20)))
        for _ in range(4)
    ]
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(results) == sorted([2 * i for i in range(20)] * 4)
    _stepped_back(patch, caplog)


@contextlib.contextmanager
def _leaves_badly() -> Iterator[None]:
    yield
    raise RuntimeError("planted")


@pytest.mark.parametrize(("patch", "target"), [t for t in TARGETS if t.values[1].around is not None])
def test_leaving(function, caplog, patch, target):
    double = function(patch, target, around=lambda args, kwargs: _leaves_badly())
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        assert [double(torch.tensor(i)).item() for i in range(3)] == [0, 2, 4]
    _stepped_back(patch, caplog)
