"""The patches of incident 8 on made-up runners: who replays the graph of decode, whose state is zeroed."""

import importlib
from types import SimpleNamespace as Space

import pytest
import torch

from staleproof.vllm.patches import uniform_decode as patch
from staleproof.vllm.plugin import patches
from staleproof.vllm.standing import registry

RUNNER = """
from types import SimpleNamespace

class GPUModelRunner:
    uniform_decode_query_len = 3
    model_config = SimpleNamespace(is_hybrid=True)

    def _is_uniform_decode(self, most, total, requests, force):
        return most == self.uniform_decode_query_len and total == most * requests if force is None else force

    def _update_states(self, scheduler_output):
        pass

    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs, most, force_uniform_decode=None):
        return self._is_uniform_decode(most, num_tokens, num_reqs, force_uniform_decode)

    def step(self, plan, force=None):
        self._update_states(plan)
        lengths = plan.num_scheduled_tokens.values()
        return self._determine_batch_execution_and_padding(
            num_tokens=sum(lengths), num_reqs=len(lengths), most=max(lengths), force_uniform_decode=force
        )
"""


def plan(drafts, *, new=(), resumed=(), **tokens):
    """A step; a new or resumed request owns the blocks 2 and 3 of each group, and has computed nothing.

    A letter in upper case has computed 8 tokens.
    """
    both = ([2, 3], [4])
    computed = {name: 0 if name.islower() else 8 for name in tokens}
    return Space(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[
            Space(req_id=name, num_computed_tokens=computed[name], block_ids=both) for name in new
        ],
        scheduled_cached_reqs=Space(
            req_ids=[name for name in tokens if name not in new],
            resumed_req_ids={*resumed},
            num_computed_tokens=[computed[name] for name in tokens if name not in new],
            new_block_ids=[both if name in resumed else None for name in tokens if name not in new],
        ),
    )


@pytest.fixture(name="runner")
def runner_fixture(made_up):
    made_up({patch.RUNNER.removeprefix("vllm."): RUNNER})
    return importlib.import_module(patch.RUNNER).GPUModelRunner()


WHOLE = {"a": [7, 7], "b": [7, 7]}


@pytest.mark.parametrize(
    ("drafts", "tokens", "unpatched", "patched"),
    [
        ({}, {"a": 3}, True, False),
        ({}, {"a": 2}, False, False),
        ({"a": [7, 7]}, {"a": 3, "b": 3}, True, False),
        (WHOLE, {"a": 3, "b": 3}, True, True),
        ({"a": [7]}, {"a": 2}, False, False),
    ],
    ids=["prompt of k+1", "prompt of k", "prompt beside drafts", "drafts", "shorter draft"],
)
def test_only_a_step_of_whole_drafts_is_a_uniform_decode(runner, drafts, tokens, unpatched, patched):
    step = plan(drafts, **tokens)
    off = runner.step(step)
    with patches()["uniform_decode"].applied("0.22.1"):
        on = runner.step(step)
    assert (off, on, runner.step(step)) == (unpatched, patched, unpatched)


def test_capture_and_attention_only_models_keep_their_graphs(runner):
    with patches()["uniform_decode"].applied("0.22.1"):
        assert runner.step(plan({}, a=3), force=True) is True
        runner.model_config.is_hybrid = False
        assert runner.step(plan({}, a=3)) is True


@pytest.mark.parametrize(
    ("step", "patched"),
    [
        ({"a": 1, "new": "a"}, False),
        ({"a": 1, "resumed": "a"}, False),
        ({"B": 1, "a": 1, "new": "a"}, False),
        ({"A": 1, "new": "A"}, True),
        ({"A": 1}, True),
    ],
    ids=["prompt", "resumed prompt", "prompt beside a decode", "last chunk behind a prefix hit", "decode"],
)
def test_without_drafts_only_a_first_token_is_no_decode(runner, step, patched):
    runner.uniform_decode_query_len = 1
    with patches()["uniform_decode"].applied("0.33.0"):
        assert runner.step(plan({}, **step)) is patched


ADDS = """
class GPUModelRunner:
    def add_requests(self, scheduler_output):
        return "added"
"""


class MambaSpec:
    pass


class FullAttentionSpec:
    pass


def served(made_up, module, step):
    """Whether each block is zero in caches of attention, of two states, and of one in an older layer."""
    made_up({patch.RUNNER.removeprefix("vllm."): RUNNER, patch.SECOND_RUNNER.removeprefix("vllm."): ADDS})
    runner = importlib.import_module(module).GPUModelRunner()
    caches = [torch.ones(6, 2) for _ in range(4)]
    attention, conv, state, older = caches
    kept = {"full": attention, "mamba": (conv, state), "older": [(older,)]}
    layers = {name: Space(kv_cache=one) for name, one in kept.items()}
    runner.vllm_config = Space(compilation_config=Space(static_forward_context=layers))
    by_name = Space(kv_cache_specs={"full": FullAttentionSpec(), "older": MambaSpec()})
    runner.kv_cache_config = Space(
        kv_cache_groups=[
            Space(kv_cache_spec=MambaSpec(), layer_names=["mamba"]),
            Space(kv_cache_spec=by_name, layer_names=["full", "older"]),
        ]
    )
    with patches()["one_token_prompt"].applied("0.33.0"):
        (runner._update_states if module == patch.RUNNER else runner.add_requests)(step)
    return [[block for block in range(6) if not cache[block].any()] for cache in caches]


NOTHING, ZEROED = [[]] * 4, [[], [2, 3], [2, 3], [4]]


@pytest.mark.parametrize("module", [patch.RUNNER, patch.SECOND_RUNNER])
@pytest.mark.parametrize(
    ("step", "zeroed"),
    [
        ({"a": 1, "new": "a"}, ZEROED),
        ({"a": 1, "B": 1, "resumed": "a"}, ZEROED),
        ({"a": 2, "new": "a"}, NOTHING),
        ({"A": 1, "new": "A"}, NOTHING),
        ({"A": 1}, NOTHING),
    ],
    ids=["prompt", "resumed beside a decode", "prompt of two", "prefix hit", "decode"],
)
def test_state_of_a_request_that_starts_with_one_token_is_zeroed_and_no_other(made_up, module, step, zeroed):
    assert served(made_up, module, plan({}, **step)) == zeroed


def test_runner_of_another_form_makes_the_patch_step_back(made_up, caplog):
    made_up({patch.SECOND_RUNNER.removeprefix("vllm."): ADDS})
    runner = importlib.import_module(patch.SECOND_RUNNER).GPUModelRunner()
    with patches()["one_token_prompt"].applied("0.33.0"):
        assert [runner.add_requests(plan({}, a=1, new="a")) for _ in range(2)] == ["added"] * 2
        assert [*registry.out_of_service()] == ["one_token_prompt"]
    (line,) = [one.getMessage() for one in caplog.records if "one_token_prompt" in one.getMessage()]
    assert "kv_cache_config" in line
