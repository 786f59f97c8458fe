"""The Hopper kernels: they compile without a GPU, and give the reference's results on one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from staleproof.device import interpreting
from staleproof.ops.launching import Seen
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.mla.merge import merge_parts_kernel
from staleproof.ops.mla.plan import REQUEST_COST, Cut, aligned_parts, fits_hopper, merge_tiles
from staleproof.ops.mla.queries import float16_queries_kernel
from staleproof.ops.reference import mla_decode as reference

sys.path.insert(0, str(Path(__file__).parent))

import hopper

SCALE = 192**-0.5
CACHES = {"bfloat16": torch.bfloat16, "E4M3": torch.float8_e4m3fn}
Batch = dict[str, Any]

EQUAL_PARTS = """
from staleproof.ops.mla.hopper import mla_decode_KIND_kernel as kernel

kinds = dict.fromkeys(kernel.arg_names, "i32")
kinds |= dict.fromkeys(("q", "out"), "*bf16") | {"q": "*fp16" if CONVERTS else "*bf16"}
kinds |= dict.fromkeys(("lse", "parts", "part_lse", "scales"), "*fp32")
kinds |= dict.fromkeys(("block_table", "seq_lens"), "*i32")
kinds |= dict.fromkeys(("softmax_scale", "k_scale"), "fp32")
layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
kinds["columns"] = "*i32" if CONVERTS else f"tensordesc<bf16[64, 64],{layout!r}>"
constants = {"PAGE_SIZE": 64, "BATCH": BATCH, "CONVERTS": CONVERTS}
pointers = [name for name, kind in kinds.items() if kind[0] == "*"]
aligned = [*pointers, "q_batch_stride", "q_token_stride", "q_head_stride", "row_words"]
"""
ALONE = """
from staleproof.ops.mla.sm90 import mla_decode_sm90_kernel as kernel

kinds = dict.fromkeys(kernel.arg_names, "i32")
kinds |= dict.fromkeys(("q", "kv_cache", "out"), "*bf16") | {"lse": "*fp32"}
kinds |= dict.fromkeys(("block_table", "seq_lens"), "*i32")
kinds |= dict.fromkeys(("softmax_scale", "k_scale"), "fp32")
constants = {"IS_SPLIT": False, "PAGE_SIZE": 64}
aligned = [name for name, kind in kinds.items() if kind[0] == "*" or name.endswith("stride")]
"""
# (kernel, whether the cache is E4M3, requests that the sum over lengths covers; 0: one a program).
COMPILED = [("pairs", False, 128), ("few", True, 0), ("alone", False, 0)]


@pytest.mark.parametrize(("kind", "converts", "batch"), COMPILED)
def test_it_compiles_and_its_addresses_stay_out_of_local_memory(kind, converts, batch, tmp_path) -> None:
    """With the addresses of all products in a stack of 640 bytes a thread, a call took 1.5 times as long."""
    program = ALONE if kind == "alone" else EQUAL_PARTS.replace("KIND", kind)
    program = f"CONVERTS, BATCH = {converts}, {batch}\n" + program
    result = hopper.compiled(program, TRITON_DUMP_PTXAS_LOG="1", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    # What a block may have.
    assert 0 < int(re.findall(r"shared memory (\d+)", result.stdout)[0]) <= 227 * 1024
    # Of pairs 8 bytes with Triton 3.6, up to 328 with 3.9; 640 and 728 with the addresses.
    log = result.stdout + result.stderr
    stack = re.findall(r"(\d+) bytes (?:cumulative stack size|stack frame)", log)
    assert max(map(int, stack)) < 400


def test_a_merge_covers_64_rows_and_512_columns() -> None:
    for batch, most in ((1, 132), (1, 66), (7, 66), (8, 132), (31, 132), (32, 66), (100, 33), (1024, 132)):
        columns, rows, parts = merge_tiles(batch, most)
        assert 512 % columns == 64 % rows == 0
        # Powers of two, as Triton's ranges are.
        assert all(n & (n - 1) == 0 for n in (columns, rows, parts))


def _cuts(lens: list[int], programs: int) -> list[list[tuple[int, int, int]]]:
    """The (request, first tile, tile behind the last) of each program, as ``hopper.equal_part`` cuts."""
    tiles = [max(-(-n // 64), 1) for n in lens]
    units = [n + REQUEST_COST for n in tiles]
    aligned = aligned_parts(programs, len(lens))
    if len({*units}) == 1 and -(-sum(units) // aligned) <= -(-sum(units) // programs) + REQUEST_COST:
        programs = aligned
    programs, parts, start = min(programs, sum(units)), [], 0
    for p in range(programs):
        begin, end = sum(units) * p // programs, sum(units) * (p + 1) // programs
        start, mine = 0, []
        for request, n in enumerate(tiles):
            first = min(max(begin - start - REQUEST_COST, 0), n)
            last = min(end - start - REQUEST_COST, n)
            if first < last:
                mine.append((request, first, last))
            start += n + REQUEST_COST
        parts.append(mine)
    return parts


@pytest.mark.parametrize("lens", [[500, 0, 70, 64, 1000], [640] * 3, [640] * 9, [3]], ids=str)
@pytest.mark.parametrize("programs", [7, 12])
@pytest.mark.parametrize("step", [2, 8])
def test_merged_parts_are_the_whole(device: str, lens: list[int], programs: int, step: int) -> None:
    """Parts as the decode leaves them, for two groups of 3 heads; a request in one part is left alone."""
    heads, own, room, rank = 6, 3, 4, 32
    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(heads, n, generator=generator) * 3 for n in lens]
    values = [torch.randn(heads, n, rank, generator=generator) for n in lens]
    parts = torch.full((2 * 2 * programs * room, rank), torch.nan)
    part_lse = torch.full((len(parts),), torch.nan)
    out, lse = torch.full((len(lens), heads, rank), -7.0), torch.full((len(lens), heads), -7.0)
    want_out, want_lse = out.clone(), lse.clone()
    for p, mine in enumerate(_cuts(lens, programs)):
        for request, first, last in mine:
            if last - first == max(-(-lens[request] // 64), 1):
                continue
            keys = slice(64 * first, min(64 * last, lens[request]))
            slot = 2 * p + (first == 0)
            want_lse[request] = scores[request].logsumexp(1)
            want_out[request] = (scores[request].softmax(1)[..., None] * values[request]).sum(1)
            for group in range(2):
                heads_of = slice(group * own, (group + 1) * own)
                part = scores[request][heads_of, keys]
                at = (2 * (p * 2 + group) + (slot & 1)) * room
                part_lse[at : at + own] = part.logsumexp(1)
                weights = part.softmax(1)[..., None]
                parts[at : at + own] = (weights * values[request][heads_of, keys]).sum(1)
    tensors = [x.to(device) for x in (parts, part_lse, torch.tensor(lens, dtype=torch.int32), out, lse)]
    sizes = heads, own, heads, 4096, 1, len(lens), programs, aligned_parts(programs, len(lens))
    merge_parts_kernel[2 * 2, 2, len(lens)](*tensors, *sizes, rank, room, 16, 2, step, 16, interpreting())
    torch.testing.assert_close(tensors[3].cpu(), want_out)
    torch.testing.assert_close(tensors[4].cpu(), want_lse)


def test_queries_become_float16_numbers_times_a_power_of_two(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, 2, 5, 96, generator=generator).bfloat16() * torch.logspace(-25, 25, 30).view(
        3, 2, 5, 1
    )
    q = q.bfloat16()
    q[0, 1, 2], q[1, 0, 3, 95], q[2, 1, 4, 0] = 0.0, torch.nan, torch.inf
    numbers = torch.empty(30, 96, dtype=torch.float16, device=device)
    scales = torch.empty(30, device=device)
    # Heads of a wider tensor.
    wide = torch.full((3, 2, 9, 96), torch.nan).bfloat16()
    wide[:, :, 2:7] = q
    given = wide.to(device)[:, :, 2:7]
    strides = given.stride()[:3]
    float16_queries_kernel[(8,)](given, numbers, scales, *strides, 30, 2, 5, 64, 32, 4, interpreting())
    rows, numbers, scales = q.view(30, 96).float(), numbers.cpu().float(), scales.cpu()
    assert torch.equal(scales.log2(), scales.log2().round())
    finite = rows.isfinite().all(1)
    back = numbers[finite] * scales[finite, None]
    # What is lost is far below what bfloat16 holds of the largest number of the row.
    assert bool(((back - rows[finite]).abs() <= rows[finite].abs().amax(1, True) * 2**-24).all())
    assert bool(numbers[13, 95].isnan())
    assert bool(numbers[29, 0].isinf())


@pytest.fixture(name="chosen", params=["equal parts", "one request a program"])
def chosen_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """These kernels wherever they support the call, also where another is faster."""

    def cut(q: torch.Tensor, kv_cache: torch.Tensor, q_len: int, capacity: int) -> Cut:
        blocks = -(-q_len * q.shape[-2] // min(q.shape[-2], 64))
        return Cut("pairs", max(1, 132 // blocks) if request.param == "equal parts" else 0)

    monkeypatch.setattr("staleproof.ops.mla.decode.fastest", cut)
    # What other cuts have left.
    monkeypatch.setattr("staleproof.ops.mla.decode._SEEN", Seen())


def _hopper_batch(
    device: str, lens: list[int], heads: int = 128, q_len: int | None = None, cache: str = "bfloat16"
) -> Batch:
    """Arguments of a call that goes to this kernel; entries of the table that belong to no token are -1."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for Hopper")
    generator = torch.Generator().manual_seed(0)
    counts = [-(-n // 64) for n in lens]
    q = torch.randn(len(lens), q_len or 1, heads, 576, generator=generator).bfloat16()
    kv_cache = torch.randn(sum(counts) + 3, 64, 576, generator=generator).bfloat16()
    pages = iter(torch.randperm(len(kv_cache), generator=generator).tolist())
    table = torch.full((len(lens), max(counts) + 2), -1, dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([next(pages) for _ in range(count)])
    q, kv_cache = (q if q_len else q[:, 0]).to(device), kv_cache.to(device).to(CACHES[cache])
    assert fits_hopper(q, kv_cache, 512, q_len or 1, SCALE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return {
        "q": q,
        "kv_cache": kv_cache,
        "block_table": table.to(device),
        "seq_lens": seq_lens,
        "softmax_scale": SCALE,
    }


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def _poisoned(batch: Batch, value: float) -> Batch:
    """Tokens that belong to no request become ``value``."""
    # Which holds every E4M3 number.
    kept = batch["kv_cache"].bfloat16()
    cache = torch.full_like(kept, value)
    for request, n in enumerate(batch["seq_lens"].tolist()):
        token = torch.arange(n, device=cache.device)
        page = batch["block_table"][request][token // 64].long()
        cache[page, token % 64] = kept[page, token % 64]
    return batch | {"kv_cache": cache.to(batch["kv_cache"].dtype)}


def _assert_close(batch: Batch, out: torch.Tensor, lse: torch.Tensor) -> None:
    want_out, want_lse = reference.mla_decode(**batch | {"kv_cache": batch["kv_cache"].bfloat16()})
    # bfloat16 holds 8 bits.
    assert ((out.float() - want_out.float()).norm() / want_out.float().norm()).item() < 8e-3
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-3)


LENGTHS = {
    "equal": [512] * 16,
    "ragged": [1, 63, 64, 65, 127, 128, 129, 300, 5000, 2, 1000, 192],
    "empty between": [0, 700, 0, 0, 64, 1, 0, 4000, 33, 0],
    "all empty": [0] * 9,
    "fewer tiles than programs": [3] * 8,
    "more requests than threads": [i * 37 % 400 for i in range(300)],
}


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("heads", "q_len"),
    [(128, None), (40, None), (128, 2), (64, 3), (32, 2), (40, 3), (16, None), (5, None), (16, 4), (8, 2)],
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("cache", CACHES)
def test_values_where_requests_are_cut_at_any_tile(
    device: str, cache: str, lengths: str, heads: int, q_len: int | None
) -> None:
    batch = _hopper_batch(device, LENGTHS[lengths], heads, q_len, cache) | {"k_scale": 0.5}
    out, lse = mla_decode(**batch)
    if any(LENGTHS[lengths]):
        _assert_close(batch, out, lse)
    empty = batch["seq_lens"] == 0
    assert torch.equal(_bits(out[empty]), torch.zeros_like(_bits(out[empty])))
    assert bool((lse[empty] == -torch.inf).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(
    ("cache", "poison"),
    [*(("bfloat16", x) for x in (torch.nan, torch.inf, 3e38)), ("E4M3", torch.nan), ("E4M3", 448.0)],
)
@pytest.mark.parametrize("heads", [16, 128])
def test_what_neighbours_hold_changes_no_bit(device: str, cache: str, poison: float, heads: int) -> None:
    """Lengths decide where a request is cut, contents do not: of the tail of a page, or of other requests."""
    batch = _hopper_batch(device, LENGTHS["ragged"], heads, cache=cache)
    want_out, want_lse = mla_decode(**batch)
    for _ in range(5):
        out, lse = torch.full_like(want_out, torch.nan), torch.full_like(want_lse, torch.nan)
        mla_decode(**_poisoned(batch, poison), out=out, lse=lse)
        assert torch.equal(_bits(out), _bits(want_out))
        assert torch.equal(_bits(lse), _bits(want_lse))
    # All of request 8, which is cut into several parts.
    pages = batch["block_table"][8, : -(-5000 // 64)].long()
    spoiled = batch["kv_cache"].bfloat16()
    spoiled[pages] = poison
    batch["kv_cache"] = spoiled.to(CACHES[cache])
    out, lse = mla_decode(**batch)
    others = torch.arange(len(out), device=device) != 8
    assert torch.equal(_bits(out[others]), _bits(want_out[others]))
    assert torch.equal(_bits(lse[others]), _bits(want_lse[others]))


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_thousand_calls_give_the_same_bits(device: str, heads: int, cache: str) -> None:
    """Groups of warps that did not wait for each other would show here; racecheck cannot tell."""
    batch = _hopper_batch(device, [i * 37 % 400 for i in range(40)] + [4000], heads, cache=cache)
    want_out, want_lse = mla_decode(**batch)
    out, lse = torch.empty_like(want_out), torch.empty_like(want_lse)
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        mla_decode(**batch, out=out, lse=lse)
        differ += (_bits(out) != _bits(want_out)).sum() + (_bits(lse) != _bits(want_lse)).sum()
    assert differ.item() == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_replays_follow_the_lengths(device: str, heads: int, cache: str) -> None:
    """The parts are found on the device in each replay."""
    batch = _hopper_batch(device, [2000] * 16, heads, cache=cache)
    out, lse = mla_decode(**batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode(**batch, out=out, lse=lse)
    for lens in ([1] * 16, [2000, 0] * 8, [0] * 15 + [1999], [i * 100 for i in range(16)], [2000] * 16):
        batch["seq_lens"].copy_(torch.tensor(lens))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        _assert_close(batch, out, lse)


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("heads", "q_len"), [(128, None), (40, None), (128, 2), (32, 2), (16, None)])
def test_with_splits_given_a_request_depends_on_itself_alone(
    device: str, splits: int, cache: str, heads: int, q_len: int | None
) -> None:
    """The same bits alone as in a batch, whatever its neighbours; 3 splits run the kernel of one request."""
    batch = _hopper_batch(device, LENGTHS["ragged"], heads, q_len, cache) | {"num_kv_splits": splits}
    out, lse = mla_decode(**batch)
    _assert_close({k: v for k, v in batch.items() if k != "num_kv_splits"}, out, lse)
    again, _ = mla_decode(**_poisoned(batch, 448.0 if cache == "E4M3" else torch.nan))
    assert torch.equal(_bits(again), _bits(out))
    for i in (0, 8):
        one = {k: batch[k][i : i + 1] for k in ("q", "block_table", "seq_lens")}
        alone, alone_lse = mla_decode(**batch | one)
        assert torch.equal(_bits(alone), _bits(out[i : i + 1]))
        assert torch.equal(_bits(alone_lse), _bits(lse[i : i + 1]))


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
def test_queries_of_any_magnitude_beside_an_e4m3_cache(device: str) -> None:
    """float16 ends at 65,504; bfloat16 and a row's own power of two do not."""
    batch = _hopper_batch(device, [300] * 4, 16, cache="E4M3")
    want, _ = mla_decode(**batch)
    for factor in (2.0**40, 2.0**-40):
        scaled = batch | {"q": batch["q"] * factor, "softmax_scale": SCALE / factor}
        out, _ = mla_decode(**scaled)
        assert torch.equal(_bits(out), _bits(want))
