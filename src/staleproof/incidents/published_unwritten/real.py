"""vLLM's own Scheduler and KVCacheManager of one release, run on a CPU from its source files.

The files below are executed as they are; every other ``vllm`` module is a stand-in (see
:mod:`staleproof.kernels.vllm_sources`), so that nothing but the sources is needed. Tokens are made
up, and nothing is computed: :class:`Model` of :mod:`.scene` stands for the worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from staleproof.incidents.published_unwritten.broken import Remedy
from staleproof.incidents.published_unwritten.scene import Arrival, Memory, Row
from staleproof.kernels.vllm_sources import executed
from staleproof.vllm.sources import PatchError, file_of, installed

CORE = "vllm.v1.core"
FILES = (
    *(f"{CORE}.sched.{name}" for name in ("scheduler", "async_scheduler", "output", "request_queue")),
    *(f"{CORE}.sched.{name}" for name in ("utils", "interface")),
    *(f"{CORE}.{name}" for name in ("kv_cache_manager", "kv_cache_coordinator", "block_pool")),
    *(f"{CORE}.{name}" for name in ("single_type_kv_cache_manager", "kv_cache_utils")),
    *(f"{CORE}.{name}" for name in ("kv_cache_metrics", "encoder_cache_manager")),
    *(f"vllm.v1.{name}" for name in ("request", "kv_cache_interface", "kv_cache_spec_registry")),
    *(f"vllm.v1.{name}" for name in ("outputs", "metrics.stats")),
    "vllm.utils.math_utils",
)
BLOCK = 16


class _Unset(SimpleNamespace):
    """A configuration in which every option that is not named is ``None``."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _fitting(call: Callable[..., Any], **keywords: Any) -> Any:
    """Call with the keywords that this release knows."""
    # AsyncScheduler takes whatever its base takes.
    base = getattr(call, "__mro__", (call, call))[1] if call.__name__ == "AsyncScheduler" else call
    known = inspect.signature(base).parameters
    return call(**{name: value for name, value in keywords.items() if name in known})


def _none(*args: Any, **kwargs: Any) -> None:
    return None


def _true(*args: Any, **kwargs: Any) -> bool:
    return True


def package(version: str) -> Path | None:
    """The folder ``vllm`` of a release: installed, or unpacked by ``tests/vllm/environment.py``."""
    with contextlib.suppress(PatchError):
        found, sources = installed()
        if found.partition("+")[0] == version:
            return sources.package
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staleproof/vllm"
    folder = Path(os.environ.get("STALEPROOF_VLLM_CACHE", home)) / version / "vllm"
    return folder if folder.is_dir() else None


@contextlib.contextmanager
def release(package: Path) -> Iterator[None]:
    """Let ``import vllm`` find the scheduler's files of this folder ``vllm``, inside a ``with``."""
    names = [name for name in FILES if (package / file_of(name)).is_file()]
    with executed(package, *names):
        known: dict[str, dict[str, Any]] = {
            "vllm.v1.utils": {
                "ConstantList": lambda items: items,
                "record_function_or_nullcontext": lambda name: contextlib.nullcontext(),
            },
            "vllm.distributed.kv_events": {"EventPublisherFactory": SimpleNamespace(create=_none)},
            "vllm._bc_linter": {"bc_linter_include": lambda decorated: decorated},
            "vllm.envs": {"__getattr__": _none},
            "vllm.v1.structured_output.request": {
                "StructuredOutputRequest": SimpleNamespace(from_sampling_params=_none)
            },
            "vllm.platforms": {
                "current_platform": SimpleNamespace(
                    register_custom_kv_cache_specs=_none, is_cpu=_none, is_xpu=_none
                )
            },
            "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda ids, embeds: len(ids)},
        }
        for name, members in known.items():
            vars(importlib.import_module(name)).update(members)
        # Once: each call draws another seed of the hashes, and then no request finds another's prefix.
        importlib.import_module(f"{CORE}.kv_cache_utils").init_none_hash(_digest)
        yield


def scheduler(
    blocks: int,
    *,
    policy: str = "priority",
    threshold: int = 64,
    budget: int = 512,
    seqs: int = 8,
    asynchronous: bool = False,
    caching: bool = True,
) -> Any:
    """The Scheduler of the release whose files are found now, over one group of full attention.

    Args:
        blocks: of the pool, of 16 tokens each.
        policy: ``priority`` or ``fcfs``.
        threshold: ``long_prefill_token_threshold``; 0 for none.
        budget: tokens of a step.
        seqs: requests of a step.
        asynchronous: take ``AsyncScheduler``.
        caching: prefix caching.
    """
    import torch

    chosen = "async_scheduler", "AsyncScheduler"
    module, name = chosen if asynchronous else ("scheduler", "Scheduler")
    cls = getattr(importlib.import_module(f"{CORE}.sched.{module}"), name)
    kv = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = _fitting(kv.FullAttentionSpec, block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = _Unset(
        scheduler_config=_Unset(
            max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy,
            long_prefill_token_threshold=threshold, enable_chunked_prefill=True, watermark=0,
            async_scheduling=asynchronous, prefill_schedule_interval=1, scheduler_reserve_full_isl=True,
        ),
        cache_config=_Unset(num_gpu_blocks=blocks, enable_prefix_caching=caching, block_size=BLOCK),
        model_config=_Unset(max_model_len=8192, supports_multimodal_inputs=False),
        parallel_config=_Unset(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1,
            data_parallel_index=0, data_parallel_size=1,
        ),
        observability_config=_Unset(),
        aux_output_config=_Unset(),
        ec_manager_config=_Unset(get_encoder_cache_manager_obj=lambda: None),
        max_concurrent_batches=1, use_v2_model_runner=False, num_speculative_tokens=0, num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0, num_hash_lookahead_tokens=0,
    )  # fmt: skip
    tensor = _fitting(kv.KVCacheTensor, size=1, shared_by=["0"], layers=["0"], layer_stride=0, block_stride=1)
    groups = [kv.KVCacheGroupSpec(["0"], spec)]
    return _fitting(
        cls,
        vllm_config=config,
        kv_cache_config=kv.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups
        ),
        structured_output_manager=SimpleNamespace(should_advance=_none, accept_tokens=_true),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
        log_stats=False,
    )


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


_arrivals = count()


def request(name: str, prompt: Sequence[int], reply: int, priority: int = 0) -> Any:
    """A request that ends after ``reply`` tokens; 0 is the highest priority."""
    utils = importlib.import_module(f"{CORE}.kv_cache_utils")
    sampling = _Unset(
        max_tokens=reply, min_tokens=0, eos_token_id=None, stop_token_ids=(), structured_outputs=None,
        extra_args=None, skip_reading_prefix_cache=False, repetition_detection=None, ignore_eos=True,
    )  # fmt: skip
    return _fitting(
        importlib.import_module("vllm.v1.request").Request,
        request_id=name,
        prompt_token_ids=[*prompt],
        sampling_params=sampling,
        pooling_params=None,
        eos_token_id=None,
        arrival_time=float(next(_arrivals)),
        block_hasher=utils.get_request_block_hasher(BLOCK, _digest),
        priority=priority,
    )


def sampled(engine: Any, scheduled: Any, token: Callable[[Any], int]) -> Any:
    """What the worker would return for a step: a token of each request whose prefill is done."""
    names = [*scheduled.num_scheduled_tokens]
    requests = [engine.requests[name] for name in names]
    done = [one.num_computed_tokens >= one.num_tokens for one in requests]
    return _fitting(
        importlib.import_module("vllm.v1.outputs").ModelRunnerOutput,
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[token(one)] if ends else [] for one, ends in zip(requests, done, strict=True)],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[None for _ in names],
    )


def _token(request: Any) -> int:
    return (request.num_tokens * 7 + request.num_prompt_tokens) % 450 + 5


class Real:
    """vLLM's scheduler as an :class:`~.scene.Engine`, inside :func:`release`; the worker is made up.

    Args:
        blocks: of the pool.
        remedy: see :mod:`.broken`.
        options: of :func:`scheduler`.

    Attributes:
        memory: what the worker would have written.
        preempted: preemptions so far.
        steps: planned so far.
        host_s: seconds in ``schedule``.
    """

    def __init__(self, blocks: int, remedy: Remedy | None = None, **options: Any) -> None:
        self.scheduler = scheduler(blocks, **options)
        self.memory, self.preempted, self.steps, self.host_s = Memory(BLOCK), 0, 0, 0.0
        self._remedy = remedy or Remedy()
        if remedy is not None:
            _apply(remedy, self.scheduler, self.memory)
        self._flying: list[tuple[Any, Any]] = []
        self._most = 2 if options.get("asynchronous") else 1

    def add(self, arrival: Arrival) -> None:
        """Queue a request."""
        one = request(arrival.name, arrival.prompt, arrival.reply, arrival.priority)
        self.scheduler.add_request(one)

    def running(self) -> set[str]:
        """Requests that have not ended."""
        return {*self.scheduler.requests}

    def step(self) -> None:
        """Plan a step, write it, and take in the tokens; one step later if it is asynchronous."""
        engine = self.scheduler
        if engine.requests:
            before = {name: one.num_preemptions for name, one in engine.requests.items()}
            self._remedy.step()
            started = time.perf_counter()
            scheduled = engine.schedule()
            self.host_s += time.perf_counter() - started
            self.steps += 1
            self.preempted += sum(engine.requests[name].num_preemptions - n for name, n in before.items())
            self.memory.step(rows(engine, scheduled))
            self._flying.append((scheduled, sampled(engine, scheduled, _token)))
        if self._flying and (len(self._flying) >= self._most or not engine.requests):
            engine.update_from_output(*self._flying.pop(0))


def rows(engine: Any, scheduled: Any) -> list[Row]:
    """What a ``SchedulerOutput`` asks of the worker, one row a request."""
    fresh = {new.req_id for new in scheduled.scheduled_new_reqs} | _resumed(scheduled.scheduled_cached_reqs)
    found = []
    for name, tokens in scheduled.num_scheduled_tokens.items():
        one, blocks = engine.requests[name], engine.kv_cache_manager.get_block_ids(name)[0]
        # _update_after_schedule has counted the step in.
        start = one.num_computed_tokens - tokens
        found.append(Row(name, one.all_token_ids, blocks, start, tokens, name in fresh))
    return found


def _resumed(cached: Any) -> set[str]:
    if hasattr(cached, "resumed_req_ids"):
        return {*cached.resumed_req_ids}
    pairs = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
    return {name for name, resumed in pairs if resumed}


def _apply(remedy: Remedy, engine: Any, memory: Memory) -> None:
    """Put a remedy around the methods of one scheduler and its pool."""
    manager = engine.kv_cache_manager
    pool = manager.block_pool
    preempt, publish, find, allocate = (
        engine._preempt_request, pool.cache_full_blocks, pool.get_cached_block, pool.get_new_blocks,
    )  # fmt: skip
    full = inspect.signature(publish)

    def preempting(one: Any, *args: Any, **kwargs: Any) -> Any:
        (ids,) = manager.get_block_ids(one.request_id)
        computed = one.num_computed_tokens // BLOCK
        manager.evict_blocks({*remedy.taken_back(ids, computed, len(pool.blocks))})
        return preempt(one, *args, **kwargs)

    def publishing(*args: Any, **kwargs: Any) -> None:
        given = full.bind(*args, **kwargs).arguments
        publish(*args, **kwargs)
        new = given["blocks"][given["num_cached_blocks"] : given["num_full_blocks"]]
        remedy.published([block.block_id for block in new])

    def finding(*args: Any, **kwargs: Any) -> Any:
        found = find(*args, **kwargs)
        return found if found and all(remedy.usable(block.block_id) for block in found) else None

    def allocating(*args: Any, **kwargs: Any) -> Any:
        taken = allocate(*args, **kwargs)
        memory.zero(remedy.zeroed([block.block_id for block in taken]))
        return taken

    engine._preempt_request = preempting
    pool.cache_full_blocks, pool.get_cached_block, pool.get_new_blocks = publishing, finding, allocating
