"""mla_decode over a cache of E4M3 numbers: values, and its contract for padding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.bits import assert_same_bits

from staleproof.ops.mla.decode import mla_decode

sys.path.insert(0, str(Path(__file__).parent))

from test_mla_decode import Batch, assert_close, make, poison_past_seq_len

# A code that is NaN, the largest number, and minus the largest.
CODES = {"NaN": 0x7F, "448": 0x7E, "-448": 0xFE}


def quantised(batch: Batch) -> Batch:
    return replace(batch, kv_cache=batch.kv_cache.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_values_and_k_scale(device: str, dtype: torch.dtype, splits: int | None) -> None:
    batch = quantised(make(device, [0, 1, 64, 147], dtype=dtype, page_size=64))
    out, lse = mla_decode(**batch.args(), num_kv_splits=splits, k_scale=0.25)
    assert out.dtype == dtype
    assert_close(batch, out, lse, k_scale=0.25)


def test_several_query_tokens(device: str) -> None:
    batch = quantised(make(device, [4, 65, 0, 130], heads=20, q_len=3, page_size=32))
    out, lse = mla_decode(**batch.args())
    assert_close(batch, out, lse)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_past_seq_len_changes_a_bit(device: str, code: int, splits: int) -> None:
    batch = quantised(make(device, [0, 5, 64, 100], page_size=48))
    want = mla_decode(**poison_past_seq_len(batch, 0).args(), num_kv_splits=splits)
    out, lse = mla_decode(**poison_past_seq_len(batch, code).args(), num_kv_splits=splits)
    assert_same_bits((out, lse), want)
    assert not bool(out[0].any())
    assert bool((lse[0] == -torch.inf).all())


def test_a_live_nan_reaches_its_own_request_alone(device: str) -> None:
    """Also under the interpreter, whose own cast makes 480 of it."""
    batch = quantised(make(device, [33, 70]))
    batch.kv_cache.view(torch.uint8)[batch.block_table[1, 0].item(), 3, 5] = CODES["NaN"]
    out, _ = mla_decode(**batch.args())
    assert bool(out[1].isnan().all())
    assert not bool(out[0].isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_deepseek_shape_with_each_tile(device: str, heads: int, code: int) -> None:
    lens = [0, 2, 64, 65, 1000, 7, 128, 514]
    batch = quantised(make(device, lens, heads=heads, page_size=64, rank=512, rope=64, spare_pages=800))
    want = mla_decode(**batch.args(), k_scale=0.5)
    assert_close(batch, *want, k_scale=0.5)
    assert_same_bits(mla_decode(**poison_past_seq_len(batch, code).args(), k_scale=0.5), want)
