"""``STALEPROOF_CONTAIN=1``: a request whose logits are not finite ends with an error, alone.

The worker looks at each row of the logits, without waiting for the device: a kernel writes the flags into
the host's memory, where they are read with the step's tokens. The scheduler ends the request before it takes
in that step's tokens, takes the hashes of the blocks that the request wrote out of the prefix cache, and has
them zeroed when they are next given out.
"""

from __future__ import annotations

import importlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staleproof.vllm import kv_memory
from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target, logger, out_of_service
from staleproof.vllm.patch import Patch
from staleproof.vllm.patches.published_unwritten import PREEMPT, SCHEDULER, unknown
from staleproof.vllm.patches.uniform_decode import RUNNER
from staleproof.vllm.patches.uniform_decode import SECOND_RUNNER as RUNNER_V2
from staleproof.vllm.poison import ALLOCATED, INIT, PLAN, UPDATE, UPDATE_V2
from staleproof.vllm.sources import Evidence, PatchError, Sources, file_of
from staleproof.vllm.standing import registry

NAME, VARIABLE, RAISES = "contain", "STALEPROOF_CONTAIN", "VLLM_RAISE_ON_LOGIT_NANS"
MESSAGE = "staleproof: logits were NaN or Inf; the request was ended, and no token of that step was sent"
SAMPLER, REJECTION = "vllm.v1.worker.gpu.sample.sampler", "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
BATCH = "self", "logits", "input_batch"
OUTPUT = "self", "scheduler_output", "model_runner_output"
# Kept on objects of vLLM's. On a batch, then on the runner: the flags of a step. On a step's output: whose
# logits are not finite. On a request: tokens that it hit first, and the blocks that it left when preempted.
# On the scheduler: blocks to zero when they are next given out, steps, and requests ended. On a plan: blocks
# to zero, and its step.
FLAGS, BAD, HITS, LEFT = "_staleproof_flags", "_staleproof_bad", "_staleproof_hits", "_staleproof_left"
DIRTY, STEP, ENDED = "_staleproof_dirty", "_staleproof_step", "_staleproof_ended"
_ended = [0]
# Flags lie in pinned memory of the host, of which each piece has so many bytes or more. Pieces that no kernel
# writes to now; those of the last steps, which must not be freed before their kernels have run, even if a
# switch of the plugin came between and nobody reads them. A byte that is no flag.
BYTES = 1 << 16
_unused: list[tuple[Any, memoryview]] = []
_last: deque[Any] = deque(maxlen=8)
UNWRITTEN = b"\2"


def enabled(environment: Mapping[str, str]) -> bool:
    """Whether requests are to be contained.

    Raises:
        PatchError: a value that is not known, or vLLM would stop before us.

    >>> enabled({}), enabled({"STALEPROOF_CONTAIN": "0"}), enabled({"STALEPROOF_CONTAIN": "1"})
    (False, False, True)
    """
    word = environment.get(VARIABLE, "").strip()
    if word in ("", "0"):
        return False
    if word != "1":
        raise PatchError(f"{VARIABLE}: expected 1 or 0, got {word!r}")
    if environment.get(RAISES, "0") not in ("", "0"):
        raise PatchError(f"{RAISES}={environment[RAISES]} stops the engine at the first NaN")
    registry.of(NAME).counters["contained_requests"] = lambda: _ended[0]
    return True


# --- In the worker.


def _memory(count: int) -> tuple[Any, memoryview]:
    """Pinned memory for so many flags, to which no kernel writes now: its tensor, and its bytes."""
    while _unused:
        found = _unused.pop()
        if len(found[1]) >= count:
            return found
    import torch

    memory = torch.empty(max(count, BYTES), dtype=torch.uint8, pin_memory=True)
    return memory, memory.numpy().data


def _flags(logits: Any) -> Callable[[], list[bool]]:
    """Look at each row. Called later, what is returned waits for that, and says which rows are bad, if any.

    Bad is NaN and +Inf; -Inf may be a mask's.
    """
    if not logits.is_cuda:
        bad: list[bool] = (~(logits.amax(-1) < float("inf"))).tolist()
        return lambda: bad
    from staleproof.ops.bad_logits import find_bad_logits, parts_of

    # Without an operator of torch, an event or a copy: each costs the host as much as the launch, or more.
    rows, columns = logits.shape
    parts = parts_of(columns)
    count = rows * parts
    memory, view = _memory(count)
    view[:count] = UNWRITTEN * count
    find_bad_logits(logits, memory)
    _last.append(memory)

    def read() -> list[bool]:
        flags = view[:count].tobytes()
        # The tokens of the step are there, so the kernel before them has run. If a release gives its output
        # out earlier, this waits.
        if UNWRITTEN in flags:
            import torch

            torch.cuda.synchronize()
            flags = view[:count].tobytes()
        _unused.append((memory, view))
        return [1 in flags[at : at + parts] for at in range(0, count, parts)] if 1 in flags else []

    return read


def _allocated(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After the cache was allocated: step back if its blocks could not be zeroed."""
    runner = args[0]
    if (why := kv_memory.unknown_layout(runner)) is not None:
        out_of_service(registry.step_back(NAME, why))
    elif runner.device.type == "cuda":
        import torch

        # Its kernel is compiled now, not in a request's first step.
        _flags(torch.empty(1, 8, dtype=runner.vllm_config.model_config.dtype, device=runner.device))
    return result


def _look(args: Arguments, kwargs: Keywords) -> None:
    """Before the first model runner samples; its rows are a request's drafts and one more."""
    runner, logits = args[0], argument(args, kwargs, 1, "logits")
    drafts = argument(args, kwargs, 2, "spec_decode_metadata")
    if logits is not None:
        ends = None
        if drafts is not None:
            ends = [*itertools.accumulate((count + 1 for count in drafts.num_draft_tokens), initial=0)]
        setattr(runner, FLAGS, (_flags(logits), [*runner.input_batch.req_ids], ends))


def _look_v2(args: Arguments, kwargs: Keywords) -> None:
    """Before the second model runner samples, with drafts or without."""
    logits, batch = (argument(args, kwargs, at, BATCH[at]) for at in (1, 2))
    setattr(batch, FLAGS, (_flags(logits), [*batch.req_ids], batch.cu_num_logits_np.copy()))


def _sampled_v2(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After the second model runner sampled. A sampler of another kind, or a shard's, leaves no flags."""
    runner, batch = args[0], argument(args, kwargs, 2, BATCH[2])
    kept = batch.__dict__.pop(FLAGS, None)
    if kept is None:
        why = "the sampler is not vLLM's own, or samples a shard of the batch a rank"
        out_of_service(registry.step_back(NAME, why))
        return result
    setattr(runner, FLAGS, kept)
    return result


def _attach(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After ``sample_tokens``: let the flags travel with the step's output, now or when that is read."""
    kept = args[0].__dict__.pop(FLAGS, None)
    if kept is None or result is None:
        return result
    flags, names, ends = kept

    def attached(output: Any) -> Any:
        try:
            if found := _bad(flags(), names, ends):
                setattr(output, BAD, (found, _first_bad()))
        except Exception as error:
            out_of_service(registry.step_back(NAME, f"reading flags: {type(error).__name__}: {error}"))
        return output

    # With asynchronous scheduling the output is read later, perhaps in another thread.
    if not hasattr(result, "get_output"):
        return attached(result)
    read = result.get_output
    result.get_output = lambda: attached(read())
    return result


def _bad(bad: Sequence[bool], names: Sequence[str], ends: Sequence[int] | None) -> list[str]:
    """The requests of which a row is bad. ``ends`` of their rows begin with 0; without, each has one row.

    >>> _bad([False, True], ["a", "b"], None), _bad([False, True, False], ["a", "b"], [0, 2, 3])
    (['b'], ['a'])
    """
    if not any(bad):
        return []
    rows = itertools.pairwise(range(len(names) + 1) if ends is None else ends)
    return [name for name, (start, end) in zip(names, rows, strict=False) if any(bad[start:end])]


def _first_bad() -> str:
    """Where the watch of this process first saw a bad live row, if it runs."""
    from staleproof.vllm import watch_hooks

    watches = [hooks.watch for hooks in watch_hooks.installed if hooks.watch is not None]
    return watches[0].first_live() if watches else ""


def _zero(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After a step's blocks were taken in: zero those of them that a contained request had written."""
    blocks = getattr(argument(args, kwargs, 1, PLAN[1]), DIRTY, None)
    if blocks is not None:
        kv_memory.fill(args[0], blocks, 0.0)
    return result


# --- In the scheduler.


def _begin(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After a scheduler was made: step back if it is none that we know."""
    why = unknown(args[0])
    if why is None and args[0].connector is not None:
        why = "a KV connector is configured, which may have taken a bad block elsewhere"
    if why is not None:
        out_of_service(registry.step_back(NAME, why))
    return result


def _planned(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After ``schedule``: note what new requests hit, and which given blocks have to be zeroed first."""
    scheduler = args[0]
    kept = scheduler.__dict__
    kept[STEP] = kept.get(STEP, 0) + bool(result.total_num_scheduled_tokens)
    setattr(result, STEP, kept[STEP])
    for new in result.scheduled_new_reqs:
        scheduler.requests[new.req_id].__dict__.setdefault(HITS, new.num_computed_tokens)
    if dirty := kept.get(DIRTY):
        given = kv_memory.given(result, [kind.block_size for kind in kv_memory.kinds(scheduler)]).fresh
        setattr(result, DIRTY, [[block for block in ids if block in dirty] for ids in given])
        dirty.difference_update(*given)
    return result


def _written(scheduler: Any, request: Any) -> set[int]:
    """The blocks that a request has and did not hit when it first came."""
    found: set[int] = set()
    for kind in kv_memory.kinds(scheduler):
        first = getattr(request, HITS, 0) // kind.block_size
        blocks = kind.req_to_blocks.get(request.request_id, ())
        found |= {block.block_id for block in blocks[first:] if not block.is_null}
    return found


def _preempted(args: Arguments, kwargs: Keywords) -> None:
    """Before a request is preempted: with asynchronous scheduling its last step may still be computed."""
    request = argument(args, kwargs, 1, "request")
    setattr(request, LEFT, _written(args[0], request))


def _end(args: Arguments, kwargs: Keywords) -> None:
    """Before a step's output is taken in: end the requests whose logits are not finite.

    What vLLM then finds for them in the output it drops, as it does for a request that a client aborted.
    """
    found = getattr(argument(args, kwargs, 2, OUTPUT[2]), BAD, None)
    if found is None:
        return
    names, first = found
    scheduler, plan = args[0], argument(args, kwargs, 1, OUTPUT[1])
    requests = [scheduler.requests[name] for name in names if name in scheduler.requests]
    requests = [request for request in requests if not request.is_finished()]
    if not requests:
        return
    own = {
        request.request_id: _written(scheduler, request) or getattr(request, LEFT, set())
        for request in requests
    }
    blocks = set().union(*own.values())
    scheduler.kv_cache_manager.evict_blocks(blocks)
    scheduler.__dict__.setdefault(DIRTY, set()).update(blocks)
    scheduler.finish_requests([*own], type(requests[0].status).FINISHED_ERROR)
    setattr(scheduler, ENDED, requests)
    _ended[0] += len(requests)
    for name, ids in own.items():
        logger.error(
            "staleproof: contained %s: its logits were NaN or Inf in step %d%s; ended with an error, its %d "
            "blocks leave the prefix cache", name, getattr(plan, STEP, 0), first, len(ids),
        )  # fmt: skip


def _tell(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After a step's output was taken in: tell the clients of the requests that were ended."""
    ended = args[0].__dict__.pop(ENDED, None)
    if ended is None:
        return result
    engine = importlib.import_module("vllm.v1.engine")
    for request in ended:
        error = engine.EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=MESSAGE,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        result.setdefault(request.client_index, engine.EngineCoreOutputs()).outputs.append(error)
    return result


def _serves_on(sources: Sources) -> Evidence:
    update = sources.function(file_of(SCHEDULER), "Scheduler.update_from_output")
    if "nan_fault_tolerance" in update.text:
        return Evidence(False, f"{update.at('nan_fault_tolerance')} ends such requests itself")
    return Evidence(True, f"{update.place} takes in the token of a request whose logits are NaN")


PATCH = Patch(
    name=NAME,
    incident="canary",
    on_host=True,
    summary=f"ends a request whose logits are NaN or Inf with an error, alone ({VARIABLE}=1)",
    versions=(("0.20.0", "0.33.0"),),
    targets=(
        Target(
            RUNNER,
            "GPUModelRunner._sample",
            ("self", "logits", "spec_decode_metadata"),
            before=_look,
            vital=True,
        ),
        Target(RUNNER, "GPUModelRunner.sample_tokens", ("self",), after=_attach, vital=True),
        Target(RUNNER, INIT, ALLOCATED, after=_allocated, vital=True),
        Target(RUNNER, UPDATE, PLAN, after=_zero, vital=True),
        Target(SAMPLER, "Sampler.__call__", BATCH, before=_look_v2, vital=True),
        Target(REJECTION, "RejectionSampler.__call__", BATCH, before=_look_v2, vital=True),
        Target(
            RUNNER_V2,
            "GPUModelRunner.sample",
            ("self", "hidden_states", "input_batch"),
            after=_sampled_v2,
            vital=True,
        ),
        Target(RUNNER_V2, "GPUModelRunner.sample_tokens", ("self",), after=_attach, vital=True),
        Target(RUNNER_V2, INIT, ALLOCATED, after=_allocated, vital=True),
        Target(RUNNER_V2, UPDATE_V2, PLAN, after=_zero, vital=True),
        Target(SCHEDULER, "Scheduler.__init__", ("self",), after=_begin, vital=True),
        Target(SCHEDULER, "Scheduler.schedule", ("self",), after=_planned, vital=True),
        Target(SCHEDULER, PREEMPT, ("self", "request"), before=_preempted, vital=True),
        Target(SCHEDULER, "Scheduler.update_from_output", OUTPUT, before=_end, after=_tell, vital=True),
    ),
    probe=_serves_on,
    mechanism=(
        "A request whose KV holds a NaN has NaN logits, is sent token 0 for ever, and leaves its blocks in "
        "the prefix cache, where the next request hits them. With the patch it ends before that token, with "
        "finish reason error; hashes of blocks that it wrote are taken back, and the blocks are zeroed when "
        "they are next given out. A block that it hit keeps its hash. With a KV connector it steps back."
    ),
    threads=("vLLM #50283", "vLLM #57716"),
    cost=(
        "a launch a step; on an H200 up to 16 us of a step of 5 to 12.4 ms (1, 64 and 256 requests), up to "
        "0.3 %"
    ),
)
