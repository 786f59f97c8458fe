"""The device of the test session, chosen once, before a kernel module is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from staleproof import device

DEVICE = device.select()


@pytest.fixture(name="device")
def device_fixture() -> str:
    """Where kernels run: ``cuda``, or ``cpu`` through Triton's interpreter."""
    return DEVICE


@pytest.fixture(name="asked", scope="session")
def asked_fixture() -> Callable[..., list[Any]]:
    """Asks a question that takes long only once per process, and returns its findings."""
    return functools.cache(lambda question: list(question(DEVICE)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE != "cuda":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
