"""Blocks that are known by addresses: exactly the bytes that vLLM's zeroer would write, and no others."""

from __future__ import annotations

import pytest
import torch

from staleproof.ops.zero_segments import SegmentZeroer


def caches(device: str, count: int, *, blocks: int = 6, words: int = 10) -> list[torch.Tensor]:
    """K and V outermost; pages of 40 bytes, which are no multiple of 16."""
    return [torch.full((2, blocks, words), 7, dtype=torch.int32, device=device) for _ in range(count)]


def zeroer(made: list[torch.Tensor], **options) -> SegmentZeroer:
    return SegmentZeroer([part.data_ptr() for cache in made for part in cache], 40, made[0].device, **options)


@pytest.mark.parametrize("ids", [[1], [5], [4, 2, 4], [5, 4, 3, 2, 1]])
def test_these_blocks_and_no_other_byte(device, ids):
    made = caches(device, 3)
    zeroer(made).zero(ids)
    for cache in made:
        for block in range(6):
            expected = 0 if block in ids else 7
            assert set(cache[:, block].flatten().tolist()) == {expected}, block


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "block_ids: expected 1 to 3 of them, got 0"),
        ([1, 2, 3, 4], "block_ids: expected 1 to 3 of them, got 4"),
        ([2, 0], r"block_ids: expected 1 to \d+, got \[0, 2\]"),
        ([2, 2**31], r"block_ids: expected 1 to 2147483646, got \[2, 2147483648\]"),
        ([2, 2**31 - 1], r"block_ids: expected 1 to 2147483646, got \[2, 2147483647\]"),
    ],
)
def test_bad_ids_write_nothing(device, ids, text):
    made = caches(device, 1)
    with pytest.raises(ValueError, match=text):
        zeroer(made, capacity=3).zero(ids)
    assert bool((made[0] == 7).all())


def test_as_many_ids_as_were_promised_fit(device):
    made = caches(device, 1)
    zeroer(made, capacity=3).zero([1, 2, 3])
    assert made[0].ne(0).any(-1).tolist() == [[True, False, False, False, True, True]] * 2


def test_bad_segments(device):
    with pytest.raises(ValueError, match="segments: expected at least one"):
        SegmentZeroer([], 40, torch.device(device))
    for page_bytes in (42, 0, -4):
        with pytest.raises(ValueError, match=f"page_bytes: expected a multiple of 4, got {page_bytes}"):
            SegmentZeroer([4096], page_bytes, torch.device(device))


@pytest.mark.gpu
def test_lists_of_steps_that_wait_in_the_stream(device):
    made = caches(device, 1, blocks=64)
    ours = zeroer(made)
    ours.zero([63])
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for step in range(1, 60, 2):
            ours.zero([step])
    torch.cuda.synchronize()
    assert [b for b in range(64) if not made[0][:, b].any()] == [*range(1, 60, 2), 63]


@pytest.mark.gpu
def test_a_capture_is_refused(device):
    made = caches(device, 1)
    ours = zeroer(made)
    ours.zero([1])
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        with pytest.raises(ValueError, match="where the current stream is capturing"):
            ours.zero([2])
