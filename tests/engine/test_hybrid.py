"""What the answers of hybrid engines and of equal engines become."""

from __future__ import annotations

from tests.engine.engine_answers import asked, results

from staleproof.cases.finding import NOT_RUN
from staleproof.engine import hybrid, starts
from staleproof.engine.orders import EngineResult


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
            # NaN is told also where engines that zero differ from each other.
            hybrid.CONTROL: hybrid_engine(
                no_zeroing=served(nan=(0, 50), stale=25), zeroing_again=served(changed=(3,))
            ),
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
    late = EngineResult(states, "hybrid: gave no answer within 240 s")
    said = asked(hybrid.BENCH, {"FLASH_ATTN": late}, monkeypatch)
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
    told = results(**{starts.engine(starts.FP8, state): usual for state in starts.STATES})
    # With one scale a batch the plugin changes rounds with padding; that is no difference of engines.
    told[starts.engine(starts.FP8, "on")] = EngineResult(equal_engine(9, 2, 2, 9, 9), None)
    assert asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8].verdict == "same bits"
    told[starts.engine(starts.FP8, "off again")] = EngineResult(
        equal_engine(1, 7, 7, 3, 3, kernel="triton_0: warps 8"), None
    )
    said = asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8]
    assert said.verdict == "differ between equal engines"
    rest = ["off", "off once more", "on", "on again"]
    assert said.numbers["engines_with_equal_bits"]["8 of 8"]["prefill"] == [rest, ["off again"]]
    assert said.numbers["engines_with_equal_kernels"] == [rest, ["off again"]]
    assert said.numbers["kernels_that_not_all_have"]["off again"] == ["triton_0: warps 8"]
    # A start that failed leaves the rest to compare, unless it is the only one of its kind.
    told[starts.engine(starts.FP8, "off again")] = EngineResult({}, "rows: out of memory")
    assert asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8].verdict == "same bits"
    del told[starts.engine(starts.FP8, "off")]
    assert asked(starts.BENCH, told, monkeypatch)[starts.SAME, starts.FP8].verdict == NOT_RUN


def test_late_copies_are_judged_by_the_blocks_they_leave(monkeypatch):
    left = {"late_copies,_no_wait": served(stale=30), "late_copies,_no_wait_again": served(stale=20)}
    told = results(**{"TRITON_ATTN": hybrid_engine(**left), hybrid.PLUGIN: hybrid_engine()})
    said = asked(hybrid.BENCH, told, monkeypatch)
    assert said[hybrid.RACE, "late copies"].verdict == "all zeroed"
    assert said[hybrid.RACE, hybrid.UNGUARDED].verdict == "blocks not zeroed"
    assert said["off/on/off", hybrid.STAGING].verdict == "fixed"
    told[hybrid.PLUGIN] = EngineResult(hybrid_engine(zeroing=served(changed=(3,))), None)
    assert asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.STAGING].verdict == "wrong"
    told[hybrid.PLUGIN] = EngineResult(hybrid_engine(**left), None)
    assert asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.STAGING].verdict == "not fixed"


def test_blocks_of_mla_that_vllm_does_not_zero(monkeypatch):
    stale = {"zeroing": served(stale=90), "zeroing_again": served(stale=91)}
    told = results(**{hybrid.KIMI: hybrid_engine(**stale), hybrid.KIMI_PLUGIN: hybrid_engine()})
    fixed = asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.RECORDING]
    assert (fixed.verdict, [*fixed.numbers.values()]) == ("fixed", [90, 0, 91])
    told[hybrid.KIMI_PLUGIN] = EngineResult(hybrid_engine(zeroing=served(changed=(3,))), None)
    assert asked(hybrid.BENCH, told, monkeypatch)["off/on/off", hybrid.RECORDING].verdict == "wrong"
