"""The real fused MoE: how cases are run and survived; on a Hopper GPU, the table itself."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import environment
import pytest
import torch

from staleproof.cases import children, machine
from staleproof.cases.case import absent, reading
from staleproof.device import Provenance
from staleproof.incidents.moe_routing import broken, cases, fused_moe
from staleproof.incidents.moe_routing.batch import ILLEGAL_ACCESS, NAN_ROWS, RIGHT, SILENT, Batch
from staleproof.incidents.moe_routing.consumer import observe
from staleproof.incidents.moe_routing.fused_moe import CUDA_ILLEGAL_ACCESS, DIED, TIMED_OUT, Case, outcome
from staleproof.kernels import moe_module, packages
from staleproof.ops.reference import topk as reference

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void a::b::finalizeMoeRoutingKernel<x, (a::ScaleMode)1>(const T2 *, int)+0x3d0
=========     by thread (0,0,0) in block (1,0,0)
=========     Access to 0x7f0000 is out of bounds
=========     and is 2,190,366 bytes after the nearest allocation at 0x7e0000 of size 2 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: {errors} error{s}
"""
# Stands for the function that runs in a child: what a case does stands in its ``ids``. Each process writes
# a line with the tokens of the cases that it was given.
CHILD = """
import os, sys, time
from pathlib import Path
from staleproof.cases import children
from staleproof.incidents.moe_routing.fused_moe import outcome

def run_in_child(module, cases):
    print("some library greets")
    with Path(__file__).with_name("given").open("a") as given:
        print(*(case.tokens for case in cases), file=given)
    for number, case in enumerate(cases, 1):
        assert module == (str(case.check), "root") and os.environ["STALEPROOF_TEST"] == "given"
        if case.ids == "dies":
            print("first\\nlast words\\n\\n", file=sys.stderr, flush=True)
            os.abort()
        if case.ids == "raises":
            raise ImportError("no such operator")
        if case.ids == "hangs":
            time.sleep(60)
        children.tell(outcome(case.ids, wrong_rows=number))
        if case.ids == "illegal memory access":
            os._exit(3)
"""
# As compute-sanitizer: it runs the program behind its own options, and reports on standard output.
SANITIZER = """#!/bin/sh
[ "$1 $2" = "--tool memcheck" ] || exit 1
shift 2
"$@"
[ $? = 3 ] && cat "$(dirname "$0")/report"
"""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Processes that run :data:`CHILD` in place of the function that needs a GPU; the file they write."""
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "child_of_a_test", raising=False)
    import child_of_a_test  # type: ignore[import-not-found]

    monkeypatch.setattr(fused_moe, "run_in_child", child_of_a_test.run_in_child)
    monkeypatch.setattr(fused_moe, "_module", lambda check: (str(check), "root"))
    # In its place a variable with which they may be forks.
    assert fused_moe.CHILD_ENV["TRITON_INTERPRET"] == "0"
    monkeypatch.setattr(fused_moe, "CHILD_ENV", {"STALEPROOF_TEST": "given"})
    return tmp_path / "given"


def test_a_process_that_ends_is_followed_by_another_and_has_one_module(given):
    fatal = Case(2, 8, CUDA_ILLEGAL_ACCESS, check=False)
    asked = [Case(1, 8, RIGHT), fatal, Case(3, 8, SILENT), Case(4, 8, "dies"), fatal]
    # In the order of the cases, and a case that is given twice is run twice.
    assert fused_moe.run_cases(asked, processes=1) == [
        outcome(RIGHT, wrong_rows=1),
        outcome(CUDA_ILLEGAL_ACCESS, wrong_rows=1),
        outcome(SILENT, wrong_rows=2),
        outcome(DIED, "last words"),
        outcome(CUDA_ILLEGAL_ACCESS, wrong_rows=1),
    ]
    assert sorted(given.read_text().splitlines()) == ["1 3 4", "2", "2 2"]
    assert fused_moe.run_cases([]) == []


def test_an_error_of_python_is_no_outcome(given):
    right = outcome(RIGHT, wrong_rows=1)
    asked = [Case(1, 8, RIGHT), Case(2, 8, "raises"), Case(3, 8, RIGHT)]
    assert fused_moe.run_cases(asked, processes=1) == [right, absent("ImportError: no such operator"), right]


def test_cases_apart_have_a_process_each(given):
    asked = [Case(tokens, 8, RIGHT) for tokens in (1, 2, 3)]
    assert fused_moe.run_apart(asked, at_once=2) == [outcome(RIGHT, wrong_rows=1)] * 3
    assert sorted(given.read_text().splitlines()) == ["1", "2", "3"]


def test_a_child_that_hangs_is_ended(given):
    (result,) = fused_moe.run_cases([Case(1, 8, "hangs")], timeout_s=0.2)
    assert result.verdict == TIMED_OUT


FOUND = reading(
    "invalid read",
    note="Invalid __global__ read of size 4 bytes, 2,190,366 bytes after the nearest "
    "allocation at 0x7e0000 of size 2 bytes",
    kernel="finalizeMoeRoutingKernel",
    errors=9,
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (MEMCHECK.format(errors=9, s="s"), FOUND),
        ("========= ERROR SUMMARY: 0 errors\n", reading("no error", kernel="", errors=0)),
        ("first\nnot supported here\n", absent("compute-sanitizer gave no summary: not supported here")),
    ],
)
def test_what_memcheck_says(said, expected):
    assert fused_moe.memcheck(said) == expected


def test_a_case_runs_under_the_sanitizer(given, tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    (tmp_path / "report").write_text(MEMCHECK.format(errors=9, s="s"))
    monkeypatch.setattr(machine, "tool", lambda name: tool)
    assert fused_moe.sanitize(Case(512, 8, CUDA_ILLEGAL_ACCESS)) == FOUND


def test_without_the_sanitizer_it_says_so(monkeypatch):
    monkeypatch.setattr(machine, "tool", lambda name: None)
    assert fused_moe.sanitize(Case(512, 8, "all equal")) == absent("compute-sanitizer is not installed")


@pytest.mark.parametrize(("second", "told", "left"), [(SILENT, 3, []), (CUDA_ILLEGAL_ACCESS, 2, [3])])
def test_a_child_tells_each_case_and_leaves_once_its_context_is_lost(monkeypatch, second, told, left):
    class LeftError(BaseException):
        pass

    def leave(code: int) -> None:
        codes.append(code)
        raise LeftError

    said = [outcome(verdict) for verdict in (RIGHT, second, RIGHT)]
    found, codes, selected = [], [], []
    monkeypatch.setattr(fused_moe.device, "select", selected.append)
    monkeypatch.setattr(fused_moe, "_entry", lambda module: {"of": module})
    monkeypatch.setattr(fused_moe, "_run_case", lambda case, entry: entry["of"][case.tokens])
    monkeypatch.setattr(fused_moe.children, "tell", found.append)
    monkeypatch.setattr(fused_moe.os, "_exit", leave)
    with contextlib.suppress(LeftError):
        fused_moe.run_in_child(said, [Case(number, 8, RIGHT) for number in range(3)])
    assert (found, codes, selected) == (said[:told], left, ["cuda"])


def test_every_block_that_the_allocator_would_hand_out_is_filled(monkeypatch):
    def segment(kind: str, *blocks: tuple[int, str]) -> dict[str, object]:
        return {"segment_type": kind, "blocks": [{"size": size, "state": state} for size, state in blocks]}

    mib, made, empty = 2**20, [], torch.empty
    large = segment("large", (3 * mib, "inactive"), (512, "inactive"), (5 * mib, "active_allocated"))
    small = segment(
        "small", (512, "inactive"), (1024, "active_allocated"), (2 * mib, "inactive"), (mib, "inactive")
    )
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [large, small])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fused_moe, "DEVICE", "cpu")
    monkeypatch.setattr(torch, "empty", lambda *a, **o: made.append(empty(*a, **o)) or made[-1])
    fused_moe._fill_free_memory(0x7F)
    # A free block of a large segment below a MiB is handed to nobody; a small one serves up to a MiB.
    assert [len(each) for each in made] == [3 * mib, 512, mib, mib, mib]
    assert all(bool((each == 0x7F).all()) for each in made)


@pytest.fixture
def module(monkeypatch):
    """A small layer on the CPU, and a right kernel that notes what it was given."""
    for name, value in {"DEVICE": "cpu", "HIDDEN": 64, "INTERMEDIATE": 32}.items():
        monkeypatch.setattr(fused_moe, name, value)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    filled: list[int] = []
    monkeypatch.setattr(fused_moe, "_fill_free_memory", filled.append)
    calls: list[dict[str, object]] = []

    def kernel(x, ids, weights, w1, w2, *, output, **given):
        calls.append({"ids": ids, "experts": len(w1), **given})
        ones = (torch.ones(()),) * 4
        output.copy_(fused_moe._expected(fused_moe.Layer(x, w1, w2, ones), weights, ids))

    return SimpleNamespace(kernel=kernel, calls=calls, filled=filled)


@pytest.mark.parametrize(
    ("case", "calls", "filled"),
    [
        (Case(10, 4, "distinct", experts=8), 2, [0x7F]),
        (Case(10, 4, "all equal", experts=8, tail=fused_moe.ZEROS, all_to_all=True), 2, [0]),
        (Case(10, 4, "partly equal", experts=8, tail=fused_moe.PREVIOUS), 2, []),
        (Case(10, 4, fused_moe.NEGATIVE, experts=8, tail=fused_moe.FRESH), 1, []),
        (Case(10, 4, fused_moe.PAST, experts=8), 2, [0x7F]),
        (Case(10, 4, fused_moe.INT64, experts=8), 2, [0x7F]),
    ],
)
def test_a_right_kernel_gets_what_the_case_says_and_is_right(module, case, calls, filled):
    assert fused_moe._run_case(case, module.kernel) == outcome(RIGHT)
    assert (len(module.calls), module.filled) == (calls, filled)
    given = module.calls[-1]
    ids, ranks = given.pop("ids"), 1 + case.all_to_all
    assert given == {
        "experts": 8 // ranks,
        "ep_size": ranks,
        "ep_rank": 0,
        "enable_alltoall": case.all_to_all,
        "output_dtype": torch.bfloat16,
        "quant_scales": None,
    }
    assert ids.dtype == (torch.int64 if case.ids == fused_moe.INT64 else torch.int32)
    repeated = {"all equal": 10, "partly equal": 2, fused_moe.NEGATIVE: 2, fused_moe.PAST: 2}.get(case.ids, 0)
    assert int(fused_moe.rows_with_duplicates(ids).sum()) == repeated
    assert bool((ids == ids[0, 0]).all()) == (case.ids == "all equal")
    outside = {fused_moe.NEGATIVE: -1, fused_moe.PAST: 9}.get(case.ids)
    assert ids[(ids < 0) | (ids >= 8)].tolist() == ([] if outside is None else [outside] * 8)
    if case.all_to_all:
        assert int(ids.max()) < 4


@pytest.mark.parametrize(
    ("spoil", "verdict", "wrong", "nan"),
    [
        (lambda out: out.mul_(1.1), SILENT, 10, 0),
        (lambda out: out[:9].mul_(1.02), SILENT, 9, 0),
        (lambda out: out.mul_(1.004), RIGHT, 0, 0),
        (lambda out: out[:9].fill_(torch.nan), NAN_ROWS, 9, 9),
        (lambda out: 1 / 0, fused_moe.REFUSED, 0, 0),
    ],
)
def test_what_a_kernel_makes_wrong_is_counted(module, spoil, verdict, wrong, nan):
    def kernel(*args, output, **given):
        module.kernel(*args, output=output, **given)
        spoil(output)

    case = Case(10, 4, "partly equal", experts=8)
    doubled = fused_moe.rows_with_duplicates(fused_moe.make_ids(case.ids, case.batch, seed=1))
    clean = int((~doubled[:wrong]).sum())
    found = fused_moe._run_case(case, kernel)
    assert found.numbers == {"wrong_rows": wrong, "wrong_clean_rows": clean, "nan_rows": nan}
    assert (found.verdict, found.note) == (verdict, "division by zero" * (verdict == fused_moe.REFUSED))


def test_misread_ids_are_judged_by_those_that_were_meant(module):
    found = fused_moe._run_case(Case(10, 4, fused_moe.MISREAD, experts=8), module.kernel)
    assert (found.verdict, found.numbers["wrong_rows"]) == (SILENT, 10)


def test_a_fifth_of_the_logits_is_nan():
    logits = fused_moe.bad_logits(Case(11, 8, RIGHT, experts=16), "cpu")
    assert (logits.shape, logits.dtype) == ((11, 16), torch.bfloat16)
    assert logits.isnan().all(1).tolist() == [True] * 3 + [False] * 8
    assert not logits[3:].isnan().any()


@pytest.fixture
def chain(device, monkeypatch):
    """Runs a case through vLLM's own sources on the CPU, over stand-ins for the two compiled kernels.

    vLLM's repeats an expert as its warp does, and FlashInfer's follows the map of our miniature.
    """
    if device != "cpu":
        pytest.skip("kernels that take tensors of the CPU are interpreted")
    core = pytest.importorskip("flashinfer.fused_moe.core")
    root = environment.sources(fused_moe.VLLM) / "vllm"

    def topk_softmax(weights, ids, unread, logits, renormalize, bias):
        found = broken.route(broken.warp_keeps_its_first_column, logits, ids.shape[1])
        weights.copy_(found[0])
        ids.copy_(found[1])

    def cutlass_fused_moe(**given):
        ids, x = given["token_selected_experts"], given["input"]
        batch = Batch(*ids.shape, len(given["fc1_expert_weights"]))
        if observe(batch, ids).verdict == ILLEGAL_ACCESS:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        of_inputs, of_inner, of_w2, of_x = given["quant_scales"] or [torch.ones(batch.experts)] * 4
        of_x, of_inner = of_x.flatten()[0], 1 / of_inner.flatten()[0]
        scales = of_x, of_inputs[0] / of_x, of_w2[0] / of_inner, of_inner
        layer = fused_moe.Layer(x, given["fc1_expert_weights"], given["fc2_expert_weights"], scales)
        given["output"].copy_(fused_moe._expected(layer, given["token_final_scales"], ids))

    monkeypatch.setattr(torch.ops, "_moe_C", SimpleNamespace(topk_softmax=topk_softmax), raising=False)
    monkeypatch.setattr(core, "cutlass_fused_moe", cutlass_fused_moe)
    monkeypatch.setattr("flashinfer.fused_moe.cutlass_fused_moe", cutlass_fused_moe)
    for name, value in {"DEVICE": "cpu", "HIDDEN": 64, "INTERMEDIATE": 32, "_vllm": lambda: root}.items():
        monkeypatch.setattr(fused_moe, name, value)
    monkeypatch.setattr(fused_moe, "_fill_free_memory", lambda byte: None)
    monkeypatch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
    for owner, name in (
        (torch.ops, "load_library"),
        (torch.cuda, "empty_cache"),
        (torch.cuda, "synchronize"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: None)
    return lambda case: fused_moe._run_case(case, cutlass_fused_moe)


@pytest.mark.parametrize("name", ["4 tokens, top 10, bf16", "4 tokens, top 10, fp8"])
def test_a_nan_crashes_through_vllms_own_code_and_not_with_either_patch(chain, name, monkeypatch):
    case = fused_moe.CHAINS[name]
    assert chain(case).verdict == CUDA_ILLEGAL_ACCESS
    for patch, repeated in (("topk_nan", 0), ("duplicate_experts", 1)):
        found = chain(replace(case, patch=patch))
        more = {"rows_with_duplicates": repeated, "rows_that_padding_changes": 0}
        assert found == replace(outcome(RIGHT), numbers={**outcome(RIGHT).numbers, **more})
    assert chain(replace(case, again=True)).verdict == CUDA_ILLEGAL_ACCESS
    # The judge: the experts are the reference's, not those that some top-k says.
    ours = reference.topk_softmax
    monkeypatch.setattr(fused_moe.reference, "topk_softmax", lambda x, k: ours(x.roll(1, 1), k))
    found = chain(replace(case, patch="topk_nan"))
    assert (found.verdict, found.numbers["wrong_rows"]) == (SILENT, 3)


def test_without_vllms_library_or_what_it_links_the_chain_says_what_to_get(monkeypatch, tmp_path):
    monkeypatch.setenv("STALEPROOF_AUDIT_PACKAGES", str(tmp_path))
    monkeypatch.setenv("STALEPROOF_VLLM_CACHE", str(tmp_path / "sources"))
    # Sources alone, as tests/vllm unpacks them, hold no library.
    (tmp_path / "sources/0.19.1/vllm").mkdir(parents=True)
    folder = tmp_path / "vllm-0.19.1"
    library = folder / "vllm/_moe_C.abi3.so"
    assert fused_moe.vllm_unavailable_reason() == (
        f"vLLM 0.19.1 with _moe_C.abi3.so is not unpacked in {folder}"
    )
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(fused_moe, "CUDA_RUNTIME", "libno.so.12")
    assert fused_moe.vllm_unavailable_reason() == (
        "libno.so.12 of vLLM 0.19.1 is not there: pip install nvidia-cuda-runtime-cu12"
    )
    monkeypatch.setattr(fused_moe, "CUDA_RUNTIME", "libc.so.6")
    assert fused_moe.vllm_unavailable_reason() is None
    monkeypatch.setattr(packages, "fits", lambda path: path != library)
    assert "_moe_C.abi3.so of vLLM 0.19.1 was compiled against another torch than" in str(
        fused_moe.vllm_unavailable_reason()
    )


@pytest.mark.parametrize("check", [True, False])
def test_a_release_that_is_missing_leaves_the_other_one_to_be_asked(check, monkeypatch):
    """No FlashInfer of one release here: its cases are not run, with the reason, and the others are."""

    def module(checked: bool) -> None:
        if checked is check:
            raise moe_module.ModuleError("not here")

    monkeypatch.setattr(fused_moe, "_module", module)
    monkeypatch.setattr(fused_moe.device, "provenance", lambda: Provenance.MEASURED)
    monkeypatch.setattr(fused_moe.device, "flashinfer_missing", lambda: None)
    monkeypatch.setattr(fused_moe.importlib.util, "find_spec", lambda name: name)
    asked = [*fused_moe.MODULE_CASES, *fused_moe.CHAINS.values()]
    left = cases.possible(asked, "cuda")
    assert left == [case for case in asked if case.check is not check]
    absent = next(case for case in asked if case.check is check)
    assert cases.needs_chain(absent, "cuda") == "not here"
    assert cases.possible(asked, "cpu") == []


@pytest.mark.gpu
def test_only_tokens_with_a_duplicate_are_hurt_and_as_many_as_our_replica_says():
    why = fused_moe.unavailable_reason() or fused_moe.unavailable_reason(check=False)
    if why:
        pytest.skip(why)
    before = {fused_moe.BYTES: "canary", fused_moe.ZEROS: "zeros", fused_moe.PREVIOUS: "previous map"}
    asked, compared = [*fused_moe.MODULE_CASES], 0
    for case, found in zip(asked, fused_moe.run_cases(asked), strict=True):
        assert found.numbers["wrong_clean_rows"] == 0, case.name
        if found.verdict == SILENT and case.tail in before:
            ours = observe(case.batch, case.ids, before=before[case.tail], guard=case.check)
            assert ours.verdict == SILENT, case.name
            assert ours.numbers["wrong_rows"] == found.numbers["wrong_rows"], case.name
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        ([RIGHT, SILENT], 0, [RIGHT, SILENT]),
        ([RIGHT, SILENT], -11, [RIGHT, SILENT]),
        ([RIGHT, CUDA_ILLEGAL_ACCESS], 1, [RIGHT, CUDA_ILLEGAL_ACCESS]),
        ([CUDA_ILLEGAL_ACCESS], -6, [CUDA_ILLEGAL_ACCESS]),
        ([RIGHT], 1, [RIGHT, "not run"]),
        ([], -6, [DIED]),
        ([RIGHT], None, [RIGHT, TIMED_OUT]),
    ],
)
def test_what_a_process_told_and_how_it_ended_are_its_results(told, code, said):
    ended = children.Ended([reading(word) for word in told], code, "", "\n the last line\n", 9.0)
    found = fused_moe._results([SimpleNamespace()] * 2, ended)
    assert [one.verdict for one in found] == said
    assert all(one.note == "the last line" for one in found[len(told) :])
