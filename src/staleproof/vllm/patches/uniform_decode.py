"""Patch for incident 8: a prompt as long as a draft does not replay the graph of decode."""

from __future__ import annotations

from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of

RUNNER = "vllm.v1.worker.gpu_model_runner"
UPDATE = "GPUModelRunner._update_states"
DISPATCH = "GPUModelRunner._determine_batch_execution_and_padding"
UNIFORM = "GPUModelRunner._is_uniform_decode"
# Whether all requests of the step verify a whole draft: kept on the runner until it chooses the step's graph.
NOTE = "_staleproof_whole_drafts"
FORCE = "force_uniform_decode"


def whole_drafts(drafts: dict[str, list[int]], requests: int, k: int) -> bool:
    """Whether each of these requests verifies exactly ``k`` draft tokens.

    A request has at most ``k``, so the sum decides.

    >>> whole_drafts({"a": [7, 8]}, 1, 2), whole_drafts({"a": [7, 8]}, 2, 2)
    (True, False)
    """
    return len(drafts) == requests and sum(map(len, drafts.values())) == k * requests


def _note(args: Arguments, kwargs: Keywords) -> None:
    """Before the states of a step are updated: note whether all its requests verify whole drafts."""
    runner, plan = args[0], argument(args, kwargs, 1, "scheduler_output")
    k = runner.uniform_decode_query_len - 1
    # Attention's buffers are filled for every batch; those of a recurrent state only for drafts.
    affected = k > 0 and runner.model_config.is_hybrid
    drafts, requests = plan.scheduled_spec_decode_tokens, len(plan.num_scheduled_tokens)
    setattr(runner, NOTE, not affected or whole_drafts(drafts, requests, k))


def _dispatch(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Before a step's graph is chosen: a step that does not verify whole drafts is no uniform decode.

    A capture and a dummy step say what they are by this argument, and stay as they are.
    """
    if kwargs.get(FORCE) is None and not getattr(args[0], NOTE, True):
        return args, {**kwargs, FORCE: False}
    return None


def _by_shape(sources: Sources) -> Evidence:
    uniform = sources.function(file_of(RUNNER), UNIFORM)
    dispatch = sources.function(file_of(RUNNER), DISPATCH)
    shape = "num_tokens == max_num_scheduled_tokens * num_reqs"
    if shape not in uniform.text or any(word in dispatch.text for word in ("has_prefill", "is_prefilling")):
        return Evidence(False, f"{uniform.place} does not decide by the shape alone")
    why = f"{uniform.at(shape)} decides by the shape alone (model runner V1)"
    if "def use_v2_model_runner" in sources.text("config/vllm.py"):
        why += f"; model runner V2, if this model gets it, {_second_runner(sources)}"
    return Evidence(True, why)


def _second_runner(sources: Sources) -> str:
    """What model runner V2 does, in a few words: from 0.28.0 on it knows whether a step has a prompt."""
    path = "v1/worker/gpu/model_runner.py"
    if "get_uniform_decode_token_count" in sources.text(path):
        return f"leaves prompts out ({path}) and needs no patch"
    return "decides by the shape too, and is not patched"


PATCHES = (
    Patch(
        name="uniform_decode",
        incident="uniform_decode",
        on_host=True,
        summary="a prompt of k+1 tokens is not taken for the verification of k drafts",
        models="hybrid models (Mamba, GDN) with draft tokens (MTP, ngram), under full CUDA graphs",
        versions=(("0.16.0", "0.33.0"),),
        targets=(
            Target(RUNNER, UPDATE, ("self", "scheduler_output"), before=_note, vital=True),
            Target(RUNNER, DISPATCH, ("self", "num_tokens"), before=_dispatch, vital=True),
        ),
        probe=_by_shape,
        mechanism=(
            "With k draft tokens a step whose requests all have k+1 tokens replays the graph of decode. A "
            "prompt of k+1 tokens, or a last chunk of that length, has that shape too. The graph reads the "
            "state indices of the last real decode: the prompt overwrites the state of whoever owned those "
            "blocks, leaves its own unwritten, and its answer is that of a stranger. With the patch only a "
            "step in which each request verifies k drafts counts as such."
        ),
        threads=("vLLM #53051", "vLLM #53059", "vLLM #47123"),
        cost="host only: a sum over the drafts of a step; the first step of a prompt of k+1 tokens is eager",
    ),
)
