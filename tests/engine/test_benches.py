"""What the answers of engines become: verdicts, off / on / off, intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engine_answers import asked, ended, findings, three

from staleproof.cases.case import MissingError, Reading, reading
from staleproof.cases.words import NOT_RUN
from staleproof.engine import bench as benches
from staleproof.engine import blocks, cases, memory, mla, router, watched
from staleproof.engine.bench import Bench, Results, cell
from staleproof.engine.cases import BENCHES
from staleproof.engine.orders import EngineResult
from staleproof.engine.session import Order

MLA = "TRITON_MLA, full graphs"
COMPILED = f"{MLA}, compiled"
ORDER = Order("qwen3", {})
# Rounds of an engine of the bench ``mla``: those with padding rows and the one without, of 8 of 8.
PADDED, WHOLE = (0, 2, 3), 1
# Checksums that no other engine has, for as many rows as a round needs.
OTHER = [[99] * 50] * 2


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


def mla_engine(bad: int, sums: int = 0, control: int = 8, **more: object) -> dict[str, Any]:
    rounds = [a_round(3, 8, bad, sums), a_round(8, 8, 0, sums), a_round(3, 8, bad, sums)]
    return {
        "rows": [*rounds, a_round(50, 64, bad, sums)],
        "control": [control, 8],
        "spoilt_blocks": [],
        "start": {},
        **more,
    }


def but(engine: dict[str, Any], *rounds: int, **fields: object) -> dict[str, Any]:
    """The same engine with other fields in these rounds."""
    rows = [{**one, **(fields if number in rounds else {})} for number, one in enumerate(engine["rows"])]
    return {**engine, "rows": rows}


WARPS, FOREIGN, LAST = (f"norm: num_warps {n}" for n in (4, 8, 2))


def compiled(on: int, again: int, *kernels: str) -> tuple[dict[str, Any], ...]:
    """Three compiled engines: the logits of the last two, and the kernels of the second."""
    seen = {WARPS: 1}, dict.fromkeys(kernels, 1), {WARPS: 2, LAST: 1}
    made = (5, 0), (0, on), (5, again)
    return tuple(mla_engine(*one, **{mla.KERNELS: ran}) for one, ran in zip(made, seen, strict=True))


DIFFER = "live logits: {} differ"


@pytest.mark.parametrize(
    ("name", "engines", "said", "logits", "note"),
    [
        (MLA, (mla_engine(5), mla_engine(0)), "fixed", "same bits", ""),
        (MLA, (mla_engine(5), mla_engine(0, 7)), "wrong", "other bits", DIFFER.format(128)),
        # Logits that do not notice another first token notice nothing.
        (MLA, (mla_engine(5), mla_engine(0, control=0)), "fixed", NOT_RUN, ""),
        # A leak is cured, and one scale a batch is another, if rounds without padding keep their bits.
        *(
            (name, (but(mla_engine(5), *PADDED, nan=nan), on), said, logits, note)
            for name, nan in ((MLA, 7), (mla.FP8, 0))
            for on, said, logits, note in (
                (but(mla_engine(0), *PADDED, sums=OTHER), "fixed", "padding reaches live rows", ""),
                (but(mla_engine(0), WHOLE, sums=OTHER), "wrong", "other bits", DIFFER.format(16)),
            )
        ),
        (COMPILED, compiled(0, 0, WARPS), "fixed", "same bits", ""),
        (COMPILED, compiled(7, 0, WARPS), "wrong", "other bits", DIFFER.format(128)),
        # One of the two engines without the plugin gave these bits.
        (COMPILED, compiled(7, 7, WARPS), "fixed", "same bits", ""),
        (COMPILED, compiled(0, 7, WARPS), "fixed", "same bits", ""),
        # Neither gave them, but they do not agree with each other either.
        (
            *(COMPILED, compiled(7, 8, WARPS), NOT_RUN, "differ without it too"),
            "128 rows of live logits differ between",
        ),
        # The engine with the plugin ran a kernel that the others did not, or nobody saw what it ran.
        (COMPILED, compiled(7, 0, WARPS, "a", "b", FOREIGN, LAST), NOT_RUN, NOT_RUN, FOREIGN),
        # One that only the last of the others ran is nobody's own.
        (COMPILED, compiled(7, 0, WARPS, LAST), "wrong", "other bits", DIFFER.format(128)),
        (COMPILED, compiled(7, 0), NOT_RUN, NOT_RUN, "none seen"),
        (COMPILED, compiled(0, 0, FOREIGN), "fixed", "same bits", ""),
    ],
)
def test_bits_of_live_rows_are_the_plugins_only_if_no_engine_without_it_has_them(
    monkeypatch, name, engines, said, logits, note
):
    found = asked(mla.BENCH, three(name, *engines), monkeypatch)
    fixed = found["off/on/off", name]
    assert (fixed.verdict, found[mla.LIVE_LOGITS, name].verdict) == (said, logits)
    assert note in fixed.note
    assert len(fixed.source_digest) == 12
    assert (fixed.grade, fixed.of) == (("", "") if said == NOT_RUN else ("real", "vLLM 0.22.1"))
    # An engine that did not answer leaves its own cells open, not those of others.
    leaked = engines[0]["rows"][0]["nan"]
    assert found[mla.NAN_ROWS, name].verdict == ("leaked" if leaked else "pad_only")
    assert found[mla.NAN_ROWS, "FLASHMLA, full graphs"].verdict == NOT_RUN


def nan_bias(twice: dict[int, list[int]], other: int = 0, chosen: tuple[int, int] = (4, 0)) -> dict[str, Any]:
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
    one_group = {router.ONE_GROUP: nan_bias({5: [0, 0]}, chosen=(2, 9))}
    told = {**three(name, bad, good), f"{router.SOFTMAX}, off": good, **one_group}
    said = asked(router.BENCH, told, monkeypatch)
    assert said[router.TWICE, name].verdict == "duplicates"
    assert said["off/on/off", name].verdict == "fixed"
    assert said[router.TWICE, router.SOFTMAX].verdict == "distinct"
    # Each of three live rows names the expert in each of three routers.
    assert said[router.TWICE, router.ONE_GROUP].verdict == "always chosen"
    told[f"{name}, on"] = nan_bias({8: [0, 0]}, other=7)
    wrong = asked(router.BENCH, told, monkeypatch)["off/on/off", name]
    assert (wrong.verdict, wrong.note) == ("wrong", "topk_sigmoid: not vLLM's choice with a sound bias")


def spiked(moved: int) -> dict[str, Any]:
    """An engine in which another token in the padding rows changes so many live rows' logits."""
    engine = mla_engine(0)
    plain = [{**one, "largest": {}} for one in engine["rows"]]
    first, second = plain[2]["sums"]
    spike = [*plain[:2], {**plain[2], "sums": [[-1] * moved + first[moved:], second]}, plain[3]]
    return {**engine, "planted": {"plain": plain, "spike": spike}}


@pytest.mark.parametrize("name", mla.SHARED_SCALE)
def test_another_token_in_padding_rows(monkeypatch, name):
    def fixed(on: dict[str, Any]) -> Any:
        # Under piecewise graphs attention does not tell which rounds have padding.
        on = {**on, "rows": [{**one, "size": one["live"]} for one in on["rows"]]}
        found = asked(mla.BENCH, three(name, spiked(2), on), monkeypatch)
        return found["off/on/off", f"{name}, {mla.PLANTED}"]

    # What padding decided without the patch is no fault of the patch's.
    cured = fixed(but(spiked(0), 0, sums=OTHER))
    assert cured.verdict == "fixed"
    assert (cured.three.off, cured.three.on) == ("padding reaches live rows", "same bits")
    assert fixed(spiked(1)).verdict == "not fixed"
    # Live rows must keep their bits in the round that had no padding to begin with.
    compiles = mla.SHARED_SCALE[name].compiles
    assert fixed(but(spiked(0), WHOLE, sums=OTHER)).verdict == (NOT_RUN if compiles else "wrong")


@pytest.mark.parametrize("name", mla.UNPADDED)
def test_live_logits_are_those_of_an_engine_without_padding(monkeypatch, name):
    on = but(mla_engine(0), *PADDED, sums=OTHER)
    alone = {**on, "rows": [{**one, "size": one["live"]} for one in on["rows"]]}
    told = {**three(name, mla_engine(5), on), f"{name}, {mla.WITHOUT}": alone}
    key = "off/on/off", f"{name}, {mla.WITHOUT}"
    assert asked(mla.BENCH, told, monkeypatch)[key].verdict == "fixed"
    alone["rows"][0]["size"] += 1
    assert f"{name}, {mla.WITHOUT}: a round had padding rows" in asked(mla.BENCH, told, monkeypatch)[key].note


def test_a_quantizer_that_lets_a_nan_row_change_the_others(monkeypatch):
    """A scale of NaN that no sound row is quantized with hurts nobody; another finite one does."""
    found = {
        "CUDA, per token": [0.01, "nan", 0],
        "CUDA, per tensor": [0.01, "0.02", 1],
        "torch, per tensor": [0.01, "nan", 6144],
    }
    told = {mla.QUANTIZER: {"quantizers": found}}
    said = asked(mla.BENCH, told, monkeypatch)[mla.QUANTIZERS, "3 sound rows, 5 rows of NaN"]
    numbers = {"leaked": [*found][1:], "scale_alone_scale_with_nan_values_changed": found}
    assert (said.verdict, said.numbers) == ("leaked", numbers)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "predicted"),
        ({"fits": True}, "not predicted"),
        # Without a budget the ledger says neither.
        ({"fits": None}, "not predicted"),
        # Within one per cent.
        ({"predicted": 4041}, "not predicted"),
        ({"predicted": 4039}, "predicted"),
        ({"predicted": 3961}, "predicted"),
        ({"predicted": 3959}, "not predicted"),
        ({"died": None}, "lives"),
        ({"healthy": False}, "dies without the fault"),
    ],
)
def test_a_death_counts_as_predicted_only_if_the_ledger_said_so_before(monkeypatch, changes, said):
    death = {"predicted": 4000, "taken": 4000, "fits": False, "healthy": True, "died": "OutOfMemoryError: x"}
    death |= changes
    error = {4000: 0.0, 4041: 1.025, 4039: 0.975, 3961: -0.975, 3959: -1.025}[death["predicted"]]
    found = asked(memory.BENCH, {memory.V1: {"death": death}}, monkeypatch)
    one = found[memory.DEATH, memory.V1]
    assert (one.verdict, one.numbers) == (said, {"error_percent": error, **death})


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
    # A part of a name is enough.
    found = findings(cases.table(without=["none", "st 2"]), monkeypatch)
    assert started == [(["slow", "fast 1"], 240, None), (["alone"], 240, 1)]
    assert [one.numbers["by"] for one in found.values()] == ["fast 1", "fast 1", "it was not started"]
    # As long as if they started one after another, and a minute.
    limits = [case.scene.limit_s for case in cases.table(without=["fast 2"]).cases]
    assert limits == [60 + 2 * 240, 60 + 2 * 240, 60 + 240]
    assert [case.scene.limit_s for case in cases.table("fast", "fast", without=["fast"]).cases] == [300]


def plain(value: Any) -> Any:
    """As JSON gives it back; a function is its name."""
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.__name__ if callable(value) else value


def frozen() -> dict[str, Any]:
    """Every engine and every case of each bench."""
    rows = {}
    for of in BENCHES.values():
        rows |= {f"{of.name}, engine {name}": plain(vars(order)) for name, order in of.orders.items()}
        rows |= {f"{of.name}, case {' | '.join(c.key)}": c.expect for c in of.cases}
    return rows


FILE = Path(__file__).with_name("benches.json")


def test_engines_and_cases_of_the_benches_are_those_of_the_file():
    """``python -m tests.engine.test_benches`` writes it anew, for a change that means to change one.

    What a release does is the question, so most cases expect nothing; but a control must notice, and a
    remedy must help. Where torch.compile looks into a model no spy looks into its stages.
    """
    assert frozen() == json.loads(FILE.read_text())
    assert {case.reason for of in BENCHES.values() for case in of.cases} == {benches.ASKED}


@pytest.mark.parametrize("bench", BENCHES.values(), ids=lambda bench: bench.name)
def test_engines_that_are_compared_are_asked_alike(bench):
    for name, off in bench.orders.items():
        for state in ("on", "off again") if name.endswith(", off") else ():
            other = bench.orders.get(name.removesuffix("off") + state, off)
            patches = "all" if state == "on" and other is not off else "none"
            assert other == replace(off, patches=patches), (name, state)


def test_no_two_benches_name_an_engine_alike():
    names = [name for bench in BENCHES.values() for name in bench.orders]
    assert len(names) == len(set(names))


def test_every_number_of_nan_rows_is_of_its_rows():
    one = {**a_round(3, 8, 0, nan=2), "twice": [1, 2]}
    one["stages"] = {
        "layers.0.attention": [0, 5],
        "layers.1.attention": [0, 4],
        "layers.1.mlp.gate": [2, 0],
        "layers.1": [0, 1],
    }
    rounds = [one, a_round(8, 8, 0), {**one, "nan": 1}]
    answers = {"rows": rounds, "spoilt_blocks": [[0]], "start": {"seconds": 9.0}}
    name = "TRITON_MLA, eager"
    padding = {"attention": "5 in 2 of 2 layers", "layer": "1 in 1 of 1 layers"}
    live = {"mlp.gate": "2 in 1 of 1 layers"}
    assert mla.nan_rows(name, ended({name: answers})) == reading(
        "leaked",
        padding={"3 of 8": padding, "3 of 8 again": padding},
        in_order_of_execution=["attention", "layer"],
        live={"3 of 8": live, "3 of 8 again": live},
        sizes=["3 of 8", "8 of 8", "3 of 8"],
        nan_tokens=3,
        routers_with_an_expert_twice=[[1, 2], [0, 0], [1, 2]],
        kv_blocks_with_nan=[[0]],
        start={"seconds": 9.0},
    )
    # Of three engines the one without the plugin is asked.
    engines = ended({f"{MLA}, off": answers})
    assert mla.nan_rows(MLA, engines).verdict == "leaked"
    assert mla.state(MLA, engines, "off") == reading(
        "leaked", nan_tokens=3, padding={"3 of 8": padding, "3 of 8 again": padding}
    )


@pytest.mark.parametrize(
    ("live", "padding", "nan", "said"),
    [
        (0, 0, 0, "clean"),
        (0, 1, 0, "pad_only"),
        (1, 0, 0, "leaked"),
        (0, 0, 1, "leaked"),
        (1, 1, 1, "leaked"),
    ],
)
def test_where_a_nan_is_decides(live, padding, nan, said):
    one = {"stages": {"layers.0.attention": [0, 0], "layers.1.attention": [live, padding]}, "nan": nan}
    clean = {"stages": {"layers.0.attention": [0, 0]}, "nan": 0}
    assert mla.verdict([clean, one, clean]) == mla.verdict([one]) == said
    with pytest.raises(MissingError, match="a round in which no step was seen"):
        mla.verdict([one, {"stages": {}, "nan": 1}])


SAME, ONE = {"logits": 0, "tokens": 0}, {"logits": 1, "tokens": 1}


def moved(bad: int = 5, *rounds: int) -> dict[str, Any]:
    """An engine whose first live row has other logits and tokens in the second step of these rounds."""
    engine = mla_engine(bad)
    for number in rounds:
        one = engine["rows"][number]
        one["sums"] = [one["sums"][0], [-1, *one["sums"][1][1:]]]
        one["tokens"] = [[1, 9], *one["tokens"][1:]]
    engine["rows"][3]["largest"] = {"layers.3": [1.0 + bad, 0.0]}
    return engine


def test_every_number_of_live_logits_is_of_its_engines():
    usual = {"layers.1.post_attention_layernorm": [4.0, 5.0]}
    off, on, again = moved(5), moved(0, 1, 2, 3), moved(5, 1, 3)
    engines = ended(three(MLA, off, on, again))
    largest = {"3 of 8": usual, "8 of 8": usual}
    said = mla.live_logits(MLA, engines)
    assert said == reading(
        # In the rounds of 8 and of 50 an engine without the plugin had these bits too.
        "differ without it too",
        off_against_on={**ONE, "of": 128},
        off_against_off={"logits": 2, "tokens": 2, "of": 128},
        without_padding={**SAME, "of": 16},
        by_round={"3 of 8": {**ONE, "of": 6}, "8 of 8": {**ONE, "of": 16}, "50 of 64": {**ONE, "of": 100}},
        largest_of_live_and_padding_rows={
            "off": {**largest, "50 of 64": {"layers.3": [6.0, 0.0]}},
            "on": {**largest, "50 of 64": {"layers.3": [1.0, 0.0]}},
        },
        control="another first token changes 8 of 8 steps",
    )
    # Tokens alone are not logits.
    on["rows"][1] = again["rows"][1] = {**off["rows"][1]}
    off["rows"][1]["tokens"] = [[7, 7]] * 8
    again["rows"][3] = off["rows"][3]
    assert mla.live_logits(MLA, engines).verdict == "padding reaches live rows"
    on["rows"][2] = off["rows"][2]
    on["rows"][3] = off["rows"][3]
    assert mla.live_logits(MLA, engines).verdict == "same bits"


def test_what_another_round_of_an_engine_changes():
    engine = moved(5, 1)
    engine["rows"][2]["tokens"] = [[1, 2], [1, 2], [8, 8]]
    said = mla.live_padding("one", ended({"one": engine}))
    assert said == reading(
        "other bits",
        with_8_live={**ONE, "of": 6},
        with_3_live_again={"logits": 0, "tokens": 1, "of": 6},
        control="another first token changes 8 of 8 steps",
    )
    engine["rows"][2]["sums"] = [[9, 9, 9]] * 2
    assert mla.live_padding("one", ended({"one": engine})).verdict == "other bits of three again"
    # Of the eight only the first three are compared, and tokens alone are not logits.
    other = moved(5)
    other["rows"][1]["sums"] = [[0, 1, 2, 9, 9, 9, 9, 9]] * 2
    other["rows"][1]["tokens"] = [[1, 2]] * 2 + [[9, 9]] * 6
    assert mla.live_padding("one", ended({"one": other})) == reading(
        "same bits",
        with_8_live={**SAME, "tokens": 1, "of": 6},
        with_3_live_again={**SAME, "of": 6},
        control="another first token changes 8 of 8 steps",
    )
    other["rows"][2]["sums"] = [[9, 9, 9]] * 2
    assert mla.live_padding("one", ended({"one": other})).verdict == "other bits of three again"
    with pytest.raises(MissingError, match="one: the logits do not notice another first token"):
        mla.live_padding("one", ended({"one": mla_engine(5, control=0)}))


@pytest.mark.parametrize(("changed", "said"), [(0, "same bits"), (2, "padding reaches live rows")])
def test_every_number_of_another_padding_and_of_none(changed, said):
    engine = spiked(changed) | {"control": [7, 8]}
    for number, one in enumerate(engine["planted"]["spike"]):
        engine["planted"]["spike"][number] = {**one, "largest": {"layers.1": [4.0, float(number)]}}
    # The rounds of three have one name: the later one counts.
    by_round = {"3 of 8": 6, "8 of 8": 16, "50 of 64": 100}
    same = {name: {**SAME, "of": of} for name, of in by_round.items()} | {
        "3 of 8": {"logits": changed, "tokens": 0, "of": 6}
    }
    control = "another first token changes 7 of 8 steps"
    name = mla.FP8
    assert mla.other_padding(name, ended({f"{name}, on": engine}), "on") == reading(
        said,
        changed={"logits": changed, "tokens": 0, "of": 128},
        by_round=same,
        control=control,
        largest_of_live_and_padding_rows={
            "3 of 8": {"layers.1": [4.0, 2.0]},
            "8 of 8": {"layers.1": [4.0, 1.0]},
            "50 of 64": {"layers.1": [4.0, 3.0]},
        },
    )
    alone = {"rows": [{**one, "size": one["live"]} for one in engine["planted"]["spike"]], "control": [0, 8]}
    both = ended({f"{name}, off": engine, f"{name}, without padding": alone})
    assert mla.without_padding(name, both, "off") == reading(
        "other bits" if changed else "same bits",
        changed={"logits": changed, "tokens": 0, "of": 128},
        by_round=same,
        control=control,
    )


def test_only_the_rounds_that_fill_a_graph_are_compared_where_padding_reaches_live_rows():
    name = mla.FP8
    engine = {"rows": [a_round(3, 8, 5), a_round(50, 64, 5)], "control": [8, 8]}
    engines = ended(three(name, engine, engine))
    assert mla.wrong(name, engines) == "no round without padding to compare"
    engine["rows"] += [a_round(8, 8, 0)]
    assert mla.wrong(name, engines) is None
    # Without such a leak any round does.
    alike = {"rows": [a_round(3, 8, 5)]}
    assert mla.wrong(MLA, ended(three(MLA, alike, alike))) is None


def test_every_number_of_the_routers():
    sound = {**a_round(3, 8, 0), "twice": [0, 1], "sums": [[1, 2], [3, 4], [5, 6]]}
    five = {**sound, "twice": [0, 5], "nan": 4, "tokens": [[1, 2], [9, 9], [1, 3]]}
    nan = nan_bias({5: [0, 5]})["nan_bias"] | {"sound": sound, "spoilt": {5: five}}
    bias = {"nan_bias": nan, "same_choice": {"topk_softmax": [0, 2**-20]}}
    name = router.SIGMOID
    assert router.twice(name, ended({f"{name}, off": bias})) == reading(
        "nan",
        live_and_padding_rows_by_expert={5: [0, 5]},
        with_a_sound_bias=[0, 1],
        nan_tokens_by_expert={5: 4},
        rows_that_name_the_expert={5: [4, 0]},
        rows_with_the_first_experts={"sound": [0, 64], 5: [1, 64]},
        requests_with_other_tokens={5: 2},
        routers=3,
        kind=["FusedTopKBiasRouter"],
        top_k=8,
    )
    assert router.state(name, ended({f"{name}, off again": bias}), "off again") == reading(
        "nan", live_and_padding_rows_by_expert={5: [0, 5]}
    )
    on, again = ({**nan, "sound": {**sound}} for _ in range(2))
    on["sound"]["sums"] = [[1, 2], [3, 9], [9, 6]]
    on["sound"]["tokens"] = [[1, 2], [1, 2], [7, 7]]
    # Engines without the plugin differ as often.
    again["sound"]["sums"] = [[1, 2], [3, 8], [5, 7]]
    choice = {"topk_softmax": [2, 2**-20], "topk_sigmoid": [0, 2**-19], "grouped_topk": [0, 2**-20]}
    engines = three(name, bias, {"nan_bias": on, "same_choice": choice}, {"nan_bias": again})
    assert router.sound(name, ended(engines)) == reading(
        "other bits",
        rows_that_choose_otherwise_and_error_of_weights={"off": bias["same_choice"], "on": choice},
        requests_with_other_tokens=1,
        steps_with_other_logits=2,
        steps_with_other_logits_off_again=2,
    )
    assert router.wrong(name, ended(engines)) == (
        "topk_softmax, topk_sigmoid: not vLLM's choice with a sound bias"
    )
    engines[f"{name}, on"] = {"nan_bias": again, "same_choice": {"grouped_topk": [0, 2**-20]}}
    engines[f"{name}, off"] = {"nan_bias": again, "same_choice": {}}
    assert router.sound(name, ended(engines)).verdict == "same bits"
    assert router.wrong(name, ended(engines)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "distinct"),
        ({"twice": [1, 0]}, "duplicates"),
        # Padding rows are nobody's.
        ({"twice": [0, 9]}, "distinct"),
        ({"nan": 1}, "nan"),
        ({"first": [64, 64]}, "first experts"),
        ({"first": [1, 1]}, "first experts"),
        ({"first": [63, 64]}, "distinct"),
        ({"first": [0, 0]}, "distinct"),
        # With a sound bias all rows get them as well.
        ({"first": [64, 64], "usual": [64, 64]}, "distinct"),
        # Three live rows in three routers.
        ({"chosen": [8, 9]}, "always chosen"),
        ({"chosen": [8, 8]}, "distinct"),
        ({"chosen": [9, 9]}, "distinct"),
    ],
)
def test_what_a_nan_bias_did_to_a_choice(changes, said):
    told = nan_bias({5: [0, 0], 8: [0, 0]}, chosen=(0, 0))["nan_bias"]
    told["spoilt"][8] = {**told["sound"], **{k: v for k, v in changes.items() if k in ("twice", "nan")}}
    told["first"] |= {8: changes.get("first", [1, 64]), "sound": changes.get("usual", [0, 64])}
    told["chosen"] |= {8: changes.get("chosen", [0, 0])}
    assert router.verdict(told) == said


def memory_phase(device: int, *parts: int) -> dict[str, int]:
    return {"device": device, **dict(zip(("owned", "pools", "cached", "outside"), parts, strict=True))}


MIB = 2**20


@pytest.mark.parametrize(
    ("device", "left", "balanced"),
    [
        # One block of the allocator, however little it is of.
        (4 * MIB, 2 * MIB, True),
        (4 * MIB, 2 * MIB + 1, False),
        (4 * MIB, -2 * MIB, True),
        (4 * MIB, -2 * MIB - 1, False),
        # And one per cent of more.
        (1000 * MIB, 10 * MIB, True),
        (1000 * MIB, 10 * MIB + 1, False),
        (-1000 * MIB, -10 * MIB, True),
    ],
)
def test_a_start_balances_within_one_per_cent_or_one_block_in_each_phase(device, left, balanced):
    phases = {
        "capture": memory_phase(0, 0, 0, 0, 0),
        "profile": memory_phase(device, device - left - 6, 1, 2, 3),
    }
    accounts = {"phases": phases, "graph_bytes_estimated": 5, "graph_bytes_taken": 6}
    engines = ended({memory.V1: {"accounts": accounts, "start": {"runner": "V1"}}})
    assert memory.account(memory.V1, engines) == reading(
        "balances" if balanced else "does not balance",
        unexplained_bytes={"capture": 0, "profile": left},
        **accounts,
    )
    assert memory.graphs(memory.V1, engines) == reading("counted", estimated=5, taken=6, runner="V1")


@pytest.mark.parametrize(
    ("estimated", "taken", "said"),
    [(0, 6, "not counted"), (None, 6, "not counted"), (0, 0, "counted"), (None, None, "counted")],
)
def test_graphs_are_counted_unless_they_took_memory_that_nobody_estimated(estimated, taken, said):
    accounts = {"phases": {}, "graph_bytes_estimated": estimated, "graph_bytes_taken": taken}
    engines = ended({memory.V2: {"accounts": accounts, "start": {"runner": "V2"}}})
    assert memory.graphs(memory.V2, engines) == reading(said, estimated=estimated, taken=taken, runner="V2")


def test_every_number_of_undrained_ids(monkeypatch):
    def counted(*ids: int, tokens: int = 5) -> dict[str, object]:
        more = {"requests": [0, 3, 6], "rss": [100, 110, 125], "tokens": tokens, "seconds": 1.0}
        return {"undrained": {"ids": [*ids], **more}}

    name, grows, drained = blocks.UNDRAINED, counted(1, 9, 17), counted(0, 0, 0)
    engines = ended({f"{name}, off": grows})
    assert blocks.ids(engines) == reading("grows", **grows["undrained"], rss_grown=15)
    assert blocks._state(engines, "off") == reading("grows", ids=[1, 9, 17])
    # What the first part records is there once.
    assert blocks.ids(ended({f"{name}, off": counted(0, 9, 9)})).verdict == "flat"
    said = asked(blocks.BENCH, three(name, grows, drained), monkeypatch)
    assert [one.verdict for one in said.values()] == ["grows", "fixed"]
    other = three(name, grows, counted(0, 0, 0, tokens=6))
    assert asked(blocks.BENCH, other, monkeypatch)["off/on/off", name].verdict == "wrong"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "exact"),
        ({"scraped": []}, "not exact"),
        ({"counted": -1}, "not exact"),
        ({"counted": 1}, "not exact"),
        # A step that was counted twice, or rows that were.
        ({"steps": 1}, "not exact"),
        ({"bad": {f"attention, layers.{i}": [50, 0] for i in range(4)}}, "not exact"),
        # Other stages may hold live rows, if a token was NaN; and only then.
        ({"bad": {"experts, layers.1": [0, 2]}}, "not exact"),
        ({"bad": {"experts, layers.1": [0, 2]}, "nan": 1}, "exact"),
        ({"nan": 1}, "not exact"),
        ({"bad": {"attention, layers.0": [1, 0]}}, "not exact"),
        ({"bad": {"attention, layers.4": [200, 0]}}, "not exact"),
        ({"bad": {"attention, layers.3": [200, 1]}, "nan": 1}, "not exact"),
    ],
)
def test_a_watch_is_exact_if_every_count_is_and_its_port_says_something(changes, said):
    sampled = f"{watched.PLAIN}, one step in {watched.SAMPLED}"
    sums = [[0]] * 24
    rounds = [{**a_round(3, 8, 5), "sums": sums}, {**a_round(8, 8, 0), "sums": sums}, {**a_round(3, 8, 5)}]
    rounds[0]["nan"] = changes.get("nan", 0)
    # Rounds of 24, 24 and 2 steps, of which the first is a prompt's: all count, or of 1, 5, ... those to 21.
    for name, rows, counted in ((watched.PLAIN, 120, 50), (sampled, 25, 13)):
        counts = {
            "bad": {f"attention, layers.{i}": [rows, 0] for i in range(4)} | changes.get("bad", {}),
            "steps": 50 + changes.get("steps", 0),
            "counted": counted + changes.get("counted", 0),
            "scraped": changes.get("scraped", [["attention"]]),
        }
        engines = ended({name: {"start": {"seconds": 9.0}, "rows": rounds, "watched": counts}})
        assert watched.judge(name, engines) == reading(
            said, want=[rows, 0], reference_steps=50, start_seconds=9.0, **counts
        )


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in frozen().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
