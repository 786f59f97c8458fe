"""What the answers of engines become: verdicts, off / on / off, intervals."""

from __future__ import annotations

import json

import pytest

from staleproof.engine import bench as benches
from staleproof.engine import blocks, cost, hybrid, memory, mla, questions, router, starts, watched
from staleproof.engine.bench import Bench, MissingError, Results
from staleproof.engine.orders import Order, Told
from staleproof.engine.questions import BENCHES
from staleproof.harness.answers import Answer
from staleproof.harness.findings import NOT_RUN, Evidence, Grade
from staleproof.harness.questions import Questions

MLA = "TRITON_MLA, full graphs"


def results(**by_order: dict[str, object]) -> Results:
    return Results({name: Told(answers, None) for name, answers in by_order.items()})


def asked(bench: Bench, told: Results, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Answer]:
    """The answers of a bench whose engines told this."""
    monkeypatch.setattr(benches, "unavailable", lambda device: None)
    monkeypatch.setattr(benches, "real", lambda package: Evidence(Grade.REAL, "vLLM 0.22.1"))
    here = Bench(bench.name, bench.about, bench.orders, bench.cells, together=lambda *_, **__: told.items())
    answers = {(said.question, said.variant): said for said in here.ask("cuda")}
    for said in answers.values():
        # A run is written only if every finding can be.
        json.dumps(said.numbers, sort_keys=True)
    return answers


def a_round(live: int, size: int, bad: int, sums: int = 0, nan: int = 0) -> dict[str, object]:
    return {
        "live": live,
        "size": size,
        "stages": {f"layers.{i}.attention": [0, bad] for i in range(4)},
        "largest": {"layers.1.post_attention_layernorm": [4.0, 5.0]},
        "tokens": [[1, 2]] * live,
        "sums": [[sums + i for i in range(live)]] * 2,
        "nan": nan,
        "twice": [0, 0],
    }


def mla_engine(bad: int, sums: int = 0, control: int = 8) -> dict[str, object]:
    rounds = [a_round(3, 8, bad, sums), a_round(8, 8, 0, sums), a_round(3, 8, bad, sums)]
    return {
        "rows": [*rounds, a_round(50, 64, bad, sums)],
        "control": [control, 8],
        "spoilt_blocks": [],
        "start": {},
    }


def test_padding_rows_are_fixed_if_no_live_bit_changes(monkeypatch):
    told = results(
        **{f"{MLA}, off": mla_engine(5), f"{MLA}, on": mla_engine(0), f"{MLA}, off again": mla_engine(5)}
    )
    said = asked(mla.BENCH, told, monkeypatch)
    assert said[mla.NAN_ROWS, MLA].verdict == "pad_only"
    assert said[mla.NAN_ROWS, MLA].numbers["padding"]["3 of 8 again"] == {"attention": "5 in 4 of 4 layers"}
    assert said[mla.LIVE_LOGITS, MLA].verdict == "same bits"
    assert said["off/on/off", MLA].verdict == "fixed"
    # An engine that did not answer leaves its own cells open, not those of others.
    assert said[mla.NAN_ROWS, "FLASHMLA, full graphs"].verdict == NOT_RUN


def test_a_plugin_that_changes_a_live_row_is_wrong(monkeypatch):
    told = results(
        **{f"{MLA}, off": mla_engine(5), f"{MLA}, on": mla_engine(0, 7), f"{MLA}, off again": mla_engine(5)}
    )
    said = asked(mla.BENCH, told, monkeypatch)
    assert said[mla.LIVE_LOGITS, MLA].verdict == "other bits"
    assert said["off/on/off", MLA].verdict == "wrong"
    assert "live logits: 128 differ" in said["off/on/off", MLA].note


def test_equal_bits_say_nothing_if_the_control_does_not_differ(monkeypatch):
    engines = {f"{MLA}, {state}": mla_engine(5, control=0) for state in ("off", "on", "off again")}
    said = asked(mla.BENCH, results(**engines), monkeypatch)
    assert said[mla.LIVE_LOGITS, MLA].verdict == NOT_RUN
    assert "do not notice" in said[mla.LIVE_LOGITS, MLA].note


def test_what_padding_held_is_told_from_the_size_of_the_batch(monkeypatch):
    engine = mla_engine(0)
    engine["rows"][2]["sums"] = [[9, 9, 9]] * 2
    said = asked(mla.BENCH, results(**{"TRITON_MLA, eager": engine}), monkeypatch)
    assert said[mla.LIVE_PADDING, "TRITON_MLA, eager"].verdict == "other bits of three again"


def test_ids_that_grow_and_ids_that_are_drained(monkeypatch):
    def counted(ids: list[int], tokens: int = 5) -> dict[str, object]:
        return {"undrained": {"ids": ids, "rss": [1, 2, 3], "tokens": tokens}}

    grows, clean = counted([0, 800, 1600]), counted([0, 0, 0])
    name = blocks.UNDRAINED
    told = results(**{f"{name}, off": grows, f"{name}, on": clean, f"{name}, off again": grows})
    said = asked(blocks.BENCH, told, monkeypatch)
    assert [one.verdict for one in said.values()] == ["grows", "fixed"]
    told[f"{name}, on"] = Told(counted([0, 0, 0], tokens=6), None)
    assert asked(blocks.BENCH, told, monkeypatch)["off/on/off", name].verdict == "wrong"


def blocks_by_fifth(nonzero: int, nan: int = 0) -> dict[str, list[int]]:
    rows = {"given": 25, "nonzero": nonzero, "nan_in_tail": nan, "from_state": nonzero}
    return {name: [0, 0, 0, 0, count] for name, count in rows.items()}


def served(changed: tuple[int, ...] = (), nan: tuple[int, ...] = (), stale: int = 0) -> dict[str, object]:
    return {
        "tokens": [[i] for i in range(100)],
        "logprobs": [[-1 if i in changed else 1] for i in range(100)],
        "nan": [i in nan for i in range(100)],
        "blocks_by_fifth": blocks_by_fifth(stale),
    }


def hybrid_engine(**states: dict[str, object]) -> dict[str, object]:
    every = {name: served() for name in hybrid.QUIET + hybrid.FILLED + hybrid.LATE}
    told = {**every, **{name.replace("_", " "): one for name, one in states.items()}}
    return {
        **told,
        "cache": {"blocks": 24, "block_size": 528, "waits": True},
        "start": {"async_scheduling": True},
    }


def test_a_hybrid_engine_is_compared_with_itself_zeroing(monkeypatch):
    told = results(
        **{
            "TRITON_ATTN": hybrid_engine(no_zeroing=served(changed=(99,), stale=25)),
            "FLASH_ATTN": hybrid_engine(no_zeroing=served(stale=25)),
            hybrid.KIMI: hybrid_engine(no_zeroing=served(stale=0)),
            hybrid.CONTROL: hybrid_engine(no_zeroing=served(nan=(0, 50), stale=25)),
        }
    )
    said = asked(hybrid.BENCH, told, monkeypatch)
    assert said[hybrid.BITS, "TRITON_ATTN"].verdict == "other bits"
    assert said[hybrid.BITS, "TRITON_ATTN"].numbers["changed_bits_by_fifth"] == [0, 0, 0, 0, 1]
    assert said[hybrid.BITS, "FLASH_ATTN"].verdict == "same bits"
    # Equal bits say nothing if no block was stale.
    assert said[hybrid.BITS, hybrid.KIMI].verdict == "no stale block"
    assert said[hybrid.BITS, hybrid.CONTROL].verdict == "nan"
    assert said[hybrid.POISONED, hybrid.CONTROL].expected == "nan"
    assert said[hybrid.POISONED, hybrid.WIDE].verdict == NOT_RUN


def test_a_hybrid_engine_whose_time_ends_has_answered_the_states_before(monkeypatch):
    states = {name: one for name, one in hybrid_engine().items() if name not in hybrid.FILLED}
    late = Told(states, "hybrid: gave no answer within 240 s")
    said = asked(hybrid.BENCH, Results({"FLASH_ATTN": late}), monkeypatch)
    assert said[hybrid.BITS, "FLASH_ATTN"].verdict == "no stale block"
    missing = said[hybrid.POISONED, "FLASH_ATTN"]
    assert (missing.verdict, missing.note) == (NOT_RUN, "FLASH_ATTN: hybrid: gave no answer within 240 s")


def equal_engine(*bits: int, kernel: str = "triton_0: warps 4") -> dict[str, object]:
    """Rounds of a prefill and a decode step of one request; ``bits`` of each round."""
    rounds = [
        {"size": -(-live // 8) * 8, "sums": [[bit], [bit]]}
        for live, bit in zip(starts.LIVE, bits, strict=True)
    ]
    return {"rows": rounds, "compiled_kernels": {kernel: 2}}


def test_equal_engines_are_compared_where_no_padding_takes_part(monkeypatch):
    usual = equal_engine(1, 2, 2, 3, 3)
    told = results(**{f"{starts.FP8}, {state}": usual for state in starts.STATES})
    # With one scale a batch the plugin changes rounds with padding; that is no difference of engines.
    told[f"{starts.FP8}, on"] = Told(equal_engine(9, 2, 2, 9, 9), None)
    assert asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8].verdict == "same bits"
    told[f"{starts.FP8}, off again"] = Told(equal_engine(1, 7, 7, 3, 3, kernel="triton_0: warps 8"), None)
    said = asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8]
    assert said.verdict == "differ between equal engines"
    rest = ["off", "off once more", "on", "on again"]
    assert said.numbers["engines_with_equal_bits"]["8 of 8"]["prefill"] == [rest, ["off again"]]
    assert said.numbers["engines_with_equal_kernels"] == [rest, ["off again"]]
    assert said.numbers["kernels_that_not_all_have"]["off again"] == ["triton_0: warps 8"]
    # A start that failed leaves the rest to compare, unless it is the only one of its kind.
    told[f"{starts.FP8}, off again"] = Told({}, "rows: out of memory")
    assert asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8].verdict == "same bits"
    del told[f"{starts.FP8}, off"]
    assert asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8].verdict == NOT_RUN


def test_late_copies_are_judged_by_the_blocks_they_leave(monkeypatch):
    left = {"late_copies,_no_wait": served(stale=30), "late_copies,_no_wait_again": served(stale=20)}
    told = results(**{"TRITON_ATTN": hybrid_engine(**left), hybrid.PLUGIN: hybrid_engine()})
    said = asked(hybrid.BENCH, told, monkeypatch)
    assert said[hybrid.RACE, "late copies"].verdict == "all zeroed"
    assert said[hybrid.RACE, hybrid.UNGUARDED].verdict == "blocks not zeroed"
    assert said["off/on/off", hybrid.STAGING].verdict == "fixed"
    told[hybrid.PLUGIN] = Told(hybrid_engine(zeroing=served(changed=(3,))), None)
    assert asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.STAGING].verdict == "wrong"
    told[hybrid.PLUGIN] = Told(hybrid_engine(**left), None)
    assert asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.STAGING].verdict == "not fixed"


def test_blocks_of_mla_that_vllm_does_not_zero(monkeypatch):
    stale = {"zeroing": served(stale=90), "zeroing_again": served(stale=91)}
    told = results(**{hybrid.KIMI: hybrid_engine(**stale), hybrid.KIMI_PLUGIN: hybrid_engine()})
    fixed = asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.RECORDING]
    assert (fixed.verdict, fixed.numbers["blocks_not_zeroed"]) == ("fixed", [90, 0, 91])
    told[hybrid.KIMI_PLUGIN] = Told(hybrid_engine(zeroing=served(changed=(3,))), None)
    assert asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.RECORDING].verdict == "wrong"


def nan_bias(
    twice: dict[int, list[int]], other: int = 0, chosen: tuple[int, int] = (4, 0)
) -> dict[str, object]:
    sound = a_round(3, 8, 0)
    return {
        "same_choice": {"topk_sigmoid": [other, 2**-24]},
        "nan_bias": {
            "sound": sound,
            "spoilt": {at: {**sound, "twice": rows} for at, rows in twice.items()},
            "chosen": {at: [*chosen] for at in twice},
            "first": {"sound": [0, 64], **{at: [1, 64] for at in twice}},
            "routers": 3,
            "kind": ["FusedTopKBiasRouter"],
            "top_k": 8,
        },
    }


def test_a_nan_bias(monkeypatch):
    name, bad, good = router.SIGMOID, nan_bias({5: [0, 0], 8: [3, 5]}), nan_bias({5: [0, 0], 8: [0, 0]})
    told = results(
        **{f"{name}, off": bad, f"{name}, on": good, f"{name}, off again": bad},
        **{f"{router.SOFTMAX}, off": good},
        **{router.ONE_GROUP: nan_bias({5: [0, 0]}, chosen=(2, 9))},
    )
    said = asked(router.BENCH, told, monkeypatch)
    assert said[router.TWICE, name].verdict == "duplicates"
    assert said["off/on/off", name].verdict == "fixed"
    assert said[router.TWICE, router.SOFTMAX].verdict == "clean"
    # Each of three live rows names the expert in each of three routers.
    assert said[router.TWICE, router.ONE_GROUP].verdict == "always chosen"
    told[f"{name}, on"] = Told(nan_bias({8: [0, 0]}, other=7), None)
    wrong = asked(router.BENCH, told, monkeypatch)["off/on/off", name]
    assert (wrong.verdict, wrong.note) == ("wrong", "topk_sigmoid: not vLLM's choice with a sound bias")


def test_with_one_scale_a_batch_rounds_without_padding_must_keep_their_bits(monkeypatch):
    name = "TRITON_MLA, full graphs, fp8"
    off, on = mla_engine(5), mla_engine(0)
    for number in (0, 2, 3):
        on["rows"][number]["sums"] = [[99 for _ in row] for row in on["rows"][number]["sums"]]
    told = results(**{f"{name}, off": off, f"{name}, on": on, f"{name}, off again": off})
    said = asked(mla.BENCH, told, monkeypatch)
    assert said[mla.LIVE_LOGITS, name].verdict == "padding reaches live rows"
    assert said[mla.LIVE_LOGITS, name].numbers["without_padding"] == {"logits": 0, "tokens": 0, "of": 16}
    assert said["off/on/off", name].verdict == "fixed"
    assert said["off/on/off", name].numbers["compared"] == ["8 of 8"]
    on["rows"][1]["sums"] = [[5] * 8] * 2
    said = asked(mla.BENCH, told, monkeypatch)
    assert (said[mla.LIVE_LOGITS, name].verdict, said["off/on/off", name].verdict) == ("other bits", "wrong")


def test_a_leak_is_cured_if_rounds_without_padding_keep_their_bits(monkeypatch):
    bad, good = mla_engine(5), mla_engine(0)
    for number in (0, 2, 3):
        bad["rows"][number]["nan"] = 7
        good["rows"][number]["sums"] = [[99, 98, 97]] * 2
    told = results(**{f"{MLA}, off": bad, f"{MLA}, on": good, f"{MLA}, off again": bad})
    said = asked(mla.BENCH, told, monkeypatch)
    assert said[mla.NAN_ROWS, MLA].verdict == "leaked"
    assert said["off/on/off", MLA].verdict == "fixed"
    good["rows"][1]["sums"] = [[5] * 8] * 2
    assert asked(mla.BENCH, told, monkeypatch)["off/on/off", MLA].verdict == "wrong"


def test_a_quantizer_that_lets_a_nan_row_change_the_others(monkeypatch):
    found = {"CUDA, per token": [0.01, "0.01", 0], "torch, per tensor": [0.01, "nan", 6144]}
    told = results(**{mla.QUANTIZER: {"quantizers": found}})
    said = asked(mla.BENCH, told, monkeypatch)[mla.QUANTIZERS, "3 sound rows, 5 rows of NaN"]
    assert (said.verdict, said.numbers["leaked"]) == ("leaked", ["torch, per tensor"])


@pytest.mark.parametrize(("ratio", "said"), [(1.001, "under 1 %"), (1.05, "over 1 %"), (None, "around 1 %")])
def test_the_interval_decides_about_the_cost(monkeypatch, ratio, said):
    spread = [1.0, 1.018] * 4 if ratio is None else [ratio] * 8
    # The mean of a round is longer: one of its steps waited for something else.
    times = {
        "off": [(0.004, 0.002)] * 8,
        "on": [(0.005, 0.002 * r) for r in spread],
        "watch": [(0.004, 0.003)] * 8,
    }
    states = {"captured": {"off": 3, "on": 3, "watch": 3}, "left_out": {cost.AGAIN: "no memory"}}
    told = results(**{"full graphs": {"3 live": times, "states": states}})
    found = asked(cost.BENCH, told, monkeypatch)
    assert found[cost.COST, "full graphs, 3 of 8"].verdict == said
    numbers = found[cost.COST, "full graphs, 3 of 8"].numbers
    assert numbers["step_ms_off"] == 2.0
    assert numbers["slowdown_and_interval_percent_of_means"] == [25.0, 25.0, 25.0]
    assert found[cost.WATCH, "watch, full graphs, 3 of 8"].verdict == "over 3 %"
    # What was not timed has no verdict.
    assert found[cost.NOISE, "full graphs, 3 of 8"].note == "full graphs: {'off again': 'no memory'}"
    assert found[cost.COST, "full graphs, 50 of 64"].verdict == "not run"


def test_every_mode_is_timed_at_every_size_and_the_watch_has_its_bars():
    cells = [*cost.BENCH.cells]
    assert sum(question == cost.COST for question, _ in cells) == 9
    assert {"watch, eager, 3 live", "watch, one layer in four, full graphs, 256 of 256"} <= {
        variant for question, variant in cells if question == cost.WATCH
    }
    for order in cost.orders().values():
        assert order.probes["states"]["players"] == [*cost.MODES]
        assert order.env["STALEPROOF_WATCH"] == "1", "the watch's hooks are there to be taken out"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "predicted"),
        ({"fits": True}, "not predicted"),
        ({"predicted": 4100}, "not predicted"),
        ({"died": None}, "lives"),
        ({"healthy": False}, "dies without the fault"),
    ],
)
def test_a_death_counts_as_predicted_only_if_the_ledger_said_so_before(monkeypatch, changes, said):
    death = {"predicted": 4000, "taken": 4000, "fits": False, "healthy": True, "died": "OutOfMemoryError: x"}
    told = results(**{memory.V1: {"death": {**death, **changes}}})
    assert asked(memory.BENCH, told, monkeypatch)[memory.DEATH, memory.V1].verdict == said


def test_graphs_that_vllm_does_not_count(monkeypatch):
    accounts = {"phases": {}, "graph_bytes_estimated": 0, "graph_bytes_taken": 2**27}
    told = results(**{memory.V2: {"accounts": accounts, "start": {"runner": "GPUModelRunner"}}})
    said = asked(memory.BENCH, told, monkeypatch)
    assert said[memory.GRAPHS, memory.V2].verdict == "not counted"
    assert said[memory.GRAPHS, memory.V1].verdict == NOT_RUN


@pytest.mark.parametrize(
    ("counted", "steps", "said"),
    [
        (552, 96, "exact"),
        (551, 96, "not exact"),
        (1104, 96, "not exact"),
        # A step that was counted twice, or not at all.
        (552, 97, "not exact"),
    ],
)
def test_the_watch_is_compared_with_the_spies_of_the_same_run(monkeypatch, counted, steps, said):
    rounds = [{**one, "sums": [[0]] * 24} for one in mla_engine(5)["rows"][:3]]
    rounds.append({**a_round(50, 64, 14), "sums": [[0]] * 24})
    bad = {f"attention, layers.{i}": [counted, 0] for i in range(4)}
    told = {
        "start": {"seconds": 9.0},
        "rows": rounds,
        "watched": {"bad": bad, "steps": steps, "counted": steps, "scraped": [["attention"]]},
    }
    found = asked(watched.BENCH, results(**{watched.PLAIN: told}), monkeypatch)
    assert found[watched.COUNTS, watched.PLAIN].verdict == said


def test_findings_carry_what_ran(monkeypatch):
    told = results(**{f"{MLA}, off": mla_engine(5)})
    asked(mla.BENCH, told, monkeypatch)
    here = Bench("mla", "", {}, mla.BENCH.cells, together=lambda *_, **__: told.items())
    found = {f.key: f for f in Questions("engine", here.row).run("cuda")}
    one = found["engine", mla.NAN_ROWS, MLA]
    assert (one.verdict, one.grade, one.of) == ("pad_only", "real", "vLLM 0.22.1")
    assert len(one.source_digest) == 12


def test_without_a_gpu_every_question_is_not_run_with_the_reason():
    found = [f for name in BENCHES for f in Questions("engine", BENCHES[name].row).run("cpu")]
    assert len(found) == sum(len(bench.cells) for bench in BENCHES.values())
    assert {f.verdict for f in found} == {NOT_RUN}
    assert all("needs a CUDA GPU" in f.note for f in found)


def test_an_answer_that_is_missing_names_its_engine():
    told = Results({"a": Told({}, "rows: out of memory")})
    with pytest.raises(MissingError, match="a: rows: out of memory"):
        told.of("a", "rows")


def test_benches_that_share_the_gpu_start_together(monkeypatch):
    started = []

    def run(orders, timeout_s):
        started.append([*orders])
        # The engines of the second bench end first.
        for name in reversed([*orders]):
            yield name, Told({"start": {}}, name)

    monkeypatch.setattr(benches, "run", run)
    one = Bench("one", "", {"a": Order("qwen3", {}), "b": Order("qwen3", {})}, {})
    two = Bench("two", "", {"a": Order("qwen3", {})}, {})
    pool = benches.Pool([one, two])
    told = {bench.name: dict(pool.of(bench).together(bench.orders, timeout_s=1)) for bench in (one, two)}
    assert started == [["one/a", "one/b", "two/a"]]
    assert {name: [t.failed for t in of.values()] for name, of in told.items()} == {
        "one": ["one/a", "one/b"],
        "two": ["two/a"],
    }


def test_engines_that_start_slowly_start_first(monkeypatch):
    started = []

    def run(orders, timeout_s):
        started.extend(orders)
        yield from ((name, Told({}, None)) for name in orders)

    monkeypatch.setattr(benches, "run", run)
    one = Bench("one", "", {"a": Order("qwen3", {})}, {})
    two = Bench("two", "", {"b": Order("qwen3", {})}, {}, slow=True)
    pool = benches.Pool([one, two])
    assert [name for name, _ in pool.of(one).together(one.orders, timeout_s=1)] == ["a"]
    assert started == ["two/b", "one/a"]


def test_engines_that_must_be_alone_come_last():
    rows = [row.name for row in questions.table("cost", "mla", "memory", "blocks").rows]
    assert rows == ["mla", "blocks", "cost", "memory"]


def test_engines_can_be_left_out_by_name(monkeypatch):
    started = []

    def take(self, bench, orders, timeout_s):
        started.extend(orders)
        return ()

    monkeypatch.setattr(benches, "unavailable", lambda device: None)
    monkeypatch.setattr(benches.Pool, "_take", take)
    (row,) = questions.table("router", without=["off again", "MiniMax"]).rows
    found = list(row.ask("cuda"))
    pairs = [f"{name}, {state}" for name in (router.GROUPED, router.SOFTMAX) for state in ("off", "on")]
    assert started == [router.ONE_GROUP, *pairs]
    notes = {one.note for one in found if one.variant == router.SIGMOID}
    assert notes == {f"{router.SIGMOID}, off: it was not started"}
