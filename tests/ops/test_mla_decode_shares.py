"""Which requests each group of warps of the Hopper kernels takes; no GPU needed."""

from __future__ import annotations

import pytest
import torch
from tests.mla_shares import STAGES, Segment, Share

from staleproof.ops.mla.plan import REQUEST_COST, aligned_parts, whole_programs

LENS = {
    "two or three a program": [i * 53 % 300 for i in range(85)],
    "some cut in three": [i * 397 % 700 * (i % 5 > 0) for i in range(40)],
    "one long": [100] * 20 + [5000] + [64] * 9,
    "equal": [130] * 75,
    "equal, cut": [640] * 5,
    "empty": [0] * 7,
    "one": [1000],
}


def cut_word(segments: list[Segment], tiles: list[int]) -> int:
    words = [-1 if begin else request + 1 for request, begin, end in segments if end < tiles[request]]
    return words[-1] if words else 0


def taken(lens: list[int], programs: int, aligned: int, length: int) -> list[list[Segment]]:
    """What each program takes, after all its groups were found to take the same."""
    tiles = [max(-(-n // 64), 1) for n in lens]
    found = []
    for p in range(programs):
        share = Share(torch.tensor(lens), p, programs, aligned, length)
        segments, cut = share.loaded(0)
        assert (segments, cut) == share.loaded(STAGES)
        assert cut == cut_word(segments, tiles)
        slots = [2 * p if begin else 2 * p + 1 if end < tiles[r] else -1 for r, begin, end in segments]
        want = [(r, end - begin, slot) for (r, begin, end), slot in zip(segments, slots, strict=True)]
        for kernel in ("pairs", "e4m3"):
            for group in (0, 1):
                assert share.computed(kernel, group) == want, (kernel, group)
        # Of few heads each group takes every second tile.
        each = [share.computed("few", group) for group in (0, 1)]
        assert [(r, n + m, slot) for (r, n, slot), (_, m, _) in zip(*each, strict=True)] == want
        found.append(segments)
    return found


def assert_each_tile_once(found: list[list[Segment]], lens: list[int]) -> None:
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for p, segments in enumerate(found):
        for request, begin, end in segments:
            parts.setdefault(request, []).append((p, begin, end))
    assert sorted(parts) == [*range(len(lens))]
    for request, mine in parts.items():
        assert [mine[0][1], *(end for _, _, end in mine)] == [
            *(begin for _, begin, _ in mine),
            max(-(-lens[request] // 64), 1),
        ]
        # One program after the other, as the merge expects.
        assert [p for p, _, _ in mine] == [*range(mine[0][0], mine[0][0] + len(mine))]


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        ("two or three a program", 33),
        ("some cut in three", 7),
        ("one long", 7),
        ("equal, cut", 33),
        ("empty", 7),
    ],
)
def test_equal_parts_cover_every_tile_once(name: str, programs: int) -> None:
    lens = LENS[name]
    found = taken(lens, programs, aligned_parts(programs, len(lens)), 256)
    assert_each_tile_once(found, lens)
    tiles = {max(-(-n // 64), 1) for n in lens}
    if len(tiles) > 1:
        # What beginning a request costs counts as well.
        whole = sum(max(-(-n // 64), 1) + REQUEST_COST for n in lens)
        most = max(sum(end - begin + REQUEST_COST * (begin == 0) for _, begin, end in one) for one in found)
        assert most <= -(-whole // min(programs, whole)) + REQUEST_COST


@pytest.mark.parametrize("name", ["some cut in three", "one long", "empty"])
def test_splits_cover_every_tile_once(name: str) -> None:
    lens = LENS[name]
    found = taken(lens, 3 * len(lens), 3, 0)
    assert_each_tile_once(found, lens)
    assert all(len(segments) <= 1 for segments in found)


@pytest.mark.parametrize(
    ("name", "slots"),
    [("two or three a program", 33), ("some cut in three", 7), ("one long", 8), ("equal", 66), ("one", 2)],
)
def test_programs_take_whole_requests_in_turn(name: str, slots: int) -> None:
    lens = LENS[name]
    programs = whole_programs(len(lens), 1, slots)
    found = taken(lens, programs, 1, 1)
    assert_each_tile_once(found, lens)
    counts = [len(segments) for segments in found]
    assert max(counts) == -(-len(lens) // programs)
    if max(counts) > 1:
        # Where every second request is long, a program has at most one more of them than of the others.
        odd = [sum(r % 2 for r, _, _ in segments) for segments in found]
        assert all(abs(2 * some - count) <= 1 for some, count in zip(odd, counts, strict=True))
