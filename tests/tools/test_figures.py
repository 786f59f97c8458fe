"""The tables of README.md and figures.md, of the recorded run and of a run whose rows say more.

tests/test_pages.py compares them with the files.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.made import measurement

from staleproof.cases import store
from tools import figures


@pytest.fixture(name="run", scope="module")
def run_fixture() -> store.Run:
    return store.find(figures.MACHINE)


def test_every_kernel_and_patch_of_the_run_is_shown(run):
    # Host times and first calls have tables of their own.
    apart = figures.HOST, figures.FIRST
    measured = {row["kernel"] for row in run.measurements if row["benchmark"] not in apart}
    # Their shapes are those of other models.
    shown = {kernel.name for kernel in figures.KERNELS} | {"decode_step", "topk_sigmoid"}
    assert {name for name in measured if not name.startswith("patch ")} == shown
    assert {k.name for k in figures.KERNELS if figures.pairs(k, run.measurements)} >= shown - {
        *("decode_step", "topk_sigmoid")
    }
    text = figures.section(run)
    for name in measured:
        if name.startswith("patch "):
            assert f"| `{name.removeprefix('patch ')}` |" in text


def row(provider: str, p50: float, **more) -> dict:
    case = {"kernel": "mla_decode", "mode": "bf16 batch 1 heads 128 page 64", "x_name": "tokens"}
    return measurement(provider, p50, **case | {"x_value": 512} | more)


MLA = next(kernel for kernel in figures.KERNELS if kernel.name == "mla_decode")


def lines(rows: list[dict]) -> dict[str, tuple[str, str]]:
    return {
        peer: tuple(str(choose(found, key=lambda pair: pair.ratio)) for choose in (max, min))
        for peer, found in figures.pairs(MLA, rows).items()
    }


def test_the_best_case_and_the_worst_whichever_way_they_point():
    rows = [row("staleproof", 10.0), row("fa3", 20.0)]
    rows += [row("staleproof", 100.0, x_value=4096), row("fa3", 55.0, x_value=4096)]
    assert lines(rows) == {
        "fa3": ("2.00: 10.0 for 20.0, batch 1, tokens 512", "**0.55**: 100 for 55.0, batch 1, tokens 4096")
    }


def test_mixed_lengths_and_several_query_tokens_have_a_line_of_their_own():
    modes = (
        "128 page 64, cold",
        "16 page 64, cold",
        "128 page 64, q_len 2, cold",
        "128 page 64, one in 32 of 9 tokens",
        "16 page 64, fp8 cache, cold",
    )
    kernels = [kernel for kernel in figures.KERNELS if kernel.name == "mla_decode"]
    found = [[mode for mode in modes if re.match(k.modes, f"bf16 batch 8 heads {mode}")] for k in kernels]
    assert found == [[modes[0]], [*modes[1:4]], [modes[4]]]


def test_a_limit_is_not_a_loss():
    assert lines([row("staleproof", 10.0), row("limit: bytes", 5.0)])["limit: bytes"][0].startswith("0.50: ")


def test_warm_is_beside_warm_and_cold_beside_cold():
    modes = {"warm": (1.0, 5.0), "cold": (4.0, 8.0)}
    rows = [
        row(provider, p50, mode=f"bf16 batch 1 heads 128 page 64, {cache}")
        for cache, times in modes.items()
        for provider, p50 in zip(("staleproof", "fa3"), times, strict=True)
    ]
    assert lines(rows) == {
        "fa3": (
            "5.00: 1.0 for 5.0, batch 1, warm, tokens 512",
            "2.00: 4.0 for 8.0, batch 1, cold, tokens 512",
        )
    }


def test_a_peer_that_reads_all_rows_is_beside_every_live_count():
    rows = [row("staleproof", 2.0, x_value=1), row("staleproof", 8.0, x_value=1024)]
    rows += [row("torch, all rows", 16.0, x_value=1024)]
    live = [one | {"x_name": "live rows"} for one in rows]
    assert {best[:4] for best in lines(live)["torch, all rows"]} == {"8.00", "2.00"}
    # A peer's time with other tokens is no time with these.
    assert {best[:4] for best in lines(rows)["torch, all rows"]} == {"2.00"}


def test_a_patch_row_says_where_it_applies():
    def patch(provider: str, p50: float, **more) -> dict:
        return row(provider, p50, kernel="patch topk_nan", mode="host: topk_softmax", **more)

    about = {"vllm": "0.19.1", "needed": True, "applies_to": "0.17.0 to 0.19.1"}
    (line,) = [*figures.patch_lines([patch("without", 4.0, **about), patch("patched", 3.0, **about)])][2:]
    assert line == "| `topk_nan` | 0.17.0 to 0.19.1 | 0.19.1 | host: topk_softmax | 4.0 | 3.0 | -25% |"
    about = {"vllm": "0.20.2", "needed": False, "applies_to": "0.17.0 to 0.19.1"}
    (line,) = [*figures.patch_lines([patch("without", 4.0, **about), patch("patched", 5.0, **about)])][2:]
    assert "| 0.20.2, which does not need it |" in line
    assert line.endswith("| +25% |")


def test_what_is_fusion_is_said_with_its_figures(run):
    assert "gains 90.0 us with all 128 rows live" in figures.fusion(
        [
            {"kernel": "decode_step", "mode": "batch 128, 512 tokens", "x_value": x, "provider": name} | more
            for x in (3, 100, 128)
            for name, more in (("without", {"p50": 402.0}), ("quantize live rows", {"p50": 312.0}))
        ]
    )
    assert "eager `torch.max`" in figures.section(run)


def test_host_times_are_beside_a_bare_launch():
    row = {"benchmark": "host_time", "kernel": "topk_softmax", "mode": "topk_softmax, host time"}
    providers = {figures.BARE: 10.0, "staleproof": 12.0, "vLLM": 8.0}
    rows = [row | {"provider": name, "p50": p50} for name, p50 in providers.items()]
    assert [*figures.host_lines(rows)][2:] == ["| `topk_softmax` | 12.0 | 1.20 | vLLM 8.0 |"]
    alone = [r for r in rows if r["provider"] != "vLLM"]
    assert [*figures.host_lines(alone)][2:] == ["| `topk_softmax` | 12.0 | 1.20 | - |"]


def test_first_calls_have_a_line_each():
    row = {"benchmark": "first_call", "kernel": "topk_softmax"}
    rows = [
        row | {"provider": provider, "mode": f"import and first call, Triton's cache {cache}", "p50": p50}
        for provider, cache, p50 in (
            *(("staleproof", "empty", 1.52e6), ("the second call", "empty", 90.0)),
            *(("staleproof", "filled", 0.64e6), ("the second call", "filled", 80.0)),
        )
    ]
    assert [*figures.first_lines(rows)][2:] == ["| `topk_softmax` | 1.5 | 0.6 | 80.0 |"]


def test_drawn_cells_are_a_heat_map_and_no_case_of_the_first_table():
    def cell(batch: int, tokens: int, seed: int, ours: float, **peers: float) -> list[dict]:
        more = {"mode": f"bf16 batch {batch} heads 16 page 64, cold", "x_value": tokens, "cache": "cold"}
        each = {"staleproof": ours, **peers}
        return [row(name, us, **more, drawn=seed) for name, us in each.items()]

    rows = cell(4, 512, 0, 10.0, fa3=20.0, FlashMLA=12.5) + cell(1, 128, 0, 10.0, fa3=8.0)
    rows += cell(64, 20000, 7, 9.0, fa3=9.0) + cell(5, 512, 7, 9.0)
    # Warm times are no part of it.
    rows += [one | {"cache": "warm", "p50": 1.0} for one in rows]
    page = "\n".join(figures.grid_lines(rows))
    assert (
        "2 cells drawn by a number that was known: geometric mean 1.00, 1 at most 1.05, worst 1.25." in page
    )
    assert "1 cells drawn by a number that was not: geometric mean 1.00" in page
    assert "| 1 to 4 | \U0001f7e9 1.00, worst 1.25 of 2 | none drawn |" in page
    assert "| 17 to 64 | none drawn | none drawn | none drawn | \U0001f7e9 1.00, worst 1.00 of 1 |" in page
    assert lines([row("staleproof", 10.0), row("fa3", 20.0), *rows]) == lines(
        [row("staleproof", 10.0), row("fa3", 20.0)]
    )
    slow = "\n".join(figures.grid_lines(cell(1, 128, 0, 10.4, fa3=10.0) + cell(300, 128, 0, 1.0, fa3=1.0)))
    assert "\U0001f7e8 1.04" in slow


def test_routers_say_what_they_make_of_nan_rows():
    judged = {"nan_rows": 13, "of_these_repeat": 13, "of_these_weigh_nan": 0, "cache": "warm"}
    rows = [row("vLLM 0.19.1", 3.5, **judged), row("cold", 9.9, **judged | {"cache": "cold"})]
    assert [*figures.nan_lines(rows)][2:] == ["| `mla_decode` | vLLM 0.19.1 | 3.5 | 13 of 13 | 0 of 13 |"]


def test_the_sentence_of_readme_counts_whom_no_peer_beats_and_names_the_worst_case(run):
    about = dict.fromkeys(("torch", "triton", "flashinfer"), "1")
    for ours, said in ((10.0, "In 1 of 1 groups"), (10.1, "In 0 of 1 groups")):
        rows = [row("staleproof", ours), row("fa3", 10.0), row("limit: bytes", 5.0)]
        rows += [row("staleproof", 5.0, x_value=4096), row("fa3", 9.0, x_value=4096)]
        text = figures.short(replace(run, measurements=[one | about for one in rows]))
        assert said in text
        assert f"takes {ours} for a peer's 10.0 (`mla_decode`, 128 heads; batch 1, tokens 512)" in text
