"""mla_decode against its reference, and its contract for padding, bit by bit; beside an E4M3 cache too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits
from tests.ops.mla_batches import E4M3, HUGE, RANK, assert_close, make, poisoned, spoil

from staleproof import graph
from staleproof.evidence.canary import bits
from staleproof.ops.launching import Seen
from staleproof.ops.mla import decode
from staleproof.ops.mla.decode import mla_decode

# The splits of some page sizes of each dtype.
SPLITS: dict[torch.dtype, dict[int, int | None]] = {
    torch.bfloat16: {16: None, 128: 3},
    torch.float16: {48: None, 64: 1},
    torch.float32: {16: 1, 48: 3},
}


# Of a cache of E4M3 numbers the largest, minus that, and NaN.
POISON = {None: (torch.nan, torch.inf, 3e38), E4M3: (torch.nan, 448.0, -448.0)}


@pytest.mark.parametrize(
    ("dtype", "page_size", "splits", "cache"),
    [
        *((dtype, *pair, None) for dtype in SPLITS for pair in SPLITS[dtype].items()),
        *((dtype, 64, splits, E4M3) for dtype, splits in zip(SPLITS, (None, 1, 3), strict=True)),
    ],
    ids=str,
)
def test_values_and_k_scale(
    device: str, dtype: torch.dtype, page_size: int, splits: int | None, cache: torch.dtype | None
) -> None:
    batch = make(device, [0, 1, 64, page_size + 83], dtype=dtype, page_size=page_size, cache=cache)
    batch["k_scale"] = 0.25
    out, lse = mla_decode(**batch, num_kv_splits=splits)
    assert out.dtype == dtype
    assert_close(batch, out, lse)


@pytest.mark.parametrize(
    ("heads", "q_len", "splits", "cache"),
    [
        *((1, 1, 2, None), (5, 2, 1, None), (20, 4, 2, None), (33, 2, 1, None)),
        *((128, 1, 1, None), (20, 3, None, E4M3)),
    ],
)
def test_values_over_heads_and_query_tokens(
    device: str, heads: int, q_len: int, splits: int | None, cache: torch.dtype | None
) -> None:
    batch = make(device, [2, 65, 0, 130], heads=heads, q_len=q_len, page_size=32, cache=cache)
    out, lse = mla_decode(**batch, num_kv_splits=splits)
    assert out.shape == (4, q_len, heads, RANK)
    assert_close(batch, out, lse)


def test_values_at_deepseek_shape(device: str) -> None:
    batch = make(device, [0, 70], heads=64, page_size=64, rank=512, rope=64)
    out, lse = mla_decode(**batch)
    assert_close(batch, out, lse)


def test_strided_query_and_cache(device: str) -> None:
    batch = make(device, [33, 7], q_len=2, heads=4)
    want, _ = mla_decode(**batch)
    wide_q = torch.cat([batch["q"], batch["q"]], dim=2)[:, :, :4]
    wide_cache = torch.stack([batch["kv_cache"], batch["kv_cache"] * 2], dim=1)[:, 0]
    assert not wide_q.is_contiguous()
    assert not wide_cache.is_contiguous()
    got, _ = mla_decode(**batch | {"q": wide_q, "kv_cache": wide_cache})
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("cut", "splits", "ready"), [("given", 3, False), ("portable", 3, True), ("pairs", 1, False)]
)
def test_a_cut_is_launched_by_its_kernel_on_hopper(
    monkeypatch: pytest.MonkeyPatch, splits: int, cut: str, ready: bool
) -> None:
    """With splits given it is a program for each split of a request, whatever the plan would choose."""
    found: list[Any] = []

    def hopper(call: Any, chosen: Any) -> SimpleNamespace:
        found.append(chosen)
        return SimpleNamespace(is_ready=ready)

    monkeypatch.setattr(decode, "fits_hopper", lambda *given: True)
    monkeypatch.setattr(decode, "fastest", lambda *given: decode.Cut(cut, 0, splits))
    monkeypatch.setattr(decode, "launch_portable", lambda call, tiles: found.append(tiles) or (1, None, 1))
    monkeypatch.setitem(sys.modules, "staleproof.ops.mla.hopper_call", SimpleNamespace(HopperCall=hopper))
    seen = Seen()
    monkeypatch.setattr(decode, "_SEEN", seen)
    mla_decode(**make("cpu", [20, 30], heads=17), num_kv_splits=splits if cut == "given" else None)
    assert found == [(16, 64, splits, 4) if cut == "portable" else ("pairs", 0, splits)]
    # What cannot be repeated is not kept.
    assert bool(seen._kinds) == (ready or cut == "portable")


@pytest.mark.parametrize(("q_len", "splits"), [(1, 3), (4, 1)])
def test_empty_rows_are_written(device: str, q_len: int, splits: int) -> None:
    batch = make(device, [0, 40, 0, 2], q_len=q_len, heads=6)
    out = torch.full((4, q_len, 6, RANK), torch.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((4, q_len, 6), torch.nan, device=device)
    got_out, got_lse = mla_decode(**batch, num_kv_splits=splits, out=out, lse=lse)
    assert got_out is out
    assert got_lse is lse
    # A request of 2 tokens has no key for the first two of four query tokens.
    empty = torch.zeros(4, q_len, dtype=torch.bool)
    empty[[0, 2]] = True
    empty[3, : q_len - 2 if q_len > 2 else 0] = True
    empty = empty.to(device)
    assert torch.equal(bits(out[empty]), torch.zeros_like(bits(out[empty])))
    assert torch.equal(lse[empty], torch.full_like(lse[empty], -torch.inf))
    assert bool(out[~empty].isfinite().all())
    assert bool(lse[~empty].isfinite().all())


@pytest.mark.parametrize(
    ("page_size", "splits", "cache"), [*((16, 3, None), (48, 1, None), (128, 3, None), (48, 2, E4M3))]
)
def test_nothing_past_seq_len_changes_a_bit(
    device: str, page_size: int, splits: int, cache: torch.dtype | None
) -> None:
    batch = make(device, [1, 63, 130, 0], page_size=page_size, q_len=2, heads=5, cache=cache)
    want = mla_decode(**batch, num_kv_splits=splits)
    for poison in POISON[cache]:
        changed = poisoned(batch, poison)
        assert not torch.equal(bits(changed["kv_cache"]), bits(batch["kv_cache"]))
        assert_same_bits(mla_decode(**changed, num_kv_splits=splits), want)


def test_unused_table_entries_change_no_bit(device: str) -> None:
    batch = make(device, [20, 0, 70])
    want, _ = mla_decode(**batch)
    table = batch["block_table"].clone()
    table[(table == -1) | (table == HUGE)] = -(2**31)
    got, _ = mla_decode(**batch | {"block_table": table})
    assert torch.equal(bits(got), bits(want))


def test_a_later_query_token_does_not_reach_an_earlier_one(device: str) -> None:
    batch = make(device, [70], q_len=3, heads=4, page_size=16)
    want, _ = mla_decode(**batch)
    last = batch["block_table"][0, 69 // 16].item()
    batch["kv_cache"][last, 69 % 16] = torch.nan
    got, _ = mla_decode(**batch)
    assert torch.equal(bits(got[:, :2]), bits(want[:, :2]))
    assert bool(got[:, 2].isnan().all())


@pytest.mark.parametrize(("where", "splits"), [("kv_cache", 1), ("E4M3 cache", 2), ("q", 2)])
def test_a_live_nan_stays_visible_and_at_home(device: str, splits: int, where: str) -> None:
    """Also in E4M3 numbers under the interpreter, whose own cast makes 480 of it."""
    batch = make(device, [70, 70], heads=4, cache=E4M3 if where == "E4M3 cache" else None)
    want, _ = mla_decode(**batch, num_kv_splits=splits)
    if where == "q":
        batch["q"][0] = torch.nan
    else:
        spoil(batch, 0)
    got, lse = mla_decode(**batch, num_kv_splits=splits)
    assert bool(got[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert torch.equal(bits(got[1]), bits(want[1]))


def test_length_past_the_table_reads_no_entry_behind_it(device: str) -> None:
    batch = make(device, [32, 32], page_size=16)
    want, _ = mla_decode(**batch)
    # Behind the table's two columns lie entries that would be followed.
    table = batch["block_table"].clone()
    narrow = table[:, :2]
    batch["seq_lens"][:] = 4000
    got, _ = mla_decode(**batch | {"block_table": narrow})
    assert torch.equal(bits(got), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "splits", "page_size", "heads", "q_len", "cache"),
    [
        (torch.bfloat16, None, 64, 128, 1, None),
        (torch.bfloat16, 1, 64, 128, 2, None),
        (torch.bfloat16, 3, 128, 128, 1, None),
        (torch.float16, None, 128, 128, 1, None),
        (torch.float16, 3, 64, 40, 1, None),
        *((torch.bfloat16, None, 64, heads, None, E4M3) for heads in (16, 32, 128)),
    ],
    ids=str,
)
def test_wide_tiles_at_deepseek_shape(
    device: str,
    dtype: torch.dtype,
    splits: int | None,
    page_size: int,
    heads: int,
    q_len: int | None,
    cache: torch.dtype | None,
) -> None:
    """The tiles of a large batch, which on Hopper are a kernel of their own."""
    shape = {"heads": heads, "q_len": q_len, "page_size": page_size, "rank": 512, "rope": 64}
    lens = [0, 2, 64, 65, 1000, 7, 128, 514]
    batch = make(device, lens, dtype=dtype, cache=cache, spare_pages=800, **shape) | {"k_scale": 0.5}
    want_out, want_lse = mla_decode(**batch, num_kv_splits=splits)
    assert_close(batch, want_out, want_lse)
    for poison in POISON[cache]:
        out = torch.full_like(want_out, torch.nan)
        lse = torch.full_like(want_lse, torch.nan)
        mla_decode(**poisoned(batch, poison), num_kv_splits=splits, out=out, lse=lse)
        assert_same_bits((out, lse), (want_out, want_lse))
    assert torch.equal(bits(want_out[0]), torch.zeros_like(bits(want_out[0])))
    assert bool((want_lse[0] == -torch.inf).all())
    spoil(batch, 4)
    out, lse = mla_decode(**batch, num_kv_splits=splits)
    assert bool(out[4].isnan().all())
    assert torch.equal(bits(out[5:]), bits(want_out[5:]))


@pytest.mark.gpu
def test_graph_replay_with_live_count_down_then_up(device: str) -> None:
    batch = make(device, [200] * 8, heads=128, rank=512, rope=64, page_size=64)
    full = batch["seq_lens"].clone()
    out = torch.empty(8, 128, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(8, 128, device=device)
    captured = graph.capture(lambda: mla_decode(**batch, out=out, lse=lse), on=device)
    want = out.clone()
    for live in (8, 1, 3, 0, 8):
        batch["seq_lens"].copy_(torch.where(torch.arange(8, device=device) < live, full, 0))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        captured.replay()
        assert torch.equal(bits(out[:live]), bits(want[:live]))
        assert torch.equal(bits(out[live:]), torch.zeros_like(bits(out[live:])))
        assert bool((lse[live:] == -torch.inf).all())


PAGE_SIZE = r"kv_cache: expected a page size that is a multiple of 16 up to 128, got shape"
BAD_INPUTS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "q rank": ("q", lambda x: x[0], r"q: expected a tensor of rank 3 or 4, got shape"),
    "q dtype": ("q", lambda x: x.double(), r"q: expected .*bfloat16.*, got torch.float64"),
    "q not a tensor": ("q", lambda x: [1.0], r"q: expected a torch.Tensor, got list"),
    "q width": ("q", lambda x: x[..., :70], r"q: expected a last axis of kv_lora_rank 64"),
    "q layout": (
        "q",
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        r"q: expected a contiguous last axis, got strides",
    ),
    "heads": ("q", lambda x: x.repeat(1, 9, 1), r"q: expected 1 to 128 heads, got 144 heads"),
    "empty batch": ("q", lambda x: x[:0], r"q: expected at least one request, got an empty"),
    "q_len 0": ("q", lambda x: x[:, None][:, :0], r"q: expected at least one query .*, got q_len 0"),
    "rank": ("kv_lora_rank", lambda _: 60, r"kv_lora_rank: expected a power of two from 16"),
    "cache rank": ("kv_cache", lambda x: x[None], r"kv_cache: .*rank 3, got shape"),
    "cache width": ("kv_cache", lambda x: x[..., :64], r"kv_cache: expected shape \(\*, \*, 80\), got shape"),
    "page size 8": ("kv_cache", lambda x: x[:, :8], PAGE_SIZE),
    "page size 144": ("kv_cache", lambda x: x.repeat(1, 9, 1), PAGE_SIZE),
    "no pages": ("block_table", lambda x: x[:, :0], r"block_table: expected at least one page a request"),
    "empty cache": ("kv_cache", lambda x: x[:0], r"kv_cache: expected at least one page, got shape"),
    "splits": ("num_kv_splits", lambda _: 0, r"num_kv_splits: expected None or 1 to 1024, got 0"),
    "too many splits": ("num_kv_splits", lambda _: 1025, r"num_kv_splits: expected .*, got 1025"),
    "splits not whole": ("num_kv_splits", lambda _: 2.0, r"num_kv_splits: expected .*, got 2.0"),
    "rank not whole": ("kv_lora_rank", lambda _: 64.0, r"kv_lora_rank: expected .*, got 64.0"),
    "scale not a number": (
        "softmax_scale",
        lambda _: "x",
        r"softmax_scale: expected a finite float, got 'x'",
    ),
    "scale NaN": ("softmax_scale", lambda _: float("nan"), r"softmax_scale: expected .*, got nan"),
    "scale too large": ("softmax_scale", lambda _: 1e39, r"softmax_scale: expected .*, got 1e\+39"),
    "factor not a number": ("k_scale", lambda _: None, r"k_scale: expected a finite float, got None"),
    "factor infinite": ("k_scale", lambda _: float("inf"), r"k_scale: expected .*, got inf"),
}


def test_bad_input_is_named_and_nothing_is_written(device: str) -> None:
    for name, change, message in BAD_INPUTS.values():
        args = make(device, [20, 30])
        args[name] = change(args.get(name))
        out = args.setdefault("out", torch.full((2, 16, RANK), 7.0, dtype=torch.bfloat16, device=device))
        lse = args.setdefault("lse", torch.full((2, 16), 7.0, device=device))
        before = out.clone(), lse.clone()
        with pytest.raises(ValueError, match=message):
            mla_decode(**args)
        assert_same_bits((out, lse), before)


@pytest.mark.parametrize(("request_", "index", "page"), [(0, 1, 5), (1, 0, -1)])
def test_validate_names_each_page_that_is_used_and_out_of_the_cache(device, request_, index, page) -> None:
    """Pages 0 to 4 exist. The last page of a request holds few of its tokens, and none is used behind it."""
    batch = make(device, [20, 7])
    batch["kv_cache"] = batch["kv_cache"][:5].contiguous()
    good = torch.zeros_like(batch["block_table"]).fill_(page)
    good[0, :2], good[1, 0] = 4, 0
    mla_decode(**batch | {"block_table": good}, validate=True)
    bad = good.clone()
    bad[request_, index] = page
    out = torch.full((2, 16, RANK), 7.0, dtype=torch.bfloat16, device=device)
    named = rf"block_table\[{request_}, {index}\]: expected a page of kv_cache, 0 to 4, got {page}"
    with pytest.raises(ValueError, match=named):
        mla_decode(**batch | {"block_table": bad}, validate=True, out=out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize(
    ("length", "expected"),
    [(-1, "a length of at least 0"), (65, r"at most 64 tokens \(4 pages of 16 in block_table\)")],
)
def test_validate_names_a_length_that_the_table_has_no_room_for(
    device: str, length: int, expected: str
) -> None:
    batch = make(device, [20, 64, 0], spare_pages=0)
    batch["block_table"][0, 2:] = 0
    assert_same_bits(mla_decode(**batch, validate=True), mla_decode(**batch))
    batch["seq_lens"][0] = length
    out = torch.full((3, 16, RANK), 7.0, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=rf"seq_lens\[0\]: expected {expected}, got {length}"):
        mla_decode(**batch, validate=True, out=out)
    assert bool((out == 7.0).all())
