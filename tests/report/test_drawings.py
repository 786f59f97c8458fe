"""The pictures of memory are drawn from what the miniature computed, hole by hole and byte by byte."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Polygon, Rectangle
from matplotlib.text import Text

from made import texts
from staleproof.incidents.kv_reuse.pictures import BlockLife, Span
from staleproof.incidents.moe_routing.batch import Batch
from staleproof.incidents.moe_routing.pictures import MapPicture
from staleproof.incidents.scale_padding.pictures import tile_picture
from staleproof.report import drawings
from staleproof.report.plots import INK


def hatched(ax: object) -> set[tuple[int, int]]:
    """The (column, row) squares under a hatched patch."""
    squares = set()
    for patch in ax.patches:  # type: ignore[attr-defined]
        if isinstance(patch, Rectangle) and patch.get_hatch():
            x, y = int(patch.get_x()), int(patch.get_y())
            w, h = round(patch.get_width()), round(patch.get_height())
            squares |= {(x + i, y + j) for i in range(w) for j in range(h)}
    return squares


def test_map_is_hatched_exactly_where_nobody_wrote():
    holes = [[token % 3 == 0 and slot in (1, 2, 4) for slot in range(5)] for token in range(20)]
    fig = drawings.maps([MapPicture(Batch(20, 5, 16), False, holes)])
    whole, near = fig.axes
    there = {(t, s) for t, line in enumerate(holes) for s, hole in enumerate(line) if hole}
    assert hatched(whole) == there
    assert hatched(near) == {(t, s) for t, s in there if t >= 20 - drawings.ZOOM}
    assert whole.get_title(loc="left") == "20 tokens: three kernels, 21 of 100 entries never written"
    assert texts(fig.legends[0].get_texts()) == ["written", "never written"]
    # As many tokens as are shown large, none of them a hole.
    full = MapPicture(Batch(drawings.ZOOM, 1, 16), False, [[False]] * drawings.ZOOM)
    both = drawings.maps([MapPicture(Batch(20, 5, 16), False, holes), full])
    assert texts(both.legends[0].get_texts()) == ["written", "never written"]


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([], "pictures: expected at least one"),
        ([MapPicture(Batch(2, 1, 1), True, [[False]] * 2)], "of 14 tokens"),
    ],
)
def test_maps_that_cannot_be_drawn_are_refused(pictures, message):
    with pytest.raises(ValueError, match=message):
        drawings.maps(pictures)


def test_life_of_a_block_shows_its_owner_and_what_the_owner_wrote():
    spans = [Span(0, 3, "Mamba state", 0), Span(3, 5, "free"), Span(5, 9, "keys and values", 8)]
    spans.append(Span(9, 12, "prefix hit", 9))
    fig = drawings.life(BlockLife(4, spans, [(5, 1), (6, 2), (7, 3)], 4))
    who, filled = fig.axes
    at = [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in who.patches]
    assert at == [(0, 0, 3, 1), (3, 0, 2, 1), (5, 0, 4, 1), (9, 0, 3, 1)]
    assert [patch.get_hatch() or "" for patch in who.patches] == ["---", "///", "", "\\\\\\"]
    assert {to_hex(text.get_color()) for text in fig.findobj(Text)} == {INK}
    said = texts(who.texts)
    assert said == ["Mamba state\nrequest 0", "free", "keys and values\nrequest 8", "prefix hit\nrequest 9"]
    written, stale = (patch for patch in filled.patches if isinstance(patch, Polygon))
    assert (written.get_hatch() or "", stale.get_hatch()) == ("", "xxx")
    stairs = [(5, 1), (6, 1), (6, 2), (7, 2), (7, 3), (8, 3), (9, 3)]
    for outline, edge in ((written, 0), (stale, 4)):
        corners = [tuple(map(int, corner)) for corner in outline.get_xy()[:-1]]
        assert corners == [(5, edge), *stairs, (9, edge)]


def test_tile_names_each_row_once_and_hatches_what_nobody_wrote(device):
    picture = tile_picture(5, 80, device)
    fig = drawings.tile(picture)
    ax = fig.axes[0]
    assert sorted(int(text.get_text().split()[1]) for text in ax.texts) == list(range(128))
    nobody = {(byte % 16, byte // 16) for byte, written in enumerate(picture.written) if not written}
    assert hatched(ax) == nobody
    assert len(nobody) == 512 - 20
