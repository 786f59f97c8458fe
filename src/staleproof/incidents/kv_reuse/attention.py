"""Paged decode attention by real kernels, behind one call.

Some kernels multiply masked positions by a weight of 0, others never load them. Neither is wrong: a weight of
0 removes every finite value. But ``0 * NaN`` is NaN (PyTorch #101967, flash-attention #1974).
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import patch

import torch

from staleproof import device as devices
from staleproof.device import Provenance
from staleproof.evidence.canary import bits
from staleproof.incidents.kv_reuse.block_pool import NULL_BLOCK
from staleproof.kernels import flashinfer
from staleproof.kernels import torch as kernels_of_torch

# The head size of this incident's model. FlashInfer's adapter is built for it, and for pages of 16 tokens.
HEAD_DIM = 64


@dataclass(frozen=True)
class Call:
    """One decode step.

    Attributes:
        q: (rows, heads, head_dim) in the compute dtype.
        keys: (kernel blocks, tokens, kv_heads, head_dim) in the cache's dtype, any strides.
        values: like ``keys``.
        table: (rows, kernel blocks a row) int64; entries past a row's tokens name the null block.
        seq_lens: (rows,) int64, at least 1.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return 1 / math.sqrt(self.q.shape[-1])

    def gathered(self, cache_: torch.Tensor) -> torch.Tensor:
        """The whole pages of each row, positions past its last token included.

        Returns:
            (rows, heads, tokens, head_dim) in the compute dtype; the conversion is exact.
        """
        # Not every device can index fp8; every device can index its bytes.
        pages = bits(cache_)[self.table].view(cache_.dtype).flatten(1, 2).to(self.q.dtype)
        groups = self.q.shape[1] // pages.shape[2]
        heads_first = pages.transpose(1, 2)
        return heads_first if groups == 1 else heads_first.repeat_interleave(groups, 1)

    @property
    def valid(self) -> torch.Tensor:
        """(rows, tokens) bool: which gathered positions hold a token of the row."""
        tokens = self.table.shape[1] * self.keys.shape[1]
        return torch.arange(tokens, device=self.q.device) < self.seq_lens[:, None]


Attend = Callable[[Call], torch.Tensor]


def used_table(table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> torch.Tensor:
    """``table`` (rows, blocks) with the null block in every entry past a row's last token."""
    column = torch.arange(table.shape[1], device=table.device)
    return torch.where(column * block_size < seq_lens[:, None], table, NULL_BLOCK)


def masked_loads(call: Call) -> torch.Tensor:
    """Ours: positions past ``seq_lens`` become 0 before anything is computed with them.

    This is what masked loads (``other=0``) do in a kernel such as ``staleproof.mla_decode``.
    """
    valid = call.valid[:, None, :, None]
    keys = torch.where(valid, call.gathered(call.keys), 0)
    values = torch.where(valid, call.gathered(call.values), 0)
    scores = (call.q[:, :, None] @ keys.transpose(2, 3)) * call.scale
    scores = torch.where(valid.transpose(2, 3), scores, float("-inf"))
    return (scores.softmax(-1) @ values)[:, :, 0]


def _gathered(adapter: Callable[..., torch.Tensor], call: Call) -> torch.Tensor:
    """Attention by a kernel of torch, over whole pages with a boolean mask."""
    pages = call.gathered(call.keys), call.gathered(call.values)
    return adapter(call.q[:, :, None], *pages, call.valid[:, None, None], call.scale)[:, :, 0]


def _flashinfer(backend: str, call: Call) -> torch.Tensor:
    starts = torch.arange(len(call.q) + 1, dtype=torch.int32, device=call.q.device)
    table, seq_lens, out = call.table.int(), call.seq_lens.int(), torch.empty_like(call.q)
    return flashinfer.prefill(
        call.q, call.keys, call.values, table, seq_lens, starts, call.scale, out, backend
    )()


@dataclass(frozen=True)
class Kernel:
    """One attention kernel.

    Attributes:
        name: package and kernel.
        attend: computes (rows, heads, head_dim) from a :class:`Call`.
        unavailable_reason: one line why it cannot run here, or ``None``.
        dtypes: supported cache dtypes; FlashInfer supports only that of ``q``.
    """

    name: str
    attend: Attend
    unavailable_reason: str | None
    dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)


def _needs_gpu() -> str | None:
    return None if devices.provenance() is Provenance.MEASURED else "needs a CUDA device"


def _needs_flashinfer(backend: str) -> str | None:
    if why := _needs_gpu():
        return why
    if why := devices.flashinfer_missing():
        return why
    return (devices.needs_sm90() if backend == "fa3" else None) or _not_compiled(backend)


def _not_compiled(backend: str) -> str | None:
    """Why FlashInfer has no kernel for :func:`_flashinfer`; it compiles one at the first call, if allowed."""
    switched_off = "FLASHINFER_DISABLE_JIT"
    may_not = bool(os.environ.get(switched_off))
    if shutil.which("nvcc") is not None and not may_not:
        return None
    load = importlib.import_module("flashinfer.prefill").get_batch_prefill_module
    missing = importlib.import_module("flashinfer.jit").MissingJITCacheError
    dtype, index = torch.bfloat16, torch.int32
    # Let FlashInfer itself look for the module, because its name differs between releases.
    with patch.dict(os.environ, {switched_off: "1"}):
        try:
            load(backend, dtype, dtype, dtype, index, HEAD_DIM, HEAD_DIM, 0, False, False, False)
        except missing as error:
            if may_not or not error.spec.is_compiled:
                return f"FlashInfer's module {error.spec.name} is not compiled, and may not or cannot be here"
    return None


@cache
def kernels() -> dict[str, Kernel]:
    """Every kernel by its short key, runnable here or not."""
    gpu, on_cpu = _needs_gpu(), None if _needs_gpu() else "torch has it for CPU tensors only"
    release = f"FlashInfer {devices.version_of('flashinfer-python') or ''}".strip()
    sdpa = {
        # Key: description, torch's name of the backend, why it cannot run here.
        "sdpa_math": ("math", "MATH", None),
        "sdpa_flash_cpu": ("flash of the CPU", "FLASH_ATTENTION", on_cpu),
        "sdpa_efficient": ("memory-efficient", "EFFICIENT_ATTENTION", gpu),
        "sdpa_cudnn": ("cuDNN", "CUDNN_ATTENTION", gpu),
    }
    return {
        **{
            key: Kernel(
                f"torch {torch.__version__} SDPA, boolean mask, {name}",
                *(partial(_gathered, partial(kernels_of_torch.sdpa, backend=backend)), why),
            )
            for key, (name, backend, why) in sdpa.items()
        },
        "flex_attention": Kernel(
            f"torch {torch.__version__} flex_attention, compiled",
            *(partial(_gathered, partial(kernels_of_torch.flex, compiled=True)), gpu),
        ),
        **{
            f"flashinfer_{name}": Kernel(
                f"{release} paged {name}",
                *(partial(_flashinfer, name), _needs_flashinfer(name), (torch.bfloat16,)),
            )
            for name in ("fa2", "fa3")
        },
        "masked_loads": Kernel("ours, masked loads", masked_loads, None),
    }
