"""Memory that ends where its mapping ends: a read of the next byte ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch


class _Raw:
    def __init__(self, address: int, count: int) -> None:
        given = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = given


def at_address(address: int, count: int) -> torch.Tensor:
    """(count,) uint8 of the current GPU's memory, from this address on."""
    return torch.as_tensor(_Raw(address, count), device="cuda")


def mapped(count: int, device: str) -> torch.Tensor:
    """(count,) uint8 at the end of a mapping of its own, before addresses that nothing else gets.

    On a CPU this needs Linux.

    Args:
        count: bytes.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ImportError: on a GPU, if cuda-python is not here.

    >>> mapped(5, "cpu").shape
    torch.Size([5])
    """
    return _on_host(count) if device == "cpu" else _on_gpu(count)


def _on_gpu(count: int) -> torch.Tensor:
    from cuda.bindings import driver

    def done(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    wanted, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = torch.cuda.current_device()
    access.location = wanted.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    page = done(driver.cuMemGetAllocationGranularity(wanted, least))
    size = -(-count // page) * page
    # Reserved beyond the end, so that nothing else is mapped there.
    address = done(driver.cuMemAddressReserve(size + 8 * page, 0, 0, 0))
    done(driver.cuMemMap(address, size, 0, done(driver.cuMemCreate(size, wanted, 0)), 0))
    done(driver.cuMemSetAccess(address, size, [access], 1))
    return at_address(int(address) + size - count, count)


def _on_host(count: int) -> torch.Tensor:
    size = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=size - count)
