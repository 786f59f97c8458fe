"""Where the watch looks: behind attention, routers and experts, at each step, and at the start.

Stages run inside operations that torch.compile does not look into, so their kernels are captured with the
step. Function names are those of vLLM 0.20.0 to 0.33.0 (``tests/vllm/test_watch_hooks.py`` reads them in
every release of the table); a function that is not there is left alone with one line in the log.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from staleproof.vllm import hooks, process, watch_blocks, watch_memory, watch_port, watch_published
from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.fp8_scales import padding_mask
from staleproof.vllm.hooks import Target, warn_once
from staleproof.vllm.patches.mla_padding import BACKENDS, FORWARD_MQA
from staleproof.vllm.patches.uniform_decode import RUNNER
from staleproof.vllm.patches.uniform_decode import SECOND_RUNNER as RUNNER_V2
from staleproof.vllm.releases import table
from staleproof.vllm.sources import PatchError, numbers
from staleproof.vllm.sources import installed as vllm_installed
from staleproof.vllm.standing import registry
from staleproof.vllm.watch import OLDEST, OWNER, Settings, Watch, read_settings

SCHEDULED = "self", "scheduler_output"
EXECUTE = "GPUModelRunner.execute_model"
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
ALL_BACKENDS = "vllm.v1.attention.backends"
ROUTER = f"{EXPERTS}.router.base_router", "BaseRouter.select_experts"
# Since this release the method that routers share is their base class's.
MOVED = "0.24.0"
ROUTER_MOVED = f"{EXPERTS}.router.fused_moe_router", "FusedMoERouter.select_experts"
FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")


def _number(version: str) -> tuple[int, ...]:
    """A build of the main branch has no number: it counts as newer than every release."""
    return numbers(version) or (999,)


# The hooks of this process, if the watch is on.
installed: list[Hooks] = []


class Hooks:
    """The hooks of one process. The watch begins when the model is loaded.

    Args:
        chosen: what is watched.
        version: of vLLM; by default the oldest that is known.
    """

    def __init__(self, chosen: Settings, version: str = OLDEST) -> None:
        self.settings, self.version = chosen, version
        self.watch: Watch | None = None
        self.blocks: watch_blocks.Blocks | None = None
        self.memory: watch_memory.Memory | None = None
        # Tokens of each request of the last step of the first model runner.
        self._tokens: Any = None
        # Number of requests of the last step.
        self._requests = 0
        # The layer whose experts run right now: a router does not know its own name.
        self.layer = ""

    def loaded(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``Worker.load_model``: make the counters, outside of any capture."""
        self.watch = Watch(self.settings, args[0].device, padding_mask)
        if "memory" in self.settings.stages:
            self.memory = watch_memory.of(args[0])
        return result

    def starting(self, phase: str, args: Arguments, kwargs: Keywords) -> AbstractContextManager[None]:
        """Around a phase of the worker's start."""
        return nullcontext() if self.memory is None else self.memory.phase(phase)

    @contextmanager
    def capturing(self, args: Arguments, kwargs: Keywords) -> Iterator[None]:
        """Around ``Worker.compile_or_warm_up_model``, the last phase of the start."""
        with self.starting(watch_memory.CAPTURE, args, kwargs):
            yield
        if self.memory is not None:
            self.memory.ready()

    def cache(self, args: Arguments, kwargs: Keywords) -> None:
        """Before ``Worker.initialize_from_config``: the groups of the KV cache are known now."""
        if "blocks" in self.settings.stages:
            self.blocks = watch_blocks.of(argument(args, kwargs, 1, "kv_cache_config"))
            if self.watch is not None:
                self.watch.read_by = self.blocks.owners.read_by

    def ready(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``Worker.compile_or_warm_up_model``: forget what warm-up runs counted; open the port."""
        if self.watch is not None:
            self.watch.reset()
            rank = int(getattr(args[0], "local_rank", 0))
            watch_port.serve(self.watch, self.settings.port + rank, self.blocks, self.memory)
        return result

    def stepping(
        self, before: Callable[[Arguments, Keywords], None], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return ``execute_model`` with a call of ``before`` first, except in most steps of a steady decode.

        Those steps run this one function and no other. For a small model, host time is what the watch costs a
        step: code that last ran one step ago is no longer in the core's near caches.
        """
        hook = hooks._Hook(registry.of(OWNER), Target(RUNNER, EXECUTE, (), before=before), False)
        slow = hooks._wrapped(original, hook)

        @functools.wraps(original)
        def quick(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            watch, quiet = self.watch, False
            if watch is not None and watch.left and not kwargs:
                try:
                    cached, tokens = scheduler_output.scheduled_cached_reqs, self._requests
                    given = cached.new_block_ids
                    quiet = tokens == scheduler_output.total_num_scheduled_tokens == len(given) and not (
                        given.count(None) != tokens
                        or scheduler_output.scheduled_new_reqs
                        or scheduler_output.finished_req_ids
                        or cached.resumed_req_ids
                        or getattr(scheduler_output, "preempted_req_ids", None)
                        or getattr(scheduler_output, "new_block_ids_to_zero", None)
                    )
                except Exception:
                    # The slow path meets the same error, contains it and logs it.
                    quiet = False
            if watch is None or not quiet:
                return slow(runner, scheduler_output, *args, **kwargs)
            watch.left -= 1
            return original(runner, scheduler_output, *args, **kwargs)

        quick.staleproof_replaces = original  # type: ignore[attr-defined]
        return quick

    def step(self, args: Arguments, kwargs: Keywords) -> None:
        """Before ``execute_model``, unless :meth:`stepping` has seen that nothing changed."""
        watch = self.watch
        if watch is None:
            return
        if kwargs and kwargs.get("dummy_run"):
            watch.pause()
            return
        output = args[1] if len(args) > 1 else kwargs["scheduler_output"]
        blocks = self.blocks
        if blocks is not None:
            given = output.scheduled_cached_reqs.new_block_ids
            # Most steps of a decode give nobody a block.
            if (
                given.count(None) != len(given)
                or output.scheduled_new_reqs
                or output.finished_req_ids
                or getattr(output, "new_block_ids_to_zero", None)
            ):
                blocks.scheduled(output, watch.steps + 1)
        if tokens := output.total_num_scheduled_tokens:
            # A decode step of as many requests as the last one, and none came, ended or was set aside.
            requests, self._requests = self._requests, len(output.num_scheduled_tokens)
            same = requests == tokens == self._requests and not (
                output.scheduled_new_reqs
                or output.finished_req_ids
                or getattr(output, "preempted_req_ids", None)
                or output.scheduled_cached_reqs.resumed_req_ids
            )
            if same and watch.left:
                watch.left -= 1
                return
            copied = watch.latest
            watch.begin_step(tokens, same)
            if self.memory is not None and watch.latest is not copied:
                self.memory.unprofiled()

    def step_v1(self, args: Arguments, kwargs: Keywords) -> None:
        """Before ``execute_model`` of the first model runner.

        This runner orders its batch during the step, and keeps that order until the next step begins. So the
        requests of a step are named then.
        """
        watch = self.watch
        if watch is not None and self._tokens is not None and not watch.left:
            watch.name_requests(args[0].input_batch.req_ids, self._tokens)
        self.step(args, kwargs)
        # While equal steps are counted down nobody asks whose rows they were.
        if watch is not None and not watch.left:
            self._tokens = argument(args, kwargs, 1, "scheduler_output").num_scheduled_tokens or None

    def idle(self, args: Arguments, kwargs: Keywords) -> None:
        """Before ``_dummy_run``, whose rows are nobody's."""
        if self.watch is not None:
            self.watch.pause()

    def batch_v2(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``prepare_inputs`` of the second model runner, which returns the batch in order."""
        if self.watch is not None and not self.watch.left:
            tokens = argument(args, kwargs, 1, "scheduler_output").num_scheduled_tokens
            self.watch.name_requests(result.req_ids, tokens)
        return result

    def attention(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After an attention backend, which returns (rows, ...) or fills ``output``."""
        watch = self.watch
        if watch is not None:
            layer = args[1] if len(args) > 1 else kwargs.get("layer")
            watch.observe("attention", getattr(layer, "layer_name", ""), result)
        return result

    def mla(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``forward_mqa``, which returns (rows, heads, rank), or with a query axis, and the lse."""
        watch = self.watch
        if watch is not None:
            out = result[0]
            out = out if out.ndim == 3 else out.flatten(0, -3)
            layer = args[4] if len(args) > 4 else kwargs.get("layer")
            watch.observe("attention", getattr(layer, "layer_name", ""), out)
        return result

    def enter_experts(self, args: Arguments, kwargs: Keywords) -> None:
        """Before a layer's router and experts."""
        self.layer = getattr(args[0], "layer_name", "")

    def experts(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After a layer's experts: (output of shared experts or None, output)."""
        watch = self.watch
        if watch is not None:
            watch.observe("experts", self.layer, result[1])
        return result

    def router(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After a router: (weights, ids), each (rows, top_k)."""
        watch = self.watch
        if watch is not None:
            watch.observe("router", self.layer, result[0], result[1])
        return result

    def targets(self) -> list[Target]:
        """Every function that is watched."""
        worker = partial(Target, WORKER, arguments=("self",))
        found = [
            worker("Worker.load_model", after=self.loaded),
            worker("Worker.determine_available_memory", around=partial(self.starting, watch_memory.PROFILE)),
            worker(
                "Worker.initialize_from_config",
                before=self.cache,
                around=partial(self.starting, watch_memory.CACHE),
            ),
            *(
                Target(*place, ("self",), around=self.capturing, after=self.ready)
                for place in (process.WORKER, process.CPU_WORKER)
            ),
            Target(RUNNER_V2, "GPUModelRunner.prepare_inputs", SCHEDULED, after=self.batch_v2),
            Target(RUNNER, "GPUModelRunner._dummy_run", ("self",), before=self.idle),
            Target(RUNNER, EXECUTE, SCHEDULED, swap=partial(self.stepping, self.step_v1)),
            Target(RUNNER_V2, EXECUTE, SCHEDULED, swap=partial(self.stepping, self.step)),
        ]
        if "attention" in self.settings.stages:
            found += [
                Target(f"{BACKENDS}.{module}", f"{name}.forward_mqa", FORWARD_MQA, after=self.mla)
                for module, name in MLA.items()
            ]
            found += [
                Target(f"{ALL_BACKENDS}.{module}", f"{name}.forward", FORWARD, after=self.attention)
                for module, name in ATTENTION.items()
            ]
        if {"router", "experts"} & {*self.settings.stages}:
            apply = "MoERunner._apply_quant_method"
            module = f"{EXPERTS}.runner.moe_runner"
            found.append(Target(module, apply, ("self",), before=self.enter_experts, after=self.experts))
        if "router" in self.settings.stages:
            module, name = ROUTER if _number(self.version) < numbers(MOVED) else ROUTER_MOVED
            found.append(Target(module, name, ("self",), after=self.router))
        if "published" in self.settings.stages:
            found += watch_published.Published().targets()
        return found


def install(version: str | None = None) -> None:
    """Put the watch in place if ``STALEPROOF_WATCH`` asks for it. Never raises.

    Args:
        version: of vLLM; by default the installed one's.
    """
    try:
        chosen = read_settings()
        if chosen is not None:
            version = version or vllm_installed()[0]
            newest = [*table()][-1]
            number = _number(version)
            if number < numbers(OLDEST):
                raise PatchError(f"vLLM {version} is too old: the watch knows {OLDEST} to {newest}")
            if number > numbers(newest):
                warn_once(f"watch on vLLM {version}: it knows {OLDEST} to {newest} and may find nothing here")
            # The watch is not a patch: do not log that it is in place.
            registry.of(OWNER).announced = True
            installed.clear()
            installed.append(Hooks(chosen, version))
            hooks.wrap(OWNER, *installed[-1].targets())
    except PatchError as error:
        warn_once(f"no watch: {error}")
    except Exception as error:
        warn_once(f"no watch: {type(error).__name__}: {error}")


def remove() -> None:
    """Take the watch away; for tests."""
    hooks.unwrap(OWNER)
    installed.clear()
