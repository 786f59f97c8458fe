"""The device of the test session, chosen once, before a kernel module is imported."""

from __future__ import annotations

import pytest

from staleproof import device

DEVICE = device.select()


@pytest.fixture(name="device")
def device_fixture() -> str:
    """Where kernels run: ``cuda``, or ``cpu`` through Triton's interpreter."""
    return DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE != "cuda":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
