"""The Hopper kernels give the reference's results; each row of a table takes another way through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits
from tests.mla_shares import Share
from tests.ops.mla_batches import E4M3, Batch, assert_close, make, poisoned

from staleproof import graph
from staleproof.device import interpreting
from staleproof.evidence.canary import bits
from staleproof.ops.launching import Seen
from staleproof.ops.mla.decode import Call, mla_decode
from staleproof.ops.mla.merge import merge_parts_kernel
from staleproof.ops.mla.plan import Cut, aligned_parts, fits_hopper, merge_tiles
from staleproof.ops.mla.queries import float16_queries_kernel

SCALE = 192**-0.5
CACHES = {"bfloat16": torch.bfloat16, "E4M3": E4M3}


def test_a_merge_covers_64_rows_and_512_columns() -> None:
    for batch, parts in ((1, 132), (1, 66), (7, 66), (8, 132), (31, 132), (32, 66), (100, 33), (1024, 132)):
        tiles = columns, rows, _, warps = merge_tiles(batch, parts)
        assert 512 % columns == 64 % rows == 0
        # Powers of two, as Triton's ranges are.
        assert all(n & (n - 1) == 0 for n in tiles)
        # Eight columns a thread: no two warps share the parts of a row.
        assert warps == 1 or columns * rows // 8 >= 32 * warps


@pytest.mark.parametrize(
    ("lens", "programs", "heads", "q_len", "step"),
    [
        ([500, 0, 70, 64, 1000], 7, 6, 1, 2),
        ([500, 0, 70, 64, 1000], None, 2, 5, 8),
        ([640] * 3, None, 6, 1, 8),
        ([640] * 9, 12, 2, 5, 8),
        # Instead of seven programs, four with a request each just pay off, and then no longer; six with two
        # or three requests.
        ([448] * 4, 7, 6, 1, 2),
        ([512] * 4, 7, 2, 5, 8),
        ([64] * 16, 7, 6, 1, 2),
        ([3], 12, 2, 5, 2),
        # The first groups of rows have less than twelve units, and one is cut where the next is not.
        ([129, 67], 12, 2, 5, 8),
    ],
    ids=str,
)
def test_merged_parts_are_the_whole(
    device: str, lens: list[int], programs: int | None, heads: int, q_len: int, step: int
) -> None:
    """Parts as the decode leaves them, for groups of rows; a request in one part is left alone.

    ``programs`` have equal parts of all requests, or with None each request has three splits.
    """
    is_split, programs = programs is None, programs or 3 * len(lens)
    rows, own, room, rank = heads * q_len, 3, 4, 32
    groups = -(-rows // own)
    aligned = 3 if is_split else aligned_parts(programs, len(lens))
    generator = torch.Generator().manual_seed(1)
    # Keys of each row.
    limits = [[max(n - q_len + row // heads + 1, 0) for row in range(rows)] for n in lens]
    scores = [torch.randn(rows, n, generator=generator) * 3 for n in lens]
    for mine, its in zip(scores, limits, strict=True):
        mine[torch.arange(mine.shape[1]) >= torch.tensor(its)[:, None]] = -torch.inf
    values = [torch.randn(rows, n, rank, generator=generator) for n in lens]
    parts = torch.full((2 * groups * programs * room, rank), torch.nan)
    part_lse = torch.full((len(parts),), torch.nan)
    cut = torch.zeros(programs, groups, dtype=torch.int32)
    out, lse = torch.full((len(lens), rows, rank), -7.0), torch.full((len(lens), rows), -7.0)
    want_out, want_lse = out.clone(), lse.clone()

    def attended(request: int, of: slice, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = scores[request][of, keys]
        # A row without keys gets zeros.
        weights = some.softmax(1).nan_to_num()[..., None]
        return (weights * values[request][of, keys]).sum(1), some.logsumexp(1)

    for group in range(groups):
        of = slice(group * own, min((group + 1) * own, rows))
        seen = [its[of.stop - 1] for its in limits]
        for p in range(programs):
            mine, cut[p, group] = Share(
                torch.tensor(seen), p, programs, aligned, 0 if is_split else 16
            ).loaded(0)
            for request, first, last in mine:
                if last - first == max(-(-seen[request] // 64), 1):
                    continue
                at = (2 * (p * groups + group) + (first == 0)) * room
                part = slice(at, at + of.stop - of.start)
                parts[part], part_lse[part] = attended(request, of, slice(64 * first, 64 * last))
                want_out[request, of], want_lse[request, of] = attended(request, of, slice(None))
                want_out[request, of] *= 0.5
    # A length that the block table has no pages for counts as the most that it has.
    capacity = max(lens)
    seq_lens = torch.tensor([n + 999 * (n == capacity) for n in lens], dtype=torch.int32)
    tensors = [x.to(device) for x in (parts, part_lse, cut, seq_lens, out, lse)]
    sizes = 0.5, rows, own, heads, capacity, q_len, programs, aligned
    grid = 2 * groups, -(-own // 2), min(len(lens), programs)
    known = 0 if is_split else 1 << (programs - 1).bit_length()
    merge_parts_kernel[grid](*tensors, *sizes, rank, room, 16, 2, step, known, interpreting())
    torch.testing.assert_close(tensors[4].cpu(), want_out)
    torch.testing.assert_close(tensors[5].cpu(), want_lse)


def test_queries_become_float16_numbers_times_a_power_of_two(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 2, 5, 96, generator=generator).bfloat16() * torch.logspace(-25, 25, 30).view(
        3, 2, 5, 1
    )
    q = q.bfloat16()
    q[0, 1, 2], q[1, 0, 3, 95], q[2, 1, 4, 0] = 0.0, torch.nan, torch.inf
    # The largest number of a row may be a rotary one.
    q[1, 1, 0, 70] *= 1000
    numbers = torch.empty(30, 96, dtype=torch.float16, device=device)
    scales = torch.empty(30, device=device)
    # Heads of a wider tensor.
    wide = torch.full((3, 2, 9, 96), torch.nan).bfloat16()
    wide[:, :, 2:7] = q
    given = wide.to(device)[:, :, 2:7]
    strides = given.stride()[:3]
    float16_queries_kernel[(8,)](given, numbers, scales, *strides, 30, 2, 5, 64, 32, 4, False, interpreting())
    rows, numbers, scales = q.view(30, 96).float(), numbers.cpu().float(), scales.cpu()
    assert torch.equal(scales.log2(), scales.log2().round())
    finite = rows.isfinite().all(1)
    back = numbers[finite] * scales[finite, None]
    # What is lost is far below what bfloat16 holds of the largest number of the row.
    assert bool(((back - rows[finite]).abs() <= rows[finite].abs().amax(1, True) * 2**-24).all())
    assert bool(numbers[13, 95].isnan())
    assert bool(numbers[29, 0].isinf())
    # Of each four columns two go to the first half of 64, two to the second.
    shuffled = torch.empty(1, 128, dtype=torch.float16, device=device)
    columns = torch.arange(128.0, device=device).bfloat16().view(1, 1, 1, 128)
    strides = columns.stride()[:3]
    float16_queries_kernel[(1,)](
        columns, shuffled, torch.empty(1, device=device), *strides, 1, 1, 1, 64, 64, 4, True, interpreting()
    )
    order = (shuffled[0].cpu().float() / shuffled.max().cpu().float() * 127).round().int().tolist()
    assert order[:6] + order[32:36] == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7]
    assert order[64:66] + order[126:] == [64, 65, 126, 127]
    assert sorted(order) == list(range(128))


@pytest.mark.parametrize(
    ("heads", "q_len", "parts", "splits", "processors", "cache"),
    [
        (128, None, 0, 1, 132, "bfloat16"),
        (128, None, 33, 1, 132, "E4M3"),
        (40, 2, 0, 5, 132, "E4M3"),
        (16, None, 0, 5, 132, "bfloat16"),
        (16, None, 0, 1, 2, "E4M3"),
        (24, 3, 33, 1, 132, "bfloat16"),
        (12, 2, 0, 1, 132, "E4M3"),
        (8, 2, 0, 1, 2, "bfloat16"),
        (32, None, 33, 1, 132, "E4M3"),
    ],
)
def test_a_repeated_call_gives_each_launch_its_memory(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    q_len: int | None,
    parts: int,
    splits: int,
    processors: int,
    cache: str,
) -> None:
    """Launches are recorded in place of Triton's: what the first is given, and addresses of the second."""
    from staleproof.ops.mla import hopper_call as kernels

    first: list[Any] = []
    again: list[Any] = []
    made: list[torch.Tensor] = []

    @dataclass
    class Launch:
        order: int

        def __call__(self, *addresses: Any) -> None:
            again.append((self.order, *addresses))

        def described(self, descriptor: Any) -> tuple[Any, ...]:
            return "described", descriptor.base.data_ptr()

    def launched(kernel: Any, grid: Any, tensors: Any, sizes: Any, **options: Any) -> Any:
        first.append((kernel, grid, tensors, sizes, options))
        return Launch(len(first))

    def empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty(shape, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(kernels, "launched", launched)
    monkeypatch.setattr(kernels, "empty", empty)
    monkeypatch.setattr(kernels, "processor_count", lambda index: processors)
    _tokens, batch = q_len or 1, 4

    def tensors() -> tuple[torch.Tensor, ...]:
        rows = (batch, heads) if q_len is None else (batch, q_len, heads)
        # Pages of 128 tokens of which a layer has every second.
        pages = torch.zeros(3, 2, 128, 576).to(CACHES[cache])[:, 0]
        table, lengths = torch.zeros(batch, 2, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
        q, out = torch.zeros(*rows, 576).bfloat16(), torch.zeros(*rows, 512).bfloat16()
        return q, pages, table, lengths, out, torch.zeros(rows)

    old = q, pages, table, lengths, out, lse = tensors()
    kind = "packed" if heads in (24, 12, 8) else "pairs"
    call = kernels.HopperCall(Call(q, pages, table, lengths, 0.1, 0.5, out, lse), Cut(kind, parts, splits))
    assert call.is_ready
    converts = cache == "E4M3"
    # Two tokens share a program, if they are of no more than 32 rows beside an E4M3 cache.
    shares = kind == "packed" and not (converts and heads > 16)
    narrow = converts and (2 * heads if shares else min(heads, 64)) <= 32
    few = not converts and heads <= 16 and kind == "pairs"
    wanted = {narrow: kernels.mla_decode_e4m3_kernel, few: kernels.mla_decode_few_kernel}
    kernel, grid, _, _, options = first[converts]
    assert kernel is wanted.get(True, kernels.mla_decode_pairs_kernel)
    assert not converts or first[0][0] is float16_queries_kernel
    # Two processors have one program for each of two groups of rows, or two for one group.
    assert grid[1] == (parts or (batch * splits if processors == 132 else 2 if grid[0] == 1 else 1))
    assert options == {"num_warps": 4, "launch_pdl": converts}
    # Parts of a request are merged by another launch, which needs memory for them.
    is_cut = parts > 0 or splits > 1
    assert (first[-1][0] is merge_parts_kernel) == is_cut
    assert len(made) == is_cut + converts
    sizes = [len(x) for x in made]

    memory = *old, *made
    for _ in range(2):
        made.clear()
        again.clear()
        call(*(given := tensors()))

        def at(x: Any, now: tuple[torch.Tensor, ...] = (*given, *made)) -> int:
            """Where this call has what the first one had there."""
            places = (
                (b.data_ptr(), x.data_ptr() - a.data_ptr(), a) for a, b in zip(memory, now, strict=True)
            )
            return next(start + behind for start, behind, a in places if 0 <= behind < a.nbytes)

        assert again == [
            (
                order,
                *(y for x in given for y in (("described", at(x.base)) if hasattr(x, "base") else (at(x),))),
            )
            for order, (_, _, given, _, _) in enumerate(first, 1)
        ]
        assert [len(x) for x in made] == sizes


@pytest.fixture(name="cuts")
def cuts_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """These kernels wherever they support the call, also where another is faster; each cut in turn."""
    now = ""

    def cut(q: torch.Tensor, kv_cache: torch.Tensor, q_len: int, capacity: int) -> Cut:
        heads = q.shape[-2]
        is_packed = q_len > 1 and heads <= 32 and (q_len * heads > 16 or heads < 5)
        kernel = "packed" if is_packed else "pairs"
        blocks = -(-q_len * heads // Cut(kernel).height(q_len, heads))
        if now == "equal parts":
            return Cut(kernel, max(1, 132 // blocks))
        is_split = now == "splits of a request"
        return Cut(kernel, 0, max(2, 132 // (blocks * q.shape[0])) if is_split else 1)

    def each() -> Iterator[str]:
        nonlocal now
        for now in ("equal parts", "whole requests", "splits of a request"):
            # What other cuts have left.
            monkeypatch.setattr("staleproof.ops.mla.decode._SEEN", Seen())
            yield now

    monkeypatch.setattr("staleproof.ops.mla.decode.fastest", cut)
    return each()


def _hopper_batch(
    device: str, lens: list[int], heads: int = 128, q_len: int | None = None, cache: str = "bfloat16"
) -> Batch:
    """Arguments of a call that goes to this kernel."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper")
    shape = {"heads": heads, "q_len": q_len, "page_size": 64, "rank": 512, "rope": 64}
    batch = make(device, lens, cache=CACHES[cache], **shape) | {"softmax_scale": SCALE}
    assert fits_hopper(batch["q"], batch["kv_cache"], 512, q_len or 1, SCALE)
    return batch


LENGTHS = {
    "equal": [512] * 16,
    "ragged": [1, 63, 64, 65, 127, 128, 129, 300, 5000, 2, 1000, 192],
    "empty between": [0, 700, 0, 0, 64, 1, 0, 4000, 33, 0],
    "all empty": [0] * 9,
    "fewer tiles than programs": [3] * 8,
    "more requests than threads": [i * 37 % 400 for i in range(300)],
    "equal in unequal numbers": [130] * 149,
    "two or three a program": [i * 53 % 300 for i in range(170)],
}


# Of one query token, of several in a program (of which the last one may have fewer), and of both caches.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "q_len", "lengths", "cache"),
    [
        (128, None, "equal", "bfloat16"),
        (128, None, "empty between", "E4M3"),
        (40, None, "ragged", "E4M3"),
        (16, None, "more requests than threads", "bfloat16"),
        (5, None, "ragged", "E4M3"),
        (128, 2, "two or three a program", "bfloat16"),
        (64, 3, "all empty", "bfloat16"),
        (40, 3, "fewer tiles than programs", "E4M3"),
        (8, 2, "equal in unequal numbers", "bfloat16"),
        (32, 2, "ragged", "E4M3"),
        (24, 3, "empty between", "bfloat16"),
        (16, 4, "more requests than threads", "E4M3"),
        (5, 7, "ragged", "bfloat16"),
        (1, 64, "two or three a program", "bfloat16"),
        (16, 2, "equal in unequal numbers", "E4M3"),
        (4, 4, "all empty", "E4M3"),
    ],
)
def test_values_where_requests_are_cut_at_any_tile(
    device: str, cuts: Iterator[str], cache: str, lengths: str, heads: int, q_len: int | None
) -> None:
    batch = _hopper_batch(device, LENGTHS[lengths], heads, q_len, cache) | {"k_scale": 0.5}
    for cut in cuts:
        # New memory may hold what an equal batch was answered.
        out = torch.full((*batch["q"].shape[:-1], 512), torch.nan, device=device).bfloat16()
        lse = torch.full(out.shape[:-1], torch.nan, device=device)
        mla_decode(**batch, out=out, lse=lse)
        if any(LENGTHS[lengths]):
            assert_close(batch, out, lse)
        empty = batch["seq_lens"] == 0
        assert torch.equal(bits(out[empty]), torch.zeros_like(bits(out[empty]))), cut
        assert bool((lse[empty] == -torch.inf).all()), cut


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "cache", "poison"),
    [
        (16, "bfloat16", torch.nan),
        (128, "bfloat16", 3e38),
        (128, "bfloat16", torch.inf),
        (16, "E4M3", 448.0),
        (128, "E4M3", torch.nan),
    ],
)
def test_what_neighbours_hold_changes_no_bit(
    device: str, cuts: Iterator[str], cache: str, poison: float, heads: int
) -> None:
    """Lengths decide where a request is cut, contents do not: of the tail of a page, or of other requests."""
    for _ in cuts:
        batch = _hopper_batch(device, LENGTHS["ragged"], heads, cache=cache)
        want_out, want_lse = mla_decode(**batch)
        for _ in range(5):
            out, lse = torch.full_like(want_out, torch.nan), torch.full_like(want_lse, torch.nan)
            mla_decode(**poisoned(batch, poison), out=out, lse=lse)
            assert_same_bits((out, lse), (want_out, want_lse))
        # All of request 8, which is cut into several parts.
        pages = batch["block_table"][8, : -(-5000 // 64)].long()
        spoiled = batch["kv_cache"].bfloat16().clone()
        spoiled[pages] = poison
        batch["kv_cache"] = spoiled.to(CACHES[cache])
        out, lse = mla_decode(**batch)
        others = torch.arange(len(out), device=device) != 8
        assert_same_bits((out[others], lse[others]), (want_out[others], want_lse[others]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "q_len", "cache", "poison"),
    [
        (32, 2, "bfloat16", torch.nan),
        (24, 3, "E4M3", 3e38),
        (16, 4, "bfloat16", torch.inf),
        (1, 64, "bfloat16", torch.nan),
        (128, 2, "E4M3", torch.nan),
        (16, 2, "E4M3", torch.nan),
        (4, 4, "bfloat16", 3e38),
    ],
)
def test_a_later_query_token_changes_no_bit_of_an_earlier_one(
    device: str, cuts: Iterator[str], cache: str, heads: int, q_len: int, poison: float
) -> None:
    """Its key lies in the same tile, in the next one, or behind the part; its own rows show what it holds."""
    lens = [64, 65, 66, 67, 127, 128, 129, 131, 640, 642, 2000]
    batch = _hopper_batch(device, lens, heads, q_len, cache)
    for _ in cuts:
        want = mla_decode(**batch)
        for earlier in {1, q_len - 1}:
            spoiled = batch["kv_cache"].bfloat16().clone()
            for request, n in enumerate(lens):
                token = n - q_len + earlier
                spoiled[batch["block_table"][request, token // 64].long(), token % 64] = poison
            # Of E4M3 448 is the largest.
            spoiled = spoiled.clamp(-448, 448) if cache == "E4M3" else spoiled
            found = mla_decode(**batch | {"kv_cache": spoiled.to(CACHES[cache])})
            assert_same_bits([x[:, :earlier] for x in found], [x[:, :earlier] for x in want])
            if poison != poison:
                assert bool(found[0][:, earlier:].isnan().all())


BOTH_CACHES = [(16, "E4M3"), (32, "bfloat16"), (128, "E4M3"), (128, "bfloat16")]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "cache"), BOTH_CACHES)
def test_a_thousand_calls_give_the_same_bits(
    device: str, cuts: Iterator[str], heads: int, cache: str
) -> None:
    """Groups of warps that did not wait for each other would show here; racecheck cannot tell."""
    batch = _hopper_batch(device, [i * 37 % 400 for i in range(40)] + [4000], heads, cache=cache)
    for cut in cuts:
        want_out, want_lse = mla_decode(**batch)
        out, lse = torch.empty_like(want_out), torch.empty_like(want_lse)
        differ = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(1000):
            mla_decode(**batch, out=out, lse=lse)
            differ += (bits(out) != bits(want_out)).sum() + (bits(lse) != bits(want_lse)).sum()
        assert differ.item() == 0, cut


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "cache"), BOTH_CACHES)
def test_graph_replays_follow_the_lengths(device: str, cuts: Iterator[str], heads: int, cache: str) -> None:
    """The parts are found on the device in each replay."""
    for _ in cuts:
        batch = _hopper_batch(device, [2000] * 16, heads, cache=cache)
        out, lse = mla_decode(**batch)
        captured = graph.capture(
            lambda b=batch, out=out, lse=lse: mla_decode(**b, out=out, lse=lse), on=device
        )
        for lens in ([1] * 16, [2000, 0] * 8, [0] * 15 + [1999], [i * 100 for i in range(16)], [2000] * 16):
            batch["seq_lens"].copy_(torch.tensor(lens))
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            captured.replay()
            assert_close(batch, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "q_len", "splits", "cache"),
    [
        (128, None, 1, "bfloat16"),
        (40, None, 3, "E4M3"),
        (128, 2, 3, "bfloat16"),
        (32, 2, 1, "E4M3"),
        (16, None, 3, "bfloat16"),
    ],
)
def test_with_splits_given_a_request_depends_on_itself_alone(
    device: str, splits: int, cache: str, heads: int, q_len: int | None
) -> None:
    """The same bits alone as in a batch, whatever its neighbours."""
    batch = _hopper_batch(device, LENGTHS["ragged"], heads, q_len, cache) | {"num_kv_splits": splits}
    out, lse = mla_decode(**batch)
    assert_close({k: v for k, v in batch.items() if k != "num_kv_splits"}, out, lse)
    again, _ = mla_decode(**poisoned(batch, 448.0 if cache == "E4M3" else torch.nan))
    assert torch.equal(bits(again), bits(out))
    for i in (0, 8):
        one = {k: batch[k][i : i + 1] for k in ("q", "block_table", "seq_lens")}
        assert_same_bits(mla_decode(**batch | one), (out[i : i + 1], lse[i : i + 1]))


@pytest.mark.gpu
def test_queries_of_any_magnitude_beside_an_e4m3_cache(device: str, cuts: Iterator[str]) -> None:
    """float16 ends at 65,504; bfloat16 and a row's own power of two do not."""
    batch = _hopper_batch(device, [300] * 4, 16, cache="E4M3")
    for cut in cuts:
        want, _ = mla_decode(**batch)
        for factor in (2.0**40, 2.0**-40):
            scaled = batch | {"q": batch["q"] * factor, "softmax_scale": SCALE / factor}
            out, _ = mla_decode(**scaled)
            assert torch.equal(bits(out), bits(want)), cut
