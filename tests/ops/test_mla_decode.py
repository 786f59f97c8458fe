"""mla_decode against its reference, and its contract for padding, bit by bit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits

from staleproof.evidence.canary import bits
from staleproof.ops.launching import Seen
from staleproof.ops.mla import decode
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference import mla_decode as reference

RANK, ROPE = 64, 16
HUGE = 2**31 - 1


@dataclass
class Batch:
    """A batch whose unused block-table entries are -1 or huge, and must never be followed."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    rank: int

    def args(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "kv_cache": self.kv_cache,
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "softmax_scale": self.q.shape[-1] ** -0.5,
            "kv_lora_rank": self.rank,
        }


def make(
    device: str,
    lens: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 16,
    q_len: int | None = None,
    page_size: int = 16,
    rank: int = RANK,
    rope: int = ROPE,
    spare_pages: int = 2,
    seed: int = 0,
) -> Batch:
    gen = torch.Generator().manual_seed(seed)
    max_pages = max(-(-max(lens) // page_size), 1) + spare_pages
    pages = sum(-(-n // page_size) for n in lens) + 3
    q_shape = (len(lens), heads) if q_len is None else (len(lens), q_len, heads)
    q = torch.randn(*q_shape, rank + rope, generator=gen).to(dtype)
    kv_cache = torch.randn(pages, page_size, rank + rope, generator=gen).to(dtype)
    order = torch.randperm(pages, generator=gen).int()
    block_table = torch.full((len(lens), max_pages), -1, dtype=torch.int32)
    block_table[1::2] = HUGE
    taken = 0
    for request, n in enumerate(lens):
        count = -(-n // page_size)
        block_table[request, :count] = order[taken : taken + count]
        taken += count
    return Batch(
        q.to(device),
        kv_cache.to(device),
        block_table.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        rank,
    )


def poison_past_seq_len(batch: Batch, value: float) -> Batch:
    """Every number of the cache that no request may read becomes ``value``, of E4M3 this code."""
    pages, page_size = batch.kv_cache.shape[:2]
    owned = torch.zeros(pages * page_size, dtype=torch.bool)
    for request, n in enumerate(batch.seq_lens.tolist()):
        position = torch.arange(n)
        page = batch.block_table[request].cpu()[position // page_size].long()
        owned[page * page_size + position % page_size] = True
    cache = batch.kv_cache.clone()
    flat = (bits(cache) if cache.dtype == torch.float8_e4m3fn else cache).view(pages * page_size, -1)
    flat[~owned.to(flat.device)] = value
    return replace(batch, kv_cache=cache)


def assert_close(batch: Batch, out: torch.Tensor, lse: torch.Tensor, **more: float) -> None:
    want_out, want_lse = reference.mla_decode(**batch.args(), **more)
    error = (out.float() - want_out.float()).norm() / want_out.float().norm()
    # bfloat16 holds 8 bits; the interpreter rounds to it toward zero.
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[out.dtype]
    assert error.item() <= bound
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-3)


# Each pair of a dtype, a page size and a number of splits: the splits of each page size.
SPLITS: dict[torch.dtype, dict[int, int | None]] = {
    torch.bfloat16: {16: None, 48: 1, 64: 3, 128: 3},
    torch.float16: {16: 3, 48: None, 64: 1, 128: 1},
    torch.float32: {16: 1, 48: 3, 64: None, 128: None},
}


@pytest.mark.parametrize(
    ("dtype", "page_size", "splits"), [(dtype, *pair) for dtype in SPLITS for pair in SPLITS[dtype].items()]
)
def test_values_and_k_scale(device: str, dtype: torch.dtype, page_size: int, splits: int | None) -> None:
    batch = make(device, [0, 1, 64, page_size + 83], dtype=dtype, page_size=page_size)
    out, lse = mla_decode(**batch.args(), num_kv_splits=splits, k_scale=0.25)
    assert_close(batch, out, lse, k_scale=0.25)


@pytest.mark.parametrize(
    ("heads", "q_len", "splits"), [(1, 1, 2), (5, 2, 1), (5, 2, 2), (20, 4, 2), (33, 2, 1), (128, 1, 1)]
)
def test_values_over_heads_and_query_tokens(device: str, heads: int, q_len: int, splits: int) -> None:
    batch = make(device, [2, 65, 0, 130], heads=heads, q_len=q_len, page_size=32)
    out, lse = mla_decode(**batch.args(), num_kv_splits=splits)
    assert out.shape == (4, q_len, heads, RANK)
    assert_close(batch, out, lse)


def test_values_at_deepseek_shape(device: str) -> None:
    batch = make(device, [0, 70], heads=64, page_size=64, rank=512, rope=64)
    out, lse = mla_decode(**batch.args())
    assert_close(batch, out, lse)


def test_strided_query_and_cache(device: str) -> None:
    batch = make(device, [33, 7], q_len=2, heads=4)
    want, _ = mla_decode(**batch.args())
    wide_q = torch.cat([batch.q, batch.q], dim=2)[:, :, :4]
    wide_cache = torch.stack([batch.kv_cache, batch.kv_cache * 2], dim=1)[:, 0]
    assert not wide_q.is_contiguous()
    assert not wide_cache.is_contiguous()
    got, _ = mla_decode(**replace(batch, q=wide_q, kv_cache=wide_cache).args())
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("splits", [1, 3])
def test_as_many_programs_share_a_request_as_were_asked_for(device: str, monkeypatch, splits: int) -> None:
    """Values are right with any number of splits and with any tiles, so they do not tell what arrived."""
    launches, launched = [], decode.launched

    def noting(kernel: Any, grid: tuple[int, ...], tensors: Any, sizes: Any, **options: Any) -> Any:
        launches.append((grid, sizes))
        return launched(kernel, grid, tensors, sizes, **options)

    monkeypatch.setattr(decode, "launched", noting)
    monkeypatch.setattr(decode, "_SEEN", Seen())
    tiles = decode.Tiles(16, 64, splits, 4)
    monkeypatch.setattr(decode, "tiles_of", lambda *given: tiles)
    mla_decode(**make(device, [40, 7], heads=17).args(), num_kv_splits=splits)
    (grid, sizes), *merges = launches
    assert grid == (2, splits, 2)
    assert sizes[-3:-1] == (tiles.rows, tiles.keys)
    # Several splits are merged by a second launch.
    assert len(merges) == (splits > 1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("cut", ["given", "portable", "pairs"])
@pytest.mark.parametrize("ready", [True, False])
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
    mla_decode(**make("cpu", [20, 30], heads=17).args(), num_kv_splits=splits if cut == "given" else None)
    assert found == [(16, 64, splits, 4) if cut == "portable" else ("pairs", 0, splits)]
    # What cannot be repeated is not kept.
    assert bool(seen._kinds) == (ready or cut == "portable")


@pytest.mark.parametrize("splits", [None, 3])
def test_tiles_are_chosen_for_all_rows_of_a_request(monkeypatch, splits: int | None) -> None:
    found: list[Any] = []
    tiles = decode.Tiles(16, 16, 7, 4)
    monkeypatch.setattr(decode, "tiles_of", lambda q, *given: found.append(given) or tiles)
    monkeypatch.setattr(decode, "launch_portable", lambda call, chosen: found.append(chosen))
    batch = make("cpu", [20, 30], heads=5, q_len=3, page_size=16)
    mla_decode(**batch.args(), num_kv_splits=splits)
    assert found == [(15, batch.block_table.shape[1] * 16), tiles._replace(splits=splits or 7)]


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("splits", [1, 3])
def test_empty_rows_are_written(device: str, q_len: int, splits: int) -> None:
    batch = make(device, [0, 40, 0, 2], q_len=q_len, heads=6)
    out = torch.full((4, q_len, 6, RANK), torch.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((4, q_len, 6), torch.nan, device=device)
    got_out, got_lse = mla_decode(**batch.args(), num_kv_splits=splits, out=out, lse=lse)
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


@pytest.mark.parametrize(("page_size", "splits"), [(16, 3), (48, 1), (64, 3), (128, 1), (128, 3)])
def test_nothing_past_seq_len_changes_a_bit(device: str, page_size: int, splits: int) -> None:
    batch = make(device, [1, 63, 130, 0], page_size=page_size, q_len=2, heads=5)
    want = mla_decode(**batch.args(), num_kv_splits=splits)
    for poison in (torch.nan, torch.inf, 3e38):
        poisoned = poison_past_seq_len(batch, poison)
        assert not torch.equal(bits(poisoned.kv_cache), bits(batch.kv_cache))
        assert_same_bits(mla_decode(**poisoned.args(), num_kv_splits=splits), want)


def test_unused_table_entries_change_no_bit(device: str) -> None:
    batch = make(device, [20, 0, 70])
    want, _ = mla_decode(**batch.args())
    table = batch.block_table.clone()
    table[(table == -1) | (table == HUGE)] = -(2**31)
    got, _ = mla_decode(**replace(batch, block_table=table).args())
    assert torch.equal(bits(got), bits(want))


def test_a_later_query_token_does_not_reach_an_earlier_one(device: str) -> None:
    batch = make(device, [70], q_len=3, heads=4, page_size=16)
    want, _ = mla_decode(**batch.args())
    last = batch.block_table[0, 69 // 16].item()
    batch.kv_cache[last, 69 % 16] = torch.nan
    got, _ = mla_decode(**batch.args())
    assert torch.equal(bits(got[:, :2]), bits(want[:, :2]))
    assert bool(got[:, 2].isnan().all())


@pytest.mark.parametrize("where", ["kv_cache", "q"])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_live_nan_stays_visible_and_at_home(device: str, splits: int, where: str) -> None:
    batch = make(device, [70, 70], heads=4)
    want, _ = mla_decode(**batch.args(), num_kv_splits=splits)
    if where == "q":
        batch.q[0] = torch.nan
    else:
        batch.kv_cache[batch.block_table[0, 0].item(), 3, 5] = torch.nan
    got, lse = mla_decode(**batch.args(), num_kv_splits=splits)
    assert bool(got[0].isnan().all())
    assert bool(lse[0].isnan().all())
    assert torch.equal(bits(got[1]), bits(want[1]))


def test_length_past_the_table_reads_no_entry_behind_it(device: str) -> None:
    batch = make(device, [32, 32], page_size=16)
    want, _ = mla_decode(**batch.args())
    # Behind the table's two columns lie entries that would be followed.
    table = batch.block_table.clone()
    narrow = table[:, :2]
    batch.seq_lens[:] = 4000
    got, _ = mla_decode(**replace(batch, block_table=narrow).args())
    assert torch.equal(bits(got), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize(
    ("page_size", "heads", "q_len"), [(64, 128, 1), (128, 128, 1), (64, 40, 1), (64, 128, 2)]
)
def test_wide_tiles_at_deepseek_shape(
    device: str, dtype: torch.dtype, splits: int | None, page_size: int, heads: int, q_len: int
) -> None:
    """The tiles of a large batch, which on Hopper are a kernel of their own."""
    batch = make(
        device,
        [0, 2, 64, 65, 1000, 7, 128, 514],
        dtype=dtype,
        heads=heads,
        q_len=q_len,
        page_size=page_size,
        rank=512,
        rope=64,
        spare_pages=800,
    )
    want_out, want_lse = mla_decode(**batch.args(), num_kv_splits=splits, k_scale=0.5)
    assert_close(batch, want_out, want_lse, k_scale=0.5)
    for poison in (torch.nan, torch.inf):
        out = torch.full_like(want_out, torch.nan)
        lse = torch.full_like(want_lse, torch.nan)
        mla_decode(
            **poison_past_seq_len(batch, poison).args(), num_kv_splits=splits, k_scale=0.5, out=out, lse=lse
        )
        assert_same_bits((out, lse), (want_out, want_lse))
    assert torch.equal(bits(want_out[0]), torch.zeros_like(bits(want_out[0])))
    assert bool((want_lse[0] == -torch.inf).all())
    batch.kv_cache[batch.block_table[4, 0].item(), 3, 5] = torch.nan
    out, lse = mla_decode(**batch.args(), num_kv_splits=splits, k_scale=0.5)
    assert bool(out[4].isnan().all())
    assert torch.equal(bits(out[5:]), bits(want_out[5:]))


@pytest.mark.gpu
def test_graph_replay_with_live_count_down_then_up(device: str) -> None:
    batch = make(device, [200] * 8, heads=128, rank=512, rope=64, page_size=64)
    full = batch.seq_lens.clone()
    out = torch.empty(8, 128, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(8, 128, device=device)
    mla_decode(**batch.args(), out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(**batch.args(), out=out, lse=lse)
    want = out.clone()
    for live in (8, 1, 3, 0, 8):
        batch.seq_lens.copy_(torch.where(torch.arange(8, device=device) < live, full, 0))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert torch.equal(bits(out[:live]), bits(want[:live]))
        assert torch.equal(bits(out[live:]), torch.zeros_like(bits(out[live:])))
        assert bool((lse[live:] == -torch.inf).all())


def _bad(**change: Any) -> Any:
    return lambda batch: {**batch.args(), **{k: v(batch) for k, v in change.items()}}


PAGE_SIZE = r"kv_cache: expected a page size that is a multiple of 16 up to 128, got shape"
BAD_INPUTS = {
    "q rank": (_bad(q=lambda b: b.q[0]), r"q: expected a tensor of rank 3 or 4, got shape"),
    "q dtype": (_bad(q=lambda b: b.q.double()), r"q: expected .*bfloat16.*, got torch.float64"),
    "q not a tensor": (_bad(q=lambda b: [1.0]), r"q: expected a torch.Tensor, got list"),
    "q width": (_bad(q=lambda b: b.q[..., :70]), r"q: expected a last axis of kv_lora_rank 64"),
    "q layout": (
        _bad(q=lambda b: b.q.transpose(1, 2).contiguous().transpose(1, 2)),
        r"q: expected a contiguous last axis, got strides",
    ),
    "heads": (_bad(q=lambda b: b.q.repeat(1, 9, 1)), r"q: expected 1 to 128 heads, got 144 heads"),
    "empty batch": (_bad(q=lambda b: b.q[:0]), r"q: expected at least one request, got an empty"),
    "q_len 0": (_bad(q=lambda b: b.q[:, None][:, :0]), r"q: expected at least one query .*, got q_len 0"),
    "rank": (_bad(kv_lora_rank=lambda b: 60), r"kv_lora_rank: expected a power of two from 16"),
    "cache rank": (_bad(kv_cache=lambda b: b.kv_cache[None]), r"kv_cache: .*rank 3, got shape"),
    "cache width": (
        _bad(kv_cache=lambda b: b.kv_cache[..., :64]),
        r"kv_cache: expected shape \(\*, \*, 80\), got shape",
    ),
    "page size 8": (_bad(kv_cache=lambda b: b.kv_cache[:, :8]), PAGE_SIZE),
    "page size 144": (_bad(kv_cache=lambda b: b.kv_cache.repeat(1, 9, 1)), PAGE_SIZE),
    "no pages": (
        _bad(block_table=lambda b: b.block_table[:, :0]),
        r"block_table: expected at least one page a request",
    ),
    "splits": (_bad(num_kv_splits=lambda b: 0), r"num_kv_splits: expected None or at least 1"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_named_and_nothing_is_written(device: str, case: str) -> None:
    change, message = BAD_INPUTS[case]
    batch = make(device, [20, 30])
    args = change(batch)
    out = args.setdefault("out", torch.full((2, 16, RANK), 7.0, dtype=torch.bfloat16, device=device))
    lse = args.setdefault("lse", torch.full((2, 16), 7.0, device=device))
    before = out.clone(), lse.clone()
    with pytest.raises(ValueError, match=message):
        mla_decode(**args)
    assert_same_bits((out, lse), before)


@pytest.mark.parametrize("page", [-1, 5, 2**31 - 1])
@pytest.mark.parametrize(("request_", "index"), [(0, 0), (0, 1), (1, 0)])
def test_validate_names_each_page_that_is_used_and_out_of_the_cache(device, request_, index, page) -> None:
    """Pages 0 to 4 exist. The last page of a request holds few of its tokens, and none is used behind it."""
    batch = make(device, [20, 7])
    batch = replace(batch, kv_cache=batch.kv_cache[:5].contiguous())
    good = torch.zeros_like(batch.block_table).fill_(page)
    good[0, :2], good[1, 0] = 4, 0
    mla_decode(**batch.args() | {"block_table": good}, validate=True)
    bad = good.clone()
    bad[request_, index] = page
    out = torch.full((2, 16, RANK), 7.0, dtype=torch.bfloat16, device=device)
    named = rf"block_table\[{request_}, {index}\]: expected a page of kv_cache, 0 to 4, got {page}"
    with pytest.raises(ValueError, match=named):
        mla_decode(**batch.args() | {"block_table": bad}, validate=True, out=out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize(
    ("length", "expected"),
    [(-1, "a length of at least 0"), (65, r"at most 64 tokens \(4 pages of 16 in block_table\)")],
)
def test_validate_names_a_length_that_the_table_has_no_room_for(
    device: str, length: int, expected: str
) -> None:
    batch = make(device, [20, 64, 0], spare_pages=0)
    batch.block_table[0, 2:] = 0
    assert_same_bits(mla_decode(**batch.args(), validate=True), mla_decode(**batch.args()))
    batch.seq_lens[0] = length
    out = torch.full((3, 16, RANK), 7.0, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=rf"seq_lens\[0\]: expected {expected}, got {length}"):
        mla_decode(**batch.args(), validate=True, out=out)
    assert bool((out == 7.0).all())
