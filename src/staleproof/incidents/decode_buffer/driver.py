"""Direct calls of the CUDA driver: the kernels of a graph, and memory not from torch's allocator."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

_KERNEL_NODE = 0


class DriverError(RuntimeError):
    """The CUDA driver is missing, lacks a call, or refused a call; the message is one line."""


def _driver(*calls: str) -> Any:
    """The driver's library, with these calls.

    Raises:
        DriverError: the driver is missing or too old.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("no CUDA driver") from error
    missing = [call for call in calls if not hasattr(driver, call)]
    if missing:
        raise DriverError(f"the CUDA driver has no {', '.join(missing)}")
    return driver


# CUDA_KERNEL_NODE_PARAMS_v2 begins with the function and ends with the kernel and the context.
class _KernelNode(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def kernel_nodes(fn: Callable[[], Any]) -> list[str]:
    """Capture ``fn`` in a CUDA graph and name its nodes, sorted.

    Args:
        fn: launches kernels; called once, inside the capture.

    Returns:
        For a kernel its name, grid and block; for another node its type, as the driver numbers it.

    Raises:
        DriverError: the driver lacks or refused a call.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        fn()
    driver = _driver(
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphKernelNodeGetParams_v2",
        "cuFuncGetName",
        "cuKernelGetName",
    )
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)), "cuGraphGetNodes")
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)), "cuGraphGetNodes")
    return sorted(_name(driver, ctypes.c_void_p(node)) for node in nodes)


def _name(driver: Any, node: ctypes.c_void_p) -> str:
    kind = ctypes.c_int()
    _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)), "cuGraphNodeGetType")
    if kind.value != _KERNEL_NODE:
        return f"node of type {kind.value}"
    got = _KernelNode()
    _check(driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(got)), "cuGraphKernelNodeGetParams")
    name = ctypes.c_char_p()
    if got.func:
        code = driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(got.func))
    else:
        code = driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(got.kernel))
    _check(code, "the name of a kernel")
    return f"{(name.value or b'?').decode()} grid {[*got.grid]}, block {[*got.block]}"


def _check(code: int, what: str) -> None:
    if code != 0:
        raise DriverError(f"{what}: the CUDA driver returned {code}")


@contextlib.contextmanager
def driver_memory(nbytes: int) -> Iterator[None]:
    """Device memory from the driver's ``cuMemAlloc``, not from torch's allocator, inside a ``with``.

    Raises:
        DriverError: the driver lacks the call, or refused it.
    """
    driver = _driver("cuMemAlloc_v2", "cuMemFree_v2")
    address = ctypes.c_uint64()
    _check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)), "cuMemAlloc")
    try:
        yield
    finally:
        _check(driver.cuMemFree_v2(address), "cuMemFree")
