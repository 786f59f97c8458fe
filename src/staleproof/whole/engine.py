"""What runs in the child process: a started ``vllm.LLM``, a load served step by step, patches off and on."""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from staleproof.vllm import live
from staleproof.vllm.standing import SWITCHED, registry
from staleproof.whole.load import Arrival


class Answer(NamedTuple):
    """What a request got.

    Attributes:
        text: of its tokens; empty without a tokenizer.
        tokens: that it generated.
        cached: tokens of its prompt that came from the prefix cache.
        logprobs: of its tokens, of a model without a tokenizer.
        reason: why it ended, e.g. ``length`` or ``error``.
        message: beside the reason.
    """

    text: str
    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[float, ...] = ()
    reason: str = ""
    message: str = ""

    @property
    def nan(self) -> int:
        """Tokens whose log-probability is NaN."""
        return sum(map(math.isnan, self.logprobs))


def draw_dummies() -> None:
    """Let vLLM draw dummy weights at the scale of their input, for an :class:`Engine` that starts after this.

    With vLLM's own of 0.001 every answer is alike. Other weights derive from these as they are loaded, e.g.
    those that MLA multiplies with its queries.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    numbers = itertools.count(1)

    @torch.no_grad()
    def draw(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not weight.is_floating_point() or weight.is_meta:
            return
        if weight.dim() < 2:
            weight.fill_(1)
            return
        drawer = torch.Generator(device=weight.device).manual_seed(next(numbers))
        wide = torch.float32 if weight.element_size() == 1 else weight.dtype
        drawn = torch.empty(weight.shape, device=weight.device, dtype=wide)
        limit = (3 / weight.shape[-1]) ** 0.5
        weight.copy_(drawn.uniform_(-limit, limit, generator=drawer).to(weight.dtype))

    for module in (dummy_loader, weight_utils):
        vars(module)["initialize_single_dummy_weight"] = draw


class Engine:
    """A vLLM in this process, whose engine core runs here too, so that a spy can reach it.

    Args:
        model: folder of a model; or its ``config.json``, and then the weights are vLLM's dummies.
        options: of ``vllm.LLM``.
    """

    def __init__(self, model: Path | Mapping[str, Any], **options: Any) -> None:
        from vllm.platforms import current_platform

        from vllm import LLM

        fixed: dict[str, Any] = {"seed": 0, "enforce_eager": True, "async_scheduling": False}
        if not current_platform.is_cpu():
            # A small model needs little of a GPU, which others may use. With a given size vLLM does not
            # measure what is free, which changes while others start.
            fixed |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
        with tempfile.TemporaryDirectory() as folder:
            if isinstance(model, Mapping):
                Path(folder, "config.json").write_text(json.dumps(model), encoding="utf-8")
                fixed |= {"skip_tokenizer_init": True, "load_format": "dummy"}
                model = Path(folder)
            self.llm = LLM(model=str(model), **fixed | options)
        self.dummy = "load_format" in fixed
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        worker = self.core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self._loads = 0

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, without special ones around it."""
        found: list[int] = self.llm.get_tokenizer().encode(text, add_special_tokens=False)
        return found

    def serve(self, load: Sequence[Arrival], *, ends: bool = True) -> dict[str, Answer]:
        """Serve a load to its end.

        Args:
            load: requests with their priority, and the step before which each arrives.
            ends: whether an answer may end before its full length.

        Returns:
            Name of a request that did not leave -> its answer.
        """
        from vllm import SamplingParams

        self._loads += 1
        served, left, step = self.llm.llm_engine, [*load], 0
        answers: dict[str, Answer] = {}
        while left or served.has_unfinished_requests():
            for one in [*left]:
                if step >= one.at and (not one.after or one.after in answers):
                    left.remove(one)
                    sampling = SamplingParams(
                        temperature=0, max_tokens=one.reply, ignore_eos=not ends, detokenize=not self.dummy,
                        logprobs=0 if self.dummy else None,
                    )  # fmt: skip
                    # A name may come again in a later load.
                    prompt = {"prompt_token_ids": [*one.prompt]}
                    served.add_request(f"{one.name}-{self._loads}", prompt, sampling, priority=one.priority)
            if gone := [f"{one.name}-{self._loads}" for one in load if one.leaves and step == one.leaves]:
                served.abort_request(gone)
            for done in served.step():
                if done.finished:
                    (out,) = done.outputs
                    chosen = zip(out.token_ids, out.logprobs or (), strict=False)
                    logprobs = tuple(token[number].logprob for number, token in chosen)
                    name = done.request_id.rpartition("-")[0]
                    cached = done.num_cached_tokens or 0
                    ended = out.finish_reason, str(out.stop_reason or "")
                    answers[name] = Answer(out.text, tuple(out.token_ids), cached, logprobs, *ended)
            step += 1
        return answers

    def draw_weights(self) -> None:
        """Draw weights after the start, without those of a convolution, as :func:`draw_dummies` cannot."""
        import torch

        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in self.runner.model.named_parameters():
                if weight.dim() >= 2 and weight.is_floating_point() and "conv1d" not in name:
                    drawn = torch.randn(weight.shape, device=weight.device) / weight.shape[-1] ** 0.5
                    weight.copy_(drawn.to(weight.dtype))

    def empty(self, fill: float | None = None) -> None:
        """Drop the prefix cache; with ``fill``, overwrite all KV and state with it."""
        self.llm.reset_prefix_cache()
        if fill is not None:
            for cache in self.caches():
                cache.fill_(fill)

    def caches(self) -> list[Any]:
        """The tensors of the KV cache and of recurrent states."""
        kept = self.runner.kv_caches
        return [x for cache in kept for x in (cache if isinstance(cache, (list, tuple)) else [cache])]


def counters() -> dict[str, int]:
    """What the plugin counts on the host, e.g. ``unwritten_hits`` of the watch."""
    return {name: read() for name, read in registry.counters().items()}


def switch(off: Sequence[str], at_once: bool = False) -> None:
    """Switch these patches off and all others on, as an operator does: by the plugin's switch file.

    Args:
        off: names of patches.
        at_once: look at the file in this thread, and do not wait until the plugin's does.

    Raises:
        RuntimeError: the plugin does not do it within ten of the seconds in which its thread looks.
    """
    file, wanted = Path(os.environ[live.SWITCH]), {*off}
    if off:
        file.write_text(" ".join(off), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)
    if at_once:
        live.tick()
    until = time.monotonic() + 10 * live.BEAT_S
    while True:
        off_now = {name for name in [*registry.patches] if registry.is_switched_off(name)}
        by_file = {name for name in off_now if (registry.reason(name) or "").startswith(SWITCHED)}
        # Others may be off because they need one of them.
        if by_file <= wanted <= off_now:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"switched off: expected {sorted(wanted)}, got {sorted(off_now)}")
        time.sleep(0.05)


def states_of(*patches: str) -> dict[str, str]:
    """Patch -> its state, as the plugin reports it for this server."""
    found = live.health()["patches"]
    return {name: found.get(name, ("not loaded", ""))[0] for name in patches}
