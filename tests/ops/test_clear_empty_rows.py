"""clear_empty_rows against its reference; live rows keep every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits, moved

from staleproof import graph
from staleproof.evidence.canary import bits
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.reference import clear_empty_rows as reference


def canary(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random bytes, NaN among them."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).to(device)


def lens(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("shape", "seq_lens", "starts"),
    [
        ((5, 3, 512), (7, 0, 1, -1, 0), None),
        ((40, 2, 64), (0, 9) * 20, None),
        ((6, 4, 64), (0, 5, 0), None),
        ((3, 5, 2, 64), (4, 0, 8), None),
        ((11, 3, 64), (4, 0, 8, 0), (0, 2, 5, 8, 8)),
        ((300, 1, 32), (1, 0) * 75, tuple(range(0, 301, 2))),
        ((9, 2, 32), (5, 6), (0, 3, 4)),
    ],
    ids=[
        *("3-d", "many rows", "uniform q_len", "4-d", "ragged", "ragged, many requests"),
        "rows behind the last request",
    ],
)
def test_matches_reference_and_touches_no_live_bit(
    device: str, shape: tuple[int, ...], seq_lens: tuple[int, ...], starts: tuple[int, ...] | None
) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        _matches_reference(device, dtype, shape, seq_lens, starts)


def _matches_reference(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seq_lens: tuple[int, ...],
    starts: tuple[int, ...] | None,
) -> None:
    out = canary(*shape, dtype=dtype, device=device)
    lse = canary(*shape[:-1], dtype=torch.float32, device=device)
    want_out, want_lse = bits(out).clone(), lse.clone()
    lengths = lens(*seq_lens, device=device)
    start = None if starts is None else lens(*starts, device=device)
    reference.clear_empty_rows(want_out, lengths, lse=want_lse, query_start_loc=start)
    clear_empty_rows(out, lengths, lse=lse, query_start_loc=start, validate=start is not None)
    assert_same_bits((bits(out), lse), (want_out, want_lse))
    # The reference did clear some rows here and did spare others.
    cleared = (want_out == 0).flatten(-2).all(-1)
    assert 0 < int(cleared.sum()) < cleared.numel()


# CUTLASS MLA writes 128 heads; the caller keeps a slice of them. With one token a request its axis has a
# stride that leads nowhere.
@pytest.mark.parametrize(("shape", "kept"), [((4, 8, 64), 3), ((4, 3, 2, 32), 1)], ids=["heads", "tokens"])
def test_a_slice_of_heads_or_tokens_leaves_the_others_alone(
    device: str, shape: tuple[int, ...], kept: int
) -> None:
    whole = canary(*shape, dtype=torch.bfloat16, device=device)
    before = bits(whole).clone()
    clear_empty_rows(whole[:, :kept], lens(1, 0, 2, 0, device=device))
    assert int(bits(whole)[[1, 3], :kept].count_nonzero()) == 0
    assert torch.equal(bits(whole)[:, kept:], before[:, kept:])
    assert torch.equal(bits(whole)[[0, 2]], before[[0, 2]])


@pytest.mark.gpu
def test_graph_replay_with_live_count_down_then_up(device: str) -> None:
    rows = 1024
    out = torch.empty(rows, 16, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(rows, 16, device=device)
    seq_lens = torch.full((rows,), 9, dtype=torch.int32, device=device)
    captured = graph.capture(lambda: clear_empty_rows(out, seq_lens, lse=lse), on=device)
    for live in (1024, 1, 512, 0, 1000, 1024):
        seq_lens[:live] = 9
        seq_lens[live:] = 0
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        captured.replay()
        assert bool(out[:live].isnan().all())
        assert bool(lse[:live].isnan().all())
        assert int(bits(out[live:]).count_nonzero()) == 0
        assert bool((lse[live:] == -torch.inf).all())


def _sevens(*shape: int) -> torch.Tensor:
    return torch.full(shape, 7, dtype=torch.bfloat16)


ONE_STRIDE = r"out: expected the query tokens of consecutive requests at one stride, got strides"
BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "out rank": ({"out": _sevens(4, 64)}, r"out: expected a tensor of rank 3 or 4, got shape"),
    "out dtype": (
        {"out": _sevens(4, 2, 64).double()},
        r"out: expected 1, 2 or 4 bytes an element, got torch.float64",
    ),
    "out empty": ({"out": _sevens(4, 0, 64)}, r"out: expected at least one element, got shape"),
    "out layout": (
        {"out": _sevens(4, 64, 2).mT},
        r"out: expected contiguous heads and last axis, got strides",
    ),
    "4-d layout": ({"out": _sevens(3, 4, 2, 64).transpose(0, 1)}, ONE_STRIDE),
    "4-d gap": ({"out": _sevens(4, 3, 2, 64)[:, :2]}, ONE_STRIDE),
    "rows": ({"out": _sevens(5, 2, 64)}, r"out: expected a multiple of 4 rows, as in seq_lens, got 5 rows"),
    "4-d batch": ({"out": _sevens(2, 2, 2, 64)}, r"out: expected 4 requests, as in seq_lens, got shape"),
    "lens rank": ({"seq_lens": lens(1, 2, 3, 4)[None]}, r"seq_lens: expected a tensor of rank 1, got shape"),
    "empty batch": (
        {"seq_lens": lens(1)[:0]},
        r"seq_lens: expected at least one request, got an empty batch",
    ),
    "starts with 4-d": (
        {"out": _sevens(4, 1, 2, 64), "query_start_loc": lens(0, 1, 2, 3, 4)},
        r"out: expected \(rows, heads, dim\) with query_start_loc, got shape",
    ),
    "negative length": (
        {"seq_lens": lens(0, 1, -2, 0), "validate": True},
        r"seq_lens\[2\]: expected a length of at least 0, got -2",
    ),
    "starts fall": (
        {"query_start_loc": lens(0, 2, 1, 3, 4), "validate": True},
        r"query_start_loc: expected 0, rising, at most 4 rows, got \[0, 2, 1, 3, 4\]",
    ),
}


def test_bad_input_is_named_and_nothing_is_written(device: str) -> None:
    for change, message in BAD_INPUTS.values():
        given = {"out": _sevens(4, 2, 64), "seq_lens": lens(0, 0, 0, 0)} | change
        args = {name: moved(value, device) for name, value in given.items()}
        before = args["out"].clone()
        with pytest.raises(ValueError, match=message):
            clear_empty_rows(**args)
        assert torch.equal(args["out"], before)
