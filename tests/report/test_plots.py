"""The notebooks' pictures: NaN is hatched and never white, words fit, bytes repeat."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from made import drawn_words, texts
from staleproof import device
from staleproof.incidents.mla_padding.pictures import StagePicture
from staleproof.report import plots, show
from staleproof.report.plots import INK

VERDICTS = ("clean", "pad_only", "leaked", "live_born")


def _cells(fig: Figure) -> dict[tuple[int, int], Rectangle]:
    """The drawn cells by (row, column)."""
    found = [p for p in fig.axes[0].patches if isinstance(p, Rectangle)]
    return {(int(p.get_y()), int(p.get_x())): p for p in found}


def _verdicts() -> Figure:
    return plots.grid([VERDICTS, VERDICTS[::-1]], rows=["a", "b"], columns=["1", "2", "3", "4"])


_grid = partial(plots.grid, rows=["a", "b"], columns=["1"])
_uptime = partial(plots.uptime, steps=100)


def test_cell_shows_its_state():
    states = [*plots.STATES]
    count = len(states)
    fig = plots.grid([states, states[::-1]], rows=["a", "b"], columns=["1"] * count)
    cells = _cells(fig)
    assert len(cells) == 2 * count
    (mesh,) = fig.axes[0].collections
    fig.draw_without_rendering()
    faces = mesh.get_facecolor().reshape(2, count, 4)
    for column, state in enumerate(states):
        colour, strength, hatch = plots.STATES[state]
        for place in ((0, column), (1, count - 1 - column)):
            assert tuple(faces[place]) == to_rgba(colour, strength)
            assert (cells[place].get_hatch() or "") == hatch
            assert cells[place].get_edgecolor() == to_rgba(colour)
            assert plots.patch(state).get_facecolor() == to_rgba(colour, strength)
            # The cell's face is the map's, once.
            assert cells[place].get_facecolor()[3] == 0


def test_every_bad_state_is_hatched_and_none_is_white():
    for state, (colour, strength, hatch) in plots.STATES.items():
        assert to_hex(colour) not in ("#ffffff", "#000000")
        assert strength > 0
        assert bool(hatch) == (state not in ("finite", "clean", "this step", "written", "cured")), state


def test_states_of_one_picture_differ_without_their_colours():
    pictures = (
        VERDICTS,
        plots._STAGE_STATES,
        ("this step", "an earlier step", "NaN of an earlier step", "NaN in a live row", "zero"),
        ("written", "never written"),
        ("cured", "helped", "not cured", "made worse"),
    )
    for states in pictures:
        assert len({plots.STATES[s][2] for s in states}) == len(states)


def test_legend_names_the_states_that_are_there_and_no_other():
    fig = plots.grid([["clean", "leaked"]], rows=["a"], columns=["1", "2"])
    (legend,) = fig.legends
    assert texts(legend.get_texts()) == ["clean", "leaked"]
    # In one line at the lower left, without a frame, each drawn as the patch that it names.
    assert (legend._get_loc(), legend._ncols, legend.get_frame_on()) == (3, 2, False)
    assert [p.get_hatch() or "" for p in legend.get_patches()] == ["", "xxx"]


@pytest.mark.parametrize("columns", [("0.attention", "logits"), ("1", "2")])
def test_no_word_is_cut_off(columns):
    rows = ["quantize_live_rows_and_some_more", "b"]
    fig = plots.grid([["clean", "leaked"], ["pad_only", "live_born"]], rows=rows, columns=columns)
    words = drawn_words(fig)
    assert {*rows, *columns, *VERDICTS} <= {*texts(words)}
    # A word that is wider than its column is slanted, and begins there.
    label = fig.axes[0].get_xticklabels()[1]
    slanted = (35, "left") if len(columns[1]) > 1 else (0, "center")
    assert (label.get_rotation(), label.get_ha()) == slanted
    assert {to_hex(word.get_color()) for word in words} == {INK}


def test_legend_wider_than_the_cells_is_not_cut():
    states = ("NaN in a live row", "this step", "an earlier step", "NaN of an earlier step", "zero")
    page = plots.svg(plots.grid([[state] for state in states], rows=[""] * 5, columns=["1"])).data
    width = float(re.search(r'viewBox="0 0 ([0-9.]+)', page)[1])
    last = float(re.search(r'x="([0-9.]+)"[^>]*>zero<', page)[1])
    assert last + len("zero") * plots.FONT / 2 < width


def test_uptime_draws_each_share_at_the_end_of_its_window():
    fig = plots.uptime({"off": [0.0, 0.5], "on": [0.0, 0.0, 0.0, 0.0]}, steps=100)
    off, on = fig.axes[0].lines
    assert list(zip(*off.get_data(), strict=True)) == [(50, 0.0), (100, 0.5)]
    assert list(on.get_xdata()) == [25, 50, 75, 100]
    legend = fig.axes[0].get_legend()
    assert legend is not None
    assert texts(legend.get_texts()) == ["off", "on"]


@pytest.mark.parametrize(
    ("draw", "given", "message"),
    [
        (_grid, [["clean"]], "cells: expected 2 rows, got 1"),
        (_grid, [["clean"], ["clean", "clean"]], "cells: expected 1 columns, got 2"),
        (_grid, [["clean"], ["white"]], "cells: expected states of .*, got \\['white'\\]"),
        (_uptime, {}, "curves: expected at least one, got 0"),
        (_uptime, {"off": []}, r"curves\['off'\]: expected at least one window, got 0"),
        (_uptime, {"off": [-0.5]}, r"curves\['off'\]: expected shares from 0 to 1, got \[-0.5\]"),
        (_uptime, {"off": [0.5, 1.5]}, r"curves\['off'\]: expected shares from 0 to 1, got \[0.5, 1.5\]"),
    ],
)
def test_state_that_cannot_be_drawn_is_refused(draw, given, message):
    with pytest.raises(ValueError, match=message):
        draw(given)


def test_same_picture_has_the_same_bytes_and_no_date():
    fig = _verdicts()
    one, two = plots.svg(fig).data, plots.svg(fig).data
    assert one == two == plots.svg(_verdicts()).data
    assert "date" not in one
    assert "matplotlib" not in one.split("</metadata>")[0]
    # Words are stored as words, and the page shows through.
    assert ">pad_only</text>" in one
    assert _verdicts().get_facecolor()[3] == 0


def test_picture_carries_alt_text_and_caption():
    shown = plots.svg(_verdicts(), "Four <verdicts>.", "one square is a verdict")
    assert 'role="img"' in shown.data.split(">")[0]
    assert "<title>Four &lt;verdicts&gt;.</title>" in shown.data
    assert shown.metadata == {"alt": "Four <verdicts>.", "caption": "one square is a verdict"}
    assert plots.svg(_verdicts()).metadata in (None, {})


def test_caption_is_printed_with_its_provenance(capsys, monkeypatch):
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    plots.picture(_verdicts(), "Four verdicts.", "one square is a verdict")
    plots.picture(_verdicts(), "Four verdicts.", "RECORDED X, 2026-11-20: one square is a verdict")
    word = device.provenance()
    assert capsys.readouterr().out.splitlines() == [
        f"Picture, {word}: one square is a verdict",
        "Picture, RECORDED X, 2026-11-20: one square is a verdict",
    ]
    assert shown[0].metadata == {"alt": "Four verdicts.", "caption": f"{word}: one square is a verdict"}


def test_turned_step_is_its_verdict_and_a_picture_with_it_as_text(monkeypatch):
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    plots.turned_step(StagePicture(["0.attention"], [[0], [1]], 1, None))
    badge, drawn = shown
    assert (badge.text, badge.style) == ("pad_only", show.STYLES["bad"])
    assert drawn.metadata == {"alt": badge.text}


@pytest.mark.parametrize(("alt", "caption", "name"), [("", "b", "alt"), ("a", " ", "caption")])
def test_picture_without_alt_text_or_caption_is_refused(alt, caption, name):
    with pytest.raises(ValueError, match=f"{name}: expected a sentence"):
        plots.picture(_verdicts(), alt, caption)
