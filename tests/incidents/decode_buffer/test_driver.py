"""The driver's structure has the driver's size, and a driver that is absent is an error in one line."""

import ctypes

import pytest
import torch

from staleproof.incidents.decode_buffer import driver


def test_the_structure_of_the_driver_has_its_size():
    assert ctypes.sizeof(driver._KernelNode) == 72
    assert driver._KernelNode.kernel.offset == 56


@pytest.mark.gpu
def test_kernels_of_a_cuda_graph_have_names(device):
    x = torch.ones(64, device=device)
    names = driver.kernel_nodes(lambda: x.add_(1).sin_())
    assert len(names) == 2
    assert all("grid" in name for name in names)


def test_a_driver_that_is_absent_or_too_old_is_named(monkeypatch):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(driver.DriverError, match="no CUDA driver"):
        driver._driver("cuMemAlloc_v2")
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: object())
    with pytest.raises(driver.DriverError, match="the CUDA driver has no cuMemAlloc_v2"):
        driver._driver("cuMemAlloc_v2")
