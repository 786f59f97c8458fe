"""Recorded times as a sentence and a chart: labels, references, and no number that was not recorded."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from tests.made import finding, measurement

from made import drawn_words, texts
from staleproof import runs as store
from staleproof.report import charts
from staleproof.report.plots import INK


def row(**changes: Any) -> dict[str, Any]:
    about = {"incident": "mla_padding", "kernel": "clear_empty_rows", "machine": "NVIDIA X"}
    about |= {"date": "2026-11-20", "mode": "bf16", "x_name": "live rows", "source_digest": "of old"}
    return measurement(**about | {"p20": 1.5, "p80": 3.0} | changes)


ROWS = [
    row(),
    row(provider="peer", p50=9.0, p20=8.0, p80=10.0),
    row(provider="limit: memset", p50=1.0, p20=0.9, p80=1.1),
    row(x_value=1024, p50=4.0, p20=4.0, p80=4.0),
    row(x_value=1024, provider="peer", p50=2780.0, p20=2700.0, p80=2800.0),
]


def test_chart_draws_each_provider_and_its_interval():
    second = row(provider="another", p50=1.75, p20=1.75, p80=1.75)
    fig = charts.times([*ROWS[::-1], second])
    (ax,) = fig.axes
    names = ["staleproof  ", "another  ", "peer  ", "reference: memset  "]
    lines = ["live rows 1", *names, "live rows 1024", *names[::2]]
    labels = ax.get_yticklabels()
    assert [(label.get_text(), label.get_weight()) for label in labels] == [
        (name, "bold" if name.startswith("live") else "normal") for name in lines
    ]
    marks = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert [float(line.get_ydata()[0]) for line in marks] == [1, 2, 3, 4, 6, 7]
    assert [to_hex(line.get_color()) for line in marks[:4]] == ["#0072b2", "#d55e00", "#d55e00", INK]
    assert [line.get_markerfacecolor() == "none" for line in marks[:4]] == [False, False, False, True]
    assert {(line.get_markersize(), line.get_linewidth()) for line in marks} == {(5, 1.5)}
    spans = [sorted(map(float, line.get_xdata())) for line in ax.lines if len(line.get_xdata()) == 2]
    assert spans == [[1.5, 3], [1.75, 1.75], [8, 10], [0.9, 1.1], [4, 4], [2700, 2800]]
    assert texts(ax.texts) == ["2 us", "1.75 us", "9 us", "1 us", "4 us", "2,780 us"]
    # The time is written at the right end of the line, between the lowest and the highest with room for it.
    written = [(text.xy, text.xyann, text.get_va()) for text in ax.texts]
    assert written == [
        ((x, y), (7, 0), "center")
        for x, y in zip((3, 1.75, 10, 1.1, 4, 2800), (1, 2, 3, 4, 6, 7), strict=True)
    ]
    assert ax.get_xscale() == "log"
    assert ax.get_xlabel() == "us a call: median, and the line from the 20th to the 80th percentile"
    # From top to bottom, and every mark lies within the axes, with room for its time.
    low, high = ax.get_xlim()
    assert low < 0.9 < 2800 * 1.6 < high
    assert ax.get_ylim()[0] > 7 > -0.5 > ax.get_ylim()[1]


def test_chart_title_has_recorded_and_no_word_is_cut_off():
    long = "28 layers, K/V outermost, 32 KiB pages, scattered ids, with a name that is longer still, cold"
    fig = charts.times([one | {"mode": long} for one in ROWS])
    assert f"RECORDED NVIDIA X, 2026-11-20\n{long}" in texts(drawn_words(fig))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows: expected at least one, got 0"),
        ([row(), row(machine="NVIDIA Y")], "rows: expected one machine, got"),
        ([row(), row(mode="fp8")], "rows: expected one mode, got"),
    ],
)
def test_rows_of_several_charts_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        charts.times(rows)


def test_sentence_compares_the_cases_in_which_both_were_timed():
    rows = [*ROWS, row(x_value=7, p50=500.0)]
    said = charts.conclusion(rows, "{ours}; {peer}; {times}; {more}", ours="staleproof", peer="peer")
    assert said == "2 to 4 us; 9 to 2,780 us; 4.5 to 695; -99.9% to -77.8%"
    rows = [row(p50=1000.0), row(provider="peer", p50=999.4)]
    assert charts.conclusion(rows, "{ours}; {peer}", ours="staleproof", peer="peer") == "1,000 us; 999 us"
    with pytest.raises(ValueError, match="rows: expected a case with staleproof and nobody"):
        charts.conclusion(rows, "{ours}", ours="staleproof", peer="nobody")


def test_recorded_run_gives_a_sentence_and_a_captioned_chart(runs, capsys, monkeypatch):
    answer = finding("mla_padding", "empty row", "vllm_triton", "nan")
    store.write(runs / "gpu", [answer], ROWS)
    charts.timed("clear_empty_rows", "bf16", "ours {ours}, theirs {times} times", peer="peer")
    said, caption = capsys.readouterr().out.splitlines()
    # Of the run that has been shown: its findings are of another day.
    (run,) = (whole.only(rows=whole.measurements) for whole in store.read_all(runs))
    assert said == f"RECORDED {run.title}: ours 2 to 4 us, theirs 4.5 to 695 times"
    where = f"RECORDED {run.machine}, {run.date}: one mark a provider, us a call; bf16"
    assert caption == f"Picture, {where}"
    shown: list[Any] = []
    monkeypatch.setattr("staleproof.report.plots.picture", lambda *given: shown.append(given))
    charts.timed("clear_empty_rows", "bf16", "{ours}", peer="peer")
    ((figure, alt, told),) = shown
    assert (alt, told) == ("Times of clear_empty_rows: 2 to 4 us.", where)
    assert {"staleproof  ", "peer  ", "reference: memset  "} <= {*texts(figure.findobj(Text))}
    # Of several runs the newest speaks, whatever it is called.
    for name, year in (("a", 2020), ("z", 2021)):
        old = [one | {"date": f"{year}-01-31", "p50": year} for one in ROWS]
        store.write(runs / name, [], old)
    capsys.readouterr()
    charts.timed("clear_empty_rows", "bf16", "{ours}", peer="peer")
    assert capsys.readouterr().out == f"RECORDED {run.title}: 2 to 4 us\n"


@pytest.mark.parametrize(
    ("kernel", "mode", "peer"), [("other", "bf16", "peer"), ("clear_empty_rows", "bf16", "no")]
)
def test_without_such_a_recording_one_line_is_printed(runs, capsys, kernel, mode, peer):
    store.write(runs / "gpu", [finding("mla_padding", "empty row", "vllm_triton", "nan")], ROWS)
    charts.timed(kernel, mode, "{ours}", peer=peer)
    assert capsys.readouterr().out.startswith(f"no recorded timing of {kernel} ({mode}): staleproof record")
