"""How often the bits of a recurrent state are NaN when they are read as keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from staleproof.check import require

# A multiple of HEAD_DIM.
SAMPLES = 1 << 20
HEAD_DIM = 256
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def _random_bytes(draw: np.random.Generator, count: int) -> np.ndarray:
    return np.frombuffer(draw.bytes(4 * count), dtype=np.float32).copy()


def _bf16_values(draw: np.random.Generator, count: int) -> np.ndarray:
    values = torch.from_numpy(draw.standard_normal(count, dtype=np.float32))
    return values.bfloat16().float().numpy()


# Drawn with numpy, whose stream is the same on every machine.
SOURCES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "N(0, 1)": lambda draw, count: draw.standard_normal(count, dtype=np.float32),
    "N(0, 0.01²)": lambda draw, count: draw.standard_normal(count, np.float32) * np.float32(0.01),
    "N(0, 100²)": lambda draw, count: draw.standard_normal(count, np.float32) * np.float32(100),
    "U(-1, 1)": lambda draw, count: draw.random(count, np.float32) * 2 - np.float32(1),
    "random bytes": _random_bytes,
    "bf16 values in fp32": _bf16_values,
}


@dataclass(frozen=True)
class NanShare:
    """How fp32 values from one source look when their bytes are read as a smaller dtype.

    Attributes:
        source: a key of :data:`SOURCES`.
        dtype: a key of :data:`DTYPES`.
        elements: share of the dtype's elements that are NaN.
        infinite: share of them that are infinite.
        words: share of the fp32 values with at least one NaN in their bytes.
        heads: share of head vectors, :data:`HEAD_DIM` elements each, with at least one NaN.
    """

    source: str
    dtype: str
    elements: float
    infinite: float
    words: float
    heads: float


def nan_share(source: str, dtype: str) -> NanShare:
    """Draw :data:`SAMPLES` fp32 values and reinterpret their bytes in another dtype.

    Args:
        source: a key of :data:`SOURCES`.
        dtype: a key of :data:`DTYPES`.

    Raises:
        ValueError: an unknown source or dtype.
    """
    require(source in SOURCES, "source", f"one of {list(SOURCES)}", repr(source))
    require(dtype in DTYPES, "dtype", f"one of {list(DTYPES)}", repr(dtype))
    values = torch.from_numpy(SOURCES[source](np.random.default_rng(0), SAMPLES))
    read = values.view(DTYPES[dtype])
    nan = read.isnan()
    # e4m3 has no infinity, and torch has no isinf for it.
    infinite = 0.0 if dtype == "e4m3" else (read.float().abs() == float("inf")).float().mean()
    return NanShare(
        source,
        dtype,
        float(nan.float().mean()),
        float(infinite),
        float(nan.view(SAMPLES, -1).any(1).float().mean()),
        float(nan.view(-1, HEAD_DIM).any(1).float().mean()),
    )


def nan_table() -> list[NanShare]:
    """Every source in every dtype."""
    return [nan_share(source, dtype) for source in SOURCES for dtype in DTYPES]
