"""Two data-parallel ranks of a whole vLLM: what is counted, and that it fits the real vLLM 0.22.1."""

from __future__ import annotations

import pytest
from tests.engine.engine_answers import asked, results
from tests.engine.real_vllm import fits

from staleproof.cases.words import NOT_RUN
from staleproof.engine import orders, ranks
from staleproof.engine.orders import EngineResult

OFF, ON = ranks.ORDERS


def step(live: int, rows: int, nan: tuple[int, int] = (0, 0), inf: tuple[int, int] = (0, 0)) -> dict:
    return {"live": live, "rows": rows, "NaN": list(nan), "Inf": list(inf)}


def rank_answers(busy: list[dict], idle: list[dict]) -> dict[str, object]:
    return {"uneven": busy, "rank 1": {"uneven": idle}}


@pytest.mark.parametrize(
    ("bad", "verdict"), [(0, "none"), (1, "some"), (8, "some"), (9, "nearly all"), (10, "nearly all")]
)
def test_the_share_of_padded_steps_of_the_busy_rank_decides(monkeypatch, bad, verdict):
    # Half of the bad steps hold Inf only. A step without padding, and the idle rank, do not count.
    busy = [step(3, 8, (0, 5) if i % 2 else (0, 0), (0, 0) if i % 2 else (1, 4)) for i in range(bad)]
    busy += [step(3, 8)] * (10 - bad) + [step(8, 8, (8, 0))] * 30
    told = results(**{OFF: rank_answers(busy, [step(0, 8, (0, 8))] * 40)})
    found = asked(ranks.BENCH, told, monkeypatch)
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


def test_a_machine_with_one_gpu_starts_no_engine(monkeypatch):
    monkeypatch.setattr(orders, "start", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.setattr(orders, "_gpus", lambda: 1)
    why = "needs 2 GPUs, this machine has 1"
    told = dict(orders.run(ranks.ORDERS, at_once=2))
    assert told == dict.fromkeys((OFF, ON), EngineResult({}, why))
    said = asked(ranks.BENCH, told, monkeypatch)
    assert {(one.verdict, one.note) for one in said.values()} == {
        (NOT_RUN, f"{OFF}: {why}"),
        (NOT_RUN, f"{ON}: {why}"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.22.1", "0.26.0"])
def test_options_ranks_and_spies_fit_the_real_vllm(version):
    lines, errors = fits("real_ranks.py", version)
    # Row 6 holds NaN and row 7 Inf, each in one of two layers.
    steps = [step(7, 8, (1, 0), (0, 1)), step(0, 8, (0, 1), (0, 1))]
    assert lines == [
        "fits options: []",
        "fits model: Qwen3MoeConfig 128 8",
        "fits rank 0 of 2: True",
        "fits rank 1 of 2: True",
        "fits second: serve, 1",
        f"fits steps: {steps}",
    ], errors
