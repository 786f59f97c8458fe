"""Spies: they keep, on the device, which rows of a step held a NaN.

A spy is put in place before the engine starts, so that its copies are captured with the CUDA graph. What
it keeps is then what the last replay wrote. It never waits for the device during a step.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Rows of the largest step that is kept: prompts are longer, so that only decode steps are.
LARGEST = 64
BACKENDS = {
    "TRITON_MLA": ("triton_mla", "TritonMLAImpl"),
    "FLASHMLA": ("flashmla", "FlashMLAImpl"),
    "FLASH_ATTN_MLA": ("flashattn_mla", "FlashAttnMLAImpl"),
}
# What :func:`lazy_buffers` allocates: 1 GiB a layer with 16 heads of 512 bfloat16 values.
BUFFER, BUFFER_ROWS = "_staleproof_decode_out", 65536
# The stage that a decode step of MLA always has.
ATTENTION = "attention"
# The norm before the experts of a layer, whose output they quantize.
EXPERTS_INPUT = "post_attention_layernorm"


class Rows:
    """Flags for each row of each stage, and checksums of the logits.

    Attributes:
        flags: (stage, rows of the step) -> int8 flags: 1 if the row has a NaN, 0 if not, -1 if no step
            of that many rows ran since :meth:`clear`.
        largest: the same -> the largest magnitude of each row of what experts get, NaN left out.
        ids: (layer, rows of the step) -> expert ids of the last step.
        kinds: the classes of routers that chose experts.
        repeats: the same -> how often each row named an expert twice since :meth:`clear`.
        sums: for each step since :meth:`clear`, a checksum of each live row's logits.
        tenants: what new blocks held (:mod:`staleproof.engine.tenants`).
        ledger: the :class:`~staleproof.evidence.AllocationLedger` over the engine's start.
        graph_bytes: bytes that its graphs took, as vLLM reports them.
        steps: what :mod:`staleproof.engine.ranks` keeps of each step; ``None``: nothing is kept.
        lazy_layers: number of layers, counted from the first, that allocate a buffer (:func:`lazy_buffers`).
    """

    def __init__(self) -> None:
        self.flags: dict[tuple[str, int], torch.Tensor] = {}
        self.largest: dict[tuple[str, int], torch.Tensor] = {}
        self.ids: dict[tuple[str, int], torch.Tensor] = {}
        self.sums: list[torch.Tensor] = []
        self.layers: dict[int, str] = {}
        self.repeats: dict[tuple[str, int], torch.Tensor] = {}
        self.tenants: Any = None
        self.kinds: set[str] = set()
        self.ledger: Any = None
        self.graph_bytes: int | None = None
        self.lazy_layers = 0
        self.steps: list[dict[str, Any]] | None = None

    def keep(self, stage: str, x: torch.Tensor) -> None:
        """Keep which rows of a stage's output have a NaN; only launches work."""
        if not 0 < x.shape[0] <= LARGEST or not x.is_floating_point():
            return
        key = stage, x.shape[0]
        if key not in self.flags:
            self.flags[key] = torch.full((x.shape[0],), -1, dtype=torch.int8, device=x.device)
            self.largest[key] = torch.zeros(x.shape[0], device=x.device)
        nan = torch.isnan(x.float()).flatten(1)
        self.flags[key].copy_(nan.any(1))
        if stage.endswith(EXPERTS_INPUT):
            self.largest[key].copy_(x.float().abs().flatten(1).masked_fill(nan, 0).amax(1))

    def keep_ids(self, layer: str, ids: torch.Tensor) -> None:
        """Keep the expert ids of a step, (rows, top_k)."""
        if 0 < ids.shape[0] <= LARGEST:
            key = layer, ids.shape[0]
            if key not in self.ids:
                self.ids[key] = torch.full_like(ids, -1)
                self.repeats[key] = torch.zeros(len(ids), dtype=torch.int32, device=ids.device)
            self.ids[key].copy_(ids)
            ordered = ids.sort(-1).values
            self.repeats[key] += (ordered[:, 1:] == ordered[:, :-1]).any(-1)

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget what was kept; captured graphs keep writing to the same tensors."""
        for kept in (*self.flags.values(), *self.ids.values()):
            kept.fill_(-1)
        for counted in self.repeats.values():
            counted.zero_()
        self.sums.clear()

    def seen(self) -> Iterator[tuple[str, list[int]]]:
        """Stage and flags of every stage of the last decode step, in order of execution."""
        ran = {key: kept.tolist() for key, kept in self.flags.items() if int(kept[0]) >= 0}
        sizes = [rows for stage, rows in ran if stage.endswith(ATTENTION)]
        for (stage, rows), flags in ran.items():
            if rows == min(sizes, default=0):
                yield stage, flags

    def duplicates(self, rows: int) -> tuple[int, int]:
        """Rows of all steps with an expert twice: of the first ``rows`` of each step, and of the others."""
        counts = [
            counted
            for key, counted in self.repeats.items()
            # Graphs of other sizes were captured, but no step of that size ran.
            if int(self.ids[key][0, 0]) >= 0
        ]
        return sum(int(c[:rows].sum()) for c in counts), sum(int(c[rows:].sum()) for c in counts)

    def chosen(self, expert: int) -> int:
        """How many rows of the last step name this expert."""
        return sum(int((kept == expert).any(-1).sum()) for kept in self.ids.values())

    def first_experts(self) -> list[int]:
        """How many rows of the last step name just the experts 0, 1, 2, ..., and how many rows there are.

        vLLM's kernel for routers with groups gives a row these if no group has a finite score.
        """
        named = [kept.sort(-1).values for kept in self.ids.values() if int(kept[0, 0]) >= 0]
        first = [(ids == torch.arange(ids.shape[1], device=ids.device)).all(-1) for ids in named]
        return [sum(int(rows.sum()) for rows in first), sum(map(len, first))]


def attention(watch: Rows) -> None:
    """Keep the output rows of every MLA decode, which torch.compile does not look into."""
    for module, name in BACKENDS.values():
        # An engine cannot use a backend whose kernels are not installed.
        with contextlib.suppress(ImportError):
            backend = importlib.import_module(f"vllm.v1.attention.backends.mla.{module}")
            _attention(getattr(backend, name), watch)


def _attention(implementation: Any, watch: Rows) -> None:
    def look(result: Any, self: Any, q: Any, kv: Any, metadata: Any, layer: Any) -> None:
        # FlashMLA returns (requests, tokens of a query, heads, rank).
        watch.keep(f"{_layer(layer)}.{ATTENTION}", result[0].flatten(0, -3))

    behind(implementation, "forward_mqa", look)


def behind(owner: Any, name: str, look: Callable[..., object]) -> None:
    """Call ``look`` with the result of each call of a method or function, and its arguments."""
    inner = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        look(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def _layer(layer: Any) -> str:
    """``layers.3`` of ``model.layers.3.self_attn.attn``."""
    return ".".join(str(layer.layer_name).split(".")[1:3])


def stages(watch: Rows) -> None:
    """Keep the output rows of every module inside the decoder layers. Not for compiled models."""

    def loaded(model: Any) -> None:
        for name, module in model.named_modules():
            parts = name.split(".")
            if parts[:2] == ["model", "layers"] and len(parts) > 2:
                module.register_forward_hook(_hook(watch, ".".join(parts[1:])))

    _when_loaded(loaded)


def _when_loaded(look: Callable[[Any], None]) -> None:
    """Call ``look`` with the model as soon as a runner has loaded it; vLLM has two runners."""
    for module in ("gpu_model_runner", "gpu.model_runner"):
        runner = importlib.import_module(f"vllm.v1.worker.{module}").GPUModelRunner
        behind(runner, "load_model", lambda result, self, *args, **kwargs: look(self.get_model()))


def _hook(watch: Rows, stage: str) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.ndim >= 2:
            watch.keep(stage, first)

    return hook


def logits(watch: Rows) -> None:
    """Keep a checksum of the bits of every live row's logits, a step."""

    def computed(out: Any, *args: Any, **kwargs: Any) -> None:
        if out is not None and len(watch.sums) < 4096:
            watch.sums.append(checksum(out))

    _when_loaded(lambda model: behind(model, "compute_logits", computed))


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
    for name in ("base_router", "fused_moe_router"):
        module = importlib.import_module(f"vllm.model_executor.layers.fused_moe.router.{name}")
        for router in vars(module).values():
            # Of the second module up to 0.23 only an abstract method, which nobody calls.
            own = isinstance(router, type) and router.__module__ == module.__name__
            if own and "select_experts" in vars(router):
                _routing(router, watch)


def _routing(router: Any, watch: Rows) -> None:
    def chosen(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        layer = watch.layers.setdefault(id(self), f"router {len(watch.layers)}")
        watch.kinds.add(type(self).__name__)
        watch.keep_ids(layer, result[1])

    behind(router, "select_experts", chosen)


def scaled_weights() -> None:
    """Make vLLM's dummy weights large enough that every layer changes the logits.

    vLLM draws all of them, norms included, from +-0.001. Then a layer adds so little to the residual
    stream that bfloat16 rounds it away, and "no bit of the logits changed" would say nothing.
    """
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    seeds = itertools.count(1)

    @torch.no_grad()
    def initialize(param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if param.device.type == "meta" or not param.is_floating_point():
            return
        if param.ndim < 2:
            param.fill_(1.0)
            return
        draw = torch.Generator(device=param.device).manual_seed(next(seeds))
        half = spread(param.shape)
        # uniform_ does not draw dtypes of one byte.
        wide = torch.empty(param.shape, dtype=torch.float32, device=param.device)
        param.copy_(wide.uniform_(-half, half, generator=draw))

    weight_utils.initialize_single_dummy_weight = initialize
    dummy_loader.initialize_single_dummy_weight = initialize


def spread(shape: Sequence[int]) -> float:
    """Half the width of a uniform distribution of weights whose products keep the scale of their input.

    >>> spread((16, 3))
    1.0
    """
    return math.sqrt(3 / shape[-1])


def ledger(watch: Rows) -> None:
    """Keep an allocation ledger over the start: profile, KV cache (planned), capture."""
    from vllm.v1.worker.gpu_worker import Worker

    from staleproof.evidence import AllocationLedger

    def captured(graph_bytes: Any, *args: Any, **kwargs: Any) -> None:
        watch.graph_bytes = graph_bytes

    def loaded(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        watch.ledger = AllocationLedger(self.model_runner.get_model())
        behind(self.model_runner, "capture_model", captured)

    behind(Worker, "load_model", loaded)
    for name, phase, planned in (
        ("determine_available_memory", "profile", False),
        ("initialize_from_config", "kv cache", True),
        ("compile_or_warm_up_model", "capture", False),
    ):
        setattr(Worker, name, _in_phase(getattr(Worker, name), watch, phase, planned))


def _in_phase(inner: Any, watch: Rows, phase: str, planned: bool) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with watch.ledger.phase(phase, planned=planned):
            return inner(self, *args, **kwargs)

    return method


def lazy_buffers(watch: Rows) -> None:
    """A fault: a buffer a layer, in a branch that neither the profile nor the capture takes.

    vLLM 0.18.1 kept one like it in the MLA backends (``_decode_out``, vLLM #37442, reverted in #38359).
    Nothing happens until :attr:`Rows.lazy_layers` is set.
    """
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

    def allocate(result: Any, self: Any, q: Any, kv: Any, metadata: Any, layer: Any) -> None:
        wanted = int(_layer(layer).split(".")[1]) < watch.lazy_layers
        if wanted and getattr(self, BUFFER, None) is None:
            setattr(self, BUFFER, result[0].new_empty(BUFFER_ROWS, *result[0].shape[1:]))

    behind(TritonMLAImpl, "forward_mqa", allocate)
