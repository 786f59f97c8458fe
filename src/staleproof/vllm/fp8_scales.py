"""Hooks of incident 1's patch of fp8 scales: one dynamic scale a batch, taken from live rows only.

The quantisation kernel reads from device memory which rows are padding, so that a captured graph is right at
each replay: from vLLM's own mask where a step has one, else from a count that is written before a step of
another number of tokens than the last. The count says that all rows are live, which gives vLLM's
own results, before the first step, while a draft model runs, and once the patch is out of service.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target, warn_once
from staleproof.vllm.sources import Evidence, Sources, file_of
from staleproof.vllm.standing import registry

NAME = "fp8_scale"
CONTEXT, ENVS = "vllm.forward_context", "vllm.envs"
EXPERTS = "vllm.model_executor.layers.fused_moe"
UTILS, PREPARE = f"{EXPERTS}.utils", f"{EXPERTS}.prepare_finalize.no_dp_ep"
WORKER = "vllm.v1.worker.gpu_worker"
QUANTIZE = ("A", "A_scale", "per_act_token", "block_shape")
APPLY = ("self", "output", "hidden_states")
# Larger than any batch: every row counts as live.
ALL = 2**31 - 1
# Device -> the count of the step's tokens, or the reason why they cannot be counted.
_counts: dict[Any, Count | str] = {}
# A stack: the number of tokens in the expert layer that is running (rows of its hidden states).
_tokens: list[int] = []


class Count:
    """The number of live rows, where a captured kernel reads it.

    Attributes:
        tensor: (1,) int32.
        written: the value last written to it; the device may not have executed that write yet.
    """

    def __init__(self, device: Any) -> None:
        import torch

        # No inference tensor: those refuse a write outside of inference mode.
        with torch.inference_mode(False):
            self.tensor = torch.full((1,), ALL, dtype=torch.int32, device=device)
        self.written = ALL

    def say(self, tokens: int) -> None:
        if tokens != self.written:
            self.tensor.fill_(tokens)
            self.written = tokens


@functools.cache
def _writes_masks() -> bool:
    """Whether each step of this vLLM writes its mask. Otherwise the last capture has marked all as padding.

    ``VLLM_MOE_SKIP_PADDING`` is off by default before 0.27.0. It is asked once: a server does not change it.
    """
    return bool(getattr(sys.modules.get(ENVS), "VLLM_MOE_SKIP_PADDING", False))


def padding_mask(rows: int) -> Any:
    """vLLM's own mask of padding rows, if the step has one that long; else ``None``.

    From 0.25.0 on the second model runner, and from 0.31.0 on both, give ``ForwardContext.is_padding``:
    a slice of one buffer that each step writes, so that a captured kernel may keep its address. Where no step
    writes it, it is no mask.
    """
    context = getattr(sys.modules.get(CONTEXT), "_forward_context", None)
    mask = getattr(context, "is_padding", None)
    return mask if mask is not None and mask.shape[0] >= rows and _writes_masks() else None


def not_a_row_a_token(parallel: Any) -> str | None:
    """Why rows of an expert's input are not the step's tokens in order, from vLLM's parallel configuration.

    >>> from types import SimpleNamespace
    >>> not_a_row_a_token(SimpleNamespace(data_parallel_size=2))
    'experts get rows of other ranks (data_parallel_size 2)'
    """
    if getattr(parallel, "use_ubatching", False):
        return "a step runs as several micro-batches"
    for name in ("data_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            return f"experts get rows of other ranks ({name} {size})"
    return None


def started(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After ``Worker.init_device``: make the count, outside of any capture and of the pool for weights."""
    worker = args[0]
    why = not_a_row_a_token(worker.vllm_config.parallel_config)
    _counts[worker.device] = why or Count(worker.device)
    registry.of(NAME).undo = all_live
    return result


def all_live() -> None:
    """Let captured kernels take all rows for live."""
    for count in _counts.values():
        if isinstance(count, Count):
            count.say(ALL)


def begin_step(args: Arguments, kwargs: Keywords) -> None:
    """Before ``execute_model``: its kernels find how many tokens the step has."""
    tokens = argument(args, kwargs, 1, "scheduler_output").total_num_scheduled_tokens
    count = _counts.get(args[0].device)
    # The second model runner runs its dummy batches through here: nobody reads what comes out.
    if isinstance(count, Count) and tokens and not argument(args, kwargs, 3, "dummy_run"):
        count.say(tokens)
        # Switched off by another thread, after this call was let through.
        if registry.reason(NAME) is not None:
            all_live()


def end_step(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After ``execute_model``: a draft model may run more rows than the step has tokens."""
    if getattr(args[0], "speculative_config", None) is not None:
        all_live()
    return result


@contextmanager
def over_tokens(position: int, name: str, args: Arguments, kwargs: Keywords) -> Iterator[None]:
    """Around a function with an argument of one row per token: keep the number of tokens."""
    _tokens.append(argument(args, kwargs, position, name).shape[0])
    try:
        yield
    finally:
        _tokens.pop()


def quantize(args: Arguments, kwargs: Keywords) -> Any:
    """In place of ``_fp8_quantize``: a scale from live rows, where it takes one a batch.

    Behind the first GEMM a token has ``top_k`` rows, one after the other: its slots, in the order of
    ``topk_ids``, whatever expert computed them. Such rows are quantised as one long row of the token.
    """
    x, scale, per_token, block = (argument(args, kwargs, i, QUANTIZE[i]) for i in range(4))
    if scale is not None or per_token or block is not None or not _tokens:
        return NotImplemented
    count = _counts.get(x.device)
    if isinstance(count, str):
        warn_once(f"{NAME}: {count}; padding rows count in the fp8 scale of a batch, as in vLLM")
    tokens, (rows, hidden) = _tokens[-1], x.shape
    if not isinstance(count, Count) or not rows or rows % tokens or not x.is_contiguous():
        return NotImplemented
    mask = padding_mask(tokens)
    # A longer one is that of a whole batch, and this a part of it. The count is right, or too large.
    mask = mask if mask is not None and mask.shape[0] == tokens else None
    live = count.tensor if mask is None else None
    from staleproof.ops.fp8 import quantize_fp8_per_tensor

    of_tokens = x.view(tokens, rows // tokens * hidden)
    # As vLLM's kernel does: a NaN that a live row brings stays in that row.
    codes, scale = quantize_fp8_per_tensor(of_tokens, live_rows=live, is_padding=mask, saturate_nan=True)
    return codes.view(rows, hidden), scale


def _runner(module: str) -> Target:
    name = "GPUModelRunner.execute_model"
    return Target(module, name, ("self", "scheduler_output"), before=begin_step, after=end_step)


def _quantize(arguments: tuple[str, ...], versions: tuple[str, str]) -> Target:
    return Target(UTILS, "_fp8_quantize", arguments, instead=quantize, versions=versions)


def _experts(module: str, versions: tuple[str, str]) -> Target:
    around = functools.partial(over_tokens, 2, APPLY[2])
    return Target(f"{EXPERTS}.{module}", "TritonExperts.apply", APPLY, around=around, versions=versions)


TARGETS = (
    Target(WORKER, "Worker.init_device", ("self",), after=started),
    _runner("vllm.v1.worker.gpu_model_runner"),
    _runner("vllm.v1.worker.gpu.model_runner"),
    Target(PREPARE, "_quantize_input", ("a1",), around=functools.partial(over_tokens, 0, "a1")),
    _experts("fused_moe", ("0.17.0", "0.20.2")),
    _experts("experts.triton_moe", ("0.21.0", "0.33.0")),
    _quantize(QUANTIZE, ("0.17.0", "0.32.0")),
    _quantize((*QUANTIZE, "is_scale_transposed"), ("0.33.0", "0.33.0")),
)


def probe(sources: Sources) -> Evidence:
    """Do experts quantise with one scale a batch, and does nothing leave padding rows out?"""
    found = sources.function(file_of(UTILS), "_fp8_quantize")
    if "ops.scaled_fp8_quant(" not in found.text:
        return Evidence(False, f"{found.place} takes no scale of a batch")
    if "is_padding" in found.text:
        return Evidence(False, f"{found.at('is_padding')} leaves padding rows out of the scale")
    return Evidence(True, f"{found.at('ops.scaled_fp8_quant(')} takes one scale of live and padding rows")
