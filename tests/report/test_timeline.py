"""The timeline: its data, and a picture in which no label meets another."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.dates import date2num

from made import EVENT, drawn_words, texts
from staleproof import runs as store
from staleproof.grades import Grade
from staleproof.report import timeline
from staleproof.report.plots import INK

WORKBOOK = Path(__file__).resolve().parents[2] / "workbook"
# As tests/vllm/environment.py has it.
CACHE = Path(os.environ.get("STALEPROOF_VLLM_CACHE", Path.home() / ".cache/staleproof/vllm"))


Changes = Mapping[str, object]
CLAIM = {"number": 1, "source": "vLLM #1", "url": "https://example.org/1", "claim": "It is so."}
CLAIM |= {"mark": "held", "grade": "real", "note": "Here.", "where": [], "notebook": "01_mla_padding.ipynb"}
CLAIM |= {"finding": ["mla_padding", "empty row", "a", "nan"]}


def _file(tmp_path: Path, events: Sequence[Changes] = (), claims: Sequence[Changes] = ()) -> Path:
    """A timeline of these entries: an event or a claim, each with its changes."""
    rows = {"events": [EVENT | row for row in events], "claims": [CLAIM | row for row in claims]}
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(rows), "utf-8")
    return path


def test_load_reads_one_incident_or_several(tmp_path):
    several = {"incident": [2, 5], "label": None}
    path = _file(tmp_path, [{}, several, {"incident": [*timeline.LANES]}])
    one, two, every = timeline.load(path)
    assert (one.date, one.reported) == (datetime.date(2026, 3, 18), ("7 us", "8 us"))
    assert (one.incidents, two.incidents, every.incidents) == ((1,), (2, 5), (1, 2, 3, 4, 5, 6, 7))


def test_no_label_of_the_picture_meets_another_and_ink_is_mid_grey():
    events = timeline.load()
    figure = timeline.figure(events)
    words = drawn_words(figure)
    labels = [e.label for e in events for _ in e.incidents if e.label]
    assert len(words) > len(labels)
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == sum(len(e.incidents) for e in events)
    assert sorted(labels) == sorted(word for word in texts(words) if word in labels)
    boxes = [(word, word.get_window_extent()) for word in words]
    for (one, box), (other, space) in itertools.combinations(boxes, 2):
        assert not box.overlaps(space), f"{one} and {other}"
    assert {to_hex(t.get_color()) for t in words} == {INK}
    assert figure.get_facecolor()[3] == 0
    assert figure.axes[0].get_facecolor()[3] == 0


def test_no_leader_of_the_picture_crosses_a_label():
    levels = timeline._levels([(0, 10), (2, 3), (4, 10), (30, 5)])
    # The first passes above both that begin under it; the second above the third; the last is free.
    assert levels == [2, 1, 0, 0]


def test_the_picture_has_a_lane_for_each_incident_and_a_stem_below_each_label(tmp_path):
    later = {"date": "2026-04-01", "incident": 2, "label": "a label", "checked": True, "grade": "source"}
    path = _file(tmp_path, [{"label": "one"}, {"label": "two"}, {"label": None}, later])
    figure = timeline.figure(timeline.load(path))
    (ax,) = figure.axes
    names = [f"{n}  {name}\n{what}" for n, (name, what) in timeline.LANES.items()]
    assert texts(ax.get_yticklabels()) == names
    lanes = [line.get_ydata()[0] for line in ax.lines if len({*line.get_xdata()}) == 2]
    # The name stands beside the middle of its lane, which begins where the one above it ends.
    feet = [lane + 0.6 for lane in lanes]
    middles = [(above + foot) / 2 for above, foot in itertools.pairwise([0, *feet])]
    assert list(ax.get_yticks()) == pytest.approx(middles)
    assert ax.get_ylim() == pytest.approx((feet[-1], 0))
    first, last = (date2num(datetime.date(2026, month, day)) for month, day in ((3, 18), (4, 1)))
    # A tick a month, and room before the first dot and behind the last label.
    assert [x for x in ax.get_xticks() if first <= x < last + 31] == [last, last + 30]
    assert ax.get_xlim()[0] < first - 1 < last + 31 < ax.get_xlim()[1]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in dots]
    assert places == [*[(first, lanes[0])] * 3, (last, lanes[1])]
    # A ring is reported, a full dot was checked.
    blue, orange = timeline.COLOURS[1], timeline.COLOURS[2]
    assert [line.get_color() for line in dots] == [*[blue] * 3, orange]
    assert [line.get_markerfacecolor() for line in dots] == [*["none"] * 3, orange]
    upright = [line for line in ax.lines if len({*line.get_xdata()}) == 1 and len(line.get_xdata()) == 2]
    stems = [[*zip(line.get_xdata(), line.get_ydata(), strict=True)] for line in upright]
    assert [foot for foot, _ in stems] == [places[0], places[1], places[3]]
    assert texts(ax.texts) == ["one", "two", "a label"]
    for (_, (x, top)), text in zip(stems, ax.texts, strict=True):
        # Each label begins right behind the upper end of its stem.
        assert (x < text.xy[0] < x + 1, text.xy[1]) == (True, top)
    (legend,) = figure.legends
    assert texts(legend.get_texts()) == ["checked in the release", "reported"]
    assert [line.get_markerfacecolor() for line in legend.get_lines()] == [INK, "none"]


def test_what_shows_a_claim_is_what_the_recorded_runs_hold():
    runs = store.read_all()
    for c in timeline.claims():
        if c.finding:
            held = [f for run in runs for f in run.findings if f.key[:3] == c.finding[:3]]
            assert {f.verdict for f in held} == {c.finding[3]}, c
            # What rests on lines may have a finding of any grade beside it.
            assert {f.grade for f in held if f.ran} <= {c.grade} or c.grade == Grade.SOURCE, c
