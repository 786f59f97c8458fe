"""vLLM's own Scheduler and KVCacheManager of one release, run on a CPU from its source files.

The files below are executed unchanged; every other ``vllm`` module is a stub (see
:mod:`staleproof.kernels.vllm_sources`), so that only the sources are needed. Tokens are invented, and nothing
is computed: :class:`.scene.Memory` replaces the worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

from staleproof.incidents.published_unwritten.broken import NONE, Remedy
from staleproof.incidents.published_unwritten.scene import Arrival, Memory, Row
from staleproof.kernels.vllm_sources import Unset, executed, fitting, package

CORE = "vllm.v1.core"
# Executed in addition to all files of the scheduler's folder.
FILES = (
    *("v1.request", "v1.kv_cache_interface", "v1.kv_cache_spec_registry", "v1.outputs", "v1.metrics.stats"),
    *("v1.structured_output.request", "utils.math_utils", "_bc_linter"),
)
# Tokens of a block, and of a block of recurrent state.
BLOCK, STATE = 16, 8192


def _none(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def release(version: str) -> Iterator[None]:
    """Let ``import vllm`` find the scheduler's files of this release, inside a ``with``.

    Raises:
        MissingError: the files are missing.
    """
    folder = package(version)
    core = [path.relative_to(folder) for path in (folder / "v1/core").rglob("[!_]*.py")]
    names = [".".join(("vllm", *path.with_suffix("").parts)) for path in core]
    names += [f"vllm.{name}" for name in FILES]
    nothing = SimpleNamespace(create=_none, register_custom_kv_cache_specs=_none, is_xpu=_none)
    # Loads fail on purpose here, so suppress the warnings.
    quiet = logging.getLogger("staleproof.executed")
    quiet.disabled = True
    with executed(folder, *names):
        known: dict[str, dict[str, Any]] = {
            "vllm.v1.utils": {
                "ConstantList": lambda items: items,
                "record_function_or_nullcontext": contextlib.nullcontext,
            },
            "vllm.logger": {"init_logger": lambda name: quiet},
            "vllm.distributed.kv_events": {"EventPublisherFactory": nothing},
            "vllm.envs": {"__getattr__": _none},
            "vllm.platforms": {"current_platform": nothing},
            "vllm.utils": {"length_from_prompt_token_ids_or_embeds": lambda ids, embeds: len(ids)},
        }
        for name, members in known.items():
            vars(importlib.import_module(name)).update(members)
        # Only once: each call draws a new seed of the hashes, so requests would not find each other's prefix.
        importlib.import_module(f"{CORE}.kv_cache_utils").init_none_hash(_digest)
        yield


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def _scheduler(
    blocks: int,
    *,
    policy: str = "priority",
    threshold: int = 64,
    budget: int = 512,
    seqs: int = 8,
    asynchronous: bool = False,
    hybrid: bool = False,
) -> Any:
    """vLLM's scheduler for one group of full attention.

    Args:
        blocks: of the pool, of 16 tokens each.
        policy: ``priority`` or ``fcfs``.
        threshold: ``long_prefill_token_threshold``; 0 for none.
        budget: tokens of a step.
        seqs: requests of a step.
        asynchronous: take ``AsyncScheduler``.
        hybrid: beside it a group of recurrent layers, without prefix caching.
    """
    import torch

    schedulers = importlib.import_module(f"{CORE}.sched.async_scheduler")
    cls = schedulers.AsyncScheduler if asynchronous else schedulers.Scheduler
    kv = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = fitting(kv.FullAttentionSpec, block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config = Unset(
        scheduler_config=Unset(
            max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy,
            long_prefill_token_threshold=threshold, enable_chunked_prefill=True, watermark=0,
            async_scheduling=asynchronous, prefill_schedule_interval=1, scheduler_reserve_full_isl=True,
        ),
        cache_config=Unset(num_gpu_blocks=blocks, enable_prefix_caching=not hybrid, block_size=BLOCK),
        model_config=Unset(max_model_len=8192),
        parallel_config=Unset(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1,
        ),
        observability_config=Unset(),
        aux_output_config=Unset(),
        ec_manager_config=Unset(get_encoder_cache_manager_obj=_none),
        num_speculative_tokens=0, num_lookahead_tokens=0, num_prefill_lookahead_tokens=0,
    )  # fmt: skip
    tensor = fitting(kv.KVCacheTensor, size=1, shared_by=["0"], layers=["0"], layer_stride=0, block_stride=1)
    groups = [kv.KVCacheGroupSpec(["0"], spec)]
    if hybrid:
        state = fitting(kv.MambaSpec, block_size=STATE, shapes=((8,),), dtypes=(torch.float32,))
        groups.append(kv.KVCacheGroupSpec(["1"], state))
    return fitting(
        cls,
        vllm_config=config,
        kv_cache_config=kv.KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups
        ),
        structured_output_manager=SimpleNamespace(should_advance=_none, accept_tokens=lambda *args: True),
        # A multiple of every group's.
        block_size=STATE if hybrid else BLOCK,
        hash_block_size=BLOCK,
        mm_registry=SimpleNamespace(supports_multimodal_inputs=_none),
    )


class Store:
    """A KV connector that has the first tokens of every prompt, in synchronous loads.

    Args:
        tokens: number of tokens, a multiple of the block size; a prompt's last token is never included.

    Attributes:
        broken: whether loads fail.
        loads: request -> tokens that it had before its load, for loads of the planned step.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens, self.broken = tokens, True
        self.loads: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """(tokens beyond the local hit, whether the load is asynchronous)."""
        most = min(self.tokens, (request.num_tokens - 1) // BLOCK * BLOCK)
        self.loads[request.request_id] = computed
        return max(most - computed, 0), False

    def request_finished(self, *args: Any) -> tuple[bool, None]:
        """Tell vLLM that the blocks need not be kept."""
        return False, None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _none


class AsyncStore(Store):
    """The same with asynchronous loads; a load may end inside a block, and writes no token behind its end."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """(tokens beyond the local hit, whether the load is asynchronous)."""
        return self.tokens - computed, True

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups that a load restores: attention. vLLM 0.33.0 asks for them."""
        return (0,)


def rows(scheduler: Any, scheduled: Any) -> list[Row]:
    """The work that a ``SchedulerOutput`` gives to the worker, one row a request."""
    fresh = {new.req_id for new in scheduled.scheduled_new_reqs}
    fresh |= {*scheduled.scheduled_cached_reqs.resumed_req_ids}
    found = []
    for name, tokens in scheduled.num_scheduled_tokens.items():
        one, (blocks,) = scheduler.requests[name], scheduler.kv_cache_manager.get_block_ids(name)
        # _update_after_schedule has already added the step's tokens.
        start = one.num_computed_tokens - tokens
        found.append(Row(name, one.all_token_ids, blocks, start, tokens, name in fresh))
    return found


def loaded(engine: Real) -> tuple[list[int], set[int]]:
    """Plan the asynchronous load of the one request, let it end, and plan the step behind it.

    Returns:
        The request's blocks of attention, and the blocks that vLLM asked the worker to zero.
    """
    scheduler, zeroed = engine.scheduler, set[int]()
    (name,) = scheduler.requests
    received = Unset(finished_recving={name})
    for output in (received, None):
        scheduled = scheduler.schedule()
        zeroed |= {*(scheduled.new_block_ids_to_zero or ())}
        if output is not None:
            made = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
            empty: dict[str, Any] = {"req_ids": [], "req_id_to_index": {}, "sampled_token_ids": []}
            scheduler.update_from_output(scheduled, fitting(made, **empty, kv_connector_output=output))
    blocks, _ = scheduler.kv_cache_manager.get_block_ids(name)
    return [*blocks], zeroed


_arrivals = count()


class Real:
    """vLLM's scheduler as an :class:`~.scene.Engine`, inside :func:`release`, with a simulated worker.

    Args:
        blocks: of the pool, of 16 tokens each.
        remedy: see :mod:`.broken`.
        store: a connector, with vLLM's policy ``recompute`` for loads that fail.
        options: of :func:`_scheduler`.

    Attributes:
        memory: what the worker would have written.
        preempted: preemptions so far.
        host_s: seconds in ``schedule``.
    """

    def __init__(
        self, blocks: int, remedy: Remedy = NONE, *, store: Store | None = None, **options: Any
    ) -> None:
        self.scheduler = _scheduler(blocks, **options)
        self.scheduler.connector = self._store = store
        self.memory, self.preempted, self.host_s = Memory(BLOCK), 0, 0.0
        self._fresh: set[int] = set()
        self._remedy = remedy
        if remedy != NONE:
            self._apply(remedy)
        self._flying: list[tuple[Any, Any]] = []
        self._most = 2 if options.get("asynchronous") else 1
        # Requests whose first step was undone, so that their hits are not yet read.
        self._unread: set[str] = set()

    def add(self, arrival: Arrival) -> None:
        """Queue a request."""
        utils = importlib.import_module(f"{CORE}.kv_cache_utils")
        request = fitting(
            importlib.import_module("vllm.v1.request").Request,
            request_id=arrival.name,
            prompt_token_ids=[*arrival.prompt],
            sampling_params=Unset(max_tokens=arrival.reply, min_tokens=0, stop_token_ids=()),
            pooling_params=None,
            eos_token_id=None,
            arrival_time=float(next(_arrivals)),
            block_hasher=utils.get_request_block_hasher(BLOCK, _digest),
            priority=arrival.priority,
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Abort a request, as if its client disconnects."""
        status = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(name, status)

    def running(self) -> set[str]:
        """Requests that have not ended."""
        return {*self.scheduler.requests}

    def step(self) -> None:
        """Plan a step, write it, and process its tokens; if asynchronous, process them one step later."""
        engine = self.scheduler
        if engine.requests:
            self._fresh.clear()
            started = time.perf_counter()
            scheduled = engine.schedule()
            self.host_s += time.perf_counter() - started
            self.preempted += len(scheduled.preempted_req_ids)
            self._flying.append((scheduled, self._written(rows(engine, scheduled))))
        if self._flying and (len(self._flying) >= self._most or not engine.requests):
            scheduled, output = self._flying.pop(0)
            engine.update_from_output(scheduled, output)
            if self._remedy.restarts and output.kv_connector_output:
                self._restart(output.kv_connector_output)

    def _written(self, rows: list[Row]) -> Any:
        """Write a step, and return the worker's output: a token for each request whose prefill is done."""
        rows = [row._replace(hits=row.hits or row.name in self._unread) for row in rows]
        self._unread -= {row.name for row in rows}
        loads, bad = self._store.loads if self._store else {}, set[int]()
        for row in rows:
            first = loads.get(row.name, row.start)
            if self._store and self._store.broken:
                bad |= {*row.blocks[first // BLOCK : row.start // BLOCK]}
            else:
                self.memory.write(row, range(first, row.start))
        loads.clear()
        # vLLM discards what a request computed after a block that was not loaded.
        lost = [row for row in rows if bad & {*row.blocks[: row.start // BLOCK]}]
        self._unread |= {row.name for row in lost if row.hits}
        self.memory.step([row for row in rows if row not in lost])
        requests = [self.scheduler.requests[row.name] for row in rows]
        sampled = [[_token(one)] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        return fitting(
            importlib.import_module("vllm.v1.outputs").ModelRunnerOutput,
            req_ids=[row.name for row in rows],
            req_id_to_index={row.name: at for at, row in enumerate(rows)},
            sampled_token_ids=sampled,
            kv_connector_output=Unset(invalid_block_ids=bad, lost=lost) if bad else None,
        )

    def _restart(self, failed: Any) -> None:
        """Restart each request at its first block whose load failed, and drop the hashes from there on."""
        for row in failed.lost:
            first = min(row.blocks.index(block) for block in {*row.blocks} & failed.invalid_block_ids)
            self.scheduler.kv_cache_manager.evict_blocks({*row.blocks[first:]})
            request = self.scheduler.requests[row.name]
            request.num_computed_tokens = min(request.num_computed_tokens, first * BLOCK)

    def _apply(self, remedy: Remedy) -> None:
        """Wrap the methods of the scheduler and its pool with a remedy."""
        engine, manager = self.scheduler, self.scheduler.kv_cache_manager
        pool = manager.block_pool
        preempt, publish = engine._preempt_request, pool.cache_full_blocks
        find, allocate = pool.get_cached_block, pool.get_new_blocks

        def preempting(one: Any, *args: Any, **kwargs: Any) -> Any:
            (ids,) = manager.get_block_ids(one.request_id)
            computed = one.num_computed_tokens // BLOCK
            manager.evict_blocks({*remedy.taken_back(ids, computed, len(pool.blocks))})
            return preempt(one, *args, **kwargs)

        def publishing(**given: Any) -> None:
            publish(**given)
            new = given["blocks"][given["num_cached_blocks"] : given["num_full_blocks"]]
            self._fresh.update(block.block_id for block in new)

        def finding(*args: Any) -> Any:
            found = find(*args)
            return None if found and remedy.guards and self._fresh & {b.block_id for b in found} else found

        def allocating(count: int) -> Any:
            taken = allocate(count)
            self.memory.zero([block.block_id for block in taken] if remedy.zeroes else ())
            return taken

        engine._preempt_request = preempting
        pool.cache_full_blocks, pool.get_cached_block, pool.get_new_blocks = publishing, finding, allocating


def _token(request: Any) -> int:
    return int((request.num_tokens * 7 + request.num_prompt_tokens) % 450 + 5)
