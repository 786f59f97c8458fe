"""The tables of README.md and figures.md, of a run whose rows say what the recorded run has not.

tests/test_pages.py compares the tables of the recorded run with the files.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.made import measurement

from staleproof.cases import store
from tools import figures


@pytest.fixture(name="run", scope="module")
def run_fixture() -> store.Run:
    return store.find(figures.MACHINE)


def test_every_kernel_of_the_run_is_shown(run):
    # Host times and first calls have tables of their own, as patches and steps have.
    apart = figures.HOST, figures.FIRST, "patches", "decode_step"
    measured = {row["kernel"] for row in run.measurements if row["benchmark"] not in apart}
    shown = {kernel.name for kernel in figures.KERNELS if figures.pairs(kernel, run.measurements)}
    # Its shapes are those of other models.
    assert measured == shown | {"topk_sigmoid"}


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


def test_a_peer_that_reads_all_rows_is_beside_every_live_count():
    rows = [row("staleproof", 2.0, x_value=1), row("staleproof", 8.0, x_value=1024)]
    rows += [row("torch, all rows", 16.0, x_value=1024)]
    live = [one | {"x_name": "live rows"} for one in rows]
    assert {best[:4] for best in lines(live)["torch, all rows"]} == {"8.00", "2.00"}
    # Nor beside another count if it was measured at two, and so does not take the same for all.
    twice = [*live, live[2] | {"x_value": 512, "p50": 12.0}]
    assert {best[:4] for best in lines(twice)["torch, all rows"]} == {"2.00"}
    # A peer's time with other tokens is no time with these.
    assert {best[:4] for best in lines(rows)["torch, all rows"]} == {"2.00"}


def test_a_patch_row_says_where_it_applies_and_that_it_ran_on_a_release_that_does_not_need_it():
    about = {"kernel": "patch topk_nan", "mode": "host: topk_softmax", "applies_to": "0.17.0 to 0.19.1"}
    for release, needed in (("0.19.1", True), ("0.20.2, which does not need it", False)):
        about |= {"vllm": release[:6], "needed": needed}
        _, _, line = figures.patch_lines([row("without", 4.0, **about), row("patched", 3.0, **about)])
        where = f"| `topk_nan` | 0.17.0 to 0.19.1 | {release} |"
        assert line == f"{where} host: topk_softmax | 4.0 | 3.0 | -25% |"
    # An allocation, which takes no time of the device.
    *_, line = figures.patch_lines([row("without", 0.0, **about), row("patched", 3.0, **about)])
    assert line.endswith("| 0.0 | 3.0 | - |")


def test_a_cell_is_compared_cold_with_the_fastest_of_the_peers_that_ran():
    cold = {"drawn": 0, "cache": "cold"}
    rows = [row("staleproof", 10.0, **cold), row("FlashInfer 0.6 MLA fa3", 8.0, **cold)]
    rows += [row("FlashMLA of vLLM", 12.5, **cold), row("limit: bytes", 1.0, **cold)]
    rows += [
        row("staleproof", 1.0, **cold | {"cache": "warm"}),
        row("staleproof", 9.0, **cold | {"drawn": 7}),
    ]
    known = {(rows[0]["mode"], 512, 0): {"ours": 10.0, "fa3": 8.0, "FlashMLA": 12.5}}
    assert figures.cells(rows) == known
    said, _, _, line, _ = figures.cell_lines([*rows, *(one | {"drawn": 7, "p50": 4.0} for one in rows[:2])])
    assert said.startswith(
        "Over 2 cells ours takes 1.12 of the faster peer's time (geometric mean). 1 are over"
    )
    assert said.endswith("512 tokens: 1.25. Of the 1 that no constant was fitted to, the worst is 1.00.\n")
    assert line.endswith("| 512 | 10.0 |  | 8.0 | 12.5 | 1.25 |")
    # It is no case of the first table.
    assert lines(rows) == {}


def test_the_heat_map_has_a_cell_in_its_band_and_counts_the_close_ones():
    cell = {"drawn": 0, "cache": "cold", "x_value": 128}
    rows = [row("staleproof", 10.8, **cell), row("FlashInfer 0.6 MLA fa3", 10.0, **cell)]
    said, _, _, band, *_ = figures.grid_lines(rows)
    assert ": geometric mean 1.08, 0 at most 1.05, worst 1.08." in said
    assert "1.08, worst 1.08 of 1" in band.split("|")[2]


def test_the_sentence_of_readme_counts_whom_no_peer_beats_and_names_the_worst_case(run):
    about = dict.fromkeys(("torch", "triton", "flashinfer"), "1")
    for ours, said in ((10.0, "In 1 of 1 groups"), (10.1, "In 0 of 1 groups")):
        rows = [row("staleproof", ours), row("fa3", 10.0), row("limit: bytes", 5.0)]
        rows += [row("staleproof", 5.0, x_value=4096), row("fa3", 9.0, x_value=4096)]
        text = figures.short(replace(run, measurements=[one | about for one in rows]))
        assert said in text
        assert f"takes {ours} where a peer takes 10.0 (`mla_decode`, 128 heads; batch 1, tokens 512)" in text
