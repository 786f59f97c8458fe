"""Two data-parallel ranks of a whole vLLM: what is counted. ``test_real_engine.py`` tries the real one."""

from __future__ import annotations

from types import SimpleNamespace as Space

import pytest
import torch
from tests.engine.engine_answers import asked, ended
from tests.engine.made_engine import NAN, engine_fixture, stand_in  # noqa: F401

from staleproof.cases.words import NOT_RUN
from staleproof.engine import orders, ranks
from staleproof.engine.orders import EngineResult
from staleproof.engine.spies import LARGEST, Rows

OFF, ON = ranks.ORDERS


def step(live: int, rows: int, nan: tuple[int, int] = (0, 0), inf: tuple[int, int] = (0, 0)) -> dict:
    return {"live": live, "rows": rows, "NaN": list(nan), "Inf": list(inf)}


@pytest.mark.parametrize(
    ("bad", "verdict"), [(0, "none"), (1, "some"), (8, "some"), (9, "nearly all"), (10, "nearly all")]
)
def test_the_share_of_padded_steps_of_the_busy_rank_decides(monkeypatch, bad, verdict):
    # Half of the bad steps hold Inf only. A step without padding, and the idle rank, do not count.
    busy = [step(3, 8, (0, 5) if i % 2 else (0, 0), (0, 0) if i % 2 else (1, 4)) for i in range(bad)]
    busy += [step(3, 8)] * (10 - bad) + [step(8, 8, (8, 0))] * 30
    told = {"uneven": busy, "rank 1": {"uneven": [step(0, 8, (0, 8))] * 40}}
    found = asked(ranks.BENCH, {OFF: told}, monkeypatch)
    said = found[ranks.QUESTION, OFF]
    assert said.verdict == verdict
    assert said.numbers["busy rank"] == {
        "steps": 40,
        "padded": 10,
        "mean padding": 5.0,
        "with NaN": bad // 2,
        "live rows with NaN": 0,
        "padding rows with NaN": 5 * (bad // 2),
        "with Inf": bad - bad // 2,
        "live rows with Inf": bad - bad // 2,
        "padding rows with Inf": 4 * (bad - bad // 2),
    }
    assert said.numbers["idle rank"]["padding rows with NaN"] == 320
    assert found[ranks.QUESTION, ON].verdict == NOT_RUN


@pytest.mark.parametrize(("padding", "mean"), [([], 0.0), ([5], 5.0), ([5, 1, 1], 2.33)])
def test_the_mean_padding_is_of_the_steps_that_have_some(padding, mean):
    told = ranks.counted([*(step(8 - rows, 8) for rows in padding), step(8, 8)])
    assert (told["steps"], told["padded"], told["mean padding"]) == (len(padding) + 1, len(padding), mean)


def test_one_step_with_padding_is_all_of_them():
    one = {"uneven": [step(3, 8, (0, 1)), step(8, 8, (1, 0))], "rank 1": {"uneven": []}}
    found = ranks.padding("one", ended({"one": one}))
    assert (found.verdict, found.numbers["idle rank"]["steps"]) == ("nearly all", 0)


def test_a_machine_with_one_gpu_starts_no_engine(monkeypatch):
    monkeypatch.setattr(orders, "start", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.setattr(orders, "_gpus", lambda: 1)
    why = "needs 2 GPUs, this machine has 1"
    told = dict(orders.run(ranks.ORDERS, at_once=2))
    assert told == dict.fromkeys((OFF, ON), EngineResult({}, why))
    said = asked(ranks.BENCH, told, monkeypatch)
    notes = {(NOT_RUN, f"{name}: {why}") for name in (OFF, ON)}
    assert {(one.verdict, one.note) for one in said.values()} == notes


def test_router_logits_are_kept_by_step_and_by_kind_of_row(monkeypatch):
    class Router:
        def select_experts(self, hidden_states, router_logits, *, input_ids=None):
            return "chosen", input_ids

    class Runner:
        """Two routers; the first meets NaN in two rows, the second Inf in one of these and in another."""

        routers = Router(), Router()

        def serve(self, rows):
            logits = torch.zeros(2, rows, 4)
            if rows > 4:
                logits[0, 2, 1] = logits[0, 5, 0] = NAN
                logits[1, 5, 3], logits[1, 6, 3] = -torch.inf, torch.inf
            for router, one in zip(self.routers, logits, strict=False):
                assert router.select_experts(None, one, input_ids=3) == ("chosen", 3)
            return "served"

        def execute_model(self, scheduler_output, rows=8):
            return self.serve(rows), scheduler_output

        def _dummy_run(self, num_tokens, uniform_decode=False):
            return self.serve(num_tokens), uniform_decode

    stand_in(monkeypatch, "vllm.model_executor.layers.fused_moe.router.base_router", BaseRouter=Router)
    stand_in(monkeypatch, "vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner)
    watch, runner = Rows(), Runner()
    ranks.router_logits(watch)
    output = Space(total_num_scheduled_tokens=3)
    assert runner.execute_model(output) == ("served", output)
    assert watch.steps is None, "the start is not counted"
    watch.steps = []
    assert runner.execute_model(output, rows=8)[0] == "served"
    runner.execute_model(Space(total_num_scheduled_tokens=8))
    assert runner._dummy_run(8, uniform_decode=True) == ("served", True)
    runner.execute_model(Space(total_num_scheduled_tokens=2), rows=4)
    runner.execute_model(Space(total_num_scheduled_tokens=LARGEST), rows=LARGEST)
    runner.execute_model(Space(total_num_scheduled_tokens=1), rows=1)
    # A prompt, and a step in which no router ran.
    runner.execute_model(Space(total_num_scheduled_tokens=LARGEST + 1), rows=LARGEST + 1)
    runner.routers = ()
    runner.execute_model(Space(total_num_scheduled_tokens=3))
    assert watch.steps == [
        step(3, 8, (1, 1), (0, 2)),
        step(8, 8, (2, 0), (2, 0)),
        step(0, 8, (0, 2), (0, 2)),
        step(2, 4),
        step(LARGEST, LARGEST, (2, 0), (2, 0)),
        step(1, 1),
    ]


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_rounds_are_served_by_the_first_rank_while_the_others_keep_step(monkeypatch, engine, rank):
    left = [2, 1, 0, 1, 0]
    server = engine.llm.llm_engine
    server.has_unfinished_requests = lambda: left.pop(0) > 0
    server.step = lambda: engine.watch.steps.append("idle")
    engine.llm.step = lambda live, size: engine.watch.steps.append((live, size))
    monkeypatch.delenv("VLLM_DP_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("VLLM_DP_RANK", rank)
    engine.watch.steps = ["of the start"]
    told = ranks.uneven(engine, [3, 60], tokens=2)
    lengths = [[len(one["prompt_token_ids"]) for one in asked] for asked, _ in engine.llm.served]
    if rank == "1":
        assert (told, lengths) == (["idle"] * 3, [])
    else:
        assert told == [(3, 8)] * 2 + [(60, 64)] * 2
        assert lengths[0] == [67, 74, 81]
        # Longer than a step that is kept, so that only decode steps are.
        assert (len(lengths[1]), min(lengths[1]), max(lengths[1])) == (60, LARGEST + 3, 154)
        assert len(ranks.uneven(engine, [1])) == 24
