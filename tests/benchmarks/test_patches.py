"""The benchmark of the patches: a row named "patched" is a patched one, of vLLM's own function."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from staleproof.cases import measure
from staleproof.kernels.vllm_sources import executed
from staleproof.ops import topk

sys.path.insert(0, str(Path(__file__).parent))

import environment
import real_routing
import rehearsal

pytestmark = pytest.mark.skipif(rehearsal.impossible(), reason="rehearsed on the host")


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch):
    bench = rehearsal.load("patches", monkeypatch, BATCH=8, HOST_TURNS=2)
    root = environment.cache() / bench.VERSION / "vllm"
    if not root.exists():
        pytest.skip(f"vLLM {bench.VERSION} was not fetched")
    bench.root = root
    zeroer, mla_call = bench.zeroer, bench.mla_call
    # The host has no pinned memory, and small caches are enough.
    monkeypatch.setattr(bench, "zeroer", lambda: zeroer(pin=False, layers=1))

    def attention(*sizes):
        # vLLM's kernel takes minutes in the interpreter: a copy of the query stands for it.
        module = importlib.import_module(bench.TRITON_MLA)
        module.decode_attention_fwd = lambda q, k, v, out, *rest, **options: out.copy_(q[..., :512])
        return mla_call(102, 100, 1, 64)

    monkeypatch.setattr(bench, "mla_call", attention)
    return bench


def rows(bench, *chosen, library=False, files=None):
    """The rows of the cases whose patch and mode contain one of these."""
    with executed(bench.root, *(files or bench.FILES)):
        bench.import_ops()
        stand_in = real_routing.CompiledOps(clamped=True, hash_clamped=True) if library else None
        try:
            found = [c for c in bench.cases() if any(name in f"{c.patch}: {c.mode}" for name in chosen)]
            return [*bench.measured(iter(found), bench.VERSION, library)]
        finally:
            if stand_in is not None:
                stand_in.library._destroy()


def test_patches_of_the_host_have_a_row_without_and_one_with(bench):
    found = rows(bench, "undrained_ids", "mla_recording", "staging_race")
    assert {row["kernel"] for row in found} == {
        *("patch undrained_ids", "patch mla_recording", "patch staging_race")
    }
    assert [row["provider"] for row in found] == ["without", "patched"] * (len(found) // 2)
    for row in found:
        assert (row["vllm"], row["needed"], row["cache"]) == ("0.20.2", True, None)
    assert {row["applies_to"] for row in found} == {"0.17.1 to 0.25.1", "0.17.1 to 0.22.1"}


FLASHINFER = {("FlashInferExperts.apply", "warm"), ("host: FlashInferExperts.apply", None)}


def test_patches_of_the_device(bench):
    found = rows(bench, "mla_padding", "topk_sigmoid", "topk_hash", "duplicate", library=True)
    assert {(row["mode"].partition(",")[0], row["cache"]) for row in found} == {
        ("topk_sigmoid", "warm"),
        ("host: topk_sigmoid", None),
        ("topk_hash_softplus_sqrt", "warm"),
        ("host: topk_hash_softplus_sqrt", None),
        ("Triton MLA", "cold"),
    } | (FLASHINFER if importlib.util.find_spec("flashinfer") else set())


def test_vllms_function_is_wrapped_while_the_patched_row_is_timed(bench, monkeypatch):
    wrapped = []

    def timed(calls):
        ops = importlib.import_module(bench.OPS)
        wrapped.append(hasattr(ops.topk_sigmoid, "__wrapped__"))
        return measure.Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(measure, "graph_times", timed)
    assert len(rows(bench, "bias: topk_sigmoid", library=True)) == 2
    assert wrapped == [False, True]


def test_a_patch_that_steps_back_gets_no_row(bench):
    # vLLM's envs make the key of its compile cache, without which a traced patch steps back.
    files = tuple(name for name in bench.FILES if name != "vllm.envs")
    with pytest.raises(
        measure.WrongResult, match=r"topk_nan_bias is not in place.*needs compile cache, which"
    ):
        rows(bench, "bias: topk_sigmoid", library=True, files=files)


@pytest.mark.parametrize("name", ["grouped_topk", "topk_sigmoid"])
def test_a_patch_that_changes_a_result_gets_no_row(bench, monkeypatch, name):
    if name == "topk_sigmoid":
        # It writes nothing. For the other the stand-in knows no groups, so that ours chooses other experts.
        monkeypatch.setattr(topk, "route", lambda *args, **kwargs: None)
    with pytest.raises(measure.WrongResult, match=f"topk_nan_bias changes the result of {name}"):
        rows(bench, f"bias: {name}", library=True)


@pytest.mark.parametrize(("rows", "same"), [(1, True), (2, False)])
def test_of_nearly_equal_experts_either_may_be_chosen_in_a_row_of_a_hundred(bench, rows, same):
    ids = torch.arange(8).repeat(100, 1)
    other = ids.clone()
    other[:rows, 0] = 9
    assert bench.agree([ids, "text"], [other.flip(-1), "text"]) is same


def test_a_patch_that_is_not_needed_says_so(bench):
    (older,) = {case.patch for case in bench.older_cases(bench.VERSION)}
    assert older == "topk_nan"
    with executed(bench.root, *bench.FILES):
        bench.import_ops()
        stand_in = real_routing.CompiledOps(clamped=True)
        try:
            found = [*bench.measured(bench.older_cases(bench.VERSION), bench.VERSION, True)]
        finally:
            stand_in.library._destroy()
    assert {row["needed"] for row in found} == {False}
    assert {row["applies_to"] for row in found} == {"0.17.0 to 0.19.1"}


def test_scales_are_timed_in_a_graph_and_outside(bench, monkeypatch):
    root = environment.cache() / bench.OLDER / "vllm"
    if not root.exists():
        pytest.skip(f"vLLM {bench.OLDER} was not fetched")
    monkeypatch.setattr(bench, "BATCH", 128)
    zeros, zeroed = torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *args, **given: zeroed.append(args) or zeros(*args, **given))
    with executed(root, *bench.OLDER_FILES):
        found = [case for case in bench.older_cases(bench.OLDER) if case.patch == "scale_padding"]
        assert len(found) == 4
        for case in found:
            zeroed.clear()
            without, patched = bench.pair(case, bench.OLDER)
            assert (without["provider"], patched["provider"]) == ("without", "patched")
            assert bool(zeroed) is ("compiled" in case.mode)
