"""The Hopper kernel compiles. test_mla_decode.py runs it on a GPU, against the same reference."""

from __future__ import annotations

import os
import subprocess
import sys

COMPILE_FOR_HOPPER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from staleproof.ops.mla_decode_sm90 import mla_decode_sm90_kernel as kernel

kinds = dict.fromkeys(kernel.arg_names, "i32")
kinds |= dict.fromkeys(("q", "kv_cache", "out"), "*bf16") | {"lse": "*fp32"}
kinds |= dict.fromkeys(("block_table", "seq_lens"), "*i32")
kinds |= dict.fromkeys(("softmax_scale", "k_scale"), "fp32")
constants = {"SPLITS": 1, "PAGE_SIZE": 64}
kinds |= dict.fromkeys(constants, "constexpr")
aligned = [name for name, kind in kinds.items() if kind[0] == "*" or name.endswith("stride")]
place = kernel.arg_names.index
source = GluonASTSource(
    kernel,
    kinds,
    {(place(name),): value for name, value in constants.items()},
    {(place(name),): [["tt.divisibility", 16]] for name in aligned},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
print("shared memory", compiled.metadata.shared)
"""


def test_the_hopper_kernel_compiles_with_this_triton() -> None:
    """No GPU is needed to compile; the kernel must fit the 227 KiB a Hopper block may have."""
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_HOPPER],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout.split()[-1]) <= 227 * 1024
