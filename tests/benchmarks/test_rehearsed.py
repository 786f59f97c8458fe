"""Benchmarks of the operations, rehearsed on the host: which rows they give, and which they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import torch

import staleproof
from staleproof.cases import measure
from staleproof.incidents.mla_padding import scene
from staleproof.kernels.adapter import Peer
from staleproof.ops.reference import fp8, topk
from staleproof.ops.reference.mla_decode import mla_decode

sys.path.insert(0, str(Path(__file__).parent))

import rehearsal

LIMITS = {"limit: bytes at the memset rate", "limit: FLOP at the matmul rate"}

pytestmark = pytest.mark.skipif(rehearsal.impossible(), reason="rehearsed on the host")


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def mla_bench(monkeypatch, *shapes: dict, **peers: Peer):
    """The benchmark of MLA decode with these shapes and peers, at one byte and one FLOP a microsecond."""
    bench = rehearsal.load("mla_decode", monkeypatch, rates=lambda: (1.0, 1.0), peers=lambda: peers)
    bench.SHAPES = tuple(bench.Shape(**{"batch": 1, "tokens": 64, "heads": 2} | shape) for shape in shapes)
    return bench


def prepare(q, kv_cache, block_table, seq_lens, scale, splits, out):
    """A peer's call, which is right."""
    assert block_table.shape == (len(seq_lens), -(-int(seq_lens.max()) // 64))
    return lambda: out.copy_(mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=scale)[0])


def dynamic_fp8(result, x, scale):
    """vLLM's operator."""
    for out, found in zip((result, scale), fp8.quantize_fp8_per_tensor(x), strict=True):
        out.copy_(found)


def mode_of(row: dict) -> str:
    """Without where the inputs were."""
    return row["mode"].removesuffix(", cold").removesuffix(", warm")


def test_mla_rows_hold_vllms_own_splits_and_the_best(monkeypatch):
    asked = []

    def splitting(q, kv_cache, block_table, seq_lens, scale, splits, out):
        def launch():
            asked.append(splits)
            result, _ = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=scale)
            return out.copy_(result if splits != 4 else result * 3), None

        return launch

    peer = Peer("vLLM", None, splitting)
    bench = mla_bench(monkeypatch, {"tokens": 1024}, vllm_triton=peer, torch_sdpa=peer)
    # 16 splits are the fastest, and 4 are wrong.
    monkeypatch.setattr(
        measure,
        "graph_times",
        lambda calls, **options: [calls[0]()] and measure.Times(*[abs((asked or [16])[-1] - 16) + 1.0] * 3),
    )
    found = [row for row in bench.rows() if row["provider"].startswith("vLLM")]
    assert set(asked) == {1, 2, 4, 8, 16, 32, 64}
    expected = [("vLLM, best splits", 16, 1.0), ("vLLM, its own splits", 2, 15.0)]
    assert [(row["provider"], row["splits"], row["p50"]) for row in found] == expected
    assert [*found[0]["sweep"]] == ["1", "2", "8", "16", "32", "64"]


def test_several_query_tokens_and_mixed_lengths_are_measured_beside_the_peers_that_take_them(monkeypatch):
    shapes, peer = ({"batch": 2, "q_len": 2}, {"batch": 3, "longest": 192}), Peer("peer", None, prepare)
    # Which takes one query token.
    vllm = Peer("vLLM", None, lambda q, *given: pytest.fail("asked") if q.ndim == 4 else prepare(q, *given))
    bench = mla_bench(monkeypatch, *shapes, vllm_triton=vllm, flashinfer_fa3=peer)
    found: dict[str, set[str]] = {}
    limits, moved = {}, set()
    for row in bench.rows():
        mode = mode_of(row).removeprefix("bf16 ")
        moved.add((mode.partition(" ")[2][0], row["bytes"]))
        found.setdefault(mode, set()).add(row["provider"].partition(",")[0])
        limits[mode, row["provider"]] = row["p50"]
    assert {mode: providers - {"staleproof"} for mode, providers in found.items()} == {
        "batch 2 heads 2 page 64, q_len 2": LIMITS | {"peer"},
        "batch 3 heads 2 page 64, one in 32 of 192 tokens": LIMITS | {"peer", "vLLM"},
    }
    assert all("staleproof" in providers for providers in found.values())
    # The cache of all keys once, queries of 576 and results of 512 values, two bytes each.
    assert moved == {("2", 2 * (128 * 576 + 8 * 1088)), ("3", 2 * (320 * 576 + 6 * 1088))}
    # 2 * keys * query tokens * heads * (576 + 512), at one a microsecond.
    flop = "limit: FLOP at the matmul rate"
    assert limits["batch 2 heads 2 page 64, q_len 2", flop] == 2 * 128 * 2 * 2 * 1088
    assert limits["batch 3 heads 2 page 64, one in 32 of 192 tokens", flop] == 2 * 320 * 2 * 1088


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
    library = torch.library.Library("_C", "FRAGMENT")
    if here:
        monkeypatch.setenv("STALEPROOF_VLLM_C_SO", here)
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        library.define("dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()")
        library.impl("dynamic_scaled_fp8_quant", dynamic_fp8, "CPU")
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
    expected = ["staleproof", "staleproof, two launches"]
    assert [row["provider"] for case in bench.few() for row in case.rows()] == expected
    # Each is called once to be checked and once to be timed.
    assert kernels == ["_whole_kernel"] * 2 + ["_amax_kernel", "_quantize_kernel"] * 2


def test_small_inputs_have_a_warm_row_and_a_cold_one(monkeypatch):
    bench = rehearsal.load("topk", monkeypatch)
    cases = [bench.Peers(False).softmax(8, 2, tokens) for tokens in (1, 16)]
    found = {(row["x_value"], row["mode"]) for case in cases for row in case.rows()}
    words = "bf16, 8 experts, top 2"
    # The L2 that is rehearsed has 4 KiB: 16 bytes are too small to take turns, 256 are not.
    assert found == {(1, f"{words}, warm"), (1, f"{words}, cold"), (16, f"{words}, cold")}


def test_each_operation_is_beside_a_bare_launch_and_the_peers_that_are_here(monkeypatch):
    bench = rehearsal.load("host_time", monkeypatch, ROWS=4, HIDDEN=32, HEADS=2)
    peer = Peer("a peer", None, lambda *given: lambda: None)
    absent = Peer("absent", "no such machine", lambda *given: pytest.fail("prepared"))
    monkeypatch.setattr(bench, "peers", lambda: {"a": peer, "b": absent})
    found: dict[str, list[str]] = {}
    for row in bench.rows():
        found.setdefault(row["kernel"], []).append(row["provider"])
    # Every public operation, and one that is not.
    assert {name.partition(".")[0] for name in found} == {*staleproof.__all__, "distinct_experts"}
    assert found.pop("mla_decode") == [bench.BARE, "staleproof", "a peer"]
    assert {*map(tuple, found.values())} == {(bench.BARE, "staleproof")}


def test_a_call_that_is_found_again_must_give_what_it_gave_first(monkeypatch):
    bench = rehearsal.load("host_time", monkeypatch)
    same, results = torch.ones(2), iter(torch.eye(2))
    with pytest.raises(measure.WrongResult, match="staleproof, topk_softmax: the second call gives another"):
        bench.same_again("topk_softmax", lambda: [same, next(results)])


def test_drawn_cells_are_measured_beside_the_peers_and_say_their_seed(monkeypatch):
    def refuse(*given):
        raise RuntimeError("no such shape\nmore")

    peers = {"vllm_triton": Peer("vLLM", None, refuse), "flashmla": Peer("FlashMLA", None, refuse)}
    bench = mla_bench(monkeypatch, **peers, flashinfer_fa3=Peer("fa3", None, prepare))
    monkeypatch.setattr(bench, "MOST_KEYS", 400)
    monkeypatch.setenv("STALEPROOF_MLA_CELLS", "3")
    monkeypatch.setenv("STALEPROOF_MLA_SEED", "7")
    monkeypatch.setattr(
        bench, "drawn", lambda count, seed: [bench.Shape(2, 64 + seed, 2, mix="half")] * count
    )

    rows = bench.rows()
    assert {row["provider"] for row in rows} == {"staleproof", "fa3"}
    cells = [(row["drawn"], row["x_value"]) for row in rows if row["provider"] == "fa3"]
    assert {*cells} == {(0, 64), (7, 71)}
    assert len([*bench.cells()]) == 3
    assert all(row["error"] < 1e-2 and "lengths: half" in row["mode"] for row in rows)


def test_cells_are_drawn_anew_by_another_seed_only(monkeypatch):
    bench = rehearsal.load("mla_decode", monkeypatch)
    first = bench.drawn(40, 0)
    assert first == bench.drawn(40, 0) != bench.drawn(40, 1)
    assert {shape.heads for shape in first} == {16, 32, 64, 128}
    assert {shape.q_len for shape in first} == {1, 2, 4}
    assert {shape.mix for shape in first if not shape.longest} == {"", "half", "ramp"}
    assert any(shape.longest for shape in first)
    assert max(sum(shape.lengths()) for shape in first) <= bench.MOST_KEYS


def test_rows_of_nan_are_judged_and_timed(monkeypatch):
    bench = rehearsal.load("topk", monkeypatch, NAN_TOKENS=20)
    peers = bench.Peers(False)

    def first_expert(x, bias, top_k, score, **options):
        """Repeats expert 0 where a row is NaN, and weighs it NaN."""
        weights, ids = bench.softmax_then_topk(x, top_k)
        sick = x.isnan().any(-1)[:, None]
        return weights, torch.where(sick, 0, ids)

    peers.sglang = first_expert
    found = {row["provider"]: row for row in peers.softmax(128, 8, 20, nan=True).rows()}
    told = {name: (row["of_these_repeat"], row["of_these_weigh_nan"]) for name, row in found.items()}
    assert told == {
        "staleproof": (0, 0),
        "staleproof, not sanitised": told["staleproof, not sanitised"],
        "softmax, torch.topk": (0, 2),
        "SGLang": (2, 2),
    }
    assert all(row["nan_rows"] == 2 and "a tenth" in row["mode"] for row in found.values())


def test_ours_must_give_distinct_experts_and_numbers_where_rows_are_nan(monkeypatch):
    bench = rehearsal.load("topk", monkeypatch)
    xs = bench.logits(20, 8, nan=True)
    x = xs[0]
    want = bench.reference.topk_softmax(x, 2)
    sick = x.isnan().any(-1)
    for weights, ids in ((torch.nan, 1), (0.5, 0)):
        got = want[0].clone(), want[1].clone()
        got[0][sick], got[1][sick] = weights, torch.tensor([0, ids], dtype=torch.int32)
        given = "topk_softmax", "mode", xs, want
        assert [*bench.timing(*given, {"a peer": lambda x, got=got: got}).rows()]
        with pytest.raises(measure.WrongResult, match="NaN row"):
            [*bench.timing(*given, {"staleproof": lambda x, got=got: got}).rows()]


def test_the_older_vllm_is_asked_in_a_process_of_its_own(monkeypatch, capsys, tmp_path):
    bench = rehearsal.load("topk", monkeypatch)
    assert bench.old_rows() == []
    library = tmp_path / "vllm/old.so"
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/libcudart.so.12").touch()
    monkeypatch.setenv("STALEPROOF_VLLM_OLD_MOE_SO", str(library))
    asked = []

    def run(command, env, **options):
        asked.append(env["STALEPROOF_VLLM_MOE_SO"])
        assert env["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "cuda")
        rows = [{"provider": "staleproof"}, {"provider": "nan_to_num, vLLM"}]
        return Space(returncode=len(asked) - 1, stdout=json.dumps(rows), stderr="cannot load\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    bench.__file__ = "topk.py"
    assert bench.old_rows() == [{"provider": "nan_to_num, vLLM 0.19.1"}]
    assert bench.old_rows() == []
    assert asked == [str(library)] * 2
    said = capsys.readouterr().out
    assert "not set" in said
    assert "vLLM 0.19.1: not run, cannot load" in said


def test_one_launch_a_block_is_a_peer_of_the_zeroer(monkeypatch):
    pool = rehearsal.load("zero_blocks", monkeypatch).Pool("small", 1, 1, 64, 8, (2,))
    bench = rehearsal.load("zero_blocks", monkeypatch, POOLS=(pool,), TURNS=1, AHEAD=1)

    def once(self, call, lists):
        return rehearsal.times([lambda: call(lists[0])])

    monkeypatch.setattr(bench.Bench, "with_copy", once)
    for name in ("empty", "tensor"):
        made = getattr(torch, name)
        plain = lambda *data, made=made, pin_memory=False, **given: made(*data, **given)  # noqa: E731
        monkeypatch.setattr(torch, name, plain)
    found: dict[str, set[str]] = {}
    for row in bench.rows():
        mode = mode_of(row).split(", ", 1)[1]
        found.setdefault(mode, set()).add(row["provider"])
        # Two blocks of one page in each of the pool's segments; the host moves none.
        assert (row["x_value"], row["bytes"]) == (2, 0 if "host" in mode else 2 * pool.block_bytes)
    for mode in ("scattered ids", "consecutive ids"):
        assert {"staleproof", "one launch a block", "limit: cudaMemsetAsync, contiguous bytes"} <= found[mode]
    for mode in ("ids in a list, host time", "ids in a list, copy included"):
        assert len(found[mode]) == 4
        assert {"staleproof", "fresh pinned tensor, one launch a block"} <= found[mode]


def seen(rows: list[dict]) -> dict[tuple[str, int], tuple[int, str | None, list[str]]]:
    """Mode without the cache, and what varies -> the fewest bytes, and who was timed."""
    found: dict = {}
    for row in rows:
        fewest, names = found.setdefault((mode_of(row), row["x_value"]), (row["bytes"], []))
        assert fewest == row["bytes"]
        names.append(row["provider"])
    return found


def test_a_decode_step_reads_its_weights_and_the_cache_of_the_live_requests(monkeypatch):
    bench = rehearsal.load("decode_step", monkeypatch, BATCH=2, CONTEXTS=(64,), LIVE=(1, 2))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config, asked = bench.EngineConfig, []

    def for_device(where, **sizes):
        asked.append(sizes)
        return config.for_device(where, **sizes | {"hidden": 16, "inter": 8})

    # A step that is not captured says as much, and sooner.
    monkeypatch.setattr(scene, "capture", lambda step, on: step() or Space(replay=step))
    monkeypatch.setattr(bench, "EngineConfig", Space(for_device=for_device))
    monkeypatch.setattr(bench, "_paired", lambda engines: dict.fromkeys(engines, measure.Times(2, 1, 3)))
    cases = [*bench.cases()]
    variants = [
        *("without", "clear_empty_rows", "masked_fill", "fused quantiser, all rows", "quantize live rows"),
        "RowCounters on",
    ]
    usual = {"batch": 2, "context": 64, "hidden": 1344, "inter": 512, "experts": 8, "top_k": 2}
    assert asked == [usual]
    # Four heads of 576 and of 512 values, a router of 8 experts and two layers of 8 in each.
    weights = 2 * 16 * (4 * 576 + 4 * 512 + 8 + 2 * 8 * 8)
    assert seen([row for case in cases for row in case.rows()]) == {
        ("batch 2, 64 tokens", live): (weights + live * 64 * 576 * 2, variants) for live in (1, 2)
    }
    other = {name: torch.zeros(2) for name in variants} | {"without": torch.ones(2)}
    for name in variants[1:]:
        if name in ("clear_empty_rows", "masked_fill", "RowCounters on"):
            with pytest.raises(measure.WrongResult, match=f"{name}: live rows differ"):
                cases[0].wrong(name, other)
        else:
            assert cases[0].wrong(name, other) == ""


def test_rows_of_empty_requests_are_cleared_and_no_others(monkeypatch):
    sizes = {"ROWS": 8, "HEADS": 2, "RANK": 4, "LIVE": (3, 8), "ROW_BYTES": 16, "SETS": 2}
    bench = rehearsal.load("clear_empty_rows", monkeypatch, **sizes)
    cases = [*bench.cases()]
    always = ["staleproof", "masked_fill_", "torch.where"]
    by_host = ["slice zero_, n on the host", "limit: cudaMemsetAsync, n on the host"]
    assert seen([row for case in cases for row in case.rows()]) == {
        ("bf16 (8, 2, 4)", 3): (5 * 16, always + by_host),
        # No row is empty, and nothing need be written.
        ("bf16 (8, 2, 4)", 8): (0, always),
    }
    for first, why in ((2, "wrong rows"), (3, ""), (4, "wrong rows")):
        assert cases[0].wrong("cleared", {"cleared": lambda out, first=first: out[first:].zero_()}) == why


def test_a_first_call_is_timed_with_an_empty_cache_and_with_the_one_that_it_left(monkeypatch):
    bench = rehearsal.load("first_call", monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/the/users")
    asked = []

    def run(command, env, **options):
        assert (command[0], command[1], options["check"]) == (sys.executable, "-c", False)
        compile(command[2], "program", "exec")
        asked.append((command[2], env["TRITON_CACHE_DIR"], [*Path(env["TRITON_CACHE_DIR"]).iterdir()]))
        (Path(env["TRITON_CACHE_DIR"]) / "kernel").touch()
        return Space(returncode=0, stdout=f"said before\n[{len(asked)}, 0.5]\n", stderr="")

    monkeypatch.setattr(bench.subprocess, "run", run)
    rows = bench.rows()
    names = [*bench.OPERATIONS]
    assert {*names} <= {*staleproof.__all__}
    assert [(row["kernel"], row["provider"], row["p50"], row["bytes"]) for row in rows] == [
        (name, provider, time, 0)
        for number, name in enumerate(names)
        for first in (2 * number + 1, 2 * number + 2)
        for provider, time in (("staleproof", first), ("the second call", 0.5))
    ]
    for (program, cache, found), (again, same, left) in zip(asked[::2], asked[1::2], strict=True):
        assert (program, cache, found) == (again, same, [])
        assert [path.name for path in left] == ["kernel"]
    assert len({cache for _, cache, _ in asked}) == len(names)
    assert all(f"staleproof.{name}" in program for name, (program, *_) in zip(names, asked[::2], strict=True))
    assert [row["mode"].rpartition(" ")[2] for row in rows[:4]] == ["empty", "empty", "filled", "filled"]
    monkeypatch.setattr(
        bench.subprocess, "run", lambda *_, **__: Space(returncode=1, stdout="", stderr="no GPU")
    )
    with pytest.raises(RuntimeError, match="the call: no GPU"):
        bench.timed("", "the call", "cache")


def test_a_quantised_tensor_of_another_scale_or_of_other_bytes_is_wrong(monkeypatch):
    bench = rehearsal.load("quantize_fp8_per_tensor", monkeypatch)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for live in (2, 4):
        got, scale = fp8.quantize_fp8_per_tensor(x, live_rows=live)
        assert bench.wrong((got, scale), x, live) == ""
        assert bench.wrong((got, scale * (1 + 1e-5)), x, live) == "wrong result"
        assert bench.wrong((got, scale), x * 2, live) == "wrong result"
        # The neighbour of a number is a rounding; the one after that is not.
        codes = got.view(torch.uint8)
        at = got.float().abs().argmax()
        for step, why in ((1, ""), (2, "wrong result")):
            off = codes.clone()
            off.view(-1)[at] -= step
            assert bench.wrong((off.view(torch.float8_e4m3fn), scale), x, live) == why
    assert torch.equal(bench.all_rows(x)[1], fp8.quantize_fp8_per_tensor(x)[1])


def test_bytes_of_the_quantisers(monkeypatch):
    bench = rehearsal.load("quantize_fp8_per_tensor", monkeypatch, ROWS=8, HIDDEN=(64,), LIVE=(2,), FEW=())
    masked = ["staleproof", "staleproof, mask"]
    every = [f"{name}, all rows" for name in ("staleproof", "torch eager", "torch.compile")]
    assert seen(bench.rows()) == {
        # Live rows are read in two bytes an element, and all are written in one.
        ("bf16 (8, 64)", 2): (2 * 64 * 2 + 8 * 64, masked),
        ("bf16 (8, 64)", 8): (3 * 8 * 64, every),
        ("bf16 (8, 64)", 1): (8 * 64, ["limit: memset of the result"]),
    }
    bench = rehearsal.load("quantize_nvfp4", monkeypatch, ROWS=(128, 200), HIDDEN=64)
    names = ["staleproof", "staleproof, padding not written", "zeros, then staleproof", "torch.compile"]
    limit = "limit: copy of as many bytes"
    # Two bytes in, half a byte out, and 4 scales in each row of whole tiles.
    assert seen(bench.rows()) == {
        ("bf16 (m, 64), no scale padding", 128): (128 * 64 * 5 // 2 + 128 * 4, [*names, limit]),
        ("bf16 (m, 64)", 200): (200 * 64 * 5 // 2 + 256 * 4, [*names, limit]),
    }


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        *(("code", "wrong values"), ("codes", "wrong values")),
        *(("owned", "wrong scales"), ("padding", "wrong scales"), ("", "")),
    ],
)
def test_scales_and_padding_of_a_quantiser_are_compared(monkeypatch, spoilt, why):
    bench = rehearsal.load("quantize_nvfp4", monkeypatch, ROWS=(1,), HIDDEN=256)
    (case,) = bench.cases()
    out = (
        torch.zeros(1, 128, dtype=torch.uint8),
        torch.zeros(128, 16, dtype=torch.uint8).view(torch.float8_e4m3fn),
    )
    want = tuple(x.clone() for x in out)

    def quantise():
        for x in out:
            x.view(torch.uint8).zero_()
        if "code" in spoilt:
            out[0][0, : len(spoilt) - 3] = 1
        elif spoilt:
            # The one row has the first four scales.
            out[1].view(torch.uint8).view(-1)[3 if spoilt == "owned" else 300] = 1
        return out

    said = {name: case.wrong(name, {name: [quantise]}, out, want, 1) for name in case.providers}
    assert said["staleproof"] == said["zeros, then staleproof"] == why
    assert said["staleproof, padding not written"] == ("" if spoilt == "padding" else why)
    # A code of this one may differ by a rounding, in one of a hundred.
    assert said["torch.compile"] == ("wrong values" if spoilt == "codes" else "")


class Routing:
    """Routing kernels of vLLM, FlashInfer and SGLang, by their documented arguments."""

    @staticmethod
    def write(weights, ids, found):
        weights.copy_(found[0])
        ids.copy_(found[1])

    def topk_softmax(self, weights, ids, sources, x, renormalize, bias):
        assert (bias, sources.dtype) == (None, torch.int32)
        self.write(weights, ids, topk.topk_softmax(x, ids.shape[1], renormalize=renormalize))

    def topk_sigmoid(self, weights, ids, sources, x, renormalize, bias):
        self.write(weights, ids, topk.topk_sigmoid(x, ids.shape[1], bias=bias, renormalize=renormalize))

    def grouped_topk(self, x, groups, topk_group, k, renormalize, scaling, bias, sigmoid):
        assert (renormalize, sigmoid) == (True, 1)
        return self.grouped(x, groups, topk_group, k, bias, scaling)

    def grouped(self, x, groups, topk_group, k, bias, scaling):
        named = {"num_expert_group": groups, "topk_group": topk_group}
        return topk.grouped_topk(x, k, bias=bias, routed_scaling_factor=scaling, **named)

    def flashinfer(self, x, bias, groups, topk_group, k, scaling, weights, ids, overlapped):
        assert (weights.dtype, bias.dtype, overlapped) == (torch.bfloat16, torch.bfloat16, False)
        self.write(weights, ids, self.grouped(x, groups, topk_group, k, bias.float(), scaling))

    def sglang(self, x, bias, k, score, shared=0, renormalize=None, scaling=1.0, scaled=False, **groups):
        assert shared == 0
        if groups:
            assert (score, renormalize, scaled) == ("sigmoid", True, True)
            return self.grouped(x, groups["num_expert_group"], groups["topk_group"], k, bias, scaling)
        if score == "softmax":
            assert (bias, renormalize) == (None, False)
            return topk.topk_softmax(x, k)
        return topk.topk_sigmoid(x, k, bias=bias, renormalize=renormalize)


def test_every_library_routes_as_ours_by_its_own_arguments(monkeypatch):
    bench = rehearsal.load("topk", monkeypatch)
    libraries = Routing()
    for name in ("vllm", "flashinfer", "sglang"):
        monkeypatch.setattr(bench, name, lambda name=name: getattr(libraries, name, libraries))
    peers = bench.Peers()
    of_vllm = ["vLLM", "nan_to_num, vLLM", "nan_to_num(-inf), vLLM"]
    ours = ["staleproof", "staleproof, not sanitised"]
    for case, experts, k, providers in (
        (peers.softmax(16, 2, 20), 16, 2, [*ours, "softmax, torch.topk", *of_vllm, "SGLang"]),
        (peers.sigmoid(16, 1, False, 20), 16, 1, [*ours, *of_vllm, "SGLang"]),
        (peers.sigmoid(16, 2, True, 20), 16, 2, [*ours, *of_vllm, "SGLang"]),
        (peers.grouped(20), 256, 8, [*ours, *of_vllm, "FlashInfer", "SGLang"]),
    ):
        rows = [row for row in case.rows() if row["cache"] == "cold"]
        assert [row["provider"] for row in rows] == providers, case.kernel
        # Logits in two bytes, and for each choice a weight and an id.
        assert {row["bytes"] for row in rows} == {20 * (experts * 2 + k * 8)}
        assert not any("rows_of_other_experts" in row for row in rows)


def test_libraries_that_are_not_here_are_said_and_not_asked(monkeypatch, capsys):
    bench = rehearsal.load("topk", monkeypatch)
    monkeypatch.setattr(bench.shutil, "which", lambda name: None)
    monkeypatch.setattr(bench.packages, "releases", lambda gate: [])
    peers = bench.Peers()
    assert (peers.vllm, peers.flashinfer, peers.sglang) == (None, None, None)
    said = capsys.readouterr().out.splitlines()
    assert ["is not set" in said[0], "no FlashInfer" in said[1], "no SGLang" in said[2]] == [True] * 3
    loaded = []
    monkeypatch.setenv("STALEPROOF_VLLM_MOE_SO", "moe.so")
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.ops, "_moe_C", "operators", raising=False)
    assert (bench.vllm(), loaded) == ("operators", ["moe.so"])


def test_the_host_is_timed_with_vllms_own_operators(monkeypatch):
    bench = rehearsal.load("host_time", monkeypatch, ROWS=4, EXPERTS=256, HIDDEN=32, HEADS=2)
    monkeypatch.setattr(bench, "peers", dict)
    monkeypatch.setattr(bench, "flashmla", lambda: Peer("FlashMLA", "not here", None))
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.ops, "_moe_C", Routing(), raising=False)

    library = Space(dynamic_scaled_fp8_quant=dynamic_fp8)
    monkeypatch.setattr(torch.ops, "_C", library, raising=False)
    inputs = bench.Inputs()
    assert inputs.peers() == {"mla_decode": {}}
    for name in ("MOE", "C"):
        monkeypatch.setenv(f"STALEPROOF_VLLM_{name}_SO", f"{name}.so")
    found = inputs.peers()
    assert loaded == ["MOE.so", "C.so"]
    names = {"topk_softmax", "topk_sigmoid", "grouped_topk", "quantize_fp8_per_tensor"}
    assert {name for name, calls in found.items() if [*calls] == ["vLLM"]} == names
    for calls in found.values():
        for call in calls.values():
            call()


@pytest.mark.parametrize("blocks", [1, 5])
def test_blocks_that_are_zeroed_are_scattered_or_a_run_and_never_the_null_block(monkeypatch, blocks):
    zero = rehearsal.load("zero_blocks", monkeypatch)
    pool = zero.Pool("small", 3, 2, 64, 8, (blocks,))
    assert pool.block_bytes == 3 * 2 * 64
    bench = zero.Bench(pool)
    assert [cache.shape for cache in bench.caches] == [(2, 8, 64)] * 3
    for scattered in (False, True):
        lists = bench.id_sets(blocks, scattered)
        assert lists == bench.id_sets(blocks, scattered), "every provider and run has the same"
        assert len(lists) == bench.turns(blocks).sets == measure.rotation(blocks * 384).sets
        assert all(len({*ids}) == blocks and min(ids) >= 1 and max(ids) <= 7 for ids in lists)
        runs = [sorted(ids) == [*range(min(ids), min(ids) + blocks)] for ids in lists]
        assert all(runs) if blocks == 1 or not scattered else not all(runs)
    for ids, why in (([3, 5], ""), ([3], "wrong blocks"), ([3, 5, 6], "wrong blocks")):
        assert bench.wrong(lambda _, ids=ids: bench.index_fill(torch.tensor(ids)), [3, 5]) == why


def test_inputs_of_a_decode_batch_are_its_lengths_over_shuffled_pages(monkeypatch):
    bench = rehearsal.load("mla_decode", monkeypatch)
    shape = bench.Shape(3, 130, heads=2, q_len=2, longest=200, cache=torch.float8_e4m3fn)
    q, cache, table, lens = bench.make_inputs(shape)
    assert (q.shape, q.dtype) == ((3, 2, 2, 576), torch.bfloat16)
    assert torch.equal(q.to(torch.float8_e4m3fn).to(q.dtype), q), "no kernel rounds the queries"
    assert (cache.shape, cache.dtype) == ((4 + 3 + 3, 64, 576), torch.float8_e4m3fn)
    assert (lens.tolist(), lens.dtype, table.dtype) == ([200, 130, 130], torch.int32, torch.int32)
    assert table.shape == (3, 4)
    pages = [page for row, count in zip(table.tolist(), (4, 3, 3), strict=True) for page in row[:count]]
    assert sorted(pages) == [*range(10)]
    # An entry that no request uses names the first page.
    assert (table[1, 3], table[2, 3]) == (0, 0)
    half = {"dtype": torch.float16, "cache": torch.float16}
    assert bench.make_inputs(bench.Shape(1, 64, heads=2, **half))[0].shape == (1, 2, 576)


@pytest.mark.parametrize(
    ("provider", "cache", "error", "why"),
    [
        ("staleproof", torch.bfloat16, 0.009, ""),
        ("staleproof", torch.bfloat16, 0.011, "relative error 1.1e-02"),
        ("a peer", torch.bfloat16, 0.011, "relative error 1.1e-02"),
        # A peer rounds the queries and the weights beside such a cache; ours does not.
        ("staleproof", torch.float8_e4m3fn, 0.011, "relative error 1.1e-02"),
        ("a peer", torch.float8_e4m3fn, 0.05, ""),
        ("a peer", torch.float8_e4m3fn, 0.07, "relative error 7.0e-02"),
    ],
)
def test_a_decode_that_is_off_is_refused(monkeypatch, provider, cache, error, why):
    bench = rehearsal.load("mla_decode", monkeypatch)
    case = bench.Case(bench.Shape(1, 64, heads=2, dtype=torch.float32, cache=cache))

    def prepare(q, kv, table, lens, out):
        return lambda: out.copy_(case.want * (1 + error))

    timing = case.timing({provider: prepare}, drawn=7)
    assert timing.wrong(provider) == why
    assert timing.more(provider) == {"error": pytest.approx(error, rel=0.01), "drawn": 7}

    def refuse(*given):
        raise OSError(" no such shape\nand more")

    said = case.timing({provider: refuse}).wrong(provider)
    assert said == "it does not take the shape: no such shape"


def routing(monkeypatch, provider):
    bench = rehearsal.load("topk", monkeypatch)
    x = torch.randn(4, 8)
    weights, ids = want = bench.softmax_then_topk(x, 2)
    return bench.timing("topk_softmax", "mode", [x], want, {provider: lambda x: (weights + 1, ids)})


def zeroing(monkeypatch, provider, wrong=True):
    zero = rehearsal.load("zero_blocks", monkeypatch)
    bench = zero.Bench(zero.Pool("small", 1, 1, 16, 8, (2,)))
    calls = {provider: lambda ids: bench.index_fill(torch.tensor(ids[wrong:]))}
    return bench.timing("mode", 2, {provider: measure.Times(1.0, 1.0, 1.0)}, None, calls, [3, 5])


@pytest.mark.parametrize("timed", [routing, zeroing])
def test_a_wrong_result_of_a_peer_is_left_out_and_one_of_ours_ends_the_run(timed, capsys, monkeypatch):
    assert not [*timed(monkeypatch, "a peer").rows()]
    assert "a peer" in capsys.readouterr().out
    with pytest.raises(measure.WrongResult, match="staleproof"):
        [*timed(monkeypatch, "staleproof").rows()]
    assert [*zeroing(monkeypatch, "staleproof", wrong=False).rows()]


@pytest.mark.parametrize(
    ("change", "others"),
    [
        ("nothing", 0),
        ("1 other expert", 1),
        ("3 other experts", None),
        ("a repeated expert", None),
        ("an id out of range", None),
        ("a wrong weight", None),
    ],
)
def test_nearly_equal_experts_may_be_chosen_otherwise_in_a_row_of_100_and_nothing_else(
    monkeypatch, change, others
):
    bench = rehearsal.load("topk", monkeypatch)
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(1))
    weights, ids = bench.softmax_then_topk(x, 3)
    want = weights.clone(), ids.clone()
    if "other" in change:
        # The fourth best in place of the third, with its own weight.
        rows, order = int(change[0]), x.softmax(-1).sort(descending=True)
        weights[:rows, 2], ids[:rows, 2] = order.values[:rows, 3], order.indices[:rows, 3].int()
    elif change == "a repeated expert":
        ids[0, 2] = ids[0, 1]
    elif change == "an id out of range":
        ids[0, 2] = 16
    elif change == "a wrong weight":
        weights[0] *= 1.01
    assert bench.other_choices((weights, ids), want, x) == others
