"""vLLM's own files on a GPU, with and without our patches.

The files run under their own names, with stand-ins for the rest of the package. Needs an importable
``vllm`` folder with them, and for routing ``STALEPROOF_VLLM_MOE_SO``, the compiled ``_moe_C`` of the
wheel. A release whose files do not load with stand-ins is skipped with the reason.
"""

from __future__ import annotations

import importlib
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from staleproof.kernels.vllm_sources import UnavailableError, executed
from staleproof.vllm import plugin as vllm_plugin

pytestmark = pytest.mark.gpu
BENCHMARK = Path(__file__).parents[2] / "benchmarks/patches.py"
PATCHES = vllm_plugin.patches()


@pytest.fixture(name="bench", scope="module")
def bench_fixture() -> Iterator[dict[str, Any]]:
    """The calls that the benchmark times, over vLLM's files."""
    names = runpy.run_path(str(BENCHMARK))
    try:
        root = names["vllm_root"]()
    except UnavailableError as error:
        pytest.skip(f"not run: {error}")
    with executed(root, *names["FILES"]):
        # Here, so that no single test leaves it.
        importlib.import_module("vllm")
        yield names


def _replayed(bench: dict[str, Any], patch: bool) -> dict[int, tuple[int, torch.Tensor]]:
    """Live count -> padding rows with NaN, and the live rows' bits, of one captured step."""
    torch.manual_seed(0)
    call, seq_lens = bench["mla_call"](16, 16, heads=16, context=128)
    if patch:
        PATCHES["mla_padding"].apply("0.20.2")
    try:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = call()
    finally:
        PATCHES["mla_padding"].revert()
    found = {}
    # Down and up again: zeroed once is not zeroed always.
    for live in (16, 5, 1, 9):
        seq_lens.fill_(0)
        seq_lens[:live] = 128
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        bad = int((~out[live:].isfinite()).any(-1).any(-1).sum())
        assert patch is False or not out[live:].count_nonzero()
        found[live] = bad, out[:live].view(torch.int16).clone()
    return found


def test_empty_rows_of_a_captured_triton_mla(bench):
    off, on, again = (_replayed(bench, patch) for patch in (False, True, False))
    for live in off:
        assert off[live][0] == again[live][0] == 16 - live
        assert on[live][0] == 0
        assert torch.equal(off[live][1], on[live][1])


@pytest.fixture(name="ops")
def ops_fixture(bench) -> Any:
    path = os.environ.get("STALEPROOF_VLLM_MOE_SO")
    if path is None:
        pytest.skip("STALEPROOF_VLLM_MOE_SO is not set")
    torch.ops.load_library(path)
    return importlib.import_module(bench["OPS"])


def _select(ops: Any, name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows, top_k = x.shape[0], 8
    weights = torch.empty(rows, top_k, device="cuda")
    ids, indices = (torch.empty(rows, top_k, dtype=torch.int32, device="cuda") for _ in range(2))
    if name == "grouped_topk":
        _, ids = ops.grouped_topk(x, 8, 4, top_k, True, 2.5, bias, 1)
    else:
        getattr(ops, name)(weights, ids, indices, x, False, bias)
    return ids


def _repeated(ids: torch.Tensor) -> int:
    ordered = ids.sort(-1).values
    return int((ordered[:, 1:] == ordered[:, :-1]).any(-1).sum())


@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid", "grouped_topk"])
def test_routing_by_the_compiled_ops(ops, name):
    torch.manual_seed(0)
    x = torch.randn(1000, 256, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(256, device="cuda") * 0.1
    bias[4:] = torch.nan
    counts = {}
    counts["off"] = _repeated(_select(ops, name, x, bias))
    with PATCHES["topk_nan_bias"].applied("0.20.2"):
        counts["bias"] = _repeated(_select(ops, name, x, bias))
    # Where bias and logits are finite, a patch may not change the choice.
    clean = torch.randn(256, device="cuda") * 0.1
    x[::7] = torch.nan
    counts["NaN logits, off"] = _repeated(_select(ops, name, x, clean))
    with PATCHES["topk_nan"].applied("0.18.1"):
        ours = _select(ops, name, x, clean)
        counts["NaN logits, on"] = _repeated(ours)
    theirs = _select(ops, name, x, clean)
    with PATCHES["topk_nan_bias"].applied("0.20.2"):
        biased = _select(ops, name, x, clean)
    # In few values most choices are between equal sums: the same ids in the same order.
    coarse, steps = x.nan_to_num().round(), (clean * 20).round()
    tied = _select(ops, name, coarse, steps)
    with PATCHES["topk_nan_bias"].applied("0.20.2"):
        counts["ties that differ"] = int((_select(ops, name, coarse, steps) != tied).any(-1).sum())
    whole = torch.arange(1000, device="cuda") % 7 != 0
    same, same_biased = (
        (made.sort(-1).values == theirs.sort(-1).values).all(-1)[whole].float().mean().item()
        for made in (ours, biased)
    )
    print(name, counts, f"same choice {same:.3f}, {same_biased:.3f}")
    assert counts["bias"] == counts["NaN logits, on"] == 0
    # Sums of two experts round apart, so that nearly equal groups may change places.
    assert counts["ties that differ"] <= (20 if name == "grouped_topk" else 0)
    assert same > 0.98
    assert same_biased > 0.98
    if name == "topk_sigmoid":
        assert counts["off"] > 0


def test_two_steps_of_the_zeroer_before_the_first_copy(bench):
    found = {}
    for patched in (False, True, False):
        zeroer, caches = bench["zeroer"]()
        if patched:
            PATCHES["staging_race"].apply("0.20.2")
        try:
            # As many ids as below: a kernel for another count would be compiled in between, and ours
            # reads vLLM's table at its first call.
            zeroer.zero_block_ids([62, 63])
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                # The step before still runs: both copies wait in the stream.
                torch.cuda._sleep(200_000_000)
                zeroer.zero_block_ids([1, 2])
                zeroer.zero_block_ids([8, 9])
        finally:
            PATCHES["staging_race"].revert()
        torch.cuda.synchronize()
        zero = [b for b in range(64) if not any(c[:, b].count_nonzero() for c in caches)]
        found.setdefault(patched, []).append(zero)
    print(found)
    assert found == {False: [[8, 9, 62, 63]] * 2, True: [[1, 2, 8, 9, 62, 63]]}
