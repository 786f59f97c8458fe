"""What the answers of engines become: verdicts, off / on / off, intervals."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.engine_answers import Answers, asked, findings, results

from staleproof.cases.case import MissingError, Reading, reading
from staleproof.cases.words import NOT_RUN
from staleproof.engine import bench as benches
from staleproof.engine import blocks, cases, memory, mla, router, starts, watched
from staleproof.engine.bench import Bench, Results, cell
from staleproof.engine.cases import BENCHES
from staleproof.engine.orders import EngineResult
from staleproof.engine.session import Order

MLA = "TRITON_MLA, full graphs"
ORDER = Order("qwen3", {})


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


COMPILED = f"{MLA}, compiled"


WARPS, OTHER, LAST = (f"norm: num_warps {n}" for n in (4, 8, 2))


def compiled(on: int, again: int, *kernels: str) -> Answers:
    """Three compiled engines: the logits of the last two, and the kernels of the second."""
    told = mla_engine(5), mla_engine(0, on), mla_engine(5, again)
    seen = {WARPS: 1}, dict.fromkeys(kernels, 1), {WARPS: 2, LAST: 1}
    return results(
        **{
            f"{COMPILED}, {state}": {**engine, mla.KERNELS: ran}
            for state, engine, ran in zip(benches.STATES, told, seen, strict=True)
        }
    )


@pytest.mark.parametrize(
    ("told", "said", "logits", "note"),
    [
        (compiled(0, 0, WARPS), "fixed", "same bits", ""),
        (compiled(7, 0, WARPS), "wrong", "other bits", "live logits: 128 differ"),
        # One of the two engines without the plugin gave these bits.
        (compiled(7, 7, WARPS), "fixed", "same bits", ""),
        (compiled(0, 7, WARPS), "fixed", "same bits", ""),
        # Neither gave them, but they do not agree with each other either.
        (compiled(7, 8, WARPS), NOT_RUN, "differ without it too", "128 rows of live logits differ between"),
        # The engine with the plugin ran a kernel that the others did not, or nobody saw what it ran.
        (compiled(7, 0, WARPS, OTHER), NOT_RUN, NOT_RUN, OTHER),
        # One that only the last of the others ran is nobody's own.
        (compiled(7, 0, WARPS, LAST), "wrong", "other bits", "live logits: 128 differ"),
        (compiled(7, 0), NOT_RUN, NOT_RUN, "none seen"),
        (compiled(0, 0, OTHER), "fixed", "same bits", ""),
    ],
)
def test_bits_of_compiled_engines_are_the_plugins_only_if_no_engine_without_it_has_them(
    monkeypatch, told, said, logits, note
):
    found = asked(mla.BENCH, told, monkeypatch)
    assert (found["off/on/off", COMPILED].verdict, found[mla.LIVE_LOGITS, COMPILED].verdict) == (said, logits)
    assert note in found["off/on/off", COMPILED].note


def test_engines_that_are_compared_share_compiled_kernels_and_time_none():
    for state in benches.STATES:
        order = mla.BENCH.orders[f"{COMPILED}, {state}"]
        assert order.kernels == COMPILED
        assert order.options["compilation_config"]["inductor_compile_config"]["deterministic"]
        assert mla.BENCH.orders[f"{MLA}, {state}"].kernels is None
    assert {order.kernels for order in starts.ORDERS.values()} == {None}, "equal engines compile their own"


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
    told[f"{name}, on"] = EngineResult(counted([0, 0, 0], tokens=6), None)
    assert asked(blocks.BENCH, told, monkeypatch)["off/on/off", name].verdict == "wrong"


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
    assert said[router.TWICE, router.SOFTMAX].verdict == "distinct"
    # Each of three live rows names the expert in each of three routers.
    assert said[router.TWICE, router.ONE_GROUP].verdict == "always chosen"
    told[f"{name}, on"] = EngineResult(nan_bias({8: [0, 0]}, other=7), None)
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
    on["rows"][1]["sums"] = [[5] * 8] * 2
    said = asked(mla.BENCH, told, monkeypatch)
    assert (said[mla.LIVE_LOGITS, name].verdict, said["off/on/off", name].verdict) == ("other bits", "wrong")


def spiked(moved: int) -> dict[str, Any]:
    """An engine in which another token in the padding rows changes so many live rows' logits."""
    engine = mla_engine(0)
    plain = [{**one, "largest": {}} for one in engine["rows"]]
    spike = [{**one, "sums": [[*row] for row in one["sums"]]} for one in plain]
    for row in range(moved):
        spike[0]["sums"][0][row] = -1
    return {**engine, "planted": {"plain": plain, "spike": spike}}


@pytest.mark.parametrize("name", mla.SHARED_SCALE)
def test_another_token_in_padding_rows(monkeypatch, name):
    bad, good = spiked(2), spiked(0)
    told = results(**{f"{name}, off": bad, f"{name}, on": good, f"{name}, off again": bad})
    key = "off/on/off", f"{name}, {mla.PLANTED}"
    fixed = asked(mla.BENCH, told, monkeypatch)[key]
    assert fixed.verdict == "fixed"
    assert (fixed.three.off, fixed.three.on) == ("padding reaches live rows", "same bits")
    told[f"{name}, on"] = EngineResult(spiked(1), None)
    assert asked(mla.BENCH, told, monkeypatch)[key].verdict == "not fixed"
    # Live rows must keep their bits in the round that had no padding to begin with.
    good["rows"][1]["sums"] = [[5] * 8] * 2
    told[f"{name}, on"] = EngineResult(good, None)
    compiles = mla.SHARED_SCALE[name].compiles
    assert asked(mla.BENCH, told, monkeypatch)[key].verdict == (NOT_RUN if compiles else "wrong")


def test_under_piecewise_graphs_attention_does_not_tell_which_rounds_have_padding(monkeypatch):
    name = mla.PIECEWISE_FP8
    off, on = spiked(2), spiked(0)
    for engine in (off, on):
        for one in engine["rows"]:
            one["size"] = one["live"]
    # What padding decided without the patch is no fault of the patch's.
    on["rows"][0]["sums"] = [[99] * 3] * 2
    told = results(**{f"{name}, off": off, f"{name}, on": on, f"{name}, off again": off})
    assert asked(mla.BENCH, told, monkeypatch)["off/on/off", f"{name}, {mla.PLANTED}"].verdict == "fixed"


@pytest.mark.parametrize("name", mla.UNPADDED)
def test_live_logits_are_those_of_an_engine_without_padding(monkeypatch, name):
    off, on, alone = mla_engine(5), mla_engine(0), mla_engine(0)
    for number in (0, 2, 3):
        for one in (on, alone):
            one["rows"][number]["sums"] = [[7 for _ in row] for row in one["rows"][number]["sums"]]
        alone["rows"][number]["size"] = alone["rows"][number]["live"]
    told = results(
        **{f"{name}, off": off, f"{name}, on": on, f"{name}, off again": off},
        **{f"{name}, {mla.WITHOUT}": alone},
    )
    key = "off/on/off", f"{name}, {mla.WITHOUT}"
    assert asked(mla.BENCH, told, monkeypatch)[key].verdict == "fixed"
    alone["rows"][0]["size"] += 1
    assert "had padding rows" in asked(mla.BENCH, told, monkeypatch)[key].note


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "predicted"),
        ({"fits": True}, "not predicted"),
        ({"predicted": 4100}, "not predicted"),
        ({"predicted": 3900}, "not predicted"),
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
    one = asked(mla.BENCH, told, monkeypatch)[mla.NAN_ROWS, MLA]
    assert (one.verdict, one.grade, one.of) == ("pad_only", "real", "vLLM 0.22.1")
    assert len(one.source_digest) == 12


def test_without_a_gpu_every_question_is_not_run_with_the_reason():
    found = [*cases.TABLE.run("cpu")]
    assert len(found) == sum(len(bench.cases) for bench in BENCHES.values())
    assert {f.verdict for f in found} == {NOT_RUN}
    assert all("needs a CUDA GPU" in f.note for f in found)


def test_an_answer_that_is_missing_names_its_engine():
    told = Results(iter([("a", EngineResult({}, "rows: out of memory"))]))
    with pytest.raises(MissingError, match="a: rows: out of memory"):
        told.of("a", "rows")


def test_engines_that_may_share_the_gpu_start_together_slow_ones_first_and_others_alone(monkeypatch):
    started = []

    def run(orders, timeout_s, at_once):
        started.append(([*orders], timeout_s, at_once))
        yield from ((name, EngineResult({}, name)) for name in orders)

    def read(results: Results) -> Reading:
        return reading("grows", by=results.engine("fast 1").failed)

    fast = Bench("fast", {"fast 1": ORDER, "fast 2": ORDER}, [cell("q", "fast", "host memory", read)])
    slow = Bench("slow", {"slow": ORDER}, [cell("q", "slow", "host memory", read)], slow=True)
    alone = Bench("alone", {"alone": ORDER}, [cell("q", "alone", "host memory", read)], alone=True)
    monkeypatch.setattr(cases, "BENCHES", {one.name: one for one in (alone, fast, slow)})
    monkeypatch.setattr(cases, "run", run)
    found = findings(cases.table(without=["fast 2"]), monkeypatch)
    assert started == [(["slow", "fast 1"], 240, None), (["alone"], 240, 1)]
    assert [one.numbers["by"] for one in found.values()] == ["fast 1", "fast 1", "it was not started"]


def test_no_two_benches_name_an_engine_alike():
    names = [name for bench in BENCHES.values() for name in bench.orders]
    assert len(names) == len(set(names))


def test_one_step_in_two_is_counted_over_all_rounds_and_not_from_each_rounds_start():
    rounds = [{"sums": [0] * steps, "stages": {"a": [0, padding]}} for steps, padding in ((3, 5), (2, 7))]
    assert [watched.expected(rounds, every) for every in (1, 2)] == [2 * 5 + 7, 5 + 7]
