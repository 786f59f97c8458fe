"""The device of the test session, chosen once, before a kernel module is imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator

# Otherwise g++ compiles a program for each vector unit at the first use of inductor, which takes longer
# than all code that the tests compile. Set before torch is imported, which reads it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Otherwise inductor starts processes that import torch, to compile kernels of which the tests have few.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# jsonschema, which nbformat imports, makes a parser of IRIs in a second if this package is there, and
# does without otherwise. No notebook has a field of that format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

import pytest

from staleproof import child as children
from staleproof import device

DEVICE = device.select()


@pytest.fixture(name="device")
def device_fixture():
    """Where kernels run: ``cuda``, or ``cpu`` through Triton's interpreter."""
    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def _children_have_the_variables_of_the_session():
    """The first child starts the process that others are forked from, which keeps its variables.

    Were that in a test that changes some, each later child would be a new interpreter, which imports torch.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        children.call(os.getpid, timeout_s=60)


@pytest.fixture(autouse=True)
def _no_child_is_left(request):
    """No child process of a test outlives it."""
    yield
    left = [*children._running]
    children.end_all()
    if left:
        pytest.fail(f"{request.node.name} leaves {len(left)} child processes")


@pytest.fixture(autouse=True)
def _no_vllm_is_left(request):
    """A made-up vLLM that a test leaves would be the vLLM of whatever test its process runs next."""
    before = sys.modules.get("vllm")
    yield
    if sys.modules.get("vllm") is not before:
        pytest.fail(f"{request.node.name} leaves a package vllm in sys.modules: {sys.modules.get('vllm')}")


@pytest.fixture(autouse=True)
def _libraries_leave_no_variables():
    """Inductor sets variables when it is first used, and ``children`` forks none with other variables.

    Each child of a later test would be a new interpreter, which imports torch once more.
    """
    before = dict(os.environ)
    yield
    for name in {*os.environ, *before}:
        if name.startswith(children.READ_LATE):
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


# What a launch asks: whether the running test, or what it calls, has asked where kernels run.
_asked = {"device": True, "patched": False}
_select = device.select


def _noted(name: str | None = None) -> str:
    _asked["device"] |= name in (None, "auto")
    return _select(name)


device.select = _noted


def _watch_launches() -> None:
    """Make launches fail, here as on a GPU, in a test that says nothing about the device.

    Triton's interpreter takes tensors of a CPU, and a GPU machine has no interpreter: a test that makes its
    tensors on the CPU would be green here and red there.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or _asked["patched"]:
        return
    launch = interpreter.GridExecutor.__call__

    def checked(self: object, *args: object, **kwargs: object) -> object:
        if not _asked["device"]:
            pytest.fail("launches a kernel, and nobody asked for the device: fails on a GPU machine")
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = checked
    _asked["patched"] = True


@pytest.fixture(autouse=True)
def _kernels_run_where_the_session_does(request):
    _watch_launches()
    # Or it is skipped there.
    _asked["device"] = (
        "device" in request.fixturenames or request.node.get_closest_marker("skipif") is not None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # What is imported and collected lives to the end: a second of looking for garbage meanwhile, and half a
    # second of each collection that a test asks for.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    # Or bindings in C++ list all of it as leaked when Python ends.
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Those that fork from a process with vLLM's imports are first, so that one process of xdist has them all.
    items.sort(key=lambda item: "vllm" not in item.path.parts)
    if DEVICE != "cuda":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
