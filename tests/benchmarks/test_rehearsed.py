"""Benchmarks of the operations, rehearsed on the host: which rows they give, and which they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import staleproof
from staleproof.cases import measure
from staleproof.kernels.adapter import Peer
from staleproof.ops.reference import fp8
from staleproof.ops.reference.mla_decode import mla_decode

sys.path.insert(0, str(Path(__file__).parent))

import rehearsal

LIMITS = {"limit: bytes at the memset rate", "limit: FLOP at the matmul rate"}

pytestmark = pytest.mark.skipif(rehearsal.impossible(), reason="rehearsed on the host")


def test_mla_rows_hold_vllms_own_splits_and_the_best(monkeypatch):
    bench = rehearsal.load("mla_decode", monkeypatch)
    monkeypatch.setattr(bench, "SHAPES", (bench.Shape(1, 1024, heads=2),))
    monkeypatch.setattr(bench, "rates", lambda: (1.0, 1.0))
    asked = []

    def prepare(q, kv_cache, block_table, seq_lens, scale, splits, out):
        def launch():
            asked.append(splits)
            result, _ = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=scale)
            return out.copy_(result if splits != 4 else result * 3), None

        return launch

    # 16 splits are the fastest, and 4 are wrong.
    monkeypatch.setattr(
        measure,
        "graph_times",
        lambda calls, **options: [calls[0]()] and measure.Times(*[abs((asked or [16])[-1] - 16) + 1.0] * 3),
    )
    peer = Peer("vLLM", None, prepare)
    monkeypatch.setattr(bench, "peers", lambda: {"vllm_triton": peer, "torch_sdpa": peer})
    found = [row for row in bench.rows() if row["provider"].startswith("vLLM")]
    assert set(asked) == {1, 2, 4, 8, 16, 32, 64}
    assert [(row["provider"], row["splits"], row["p50"]) for row in found] == [
        ("vLLM, best splits", 16, 1.0),
        ("vLLM, its own splits", 2, 15.0),
    ]
    assert [*found[0]["sweep"]] == ["1", "2", "8", "16", "32", "64"]


def test_several_query_tokens_and_mixed_lengths_are_measured_beside_the_peers_that_take_them(monkeypatch):
    bench = rehearsal.load("mla_decode", monkeypatch)
    shapes = bench.Shape(2, 64, heads=2, q_len=2), bench.Shape(3, 64, heads=2, longest=192)
    monkeypatch.setattr(bench, "SHAPES", shapes)
    monkeypatch.setattr(bench, "rates", lambda: (1.0, 1.0))

    def prepare(q, kv_cache, block_table, seq_lens, scale, splits, out):
        assert block_table.shape == (len(seq_lens), -(-int(seq_lens.max()) // 64))
        return lambda: out.copy_(mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=scale)[0])

    peer = Peer("peer", None, prepare)
    monkeypatch.setattr(bench, "peers", lambda: {"vllm_triton": peer, "flashinfer_fa3": peer})
    found: dict[str, set[str]] = {}
    limits = {}
    for row in bench.rows():
        mode = row["mode"].removeprefix("bf16 ").removesuffix(", cold").removesuffix(", warm")
        found.setdefault(mode, set()).add(row["provider"].partition(",")[0])
        limits[mode, row["provider"]] = row["p50"]
    assert {mode: providers - {"staleproof"} for mode, providers in found.items()} == {
        "batch 2 heads 2 page 64, q_len 2": LIMITS | {"peer"},
        "batch 3 heads 2 page 64, one in 32 of 192 tokens": LIMITS | {"peer"},
    }
    assert all("staleproof" in providers for providers in found.values())
    # 2 * keys * query tokens * heads * (576 + 512), at one a microsecond.
    flop = "limit: FLOP at the matmul rate"
    assert limits["batch 2 heads 2 page 64, q_len 2", flop] == 2 * 128 * 2 * 2 * 1088
    assert limits["batch 3 heads 2 page 64, one in 32 of 192 tokens", flop] == 2 * 320 * 2 * 1088


def test_vllms_triton_kernel_is_not_asked_for_several_query_tokens(monkeypatch):
    bench = rehearsal.load("mla_decode", monkeypatch)
    monkeypatch.setattr(bench, "SHAPES", (bench.Shape(1, 64, heads=2, q_len=2),))
    monkeypatch.setattr(bench, "rates", lambda: (1.0, 1.0))
    triton = Peer("vLLM", None, lambda *given: pytest.fail("asked"))
    monkeypatch.setattr(bench, "peers", lambda: {"vllm_triton": triton})
    assert {row["provider"] for row in bench.rows()} == {"staleproof"} | LIMITS


def test_a_large_batch_is_not_split_to_64(monkeypatch):
    bench = rehearsal.load("mla_decode", monkeypatch)
    assert bench.splits_to_try(128, 512) == [1, 2, 4, 8]
    assert bench.splits_to_try(16, 8192) == [1, 2, 4, 8, 16]
    assert bench.splits_to_try(1, 512) == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("here", "name"),
    [(None, None), ("vllm-0.22.1/_C.so", "vLLM 0.22.1's op, all rows"), ("_C.so", "vLLM's op, all rows")],
)
def test_vllms_fp8_op_is_a_peer_where_its_library_is_named(monkeypatch, capsys, here, name):
    sizes = {"ROWS": 8, "HIDDEN": (64,), "LIVE": (1, 8), "FEW": ((2, 64),)}
    bench = rehearsal.load("quantize_fp8_per_tensor", monkeypatch, **sizes)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.delenv("STALEPROOF_VLLM_C_SO", raising=False)
    library = torch.library.Library("_C", "FRAGMENT")
    if here:
        monkeypatch.setenv("STALEPROOF_VLLM_C_SO", here)
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        library.define("dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")

        def op(result, x, scale):
            quantised, scales = fp8.quantize_fp8_per_tensor(x)
            result.copy_(quantised)
            scale.copy_(scales)

        library.impl("dynamic_scaled_fp8_quant", op, "CPU")
    try:
        found = {row["provider"] for row in bench.rows()}
    finally:
        library._destroy()
    assert {provider for provider in found if provider.startswith("vLLM")} == ({name} if name else set())
    assert ("vLLM's fp8 op is not run" in capsys.readouterr().out) is (here is None)
    assert {"staleproof, all rows", "torch eager, all rows"} <= found


def test_a_small_batch_is_timed_with_one_launch_and_with_two(monkeypatch):
    bench = rehearsal.load("quantize_fp8_per_tensor", monkeypatch, FEW=((2, 64),))
    launched, kernels = bench.fp8.launched, []

    def named(kernel, *args, **options):
        kernels.append(kernel.fn.__name__)
        return launched(kernel, *args, **options)

    monkeypatch.setattr(bench.fp8, "launched", named)
    assert [row["provider"] for case in bench.few() for row in case.rows()] == [
        "staleproof",
        "staleproof, two launches",
    ]
    # Each is called once to be checked and once to be timed.
    assert kernels == ["_whole_kernel"] * 2 + ["_amax_kernel", "_quantize_kernel"] * 2


def test_scales_without_padding_are_said_to_have_none(monkeypatch):
    bench = rehearsal.load("quantize_nvfp4", monkeypatch, ROWS=(1, 128), HIDDEN=64)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    found = {(row["x_value"], row["mode"].partition(", ")[2]) for row in bench.rows()}
    assert {(rows, mode.removesuffix("cold").removesuffix("warm").strip(", ")) for rows, mode in found} == {
        (1, "64)"),
        (128, "64), no scale padding"),
    }


def test_small_inputs_have_a_warm_row_and_a_cold_one(monkeypatch):
    sizes = {"TOKENS": (1, 16), "SOFTMAX_SHAPES": ((8, 2),)}
    bench = rehearsal.load("topk", monkeypatch, **sizes)
    found = {(row["x_value"], row["mode"]) for row in bench.softmax_rows(None)}
    words = "bf16, 8 experts, top 2"
    # The L2 that is rehearsed has 4 KiB: 16 bytes are too small to take turns, 256 are not.
    assert found == {(1, f"{words}, warm"), (1, f"{words}, cold"), (16, f"{words}, cold")}


def test_each_operation_is_beside_a_bare_launch_and_the_peers_that_are_here(monkeypatch):
    bench = rehearsal.load("host_time", monkeypatch, ROWS=4, HIDDEN=32, HEADS=2)
    monkeypatch.setattr(measure, "host_times", rehearsal.host_times)
    peer = Peer("a peer", None, lambda *given: lambda: None)
    absent = Peer("absent", "no such machine", lambda *given: pytest.fail("prepared"))
    monkeypatch.setattr(bench, "peers", lambda: {"a": peer, "b": absent})
    for name in ("STALEPROOF_VLLM_MOE_SO", "STALEPROOF_VLLM_C_SO"):
        monkeypatch.delenv(name, raising=False)
    found: dict[str, list[str]] = {}
    for row in bench.rows():
        found.setdefault(row["kernel"], []).append(row["provider"])
    # Every public operation, and one that is not.
    assert {name.partition(".")[0] for name in found} == {*staleproof.__all__, "distinct_experts"}
    assert found.pop("mla_decode") == [bench.BARE, "staleproof", "a peer"]
    assert {*map(tuple, found.values())} == {(bench.BARE, "staleproof")}


def test_a_call_that_is_found_again_must_give_what_it_gave_first(monkeypatch):
    bench = rehearsal.load("host_time", monkeypatch)
    results = iter(torch.eye(2))
    with pytest.raises(measure.WrongResult, match="staleproof, topk_softmax: the second call gives another"):
        bench.same_again("topk_softmax", lambda: [next(results)])
