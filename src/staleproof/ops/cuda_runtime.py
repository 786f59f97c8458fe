"""Facts about a CUDA device that launchers need, and the CUDA runtime for calls torch does not wrap."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


@cache
def processor_count(index: int) -> int:
    """Number of streaming multiprocessors of CUDA device ``index``."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of CUDA device ``index``, e.g. (9, 0) on Hopper."""
    return torch.cuda.get_device_capability(index)


@cache
def shared_memory(index: int) -> int:
    """Bytes of shared memory that a block may have on CUDA device ``index``, by opt-in."""
    import triton

    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def cudart() -> ctypes.CDLL:
    """The CUDA runtime library of this process, for calls that torch does not wrap."""
    # torch has loaded it already. Loading by soname finds that copy; a path could load a second one.
    major = (torch.version.cuda or "").split(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")
