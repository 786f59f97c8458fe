"""What the answers of hybrid engines and of equal engines become."""

from __future__ import annotations

import pytest
from tests.engine.engine_answers import asked, ended

from staleproof.cases.case import reading
from staleproof.cases.finding import NOT_RUN
from staleproof.engine import hybrid, starts
from staleproof.engine.orders import EngineResult


def blocks_by_fifth(nonzero: int, nan: int = 0) -> dict[str, list[int]]:
    rows = {"given": 25, "nonzero": nonzero, "nan_in_tail": nan, "from_state": nonzero}
    return {name: [count // 3, 0, 0, 0, count - count // 3] for name, count in rows.items()}


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


def test_a_hybrid_engine_is_compared_with_itself_zeroing_as_far_as_it_came(monkeypatch):
    states = {name: one for name, one in hybrid_engine().items() if name not in hybrid.FILLED}
    told = {
        "TRITON_ATTN": hybrid_engine(no_zeroing=served(changed=(99,), stale=25)),
        hybrid.CONTROL: hybrid_engine(no_zeroing=served(nan=(0, 50), stale=25)),
        "FLASH_ATTN": EngineResult(states, "hybrid: gave no answer within 240 s"),
    }
    said = asked(hybrid.BENCH, told, monkeypatch)
    assert [said[hybrid.BITS, name].verdict for name in told] == ["other bits", "nan", "no stale block"]
    assert said[hybrid.POISONED, "TRITON_ATTN"].verdict == "no stale block"
    missing = said[hybrid.POISONED, "FLASH_ATTN"]
    assert (missing.verdict, missing.note) == (NOT_RUN, "FLASH_ATTN: hybrid: gave no answer within 240 s")


def equal_engine(*bits: int, kernel: str = "triton_0: warps 4") -> dict[str, object]:
    """Rounds of a prefill and a decode step of one request; ``bits`` of each round."""
    rounds = [
        {"size": -(-live // 8) * 8, "sums": [[bit], [bit]]}
        for live, bit in zip(starts.LIVE, bits, strict=True)
    ]
    return {"rows": rounds, "compiled_kernels": {kernel: 2}}


FAILED = EngineResult({}, "rows: out of memory")
HALF = EngineResult({"rows": equal_engine(1, 7, 7, 3, 3)["rows"]}, "compiled_kernels: out of memory")


@pytest.mark.parametrize(
    ("state", "told", "said"),
    [
        # With one scale a batch the plugin changes rounds with padding; that is no difference of engines.
        ("on", equal_engine(9, 2, 2, 9, 9), "same bits"),
        (
            "off again",
            equal_engine(1, 7, 7, 3, 3, kernel="triton_0: warps 8"),
            "differ between equal engines",
        ),
        ("on again", equal_engine(1, 7, 7, 3, 3), "differ between equal engines"),
        ("off", equal_engine(1, 2, 7, 3, 3), "differ within an engine"),
        # A start that failed leaves the rest to compare, unless it is the only one of its kind.
        ("off again", FAILED, "same bits"),
        ("off again", HALF, "same bits"),
        ("off", FAILED, NOT_RUN),
    ],
)
def test_equal_engines_are_compared_where_no_padding_takes_part(monkeypatch, state, told, said):
    engines = {starts.engine(starts.FP8, name): equal_engine(1, 2, 2, 3, 3) for name in starts.STATES}
    engines[starts.engine(starts.FP8, state)] = told
    assert asked(starts.BENCH, engines, monkeypatch)[starts.SAME, starts.FP8].verdict == said


def test_other_bits_of_all_engines_with_the_plugin_are_the_plugins():
    usual, other = (equal_engine(1, bit, bit, 3, 3)["rows"] for bit in (2, 7))
    assert starts.verdict({"off": usual, "off again": usual, "on": other}) == "differ with the plugin"


def test_late_copies_are_judged_by_the_blocks_they_leave(monkeypatch):
    left = {"late_copies,_no_wait": served(stale=30), "late_copies,_no_wait_again": served(stale=20)}
    told = {"TRITON_ATTN": hybrid_engine(**left)}
    # What the plugin leaves in the other states does not count.
    other = {"late_copies": served(stale=9), "late_copies,_no_wait_again": served(stale=9)}
    for plugin, verdict in (
        (other, "fixed"),
        ({"zeroing": served(changed=(3,))}, "wrong"),
        (left, "not fixed"),
    ):
        told[hybrid.PLUGIN] = hybrid_engine(**plugin)
        said = asked(hybrid.BENCH, told, monkeypatch)
        fixed = said["off/on/off", hybrid.STAGING]
        assert (fixed.verdict, [*fixed.numbers.values()][::2]) == (verdict, [30, 20])
    assert said[hybrid.RACE, "late copies"].verdict == "all zeroed"
    assert said[hybrid.RACE, hybrid.UNGUARDED].verdict == "blocks not zeroed"


def test_blocks_of_mla_that_vllm_does_not_zero(monkeypatch):
    stale = {"zeroing": served(stale=90), "zeroing_again": served(stale=91)}
    told = {hybrid.KIMI: hybrid_engine(**stale), hybrid.KIMI_PLUGIN: hybrid_engine()}
    fixed = asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.RECORDING]
    assert (fixed.verdict, [*fixed.numbers.values()]) == ("fixed", [90, 0, 91])


@pytest.mark.parametrize("cache", ["", ", cache of NaN"])
@pytest.mark.parametrize(
    ("off", "on", "again", "said"),
    [
        (served(stale=1), served(), served(), "same bits"),
        (served(), served(), served(), "no stale block"),
        (served(changed=(99,)), served(), served(), "other bits"),
        (served(nan=(99,), changed=(0,)), served(), served(), "nan"),
        (served(nan=(99,)), served(), served(changed=(3,)), "nan"),
        # A NaN with zeroing as well: nothing can be said of what was not zeroed.
        (served(nan=(99,)), served(nan=(0,)), served(), "nan with zeroing too"),
        (served(), served(nan=(0,)), served(), "nan with zeroing too"),
        (served(changed=(1, 2), stale=1), served(), served(changed=(3,)), "differ with it too"),
        (served(stale=1), served(), served(changed=(3,)), "differ with it too"),
    ],
)
def test_what_is_noticed_without_zeroing(cache, off, on, again, said):
    off, on = {**off, "tokens": [[0]] * 100}, {**on, "blocks_by_fifth": blocks_by_fifth(0, nan=3)}
    on["tokens"] = [*on["tokens"][:-1], [0]]
    told = {f"zeroing{cache}": on, f"no zeroing{cache}": off, "zeroing again": again}
    told = {"zeroing": served(), "cache": {"blocks": 24, "block_size": 528}, **told}
    found = hybrid.bits("one", cache, ended({"one": told}))
    nan = off["nan"].count(True)
    where = [row for row, (a, b) in enumerate(zip(off["logprobs"], on["logprobs"], strict=True)) if a != b]
    assert found == reading(
        said,
        nan_by_fifth=[0, 0, 0, 0, nan],
        nan_with_zeroing_by_fifth=[on["nan"].count(True), 0, 0, 0, 0],
        changed_bits_by_fifth=[sum(row // 20 == fifth for row in where) for fifth in range(5)],
        # Of the first request and of the last the token is the same.
        changed_tokens_by_fifth=[19, 20, 20, 20, 19],
        changed_with_zeroing_again=[int(any(one == [-1] for one in again["logprobs"])), 0, 0, 0, 0],
        blocks_by_fifth=off["blocks_by_fifth"],
        blocks_with_zeroing_by_fifth=blocks_by_fifth(0, nan=3),
        requests=100,
        blocks=24,
        block_size=528,
    )


@pytest.mark.parametrize(("left", "said"), [(0, "all zeroed"), (1, "blocks not zeroed")])
def test_every_number_of_the_staging_race(left, said):
    late = {**served(stale=left), "tokens": [[i % 50] for i in range(100)]}
    told = {
        **hybrid_engine(zeroing=served(stale=7)),
        "late copies": served(stale=left),
        "late copies, no wait": late,
        "cache": {"waits": "an event"},
        "start": {"async_scheduling": "yes"},
    }
    results = ended({"TRITON_ATTN": told})
    assert hybrid.race(results) == reading(
        said, blocks_not_zeroed=left, without_delay=7, runner_waits="an event", asynchronous="yes"
    )
    assert hybrid.unguarded(results) == reading(
        said, blocks_not_zeroed=left, blocks_given=25, changed_tokens_by_fifth=[0, 0, 10, 20, 20]
    )


def test_a_patch_of_the_zeroing_is_asked_in_the_states_of_its_engines():
    told = {name: served(stale=number) for number, name in enumerate(("off", "on", "again", "zeroing"), 1)}
    other = {**told, "on": served(stale=0), "zeroing": served(changed=(3, 99))}
    results = ended({"one": told, "two": other})
    state, wrong = hybrid._zeroed("one", "two", ("off", "on", "again"))
    assert [state(results, which) for which in ("off", "on", "off again")] == [
        reading("blocks not zeroed", blocks_not_zeroed=1),
        reading("all zeroed", blocks_not_zeroed=0),
        reading("blocks not zeroed", blocks_not_zeroed=3),
    ]
    assert wrong(results) == "logprobs of 2 requests differ without a delay"
    other["zeroing"] = told["zeroing"]
    assert wrong(results) is None


def test_every_number_of_equal_engines():
    names = [starts.engine(starts.UNTIMED, state) for state in ("off", "on")]
    assert names[1] == "TRITON_MLA, full graphs, compiled, fp8, nothing timed, equal engine, on"
    off, on = equal_engine(1, 2, 2, 3, 3), equal_engine(1, 2, 2, 3, 3, kernel="other")
    off["compiled_kernels"]["both"] = on["compiled_kernels"]["both"] = 3
    off["compiled_kernels"] |= {f"a{number:02d}": 1 for number in range(25)}
    on["rows"][0]["sums"] = [[1], [9]]
    on["rows"][4]["sums"] = [[9], [3]]
    told = ended(dict(zip(names, (off, on), strict=True)))
    one, two = [["off", "on"]], [["off"], ["on"]]
    assert starts.equal_engines(starts.UNTIMED, told) == reading(
        "same bits",
        engines_with_equal_bits={
            "3 of 8": {"prefill": one, "decode": two},
            "8 of 8": {"prefill": one, "decode": one},
            "8 of 8 again": {"prefill": one, "decode": one},
            "50 of 56": {"prefill": one, "decode": one},
            "50 of 56 again": {"prefill": two, "decode": one},
        },
        engines_with_equal_kernels=two,
        # The first twenty, by name.
        kernels_that_not_all_have={"off": [f"a{number:02d}" for number in range(20)], "on": ["other"]},
        kernels={"off": 30, "on": 5},
    )
