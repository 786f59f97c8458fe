"""Patches for incident 8: a prompt as long as a draft, and a prompt of one token, are no decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of, line_of

RUNNER = "vllm.v1.worker.gpu_model_runner"
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
CONFIG = "config/vllm.py"
UPDATE = "GPUModelRunner._update_states"
DISPATCH = "GPUModelRunner._determine_batch_execution_and_padding"
UNIFORM = "GPUModelRunner._is_uniform_decode"
# Whether all requests of the step decode: kept on the runner until it chooses the step's graph.
NOTE = "_staleproof_decodes"
FORCE = "force_uniform_decode"


def whole_drafts(drafts: dict[str, list[int]], requests: int, k: int) -> bool:
    """Whether each of these requests verifies exactly ``k`` draft tokens.

    A request has at most ``k``, so the sum decides.

    >>> whole_drafts({"a": [7, 8]}, 1, 2), whole_drafts({"a": [7, 8]}, 2, 2)
    (True, False)
    """
    return len(drafts) == requests and sum(map(len, drafts.values())) == k * requests


def first_tokens(plan: Any) -> list[Sequence[Sequence[int]]]:
    """The requests that start with one token in a step: of each its blocks, a list a group of layers.

    Args:
        plan: vLLM's ``SchedulerOutput``. Model runner V1 finds a resumed request among the cached ones, model
            runner V2 among the new ones.
    """
    starts = [(new.req_id, new.num_computed_tokens, new.block_ids) for new in plan.scheduled_new_reqs]
    cached = plan.scheduled_cached_reqs
    for name in cached.resumed_req_ids:
        row = cached.req_ids.index(name)
        starts.append((name, cached.num_computed_tokens[row], cached.new_block_ids[row]))
    tokens = plan.num_scheduled_tokens
    return [blocks for name, computed, blocks in starts if computed == 0 and tokens[name] == 1]


def _note(args: Arguments, kwargs: Keywords) -> None:
    """Before the states of a step are updated: note whether all its requests decode.

    Attention's buffers are filled for every batch; those of a recurrent state only for decodes.
    """
    runner, plan = args[0], argument(args, kwargs, 1, "scheduler_output")
    decodes, k = True, runner.uniform_decode_query_len - 1
    if runner.model_config.is_hybrid and k > 0:
        decodes = whole_drafts(plan.scheduled_spec_decode_tokens, len(plan.num_scheduled_tokens), k)
    elif runner.model_config.is_hybrid:
        decodes = not first_tokens(plan)
    setattr(runner, NOTE, decodes)


def _dispatch(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Before a step's graph is chosen: a step in which not every request decodes is no uniform decode.

    A capture and a dummy step say what they are by this argument, and stay as they are.
    """
    if kwargs.get(FORCE) is None and not getattr(args[0], NOTE, True):
        return args, {**kwargs, FORCE: False}
    return None


def _states(runner: Any, group: Any) -> Iterator[Any]:
    """The recurrent states of a group of layers, tensors whose first axis counts blocks."""
    layers, spec = runner.vllm_config.compilation_config.static_forward_context, group.kv_cache_spec
    # Layers of different sizes share a spec that keeps theirs by name.
    specs = getattr(spec, "kv_cache_specs", {})
    for name in group.layer_names:
        # By name, because importing the class would import vLLM.
        if any(base.__name__ == "MambaSpec" for base in type(specs.get(name, spec)).__mro__):
            yield from _tensors(layers[name].kv_cache)


def _tensors(kept: Any) -> Iterator[Any]:
    """Up to 0.18.1 a layer keeps one tuple a pipeline stage, in a list."""
    if isinstance(kept, list | tuple):
        for one in kept:
            yield from _tensors(one)
    else:
        yield kept


def _clear_states(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After the states of a step are updated: zero those of requests that start with one token.

    Such a request counts as a decode, which reads the state.
    """
    runner = args[0]
    for tables in first_tokens(argument(args, kwargs, 1, "scheduler_output")):
        for group, blocks in zip(runner.kv_cache_config.kv_cache_groups, tables, strict=False):
            for state in _states(runner, group):
                # Block 0 is nobody's.
                for block in filter(None, blocks):
                    state[block].zero_()
    return result


def _by_shape(sources: Sources) -> Evidence:
    uniform = sources.function(file_of(RUNNER), UNIFORM)
    dispatch = sources.function(file_of(RUNNER), DISPATCH)
    shape = "num_tokens == max_num_scheduled_tokens * num_reqs"
    if shape not in uniform.text or any(word in dispatch.text for word in ("has_prefill", "is_prefilling")):
        return Evidence(False, f"{uniform.place} does not decide by the shape alone")
    why = f"{uniform.at(shape)} decides by the shape alone (model runner V1)"
    if "def use_v2_model_runner" in sources.text(CONFIG):
        why += f"; {_second_runner(sources)}"
    return Evidence(True, why)


def _second_runner(sources: Sources) -> str:
    """Who gets model runner V2, and what it does: from 0.28.0 on it knows whether a step has a prompt."""
    path, text = file_of(SECOND_RUNNER), sources.text(CONFIG)
    who = "some models" if "_is_default_v2_model_runner_model" in text else "a model by default"
    gets = (
        f"{who} get{'s' * who.endswith('default')} V2 ({CONFIG}:{line_of(text, 'def use_v2_model_runner')})"
    )
    knows = line_of(sources.text(path), "get_uniform_decode_token_count(")
    if knows is not None:
        return f"{gets}, which leaves prompts out ({path}:{knows}) and needs no patch"
    return f"{gets}, which decides by the shape too and is not patched"


BUILDERS = [f"v1/attention/backends/{name}_attn.py" for name in ("gdn", "linear", "mamba")]


def _one_token_decodes(sources: Sources) -> Evidence:
    """Which of vLLM's builders of metadata take the first token of a request for a decode."""
    found = []
    for path in BUILDERS:
        lines = sources.text(path).split("\n")
        for at, line in enumerate(lines):
            # The call takes a few lines.
            by_length = "treat_short_extends_as_decodes=False" not in "".join(lines[at : at + 7])
            if "split_decodes_and_prefills(" in line and by_length:
                found.append(f"{path}:{at + 1}")
    if found:
        return Evidence(True, f"{', '.join(found)} take the first token of a request for a decode")
    return Evidence(False, f"{', '.join(BUILDERS)} take the first token of a request for a prefill")


PATCHES = (
    Patch(
        name="uniform_decode",
        incident="uniform_decode",
        on_host=True,
        summary="a prompt of k+1 tokens is not taken for the verification of k drafts",
        models="hybrid models (Mamba, GDN), mostly with draft tokens (MTP, ngram), under full CUDA graphs",
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
            "step in which each request verifies k drafts counts as such. Without drafts (k = 0) it "
            "is a prompt of one token, in releases whose builders of metadata call that a prefill."
        ),
        threads=("vLLM #53051", "vLLM #53059", "vLLM #47123"),
        cost="host only: a sum over the drafts of a step; the first step of a prompt of k+1 tokens is eager",
    ),
    Patch(
        name="one_token_prompt",
        incident="uniform_decode",
        on_host=True,
        summary="a request that starts with one token starts from a state of zeros",
        models="linear attention (Ling, Ring 2.5), GDN up to 0.30.0, Mamba up to 0.18.1",
        versions=(("0.16.0", "0.33.0"),),
        targets=(
            Target(RUNNER, UPDATE, ("self", "scheduler_output"), after=_clear_states, vital=True),
            Target(
                SECOND_RUNNER,
                "GPUModelRunner.add_requests",
                ("self", "scheduler_output"),
                after=_clear_states,
                vital=True,
            ),
        ),
        probe=_one_token_decodes,
        mechanism=(
            "A prompt of one token, or a first chunk of one, has the length of a decode. Builders of "
            "metadata that go by the length take it for one, and the layer starts from the state that the "
            "block's last owner left: the answer depends on a stranger's text. With the patch that state is "
            "zeroed first."
        ),
        threads=("vLLM #51562", "vLLM #51565"),
        cost="host only, but for one memset a state and layer when a request starts with one token",
    ),
)
