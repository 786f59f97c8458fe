"""The notebooks' pictures: NaN is hatched and never white, words fit, bytes repeat."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from staleproof.mla_padding.experiment import StagePicture
from staleproof.report import plots
from staleproof.report.timeline import INK

VERDICTS = ("clean", "pad_only", "leaked", "live_born")


def _cells(fig: Figure) -> dict[tuple[int, int], Rectangle]:
    """The drawn cells by (row, column)."""
    found = [p for p in fig.axes[0].patches if isinstance(p, Rectangle)]
    return {(int(p.get_y()), int(p.get_x())): p for p in found}


def _verdicts() -> Figure:
    return plots.grid([VERDICTS, VERDICTS[::-1]], rows=["a", "b"], columns=["1", "2", "3", "4"])


def test_each_cell_shows_its_state() -> None:
    cells = _cells(_verdicts())
    assert len(cells) == 8
    for column, state in enumerate(VERDICTS):
        colour, strength, hatch = plots.STATES[state]
        for cell in (cells[0, column], cells[1, 3 - column]):
            assert cell.get_facecolor() == to_rgba(colour, strength)
            assert (cell.get_hatch() or "") == hatch


def test_every_bad_state_is_hatched_and_none_is_white() -> None:
    for state, (colour, strength, hatch) in plots.STATES.items():
        assert to_hex(colour) not in ("#ffffff", "#000000")
        assert strength > 0
        assert bool(hatch) == (state not in ("finite", "clean", "this step")), state


def test_states_of_one_picture_differ_without_their_colours() -> None:
    pictures = (VERDICTS, plots._STAGE_STATES, ("this step", "an earlier step", "nobody"))
    for states in pictures:
        assert len({plots.STATES[s][2] for s in states}) == len(states)


def test_the_legend_names_the_states_that_are_there_and_no_other() -> None:
    fig = plots.grid([["clean", "leaked"]], rows=["a"], columns=["1", "2"])
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["clean", "leaked"]


@pytest.mark.parametrize("columns", [("0.attention", "logits"), ("1", "2")])
def test_no_word_is_cut_off(columns: tuple[str, str]) -> None:
    rows = ["quantize_live_rows_and_some_more", "b"]
    fig = plots.grid([["clean", "leaked"], ["pad_only", "live_born"]], rows=rows, columns=columns)
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    words = [t for t in fig.findobj(Text) if t.get_text()]
    assert {*rows, *columns, *VERDICTS} <= {t.get_text() for t in words}
    for word in words:
        box = word.get_window_extent(renderer)
        assert box.x0 >= 0, word
        assert box.y0 >= 0, word
        assert box.x1 <= fig.bbox.x1, word
        assert box.y1 <= fig.bbox.y1, word
        assert to_hex(word.get_color()) == INK


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([["clean"]], "cells: expected 2 rows, got 1"),
        ([["clean"], ["clean", "clean"]], "cells: expected 1 columns, got 2"),
        ([["clean"], ["white"]], "cells: expected states of .*, got \\['white'\\]"),
    ],
)
def test_cells_that_do_not_fit_are_refused(cells: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plots.grid(cells, rows=["a", "b"], columns=["1"])


def test_stages_draws_the_rows_and_the_line_below_the_live_ones() -> None:
    picture = StagePicture(["0.attention", "logits"], [[0, 2], [1, 1], [1, 0]], 1, None)
    fig = plots.stages(picture)
    cells = _cells(fig)
    hatches = [[cells[row, column].get_hatch() or "" for column in (0, 1)] for row in range(3)]
    assert hatches == [["", "xxx"], ["///", "///"], ["///", ""]]
    (line,) = fig.axes[0].lines
    assert list(line.get_ydata()) == [1, 1]
    labels = [t.get_text() for t in fig.axes[0].get_yticklabels()]
    assert labels == ["row 0", "padding 1", "padding 2"]


def _timing(**changes: Any) -> dict[str, Any]:
    row = {
        "machine": "NVIDIA X", "date": "2026-11-20", "mode": "bf16", "x_name": "live rows",
        "x_value": 1, "provider": "staleproof", "p50": 2.0, "p20": 1.5, "p80": 3.0, "unit": "us",
    }  # fmt: skip
    return row | changes


def test_timings_show_median_and_spread_under_a_recorded_title() -> None:
    rows = [_timing(), _timing(x_value=1024, p50=4.0), _timing(provider="peer", p50=9.0)]
    fig = plots.timings([*rows, _timing(machine="NVIDIA Y", p50=7.0)])
    first, second = fig.axes
    assert first.get_title() == "RECORDED NVIDIA X, 2026-11-20: bf16"
    assert second.get_title() == "RECORDED NVIDIA Y, 2026-11-20: bf16"
    assert first.get_yscale() == "log"
    points = {tuple(map(float, p)) for p in first.collections[0].get_offsets()}
    assert points == {(0, 2), (1, 4), (0, 9)}
    assert [list(line.get_ydata()) for line in first.lines[:3]] == [[1.5, 3.0]] * 3
    assert [t.get_text() for t in first.get_xticklabels()] == ["1", "1024"]


def test_timings_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: expected at least one, got 0"):
        plots.timings([])


def test_the_same_picture_has_the_same_bytes_and_no_date() -> None:
    one, two = plots.svg(_verdicts()).data, plots.svg(_verdicts()).data
    assert one == two
    assert "date" not in one
    assert "matplotlib" not in one.split("</metadata>")[0]
    # Words are stored as words, and the page shows through.
    assert ">pad_only</text>" in one
    assert _verdicts().get_facecolor()[3] == 0
