"""The device of the test session, chosen once, before a kernel module is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Otherwise g++ compiles a program for each vector unit at the first use of inductor, which takes longer
# than all code that the tests compile. Set before torch is imported, which reads it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# Otherwise inductor starts processes that import torch, to compile kernels of which the tests have few.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# jsonschema, which nbformat imports, makes a parser of IRIs in a second if this package is there, and
# does without otherwise. No notebook has a field of that format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

import pytest

from staleproof import device

DEVICE = device.select()


@pytest.fixture(name="device")
def device_fixture() -> str:
    """Where kernels run: ``cuda``, or ``cpu`` through Triton's interpreter."""
    return DEVICE


@pytest.fixture(autouse=True)
def _no_vllm_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A made-up vLLM that a test leaves would be the vLLM of whatever test its process runs next."""
    before = sys.modules.get("vllm")
    yield
    if sys.modules.get("vllm") is not before:
        pytest.fail(f"{request.node.name} leaves a package vllm in sys.modules: {sys.modules.get('vllm')}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE != "cuda":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
