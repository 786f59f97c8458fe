"""The figures that the notebook shows."""

from __future__ import annotations

import pytest

from staleproof.cases.finding import Key, finding, not_run
from staleproof.incidents.decode_buffer.allocator import GIB, MIB
from staleproof.incidents.decode_buffer.pictures import Headroom, arithmetic, headroom, headroom_figure, table
from staleproof.incidents.decode_buffer.scene import DIES, LIVES
from staleproof.incidents.decode_buffer.setups import ATTENTION


def test_both_readings_are_computed_from_shapes():
    capture_size, max_num_seqs = arithmetic()
    assert (capture_size.batch, capture_size.layer_bytes) == (2048, 256 * MIB)
    assert capture_size.total_bytes == 15.25 * GIB
    assert (max_num_seqs.batch, max_num_seqs.layer_bytes) == (1024, 128 * MIB)
    assert max_num_seqs.total_bytes == 7.625 * GIB


def test_the_headroom_line_moves():
    reported, half, fewer = headroom(), headroom(batch=1024), headroom(heads=16)
    assert str(reported).startswith("256.00 MiB x 61 layers = 15.25 GiB, headroom ")
    assert [h.verdict for h in (reported, half, fewer)] == [DIES, LIVES, LIVES]
    assert reported.left < reported.needed < half.left < fewer.left
    assert headroom(utilisation=0.8).verdict == LIVES
    assert headroom(layers=30).verdict == LIVES
    with pytest.raises(ValueError, match=r"utilisation: expected a number in \(0, 1\]"):
        headroom(utilisation=1.5)


def test_the_headroom_picture_holds_the_numbers():
    case = Headroom(1, 4 * GIB, 2 * GIB, GIB, 10 * GIB, 3 * GIB, LIVES)
    axes = headroom_figure({"a": case}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [4.0, 2.0, 1.0]
    assert list(axes.lines[0].get_xdata()) == [7.0, 7.0]
    assert case.left == 3 * GIB


def test_the_table_shows_no_time_that_no_gpu_took():
    found = [
        one
        for name in ATTENTION
        for one in (
            finding(Key("decode_buffer", "profile", name), "profile", "unseen", buffers=61.0),
            finding(Key("decode_buffer", "overlap", name), "layers", "mixed"),
            finding(Key("decode_buffer", "growth", name), "buffer", "safe"),
        )
    ]
    times = [
        finding(Key("decode_buffer", "added_time", "no_buffer"), "measurement", "measured", added_us=0.04),
        not_run(
            Key("decode_buffer", "added_time", "zeros_per_layer"), "measurement", "timings need a CUDA GPU"
        ),
    ]
    rows = [line.split() for line in table(found + times).splitlines()]
    assert rows[1] == ["no_buffer", "15.25", "GiB", "unseen", "mixed", "safe", "+0.0", "us"]
    assert [row[-1] for row in rows[2:]] == ["-"] * (len(ATTENTION) - 1)
