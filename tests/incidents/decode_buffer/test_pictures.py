"""The figures that the notebook shows."""

import pytest

from staleproof.incidents.decode_buffer.allocator import GIB
from staleproof.incidents.decode_buffer.pictures import Headroom, headroom, headroom_figure
from staleproof.incidents.decode_buffer.scene import DIES, LIVES


def test_smaller_graph_or_fewer_heads_leave_headroom():
    reported, half, fewer = headroom(), headroom(batch=1024), headroom(heads=16)
    assert str(reported).startswith("256.00 MiB x 61 layers = 15.25 GiB, headroom ")
    assert [h.verdict for h in (reported, half, fewer)] == [DIES, LIVES, LIVES]
    assert reported.left < reported.needed < half.left < fewer.left
    assert headroom(utilisation=0.8).verdict == LIVES
    assert headroom(layers=30).verdict == LIVES
    with pytest.raises(ValueError, match=r"utilisation: expected a number in \(0, 1\]"):
        headroom(utilisation=1.5)


def test_headroom_picture_draws_its_numbers():
    case = Headroom(1, 4 * GIB, 2 * GIB, GIB, 10 * GIB, 3 * GIB, LIVES)
    axes = headroom_figure({"a": case}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [4.0, 2.0, 1.0]
    assert list(axes.lines[0].get_xdata()) == [7.0, 7.0]
    assert case.left == 3 * GIB
