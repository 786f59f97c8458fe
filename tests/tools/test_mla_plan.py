"""The plan of MLA decode beside the recorded times of its cuts, and the fit of its constants."""

from __future__ import annotations

import re
from math import exp
from pathlib import Path

import pytest

from staleproof.ops.mla import plan
from staleproof.ops.mla.plan import Cut
from tools import mla_plan

BOOK = Path(__file__).parents[2] / "workbook"
TIMES = mla_plan.read(BOOK / "mla-plan.jsonl")


@pytest.fixture
def constants():
    """The plan's own, put back afterwards."""
    kept = mla_plan.constants()
    yield kept
    mla_plan.take(kept)


def test_the_choice_is_nearly_the_best_of_the_recorded_cuts():
    assert mla_plan.regret(TIMES) < 0.014
    for shape, each in TIMES.items():
        assert each[mla_plan.chosen(shape)] < 1.14 * min(each.values()), shape


def test_the_page_says_what_the_tool_shows(capsys):
    mla_plan.show(TIMES)
    shown = capsys.readouterr().out
    book = (BOOK / "mla-decode.md").read_text("utf-8")
    page = " ".join(book.split())
    off = [float(x) for x in re.findall(r"differ by ([\d.]+) %", shown)]
    assert f"predicted and measured differ by {min(off)} to {max(off)} % in the median" in page
    longer = re.search(r"takes ([\d.]+) % longer than the best cut \(mean of (\d+) cells\)", shown)
    assert longer is not None
    count = sum(map(len, TIMES.values()))
    assert f"fitted to {count} times: every cut that the plan considers, in {longer[2]} cells" in page
    assert f"takes {longer[1]} % longer than the best cut (geometric mean of the {longer[2]} cells" in page
    worst, own, best = re.findall(
        r"^([\d.]+)  16 x 512.* 16 heads: .*?([\d.]+) us.*?([\d.]+), predicted", shown, re.M
    )[0]
    assert shown.startswith(worst)
    assert f"and {100 * (float(worst) - 1):.0f} % at most: 16 x 512 of 16 heads" in page
    assert f"{own} us for {best}." in page
    for kernel, won in re.findall(r"(\w+) bf16: the fastest by more than 3 % in (\d+ of \d+)", shown):
        assert re.search(rf"^\| `{kernel}` \|.*\| {won}\b", book, re.M), (kernel, won)


def test_a_kernel_wins_where_the_best_of_its_cuts_is_faster_than_each_other_by_3_percent():
    shape = next(iter(TIMES))
    each = {Cut("pairs"): 9.0, Cut("pairs", 66): 5.0, Cut("packed"): 5.14, Cut("portable"): 5.16}
    assert mla_plan.wins({shape: each})["pairs", "bf16"] == (0, 1)
    assert mla_plan.wins({shape: each | {Cut("packed"): 5.16}})["pairs", "bf16"] == (1, 1)
    assert mla_plan.wins({shape: each})["portable", "bf16"] == (0, 1)


def test_recorded_are_the_cuts_that_the_plan_considers_in_cells_of_the_benchmark():
    assert [*TIMES] == mla_plan.shapes()
    for shape, each in TIMES.items():
        assert [*each] == mla_plan.work_of(shape).cuts()


def test_a_fit_finds_constants_that_choose_and_predict_better(constants):
    some = dict([*TIMES.items()][::6])
    mla_plan.take(constants | {"RATES.pairs.tile": 3.0, "LAUNCH": 1.0})
    assert plan.RATES["pairs"].tile == 3.0
    assert plan.LAUNCH == 1.0
    worse = mla_plan.regret(some)
    found = mla_plan.fit(some)
    assert mla_plan.constants() == found
    assert mla_plan.regret(some) < worse
    assert found["RATES.pairs.tile"] == pytest.approx(constants["RATES.pairs.tile"], rel=0.15)
    assert exp(mla_plan.regret(some)) < 1.02
