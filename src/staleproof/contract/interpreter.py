"""Lets Triton's CPU interpreter run kernels of other packages that the compiler accepts.

The interpreter refuses integer masks, calls of methods on float arguments, and autotuned kernels, which would
need a GPU to time them. Its conversion to fp8 is wrong where rounding reaches the next power of two: 127
becomes 64. Use this in a child process, because it replaces parts of Triton permanently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import autotuner, interpreter


def _with_bool_mask(name: str, place: int) -> None:
    original = getattr(interpreter.InterpreterBuilder, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[place]
        if mask.data.dtype != np.bool_:
            mask = interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)
        return original(self, *args[:place], mask, *args[place + 1 :], **kwargs)

    setattr(interpreter.InterpreterBuilder, name, call)


def repair() -> None:
    """Replace those parts. Call it once, before kernels are launched."""
    _with_bool_mask("create_masked_load", 1)
    _with_bool_mask("create_masked_store", 2)
    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return convert(value)

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **{**self.configs[0].all_kwargs(), **kwargs})

    convert_float, fp8 = (
        interpreter._convert_float,
        {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2},
    )

    def with_carry(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target not in fp8 or source not in (tl.float32, tl.float16):
            return convert_float(data, source, target, rounding)
        largest = torch.finfo(fp8[target]).max
        # Compiled code saturates.
        numbers = torch.from_numpy(np.array(data)).clamp(-largest, largest)
        return numbers.to(fp8[target]).view(torch.uint8).numpy()

    interpreter._convert_float = with_carry
    interpreter._implicit_cvt = with_floats
    autotuner.Autotuner.run = first_configuration
