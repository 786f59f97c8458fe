"""A GPU that is not there: tensors without data that say they are on it, and launches that compile.

For a process of its own, because parts of torch, Triton and staleproof are replaced for good.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction, MockTensor

# Name of a kernel's log in Triton's cache, beside the kernel.
LOG = "ptxas.log"


class NoData(torch.Tensor):
    """A tensor on the device ``meta`` that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def get_device(self) -> int:
        """The index of that GPU."""
        return 0


class NoGpu(TorchFunctionMode):
    """Inside the ``with``, tensors that are made on a GPU are :class:`NoData`.

    Triton takes it for its driver.

    Attributes:
        capability, processors, shared: of the GPU; the compute capability times ten, and the bytes
            of shared memory that a block may have.
        launched: (kernel, ptxas's log) of each launch, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capability = self.processors = self.shared = 0
        self.launched: list[tuple[Any, str]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # torch, too, asks its arguments for their device: inside it they are plain meta tensors.
        args, kwargs = tree_map_only(NoData, lambda x: x.as_subclass(torch.Tensor), (args, kwargs or {}))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: x.as_subclass(NoData) if x.is_meta else x, result)

    def get_current_target(self) -> GPUTarget:
        """For Triton: what to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """For Triton, which keeps the kernels of devices apart by this number."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """For Triton: a stream that nothing is enqueued on."""
        return 0


def install() -> NoGpu:
    """Replace Triton's driver and launches, and what launchers ask about their device.

    To be called before any kernel module is imported.
    """
    from staleproof.ops import cuda_runtime, launching, operators, private

    gpu = NoGpu()
    triton.runtime.driver.set_active(gpu)
    compile_or_find = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def mock(x: Any) -> Any:
            return MockTensor(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x

        said = io.StringIO()
        # With TRITON_DUMP_PTXAS_LOG Triton prints the log, but only when it compiles.
        with contextlib.redirect_stdout(said), torch._C.DisableTorchFunction():
            kernel = compile_or_find(
                self, *map(mock, args), grid=grid, warmup=True, **{n: mock(x) for n, x in kwargs.items()}
            )
        kept = get_cache_manager(kernel.hash)
        path = kept.get_file(LOG) or kept.put(said.getvalue(), LOG, binary=False)
        with open(path) as log:
            gpu.launched.append((kernel, log.read()))
        return kernel

    replacements: tuple[tuple[Any, str, Callable[..., Any] | None], ...] = (
        (JITFunction, "run", run),
        (torch.cuda, "device", contextlib.nullcontext),
        (cuda_runtime, "processor_count", lambda index: gpu.processors),
        (cuda_runtime, "capability", lambda index: divmod(gpu.capability, 10)),
        (cuda_runtime, "shared_memory", lambda index: gpu.shared),
        (operators, "on_device_of", contextlib.nullcontext),
        # Nothing is launched twice: what would repeat a launch asks Triton's driver for the loaded kernel.
        (launching, "Ready", lambda *call: None),
        # Memory comes from torch.empty, which makes tensors without data.
        (private, "empty_strided_cuda", None),
        # Tensors without data would go to the operator, which is for tracing, and end there.
        (operators, "traced", lambda x: False),
    )
    for owner, name, value in replacements:
        setattr(owner, name, value)
    return gpu
