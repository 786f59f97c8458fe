"""What a server is put together from: MLA decode kernels, contents of memory, and the quantiser.

Kernels are called as :func:`staleproof.mla_decode` is.
"""

from __future__ import annotations

import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from staleproof import device
from staleproof.words.server import RANK, Kernel, Memory

device.load_triton()

from staleproof.kernels import vllm_sources
from staleproof.ops.mla.decode import mla_decode


def torch_unwritten(q, kv_cache, block_table, seq_lens, *, softmax_scale, out):
    """MLA decode in plain torch, which leaves the output of an empty row as it was.

    It stands for the same kernels as the replica of incident 1. On a CPU it is a hundred times faster.
    It reads the lengths on the host, so no graph can capture it.
    """
    page = kv_cache.shape[1]
    for row, length in enumerate(seq_lens.tolist()):
        if length > 0:
            blocks = block_table[row, : -(-length // page)].long()
            kv = kv_cache[blocks].flatten(0, 1)[:length].float()
            scores = q[row].float() @ kv.T * softmax_scale
            out[row] = scores.softmax(-1) @ kv[:, :RANK]


NO_VLLM = (
    "the source of vLLM 0.33.0 is neither installed nor unpacked; "
    "python tests/vllm/environment.py 0.33.0 fetches it"
)


def vllm_release() -> tuple[str, Path] | None:
    """The newest release of vLLM whose source is here, and its folder ``vllm``; ``None`` without one.

    It looks where ``tests/vllm/environment.py`` unpacks releases.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staleproof/vllm"
    folders = Path(os.environ.get("STALEPROOF_VLLM_CACHE", home)).glob("[0-9]*/vllm")
    found = {tuple(map(int, path.parent.name.split("."))): path for path in folders}
    if not found:
        return None
    newest = found[max(found)]
    return newest.parent.name, newest


@cache
def _vllm_decode() -> Any:
    found = vllm_release()
    if found is None:
        raise RuntimeError(NO_VLLM)
    return vllm_sources.load(found[1], "vllm.v1.attention.ops.triton_decode_attention")[0]


def vllm_triton(q, kv_cache, block_table, seq_lens, *, softmax_scale, out):
    """The unmodified Triton MLA decode of :func:`vllm_release`, with one split of the keys.

    Raises:
        RuntimeError: no source of vLLM is here.
    """
    module = _vllm_decode()
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    parts = torch.empty(*q.shape[:2], 1, RANK + 1, dtype=torch.float32, device=q.device)
    one = torch.ones(1, device=q.device)
    more = {"k_scale": one, "v_scale": one, "is_mla": True}
    known = inspect.signature(module.decode_attention_fwd).parameters
    kv = kv_cache.unsqueeze(2)
    module.decode_attention_fwd(
        q, kv, kv[..., :RANK], out, lse, block_table, seq_lens, parts, 1, softmax_scale, kv_cache.shape[1],
        **{name: value for name, value in more.items() if name in known},
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {"torch": torch_unwritten, "vllm": vllm_triton, "mla_decode": mla_decode}


def memory_of(factor: float) -> Memory:
    """Fills memory with normal numbers times ``factor``: 0 gives zeros, NaN gives NaN.

    >>> held = torch.empty(3)
    >>> memory_of(0.0)(held), held
    (None, tensor([0., 0., 0.]))
    """
    generator: dict[torch.device, torch.Generator] = {}

    def fill(memory: torch.Tensor) -> None:
        if factor == 0 or factor != factor:
            memory.fill_(factor)
            return
        if memory.device not in generator:
            generator[memory.device] = torch.Generator(memory.device).manual_seed(0)
        memory.normal_(0, factor, generator=generator[memory.device])

    return fill
