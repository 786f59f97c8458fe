"""Names that torch and Triton do not promise: what takes their place gives the same answers."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from staleproof.ops import private


@pytest.fixture(name="names", params=["0", "1"], ids=["private", "public alone"])
def names_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a process has it in which the variable says so."""
    monkeypatch.setenv("STALEPROOF_PUBLIC_NAMES", request.param)
    spec = importlib.util.spec_from_file_location("names", private.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_variable_leaves_them_all_out(names):
    found = [names._get_mode, names.empty_strided_cuda, names._TensorGuards]
    expected = names._PUBLIC_ONLY
    # A torch without CUDA has no memory on it.
    assert [name is None for name in found] == [expected, expected or found[1] is None, expected]
    assert (names.current_device is torch.cuda.current_device) == (expected or not torch.cuda.is_available())


def test_tracing_is_noticed(names):
    seen = []

    def call(x):
        seen.append((names.is_tracing(), names.mode_count() > 0))
        return x + 1

    call(torch.ones(2))
    make_fx(call)(torch.ones(2))
    make_fx(call, tracing_mode="fake")(torch.ones(2))
    with FakeTensorMode():
        call(torch.ones(2))
    call(torch.ones(2))
    assert seen == [(False, False), (True, True), (True, True), (True, True), (False, False)]


def _compiled(calls: list[Any], version: str) -> Any:
    """What Triton returns, as far as a launch needs it: 3.6's, or one that keeps to public names."""

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments, stream: calls.append((grid, stream, arguments))

    compiled = Compiled()
    if version == "public":
        return compiled

    def run(*arguments):
        calls.append(("run", *arguments))

    def wrapped(launcher):
        return lambda *arguments: launcher(*arguments)

    run.launch = wrapped(lambda *arguments: calls.append(("launch", *arguments)))
    run.global_scratch_size, run.profile_scratch_size = (128 if version == "scratch" else 0), 0
    run.launch_cooperative_grid, run.launch_pdl = False, True
    compiled.run, compiled.function, compiled.packed_metadata = run, "function", "packed"
    compiled.metadata = SimpleNamespace(tensordesc_meta=["how"] if version == "described" else [])
    return compiled


GIVEN = "packed", None, None, None
EXPECTED = {
    "public": ((1, 2, 3), 7, ("a", 5)),
    "3.6": ("launch", 1, 2, 3, 7, "function", False, True, None, None, *GIVEN, "a", 5),
    "described": ("launch", 1, 2, 3, 7, "function", False, True, None, None, *GIVEN, "a", 5),
    "scratch": ("run", 1, 2, 3, 7, "function", *GIVEN, "a", 5),
    "3.9": ("run", 1, 2, 3, 7, "function", *GIVEN, "a", 5),
}


def test_a_launch(names, monkeypatch):
    for version in EXPECTED:
        monkeypatch.setattr("triton.__version__", "3.9.0" if version == "3.9" else "3.6.0")
        driver = SimpleNamespace(make_tensordesc_arg=lambda descriptor, meta: [descriptor, meta])
        monkeypatch.setitem(importlib.sys.modules, "triton.backends.nvidia.driver", driver)
        calls: list[Any] = []
        run, before, described = names.launcher(_compiled(calls, version))
        run(1, 2, 3, 7, *before, "a", 5)
        assert calls == [EXPECTED["public" if names._PUBLIC_ONLY else version]]
        encodes = version == "described" and not names._PUBLIC_ONLY
        assert described("it") == (("it", "how") if encodes else ("it",))
