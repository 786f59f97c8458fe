"""One device for the whole session, chosen before any kernel is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from staleproof import device

DEVICE = device.select()


@pytest.fixture(name="device")
def device_fixture() -> str:
    """Where this session runs kernels: ``cuda``, or ``cpu`` through Triton's interpreter."""
    return DEVICE


@pytest.fixture(name="asked", scope="session")
def asked_fixture() -> Callable[..., list[Any]]:
    """Findings of one of an experiment's long questions, which is put once a process."""
    return functools.cache(lambda question: list(question(DEVICE)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE != "cuda":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
