"""Compile each kernel for a GPU that is not here: ``python tests/ops/compiled.py CAPABILITY`` prints JSON.

Triton's wheel brings ptxas, so it compiles for any NVIDIA GPU. The public functions are called with tensors
that have no data and say that they are on that GPU; each launch is replaced by a compilation. It is a process
of its own, because parts of torch, Triton and staleproof are replaced for good.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

# Streaming multiprocessors of an H200 and a B200; both allow a block as much shared memory.
PROCESSORS = {90: 132, 100: 148}
SHARED_BYTES = 227 * 1024


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
        capability: compute capability times ten, e.g. 100.
        launched: each kernel that was compiled, with the compiler's log.
    """

    def __init__(self, capability: int) -> None:
        super().__init__()
        self.capability = capability
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


def install(capability: int) -> NoGpu:
    """Replace Triton's driver and launches, and what launchers ask about their device."""
    from staleproof.ops import cuda_runtime, launching, operators, private

    gpu = NoGpu(capability)
    triton.runtime.driver.set_active(gpu)
    compile_or_find = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def mock(x: Any) -> Any:
            return MockTensor(x.dtype, list(x.shape)) if isinstance(x, torch.Tensor) else x

        # With TRITON_DUMP_PTXAS_LOG Triton prints the log when it compiles.
        log = io.StringIO()
        with contextlib.redirect_stdout(log), torch._C.DisableTorchFunction():
            kernel = compile_or_find(
                self, *map(mock, args), grid=grid, warmup=True, **{n: mock(x) for n, x in kwargs.items()}
            )
        if log.getvalue():
            gpu.launched.append((kernel, log.getvalue()))
        return kernel

    replacements: tuple[tuple[Any, str, Callable[..., Any] | None], ...] = (
        (JITFunction, "run", run),
        (torch.cuda, "device", contextlib.nullcontext),
        (cuda_runtime, "processor_count", lambda index: PROCESSORS[capability]),
        (cuda_runtime, "capability", lambda index: divmod(capability, 10)),
        (cuda_runtime, "shared_memory", lambda index: SHARED_BYTES),
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


def cases() -> dict[str, Callable[[], object]]:
    """Calls that launch each kernel at least once, with the shapes of DeepSeek and Qwen."""
    from staleproof.evidence.board import Board
    from staleproof.ops import topk
    from staleproof.ops.bad_logits import find_bad_logits
    from staleproof.ops.clear_empty_rows import clear_empty_rows
    from staleproof.ops.distinct_experts import distinct_experts
    from staleproof.ops.fp8 import quantize_fp8_per_tensor
    from staleproof.ops.mla.decode import mla_decode
    from staleproof.ops.nvfp4 import quantize_nvfp4
    from staleproof.ops.zero_blocks import BlockZeroer

    bf16, fp32, int32, fp8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn

    def empty(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def mla(batch: int, heads: int, q_len: int = 1, page: int = 64, cache: torch.dtype = bf16) -> None:
        query = (batch, heads, 576) if q_len == 1 else (batch, q_len, heads, 576)
        table, lens = empty(batch, 4096 // page, dtype=int32), empty(batch, dtype=int32)
        mla_decode(empty(*query), empty(1000, page, 576, dtype=cache), table, lens, softmax_scale=0.1)

    def count(columns: int, top_k: int = 0) -> None:
        ids = empty(256, top_k, dtype=int32) if top_k else None
        Board("cuda").count(7, empty(256, top_k or columns), ids, None)

    return {
        "mla_decode, 128 heads": lambda: mla(256, 128),
        "mla_decode, 128 heads, pages of 128": lambda: mla(256, 128, page=128),
        "mla_decode, 16 heads": lambda: mla(256, 16),
        "mla_decode, one request": lambda: mla(1, 128),
        "mla_decode, 16 heads, E4M3 cache": lambda: mla(256, 16, cache=fp8),
        "mla_decode, 4 query tokens": lambda: mla(128, 16, q_len=4),
        "clear_empty_rows": lambda: clear_empty_rows(
            empty(256, 128, 512), empty(256, dtype=int32), lse=empty(256, 128, dtype=fp32)
        ),
        "quantize_fp8_per_tensor, large": lambda: quantize_fp8_per_tensor(empty(128, 7168)),
        "quantize_fp8_per_tensor, small": lambda: quantize_fp8_per_tensor(
            empty(8, 512), live_rows=empty(1, dtype=int32)
        ),
        "topk_softmax": lambda: topk.topk_softmax(empty(256, 128), 8, renormalize=True),
        "grouped_topk": lambda: topk.grouped_topk(
            empty(256, 256, dtype=fp32), 8, bias=empty(256, dtype=fp32), num_expert_group=8, topk_group=4
        ),
        "quantize_nvfp4": lambda: quantize_nvfp4(empty(256, 7168), empty(1, dtype=fp32)),
        "find_bad_logits": lambda: find_bad_logits(empty(64, 128256), empty(1024, dtype=torch.uint8)),
        "BlockZeroer": lambda: BlockZeroer([empty(128, 64 * 576 * 2, dtype=torch.int8)]),
        "distinct_experts": lambda: distinct_experts(empty(256, 8, dtype=fp32), empty(256, 8, dtype=int32)),
        "Board, rows": lambda: count(8192),
        "Board, routing": lambda: count(0, 8),
    }


def main(capability: int) -> None:
    gpu = install(capability)
    found = []
    for case, call in cases().items():
        gpu.launched.clear()
        with gpu:
            call()
        for kernel, log in gpu.launched:
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))
            name = kernel.metadata.name.strip("_")
            found.append({"kernel": name, "case": case, "spilled": spilled, "shared": kernel.metadata.shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
