"""The Hopper kernels of equal parts: they compile without a GPU, and give the reference's results on one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.mla.plan import fits_equal_parts, merge_tiles
from staleproof.ops.reference import mla_decode as reference

sys.path.insert(0, str(Path(__file__).parent))

import hopper

SCALE = 192**-0.5
CACHES = {"bfloat16": torch.bfloat16, "E4M3": torch.float8_e4m3fn}
Batch = dict[str, Any]

PROGRAM = """
from staleproof.ops.mla.KIND import mla_decode_KIND_kernel as kernel

kinds = dict.fromkeys(kernel.arg_names, "i32")
kinds |= dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("lse", "parts", "part_lse"), "*fp32")
kinds |= dict.fromkeys(("block_table", "seq_lens"), "*i32")
kinds |= dict.fromkeys(("softmax_scale", "k_scale"), "fp32")
layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
kinds["columns"] = "*i32" if CONVERTS else f"tensordesc<bf16[64, 64],{layout!r}>"
constants = {"PAGE_SIZE": 64, "BATCH": 128, "CONVERTS": CONVERTS}
pointers = [name for name, kind in kinds.items() if kind[0] == "*"]
aligned = [*pointers, "q_batch_stride", "q_token_stride", "q_head_stride", "row_words"]
"""


@pytest.mark.parametrize("kind", ["pairs", "few"])
@pytest.mark.parametrize("converts", [False, True], ids=["bfloat16", "E4M3"])
def test_its_addresses_stay_out_of_local_memory(kind: str, converts: bool, tmp_path) -> None:
    """With the addresses of all products in a stack of 640 bytes a thread, a call took 1.5 times as long."""
    program = f"CONVERTS = {converts}\n" + PROGRAM.replace("KIND", kind)
    result = hopper.compiled(program, TRITON_DUMP_PTXAS_LOG="1", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert 0 < int(re.findall(r"shared memory (\d+)", result.stdout)[0]) <= 227 * 1024
    # Of pairs 8 bytes with Triton 3.6, 256 with 3.9; 640 and 728 with the addresses.
    log = result.stdout + result.stderr
    stack = re.findall(r"(\d+) bytes (?:cumulative stack size|stack frame)", log)
    assert max(map(int, stack)) < 400


def test_a_merge_covers_64_rows_and_512_columns() -> None:
    for batch, most in ((1, 132), (1, 66), (7, 66), (8, 132), (31, 132), (32, 66), (100, 33), (1024, 132)):
        columns, rows, parts = merge_tiles(batch, most)
        assert 512 % columns == 64 % rows == 0
        # Powers of two, as Triton's ranges are.
        assert all(n & (n - 1) == 0 for n in (columns, rows, parts))


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """This kernel wherever it supports the call, also where another is faster."""
    monkeypatch.setattr(
        "staleproof.ops.mla.decode.equal_parts_are_faster", lambda *args: fits_equal_parts(*args[:-1])
    )


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
    assert fits_equal_parts(q, kv_cache, 512, q_len or 1, SCALE)
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
@pytest.mark.parametrize(
    ("heads", "q_len"), [(128, None), (40, None), (128, 2), (64, 3), (16, None), (5, None), (16, 4), (8, 2)]
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
