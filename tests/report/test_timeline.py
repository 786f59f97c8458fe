"""The timeline: its data, the table made from it, and a picture in which no label meets another."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import json
import os
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.dates import date2num

from made import drawn_words, texts
from staleproof.cases import store
from staleproof.cases.finding import Grade
from staleproof.cases.words import NOT_RUN
from staleproof.device import version_of
from staleproof.report import timeline
from staleproof.report.plots import INK
from tools import timeline as pages

WORKBOOK = Path(__file__).resolve().parents[2] / "workbook"
# As tests/vllm/environment.py has it.
CACHE = Path(os.environ.get("STALEPROOF_VLLM_CACHE", Path.home() / ".cache/staleproof/vllm"))


def _row(**changes: object) -> dict[str, object]:
    row: dict[str, object] = {
        "date": "2026-03-18",
        "source": "vLLM #1",
        "url": "https://example.org/1",
        "incident": 1,
        "label": "opened",
        "event": "It began.",
        "checked": False,
        "reported": ["7 us", "8 us"],
        "grade": None,
        "where": [],
    }
    return row | changes


def _load(tmp_path: Path, *rows: dict[str, object]) -> list[timeline.Event]:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({"events": rows, "claims": []}), "utf-8")
    return timeline.load(path)


def test_the_committed_table_is_what_the_generator_gives():
    have = (WORKBOOK / "timeline.md").read_text("utf-8")
    assert have == pages.markdown(), "run: python -m tools.timeline"


def test_every_incident_has_events_and_every_thread_an_address():
    events = timeline.load()
    assert {n for e in events for n in e.incidents} == set(timeline.LANES)
    for e in events:
        assert e.url or e.source.endswith("wheel"), e.source
        # What a thread says is never marked as checked; a checked line has no figure of a thread.
        assert e.checked == e.source.endswith("wheel"), e.source
        assert not (e.checked and e.reported), e.source


def test_load_reads_one_incident_or_several(tmp_path):
    one, two = _load(tmp_path, _row(), _row(incident=[2, 5], label=None))
    assert one.date == datetime.date(2026, 3, 18)
    assert (one.incidents, two.incidents) == ((1,), (2, 5))
    assert one.reported == ("7 us", "8 us")
    (every,) = _load(tmp_path, _row(incident=[*timeline.LANES]))
    assert every.incidents == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([_row(incident=99)], "timeline entry 1, incident: expected some of"),
        ([_row(incident=[])], "timeline entry 1, incident: expected some of"),
        ([_row(), _row(extra=1)], "timeline entry 2: expected the fields"),
        ([_row(date="2026-03-32")], "day"),
        # What a thread says did not run here; what we checked has a grade.
        ([_row(grade="real")], "timeline entry 1, grade of None: expected one of"),
        ([_row(checked=True)], "timeline entry 1, grade of None: expected one of"),
        ([_row(where=["vllm/envs.py"])], "timeline entry 1, where: expected package, release, file:line"),
        ([_row(), _row(date="2026-03-17")], "expected entries in order of date"),
    ],
)
def test_load_names_the_bad_entry(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        _load(tmp_path, *rows)


def test_a_table_row_carries_source_incidents_figures_and_mark(tmp_path):
    read = {"grade": "source", "where": ["vLLM 1.0 a.py:7", "vLLM 1.0 b.py:8-9", "vLLM 2.0 a.py:7"]}
    wheel = _row(checked=True, url=None, reported=[], **read)
    events = _load(tmp_path, _row(event="a | b"), wheel)
    rows = pages.markdown(events, []).split("\n\n## ")[0].splitlines()[-2:]
    assert rows[0] == (
        "| 2026-03-18 | [vLLM #1](https://example.org/1) | 1 | a \\| b | 7 us<br>8 us | reported |"
    )
    assert rows[1] == (
        "| 2026-03-18 | vLLM #1 | 1 | It began. |  | "
        "checked, source<br>vLLM 1.0 `a.py:7`<br>`b.py:8-9`<br>vLLM 2.0 `a.py:7` |"
    )


def test_no_label_of_the_picture_meets_another_and_ink_is_mid_grey():
    events = timeline.load()
    figure = timeline.figure(events)
    words = drawn_words(figure)
    labels = [e.label for e in events for _ in e.incidents if e.label]
    assert len(words) > len(labels)
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == sum(len(e.incidents) for e in events)
    assert sorted(labels) == sorted(word for word in texts(words) if word in labels)
    for one, other in itertools.combinations(words, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), f"{one} and {other}"
    assert {to_hex(t.get_color()) for t in words} == {INK}
    assert figure.get_facecolor()[3] == 0
    assert figure.axes[0].get_facecolor()[3] == 0


def test_no_leader_of_the_picture_crosses_a_label():
    levels = timeline._levels([(0, 10), (2, 3), (4, 10), (30, 5)])
    # The first passes above both that begin under it; the second above the third; the last is free.
    assert levels == [2, 1, 0, 0]


def test_the_picture_has_a_lane_for_each_incident_and_a_stem_below_each_label(tmp_path):
    later = _row(date="2026-04-01", incident=2, label="a label", checked=True, grade="source")
    figure = timeline.figure(_load(tmp_path, _row(label="one"), _row(label="two"), _row(label=None), later))
    (ax,) = figure.axes
    first, last = (date2num(datetime.date(2026, month, day)) for month, day in ((3, 18), (4, 1)))
    assert ax.get_xlim() == (first - 8, last + 45)
    # Lane 1 has two levels of labels, lane 2 one, and a lane without events its line alone.
    heights = [3, 2, *(2 for _ in range(5))]
    feet = [sum(heights[: lane + 1]) for lane in range(7)]
    assert ax.get_ylim() == (feet[-1], 0)
    assert figure.get_size_inches()[1] == pytest.approx(feet[-1] * 0.21 + 0.7)
    middles = [foot - height / 2 for foot, height in zip(feet, heights, strict=True)]
    assert list(ax.get_yticks()) == middles
    names = [f"{n}  {name}\n{what}" for n, (name, what) in timeline.LANES.items()]
    assert texts(ax.get_yticklabels()) == names
    lanes = [line for line in ax.lines if list(line.get_xdata()) == [first - 8, last + 45]]
    assert [line.get_ydata()[0] for line in lanes] == pytest.approx([foot - 0.6 for foot in feet])
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    places = [(line.get_xdata()[0], pytest.approx(line.get_ydata()[0])) for line in dots]
    assert places == [*[(first, 2.4)] * 3, (last, 4.4)]
    # A ring is reported, a full dot was checked.
    blue, orange = timeline.COLOURS[1], timeline.COLOURS[2]
    assert [line.get_color() for line in dots] == [*[blue] * 3, orange]
    assert [line.get_markerfacecolor() for line in dots] == [*["none"] * 3, orange]
    stems = [
        (*line.get_xdata(), *line.get_ydata())
        for line in ax.lines
        if len({*line.get_xdata()}) == 1 and len(line.get_xdata()) == 2
    ]
    assert stems == [
        pytest.approx((first, first, 2.4, 0.65)),
        pytest.approx((first, first, 2.4, 1.65)),
        pytest.approx((last, last, 4.4, 3.65)),
    ]
    # Each label begins a twentieth of an inch behind its stem.
    inch = (last + 45 - (first - 8)) / (9.0 - 2.45 - 0.1)
    assert texts(ax.texts) == ["one", "two", "a label"]
    assert [text.xy for text in ax.texts] == [
        (pytest.approx(x + 0.05 * inch), pytest.approx(y)) for x, _, _, y in stems
    ]
    (legend,) = figure.legends
    assert texts(legend.get_texts()) == ["checked in the release", "reported"]
    assert [line.get_markerfacecolor() for line in legend.get_lines()] == [INK, "none"]


def _claims(tmp_path: Path, **changes: object) -> list[timeline.Claim]:
    row = {
        "number": 1,
        "source": "vLLM #1",
        "url": "https://example.org/1",
        "claim": "It is so.",
        "mark": "held",
        "grade": "real",
        "note": "Here.",
        "where": [],
        "notebook": "01_mla_padding.ipynb",
        "finding": ["mla_padding", "empty row", "a", "nan"],
    }
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({"events": [], "claims": [row | changes]}), "utf-8")
    return timeline.claims(path)


def test_the_first_twenty_claims_are_there_in_order_and_each_has_a_mark():
    found = timeline.claims()
    assert [c.number for c in found if c.number] == list(range(1, 21))
    for c in found:
        assert c.url.startswith("https://github.com/"), c.claim
        assert (WORKBOOK.parent / "src/staleproof/incidents" / (c.finding or ("mla_padding",))[0]).is_dir()
        # What could not be run says why, and no verdict stands for it.
        assert c.mark != timeline.NOT_HERE or (c.note and (c.finding or (NOT_RUN,))[-1] == NOT_RUN)
        # What rests on lines names them; what rests on a run names its finding, or says what was timed.
        assert c.where or c.grade != Grade.SOURCE, c.claim
        assert c.finding or c.grade not in (Grade.REAL, Grade.REPLICA) or "benchmarks/" in c.note, c.claim


def test_what_shows_a_claim_is_what_the_recorded_runs_hold():
    runs = store.read_all()
    for c in timeline.claims():
        if c.finding:
            held = [f for run in runs for f in run.findings if f.key[:3] == c.finding[:3]]
            assert {f.verdict for f in held} == {c.finding[3]}, c
            # What rests on lines may have a finding of any grade beside it.
            assert {f.grade for f in held if f.ran} <= {c.grade} or c.grade == Grade.SOURCE, c


def test_six_claims_about_sm100_rest_on_its_source():
    cuda = ("csrc/", "include/flashinfer")
    by_source = [c for c in timeline.claims() if c.grade == Grade.SOURCE]
    assert sum(any(part in line for line in c.where for part in cuda) for c in by_source) >= 6


def test_lines_that_are_cited_exist_where_the_release_is_here():
    """Of FlashInfer, if this version is installed, and of the releases of vLLM that were fetched."""
    cited = {line for c in (*timeline.claims(), *timeline.load()) for line in c.where}
    package = importlib.util.find_spec("flashinfer")
    checked = 0
    for line in sorted(cited):
        name, version, place = line.split(" ")
        if name == "flashinfer-cubin":
            continue
        file, _, numbers = place.rpartition(":")
        if name == "vLLM":
            path = CACHE / version / file
        elif package and version_of("flashinfer-python") == version:
            path = Path(package.submodule_search_locations[0]).parent / file
        else:
            continue
        if path.is_file():
            assert int(numbers.split("-")[-1]) <= len(path.read_text("utf-8").splitlines()), line
            checked += 1
        else:
            # Of vLLM the wheels are fetched, which have no CUDA sources.
            assert name == "vLLM", line
            assert "csrc/" in file or not (CACHE / version).is_dir(), line
    if not checked:
        pytest.skip("neither this FlashInfer nor a fetched release of vLLM is here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mark": "true"}, "claim 1, mark: expected one of"),
        ({"grade": "seen"}, "claim 1, grade of 'held': expected one of"),
        ({"grade": None}, "claim 1, grade of 'held': expected one of"),
        ({"mark": "could not be run here"}, "claim 1, grade of 'could not be run here': expected one of"),
        ({"mark": "consistent with a replica"}, "grade of 'consistent with a replica': expected"),
        ({"where": ["kernel.hpp"]}, "claim 1, where: expected package, release, file:line"),
        ({"grade": "source"}, "claim 1, where: expected the lines that say it"),
        ({"extra": 1}, "claim 1: expected the fields"),
        ({"finding": ["a", "b"]}, "claim 1, finding: expected incident, question, variant"),
    ],
)
def test_claims_name_the_bad_entry(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        _claims(tmp_path, **changes)


def test_a_claims_row_carries_mark_conditions_and_what_shows_it(tmp_path):
    line = pages.markdown([], _claims(tmp_path)).splitlines()[-1]
    assert line == (
        "| 1 | [vLLM #1](https://example.org/1) | It is so. | held | real | Here. | "
        "[01](../notebooks/01_mla_padding.ipynb): `mla_padding`, `empty row`, `a`, `nan` |"
    )
