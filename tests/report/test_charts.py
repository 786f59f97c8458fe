"""Recorded times as a sentence and a chart: labels, references, and no number that was not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from tests.made import finding

from staleproof.cases import store
from staleproof.report import charts


def row(**changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "incident": "mla_padding",
        "kernel": "clear_empty_rows",
        "machine": "NVIDIA X",
        "date": "2026-11-20",
        "mode": "bf16",
        "x_name": "live rows",
        "x_value": 1,
        "provider": "staleproof",
        "p50": 2.0,
        "p20": 1.5,
        "p80": 3.0,
        "unit": "us",
        "bytes": 1,
        "source_digest": "of old",
    } | changes


ROWS = [
    row(),
    row(provider="peer", p50=9.0, p20=8.0, p80=10.0),
    row(provider="limit: memset", p50=1.0, p20=0.9, p80=1.1),
    row(x_value=1024, p50=4.0, p20=4.0, p80=4.0),
    row(x_value=1024, provider="peer", p50=2780.0, p20=2700.0, p80=2800.0),
]


def words(fig: Figure) -> list[str]:
    return [text.get_text() for text in fig.findobj(Text) if text.get_text()]


def test_each_mark_has_its_time_beside_it() -> None:
    fig = charts.times(ROWS)
    assert {"2 us", "9 us", "1 us", "4 us", "2,780 us"} <= set(words(fig))
    (ax,) = fig.axes
    marks = [
        (float(line.get_xdata()[0]), line.get_marker()) for line in ax.lines if len(line.get_xdata()) == 1
    ]
    assert marks == [(2.0, "o"), (9.0, "s"), (1.0, "D"), (4.0, "o"), (2780.0, "s")]
    spread = [list(map(float, line.get_xdata())) for line in ax.lines if len(line.get_xdata()) == 2]
    assert spread[0] == [1.5, 3.0]
    names = [label.get_text().strip() for label in ax.get_yticklabels()]
    assert names == [
        "live rows 1",
        "staleproof",
        "peer",
        "reference: memset",
        "live rows 1024",
        "staleproof",
        "peer",
    ]


@pytest.mark.parametrize("slowest", [3.4, 9.0, 60.0, 900.0, 90000.0])
def test_the_axis_has_two_ticks_or_more_and_not_too_many(slowest: float) -> None:
    (ax,) = charts.times([row(p50=2.7, p20=2.7), row(provider="peer", p50=slowest, p80=slowest)]).axes
    assert 2 <= len(ax.get_xticks()) <= 10


def test_what_was_recorded_as_a_reference_stays_one() -> None:
    assert charts.provider_name("reference: memset") == "reference: memset"
    rows = [row(), row(provider="reference: memset", p50=1.0)]
    (ax,) = charts.times(rows).axes
    assert [line.get_marker() for line in ax.lines if len(line.get_xdata()) == 1] == ["o", "D"]


def test_what_was_recorded_as_a_limit_is_called_a_reference() -> None:
    assert not [word for word in words(charts.times(ROWS)) if "limit" in word]


def test_the_title_says_recorded_and_no_word_is_cut_off() -> None:
    long = "28 layers, K/V outermost, 32 KiB pages, scattered ids, with a name that is longer still, cold"
    fig = charts.times([one | {"mode": long} for one in ROWS])
    renderer = FigureCanvasAgg(fig).get_renderer()
    fig.draw(renderer)
    assert f"RECORDED NVIDIA X, 2026-11-20\n{long}" in words(fig)
    for word in fig.findobj(Text):
        box = word.get_window_extent(renderer)
        if word.get_text() and word.get_visible():
            assert box.x0 >= -0.5, word
            assert box.x1 <= fig.bbox.x1 + 0.5, word


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows: expected at least one, got 0"),
        ([row(), row(machine="NVIDIA Y")], "rows: expected one machine, got"),
        ([row(), row(mode="fp8")], "rows: expected one mode, got"),
    ],
)
def test_rows_of_several_charts_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        charts.times(rows)


def test_the_sentence_compares_the_cases_that_both_were_timed_in() -> None:
    rows = [*ROWS, row(x_value=7, p50=500.0)]
    said = charts.conclusion(rows, "{ours}; {peer}; {times}; {more}", ours="staleproof", peer="peer")
    assert said == "2 to 4 us; 9 to 2,780 us; 4.5 to 695; -99.9% to -77.8%"
    with pytest.raises(ValueError, match="rows: expected a case with staleproof and nobody"):
        charts.conclusion(rows, "{ours}", ours="staleproof", peer="nobody")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "runs_folder", lambda: tmp_path)
    monkeypatch.setattr("IPython.display.display", lambda shown: None)
    return tmp_path


def test_a_recorded_run_gives_a_sentence_and_a_captioned_chart(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = finding("mla_padding", "empty row", "vllm_triton", "nan")
    store.write(runs / "gpu", [answer], ROWS)
    charts.timed("clear_empty_rows", "bf16", "ours {ours}, theirs {times} times", peer="peer")
    said, caption = capsys.readouterr().out.splitlines()
    (run,) = store.read_all(runs)
    assert said == f"RECORDED {run.title}: ours 2 to 4 us, theirs 4.5 to 695 times"
    assert caption.startswith(
        f"Picture, RECORDED {run.machine}, {run.date}: one mark a provider, us a call; bf16"
    )


@pytest.mark.parametrize(
    ("kernel", "mode", "peer"), [("other", "bf16", "peer"), ("clear_empty_rows", "bf16", "no")]
)
def test_without_such_a_recording_it_says_so(
    runs: Path, capsys: pytest.CaptureFixture[str], kernel: str, mode: str, peer: str
) -> None:
    store.write(runs / "gpu", [finding("mla_padding", "empty row", "vllm_triton", "nan")], ROWS)
    charts.timed(kernel, mode, "{ours}", peer=peer)
    assert capsys.readouterr().out.startswith(f"no recorded timing of {kernel} ({mode}): staleproof record")
