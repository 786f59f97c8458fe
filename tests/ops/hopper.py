"""Compiles a Gluon kernel for an SM90 GPU that is not here, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

START = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
"""
END = """
kinds |= dict.fromkeys(constants, "constexpr")
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


def compiled(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Compile what a program names, and print the bytes of shared memory.

    Args:
        program: sets ``kernel``, ``kinds`` (its arguments' types), ``constants``, and ``aligned``: names of
            arguments that are multiples of 16.
        env: further variables.
    """
    return subprocess.run(
        [sys.executable, "-c", START + program + END],
        env={**os.environ, "TRITON_INTERPRET": "0", **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
