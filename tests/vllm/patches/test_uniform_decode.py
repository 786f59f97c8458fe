"""The patch of incident 8 on a made-up runner: which steps replay the graph of decode."""

import importlib
from types import SimpleNamespace as Plan

import pytest

from staleproof.vllm.patches import uniform_decode as patch
from staleproof.vllm.plugin import patches

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


def plan(drafts, **tokens):
    return Plan(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts)


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
