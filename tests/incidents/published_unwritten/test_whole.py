"""The verdict on a whole vLLM's rounds, without a GPU."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch

from staleproof.cases.case import MissingError
from staleproof.incidents.published_unwritten import cases, whole
from staleproof.incidents.published_unwritten.scene import Arrival, burst

ASKED = ("0.26.0", "on", "nan")


def told(victim: int = 0, stranger: int = 0, of: int = 16, **part: Any) -> dict[str, Any]:
    row = {"victim": {"nan": victim, "of": of}, "stranger": {"nan": stranger, "of": 8}}
    shared = {"us_a_step": 2.04, "stepped_back": []}
    return {"on, nan": {"rounds": {"7": row}, **shared, **part}, "failed": "it died"}


@pytest.mark.parametrize(
    ("rows", "verdict", "bad"),
    [({}, "its own", ([], [])), ({"victim": 16}, "NaN", (["7"], [])), ({"stranger": 1}, "NaN", ([], ["7"]))],
)
def test_one_bad_answer_of_either_makes_the_round_bad(rows, verdict, bad):
    found = cases.answers(ASKED, "cuda", told(**rows))
    assert found.verdict == verdict
    assert (found.numbers["victim_in"], found.numbers["stranger_in"]) == bad
    assert (found.numbers["rounds"], found.numbers["us_a_step"]) == (1, 2.0)


def test_a_patch_that_stepped_back_or_an_answer_cut_short_is_not_right():
    assert cases._answers_wrong(ASKED, "cuda", told()) is None
    assert "['unpublish']" in cases._answers_wrong(ASKED, "cuda", told(stepped_back=["unpublish"]))
    assert "{(15, 8)}" in cases._answers_wrong(ASKED, "cuda", told(of=15))


def test_what_the_engine_did_not_reach_is_not_run():
    with pytest.raises(MissingError, match="the engine ended before: it died"):
        cases.answers(("0.26.0", "again", "nan"), "cuda", told())
    assert cases._no_engine(ASKED, "cpu") == "needs a CUDA device"
    assert cases._no_engine(("0.0.1",), "cuda") == "vLLM 0.0.1 is not installed"


def test_rounds_are_foreseen_in_which_the_stranger_reads(monkeypatch):
    def memory(seed: int) -> Space:
        readers = {3: ["victim"], 4: ["victim", "stranger"]}.get(seed, [])
        return Space(memory=Space(reads=[Space(reader=who) for who in readers]))

    monkeypatch.setattr(cases.Server, "loaded", contextlib.nullcontext)
    monkeypatch.setattr(cases, "burst", lambda seed: (0, seed))
    monkeypatch.setattr(cases.Server, "serve", lambda self, blocks, load, **options: memory(load))
    assert cases.foreseen("0.26.0") == ["4"]


def test_hits_in_the_same_step_are_counted():
    rows = [{"hit_tokens": 192, "nan": 0}, {"hit_tokens": 176, "nan": 1}]
    for told_rows, word in ((rows[:1], "its own"), (rows, "NaN")):
        found = cases.same_step(ASKED, "cuda", {"same step": told_rows})
        assert (found.verdict, found.numbers["rounds"]) == (word, len(told_rows))
        assert found.numbers["hit_tokens"] == [row["hit_tokens"] for row in told_rows]
    for unseen in ([], [*rows, {"hit_tokens": 0, "nan": 0}]):
        with pytest.raises(MissingError, match="the second request had no hit in the same step"):
            cases.same_step(ASKED, "cuda", {"same step": unseen})


class FakeVLLM:
    """An engine that answers each request with its prompt's last tokens, one step later; NaN for 13."""

    def __init__(self, **options: Any) -> None:
        self.options = options | {"config": json.loads(Path(options.pop("model"), "config.json").read_text())}
        parts = dict.fromkeys(("embed_tokens", "qkv_proj", "o_proj", "norm", "lm_head", "up_proj"))
        self.model = torch.nn.ModuleDict({name: torch.nn.Module() for name in parts})
        for name in parts:
            shape = (3 * whole.WIDTH if name == "qkv_proj" else whole.WIDTH, whole.WIDTH)
            self.model[name].weight = torch.nn.Parameter(torch.full(shape[: 1 + (name != "norm")], 9.0))
        runner = Space(model=self.model, kv_caches=[torch.zeros(2)])
        executor = Space(driver_worker=Space(worker=Space(model_runner=runner)))
        self.engine_core = Space(engine_core=Space(model_executor=executor))
        self.llm_engine, self.waiting, self.resets, self.asked, self.steps = self, [], 0, [], 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def add_request(self, name: str, prompt: Any, sampling: Any, *, priority: int) -> None:
        self.asked.append((name, self.steps, priority, sampling))
        self.waiting.append((name, prompt["prompt_token_ids"][-sampling["max_tokens"] :]))

    def step(self) -> list[Any]:
        self.steps += 1
        done, self.waiting = self.waiting, []
        ended = {"finished": True, "num_cached_tokens": None}
        return [Space(request_id=name, outputs=[answer(tokens)], **ended) for name, tokens in done]


def answer(tokens: list[int]) -> Space:
    """As vLLM gives it, with the probability of each token; that of 13 is NaN."""
    likely = [{token: Space(logprob=math.nan if token == 13 else -1.0)} for token in tokens]
    return Space(token_ids=tokens, logprobs=likely)


@pytest.fixture
def engine(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm", Space(LLM=FakeVLLM, SamplingParams=dict))
        yield whole._Engine("fcfs")


def test_the_model_copies_and_requests_come_when_they_are_due(engine):
    assert engine.llm.options["config"] == whole.CONFIG
    assert (engine.llm.options["scheduling_policy"], engine.llm.options["block_size"]) == ("fcfs", 16)
    weights = {name.split(".")[0]: weight for name, weight in engine.llm.model.named_parameters()}
    eye = torch.eye(whole.WIDTH)
    assert weights["norm"].eq(1).all()
    assert not weights["up_proj"].any()
    assert weights["o_proj"].equal(1000 * eye)
    assert weights["embed_tokens"].equal(eye)
    assert weights["lm_head"].equal(eye)
    # Queries and keys are 0, values are the token.
    assert weights["qkv_proj"].equal(torch.cat([0 * eye, 0 * eye, eye]))
    load = [
        Arrival("late", [1, 2, 3], 1, at=3, priority=5),
        Arrival("first", [4, 13, 6], 2),
        Arrival("second", [7, 8], 1, after="first"),
    ]
    found = engine.answers(load)
    assert found == {"first": ([13, 6], 1, 0), "second": ([8], 0, 0), "late": ([3], 0, 0)}
    asked = [(name, step, priority) for name, step, priority, _ in engine.llm.asked]
    assert asked == [("first-1", 0, 0), ("second-1", 1, 0), ("late-1", 3, 5)]
    wanted = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    assert engine.llm.asked[0][-1] == wanted
    assert (engine.steps, engine.rounds) == (4, 1)


@pytest.mark.parametrize("kind", ["nan", "secret"])
def test_a_round_is_two_tenants_with_the_secret_or_a_cache_of_nan(engine, kind, monkeypatch):
    loads = []

    def answers(load):
        loads.append(load)
        return {who: ([whole.SECRET, 1, whole.SECRET], 2, 0) for who in ("victim", "stranger")}

    monkeypatch.setattr(engine, "answers", answers)
    row = {"nan": 2, "secret": 2, "of": 3}
    assert engine.round(kind, 7) == {"victim": row, "stranger": row}
    assert engine.llm.resets == 1
    assert bool(engine.runner.kv_caches[0].isnan().all()) == (kind == "nan")
    asked, plain = loads[-1], burst(7)[1]
    if kind == "nan":
        assert loads == [plain]
        return
    first, _ = loads
    tenants = [(f"tenant{number}", 2700, 1) for number in range(2)]
    assert [(one.name, len(one.prompt), one.reply) for one in first] == tenants
    assert len({one.prompt[0] for one in [*first, *asked]}) >= len(asked)
    for one, was in zip(asked, plain, strict=True):
        alike = [(each.name, len(each.prompt), each.reply, each.at) for each in (one, was)]
        assert alike[0] == alike[1]
        if one.name.startswith("chat"):
            assert {*one.prompt[1:]} == {whole.SECRET}
        else:
            assert one == was
            assert whole.SECRET not in one.prompt


def test_two_requests_of_one_prompt_come_in_the_same_step(engine):
    assert engine.same_step(3) == {"hit_tokens": 0, "nan": engine.same_step(3)["nan"]}
    assert [step for _, step, *_ in engine.llm.asked] == [0, 0, 1, 1]
    assert engine.llm.resets == 2
    assert engine.runner.kv_caches[0].isnan().all()


def test_plans_are_compared_where_nothing_was_unwritten(monkeypatch):
    def runs(*found):
        return [Space(plan=plan, reads=[1] * bad) for plan, bad in found]

    server = cases.Server("0.22.1", patched=True)
    before = runs((1, False), (2, True), (3, False))
    for after, said in (
        (runs((1, False), (9, False), (3, False)), None),
        (runs((8, False), (9, False), (3, False)), "1 plans without a fault are other plans with the patch"),
    ):
        monkeypatch.setattr(cases, "_last", {server: after, cases.Server("0.22.1"): before})
        assert cases._sizes_wrong(server, "cpu") == said


@pytest.mark.parametrize(("seen", "verdict", "alike"), [((3, 0), "the same", 2), ((3, 1), "differ", 1)])
def test_the_watch_agrees_with_the_truth_in_every_round_or_differs(monkeypatch, seen, verdict, alike):
    reads = [Space(step=1, reader="stranger", block=block) for block in (4, 5, 6, 6)]
    rounds = iter(zip(seen, (reads, []), strict=True))

    @contextlib.contextmanager
    def watching():
        hits, server.reads = next(rounds)
        yield Space(blocks=Space(hits=hits))

    def served(blocks, load, **options):
        return Space(memory=Space(reads=server.reads, steps=2), host_s=1e-6)

    server = Space(reads=[], loaded=contextlib.nullcontext, serve=served)
    monkeypatch.setattr(cases, "ROUNDS", range(2))
    monkeypatch.setattr(cases, "watching", watching)
    found = cases.watched(server, "cpu")
    assert (found.verdict, found.numbers["rounds_alike"]) == (verdict, alike)
    assert (found.numbers["hits_seen"], found.numbers["hits"]) == (sum(seen), 3)
