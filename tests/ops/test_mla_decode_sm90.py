"""The Hopper kernel compiles. test_mla_decode.py runs it on a GPU, against the same reference."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import hopper

PROGRAM = """
from staleproof.ops.mla.sm90 import mla_decode_sm90_kernel as kernel

kinds = dict.fromkeys(kernel.arg_names, "i32")
kinds |= dict.fromkeys(("q", "kv_cache", "out"), "*bf16") | {"lse": "*fp32"}
kinds |= dict.fromkeys(("block_table", "seq_lens"), "*i32")
kinds |= dict.fromkeys(("softmax_scale", "k_scale"), "fp32")
constants = {"SPLITS": 1, "PAGE_SIZE": 64}
aligned = [name for name, kind in kinds.items() if kind[0] == "*" or name.endswith("stride")]
"""


def test_the_hopper_kernel_compiles_with_this_triton() -> None:
    """No GPU is needed to compile; the kernel must fit the 227 KiB a Hopper block may have."""
    result = hopper.compiled(PROGRAM)
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout.split()[-1]) <= 227 * 1024
