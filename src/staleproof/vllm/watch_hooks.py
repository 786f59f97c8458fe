"""Where the watch looks: behind attention, routers and experts, and at the start of each step.

All of these run inside operations that torch.compile does not look into, so their kernels are captured
with the step. Function names are those of vLLM 0.22.1 to 0.26.0; a function that is not there is left
alone with one line in the log.
"""

from __future__ import annotations

from typing import Any

from staleproof.vllm import hooks, standing, watch_port
from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target, warn_once
from staleproof.vllm.patches.mla_padding import BACKENDS, FORWARD_MQA
from staleproof.vllm.sources import PatchError
from staleproof.vllm.watch import Settings, Watch, read_settings

OWNER = "watch"
RUNNER = "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner", "GPUModelRunner"
SCHEDULED = "self", "scheduler_output"
WORKER = "vllm.v1.worker.gpu_worker"
EXPERTS = "vllm.model_executor.layers.fused_moe"
MLA = {
    "triton_mla": "TritonMLAImpl",
    "cutlass_mla": "CutlassMLAImpl",
    "flashinfer_mla": "FlashInferMLAImpl",
    "flashmla": "FlashMLAImpl",
    "flashattn_mla": "FlashAttnMLAImpl",
}
ATTENTION = {
    "flash_attn": "FlashAttentionImpl",
    "triton_attn": "TritonAttentionImpl",
    "flashinfer": "FlashInferImpl",
}
FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")


# The hooks of this process, if the watch is on.
installed: list[Hooks] = []


class Hooks:
    """The hooks of one process. The watch begins when the model is loaded."""

    def __init__(self, chosen: Settings) -> None:
        self.settings = chosen
        self.watch: Watch | None = None
        # The layer whose experts run right now: a router does not know its own name.
        self.layer = ""

    def loaded(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``Worker.load_model``: make the counters, outside of any capture."""
        self.watch = Watch(self.settings, args[0].device)
        return result

    def ready(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``Worker.compile_or_warm_up_model``: forget what warm-up runs counted; open the port."""
        if self.watch is not None:
            self.watch.reset()
            watch_port.serve(self.watch, self.settings.port + int(getattr(args[0], "local_rank", 0)))
        return result

    def step(self, args: Arguments, kwargs: Keywords) -> None:
        """Before ``execute_model``."""
        tokens = int(argument(args, kwargs, 1, "scheduler_output").total_num_scheduled_tokens)
        if self.watch is not None and tokens and not kwargs.get("dummy_run"):
            self.watch.begin_step(tokens)

    def batch(self, args: Arguments, kwargs: Keywords) -> None:
        """Before ``_prepare_inputs``: now the batch is in the order of the step's rows."""
        scheduled = argument(args, kwargs, 1, "scheduler_output")
        requests = args[0].input_batch.req_ids
        # A row is a request only if each request has one token.
        one_each = scheduled.total_num_scheduled_tokens == len(requests)
        if self.watch is not None and one_each:
            self.watch.name_requests(requests)

    def attention(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After an attention backend, which returns (rows, ...) or fills ``output``."""
        self._see("attention", _name(argument(args, kwargs, 1, "layer")), result)
        return result

    def mla(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``forward_mqa``, which returns (rows, heads, rank), or with a query axis, and the lse."""
        self._see("attention", _name(argument(args, kwargs, 4, "layer")), result[0].flatten(0, -3))
        return result

    def enter_experts(self, args: Arguments, kwargs: Keywords) -> None:
        """Before a layer's router and experts."""
        self.layer = _short(getattr(args[0], "layer_name", ""))

    def experts(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After a layer's experts: (output of shared experts or None, output)."""
        self._see("experts", self.layer, result[1])
        return result

    def router(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After a router: (weights, ids), each (rows, top_k)."""
        self._see("router", self.layer, result[0])
        if self.watch is not None:
            self.watch.observe_ids(self.layer, result[1])
        return result

    def _see(self, stage: str, layer: str, x: Any) -> None:
        if self.watch is not None and getattr(x, "ndim", 0) >= 2:
            self.watch.observe(stage, layer, x)

    def targets(self) -> list[Target]:
        """Every function that is watched."""
        backends = "vllm.v1.attention.backends"
        found = [
            Target(WORKER, "Worker.load_model", ("self",), after=self.loaded),
            Target(WORKER, "Worker.compile_or_warm_up_model", ("self",), after=self.ready),
            Target(RUNNER[0], "GPUModelRunner._prepare_inputs", SCHEDULED, before=self.batch),
            *(
                Target(module, f"{name}.execute_model", SCHEDULED, before=self.step)
                for module, name in (RUNNER, RUNNER_V2)
            ),
        ]
        if "attention" in self.settings.stages:
            found += [
                Target(f"{BACKENDS}.{module}", f"{name}.forward_mqa", FORWARD_MQA, after=self.mla)
                for module, name in MLA.items()
            ]
            found += [
                Target(f"{backends}.{module}", f"{name}.forward", FORWARD, after=self.attention)
                for module, name in ATTENTION.items()
            ]
        runner, router = f"{EXPERTS}.runner.moe_runner", f"{EXPERTS}.router.base_router"
        if {"router", "experts"} & {*self.settings.stages}:
            apply = "MoERunner._apply_quant_method"
            found.append(Target(runner, apply, ("self",), before=self.enter_experts, after=self.experts))
        if "router" in self.settings.stages:
            found.append(Target(router, "BaseRouter.select_experts", ("self",), after=self.router))
        return found


def _short(name: str) -> str:
    """``layers.3`` of ``model.layers.3.self_attn.attn``; the name itself if it has no number.

    >>> _short("model.layers.3.mlp.experts"), _short("head")
    ('layers.3', 'head')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return name if not number else ".".join(parts[number - 1 : number + 1])


def _name(layer: Any) -> str:
    return _short(str(getattr(layer, "layer_name", "")))


def install() -> None:
    """Put the watch in place if ``STALEPROOF_WATCH`` asks for it. Never raises."""
    try:
        chosen = read_settings()
        if chosen is not None:
            # It is no patch: its targets are not listed with those.
            hooks._announced.add(OWNER)
            installed.clear()
            installed.append(Hooks(chosen))
            hooks.wrap(OWNER, *installed[-1].targets())
    except PatchError as error:
        warn_once(f"no watch: {error}")
    except Exception as error:
        warn_once(f"no watch: {type(error).__name__}: {error}")


def remove() -> None:
    """Take the watch away; for tests."""
    hooks.unwrap(OWNER)
    standing.forget(OWNER)
    installed.clear()
