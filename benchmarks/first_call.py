"""Time from ``import staleproof`` to the first result of each operation, each in a new process.

``Triton's cache empty``: the kernels are compiled. ``Triton's cache filled``: an earlier process has compiled
them, as for every further worker of a server. The time of ``import torch`` and of making the inputs, which
creates the CUDA context, is left out: a server has done that anyway. ``the second call`` is in the same
process.

Run: ``python benchmarks/first_call.py`` on a machine with a CUDA device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from staleproof import device

device.select()

from staleproof import measure
from staleproof.ops import clear_empty_rows, fp8, nvfp4, topk, zero_blocks
from staleproof.ops.mla import decode

# By name, so that the source digest of a recorded row covers them.
PARTS = (clear_empty_rows, fp8, decode, nvfp4, topk, zero_blocks)
# Inputs, then the call, of each operation: shapes of one decode step of DeepSeek-V3 or Qwen3.
OPERATIONS: dict[str, tuple[str, str, str]] = {
    "mla_decode": (
        "mla_padding",
        "q, kv, lens, table = bf16(99, 128, 576), bf16(256, 64, 576), ints(99) + 100, ints(198).view(-1, 2)",
        "staleproof.mla_decode(q, kv, table, lens, softmax_scale=0.07)",
    ),
    "clear_empty_rows": (
        "mla_padding",
        "out, lens = bf16(128, 128, 512), ints(128)",
        "staleproof.clear_empty_rows(out, lens)",
    ),
    "quantize_fp8_per_tensor": (
        "mla_padding",
        "x, pad = bf16(128, 7168), ints(128) > 0",
        "staleproof.quantize_fp8_per_tensor(x, is_padding=pad)",
    ),
    "topk_softmax": ("moe_routing", "x = bf16(128, 128)", "staleproof.topk_softmax(x, 8)"),
    "topk_sigmoid": ("moe_routing", "x = bf16(128, 256)", "staleproof.topk_sigmoid(x, 8)"),
    "grouped_topk": (
        "moe_routing",
        "x, bias = bf16(128, 256), torch.zeros(256, device='cuda')",
        "staleproof.grouped_topk(x, 8, num_expert_group=8, topk_group=4, bias=bias)",
    ),
    "BlockZeroer": (
        "kv_reuse",
        "caches = [bf16(2, 64, 16, 1024) for _ in range(28)]",
        "staleproof.BlockZeroer(caches, block_dim=1).zero([1, 2, 3])",
    ),
    "quantize_nvfp4": (
        "scale_padding",
        "x, factor = bf16(128, 7168), torch.ones(1, device='cuda')",
        "staleproof.quantize_nvfp4(x, factor)",
    ),
}
PROGRAM = """
import json, time, torch
def bf16(*shape): return torch.randn(*shape, device="cuda").bfloat16()
def ints(n): return torch.zeros(n, device="cuda", dtype=torch.int32)
{inputs}
torch.cuda.synchronize()
times = [time.perf_counter()]
import staleproof
for _ in range(2):
    {call}
    torch.cuda.synchronize()
    times.append(time.perf_counter())
print(json.dumps([(b - a) * 1e6 for a, b in zip(times, times[1:])]))
"""


def timed(inputs: str, call: str, cache: str) -> tuple[float, float]:
    """Microseconds of import and first call, and of the second call."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(inputs=inputs, call=call)],
        env=os.environ | {"TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{call}: {done.stderr[-500:]}")
    first, again = json.loads(done.stdout.splitlines()[-1])
    return first, again


def cases() -> Iterator[measure.Timing]:
    """Two for each operation, once each."""
    for name, (incident, inputs, call) in OPERATIONS.items():
        with tempfile.TemporaryDirectory() as cache:
            for mode in ("Triton's cache empty", "Triton's cache filled"):
                found = zip(("staleproof", "the second call"), timed(inputs, call, cache), strict=True)
                yield measure.Timing(
                    *(incident, name, f"import and first call, {mode}", "calls", 1, 0),
                    {provider: measure.Times(p50=us, p20=us, p80=us) for provider, us in found},
                    None,
                    # The process has ended; what it computed, others check.
                    lambda provider: "",
                )


def rows() -> list[dict[str, Any]]:
    """Measure every operation.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="staleproof"))
