"""Spies: they keep, on the device, which rows of a step held a NaN.

A spy is put in place before the engine starts, so that its copies are captured with the CUDA graph. What
it keeps is then what the last replay wrote. It never waits for the device during a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

# Rows of the largest step that is kept: prompts are longer, so that only decode steps are.
LARGEST = 64
BACKENDS = {
    "TRITON_MLA": ("triton_mla", "TritonMLAImpl"),
    "FLASHMLA": ("flashmla", "FlashMLAImpl"),
    "FLASH_ATTN_MLA": ("flashattn_mla", "FlashAttnMLAImpl"),
}
# The stage that a decode step of MLA always has.
ATTENTION = "attention"


class Rows:
    """Flags for each row of each stage, and checksums of the logits.

    Attributes:
        flags: (stage, rows of the step) -> int8 flags: 1 if the row has a NaN, 0 if not, -1 if no step
            of that many rows ran since :meth:`clear`.
        ids: (layer, rows of the step) -> expert ids of the last step.
        sums: for each step since :meth:`clear`, a checksum of each live row's logits.
        zeroed: for each call of vLLM's zeroer since then, the block ids it was asked to zero, and a copy
            of those that its kernel read.
    """

    def __init__(self) -> None:
        self.flags: dict[tuple[str, int], torch.Tensor] = {}
        self.ids: dict[tuple[str, int], torch.Tensor] = {}
        self.sums: list[torch.Tensor] = []
        self.layers: dict[int, str] = {}
        self.zeroed: list[tuple[list[int], torch.Tensor]] = []

    def keep(self, stage: str, x: torch.Tensor) -> None:
        """Keep which rows of a stage's output have a NaN; only launches work."""
        if not 0 < x.shape[0] <= LARGEST or not x.is_floating_point():
            return
        key = stage, x.shape[0]
        if key not in self.flags:
            self.flags[key] = torch.full((x.shape[0],), -1, dtype=torch.int8, device=x.device)
        self.flags[key].copy_(torch.isnan(x.float()).flatten(1).any(1))

    def keep_ids(self, layer: str, ids: torch.Tensor) -> None:
        """Keep the expert ids of a step, (rows, top_k)."""
        if 0 < ids.shape[0] <= LARGEST:
            key = layer, ids.shape[0]
            if key not in self.ids:
                self.ids[key] = torch.full_like(ids, -1)
            self.ids[key].copy_(ids)

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget what was kept; captured graphs keep writing to the same tensors."""
        for kept in (*self.flags.values(), *self.ids.values()):
            kept.fill_(-1)
        self.sums.clear()
        self.zeroed.clear()

    def staged(self) -> list[int]:
        """Calls of vLLM's zeroer, and those in which its kernel read other ids than it was asked to."""
        return [len(self.zeroed), sum(asked != read.tolist() for asked, read in self.zeroed)]

    def seen(self) -> Iterator[tuple[str, list[int]]]:
        """Stage and flags of every stage of the last decode step, in order of execution."""
        ran = {key: kept.tolist() for key, kept in self.flags.items() if int(kept[0]) >= 0}
        sizes = [rows for stage, rows in ran if stage.endswith(ATTENTION)]
        for (stage, rows), flags in ran.items():
            if rows == min(sizes, default=0):
                yield stage, flags

    def duplicates(self, rows: int) -> tuple[int, int]:
        """Rows of the last step with an expert twice: among the first ``rows``, and among the others."""
        live = padding = 0
        for kept in self.ids.values():
            ids = kept.sort(-1).values
            if int(ids[0, 0]) < 0:
                continue
            twice = (ids[:, 1:] == ids[:, :-1]).any(-1)
            live += int(twice[:rows].sum())
            padding += int(twice[rows:].sum())
        return live, padding


def attention(watch: Rows) -> None:
    """Keep the output rows of every MLA decode, which torch.compile does not look into."""
    for module, name in BACKENDS.values():
        implementation = getattr(importlib.import_module(f"vllm.v1.attention.backends.mla.{module}"), name)
        _attention(implementation, watch)


def _attention(implementation: Any, watch: Rows) -> None:
    inner = implementation.forward_mqa

    def forward_mqa(self: Any, q: Any, kv: Any, metadata: Any, layer: Any) -> Any:
        result = inner(self, q, kv, metadata, layer)
        # FlashMLA returns (requests, tokens of a query, heads, rank).
        watch.keep(f"{_layer(layer)}.{ATTENTION}", result[0].flatten(0, -3))
        return result

    implementation.forward_mqa = forward_mqa


def _layer(layer: Any) -> str:
    """``layers.3`` of ``model.layers.3.self_attn.attn``."""
    return ".".join(str(layer.layer_name).split(".")[1:3])


def stages(watch: Rows) -> None:
    """Keep the output rows of every module inside the decoder layers. Not for compiled models."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        for name, module in self.get_model().named_modules():
            parts = name.split(".")
            if parts[:2] == ["model", "layers"] and len(parts) > 2:
                module.register_forward_hook(_hook(watch, ".".join(parts[1:])))
        return result

    GPUModelRunner.load_model = load_model


def _hook(watch: Rows, stage: str) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.ndim >= 2:
            watch.keep(stage, first)

    return hook


def logits(watch: Rows) -> None:
    """Keep a checksum of the bits of every live row's logits, a step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        model = self.get_model()
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            out = compute(*args, **kwargs)
            if out is not None and len(watch.sums) < 4096:
                watch.sums.append(checksum(out))
            return out

        model.compute_logits = compute_logits
        return result

    GPUModelRunner.load_model = load_model


def checksum(x: torch.Tensor) -> torch.Tensor:
    """A number for each row that changes if any bit of it does, but for rare collisions.

    Args:
        x: (rows, columns), 2 or 4 bytes an element.

    Returns:
        (rows,) int64.

    >>> a = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    >>> one, other = checksum(a).tolist()
    >>> one == other, torch.equal(checksum(a), checksum(a.clone()))
    (False, True)
    """
    bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).long()
    # Odd weights: no bit of a value is lost, and the order of the values counts.
    weights = 2 * torch.arange(x.shape[1], device=x.device) + 1
    return (bits * weights).sum(1)


def routing(watch: Rows) -> None:
    """Keep the expert ids that every router chose."""
    from vllm.model_executor.layers.fused_moe.router import base_router

    for router in vars(base_router).values():
        if isinstance(router, type) and "select_experts" in vars(router):
            _routing(router, watch)


def _routing(router: Any, watch: Rows) -> None:
    inner = router.select_experts

    def select_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        layer = watch.layers.setdefault(id(self), f"router {len(watch.layers)}")
        watch.keep_ids(layer, result[1])
        return result

    router.select_experts = select_experts


def staging(watch: Rows) -> None:
    """Keep which block ids vLLM's zeroing kernel read, beside those that it was asked to zero."""
    from vllm.v1.worker.utils import KVBlockZeroer

    inner = KVBlockZeroer.zero_block_ids

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        inner(self, block_ids)
        if block_ids and self._ids_gpu is not None:
            # On the same stream: this copy sees what the kernel before it saw.
            watch.zeroed.append((list(block_ids), self._ids_gpu[: len(block_ids)].clone()))

    KVBlockZeroer.zero_block_ids = zero_block_ids


def no_zeroing(watch: Rows) -> None:
    """Switch vLLM's zeroing of new blocks off; not a spy, but the fault that zeroing prevents."""
    from vllm.v1.worker.utils import KVBlockZeroer

    KVBlockZeroer.zero_block_ids = lambda self, block_ids: None
