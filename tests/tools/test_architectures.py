"""Kernels compiled for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools.architectures import KNOWN, Compiled, compile_all

from staleproof.cases import children
from tools import architectures

# Of each kernel one case: on sm_86, with the least shared memory and no cast to e4m3, and on sm_100.
# All seven architectures take minutes without a cache: make architectures.
SAMPLE = (
    *("mla_decode, batch 256, 128 heads, pages of 32", "quantize_fp8_per_tensor, 128 x 7168, mask"),
    *("clear_empty_rows, 128 heads, FP8", "topk_softmax, Qwen3, padding", "BlockZeroer, unaligned"),
    *("distinct_experts, top 8, int64", "quantize_nvfp4, 33 x 7184"),
)
pytestmark = pytest.mark.skipif(
    not architectures.has_compiler(), reason="this Triton brings no compiler for NVIDIA GPUs"
)


def test_the_default_choices_fit_every_architecture_and_spill_nothing():
    found = compile_all((86, 100), cases=SAMPLE)
    assert [(one.capability, one.case, one.problems) for one in found if one.problems] == []
    kernels = {one.kernel for one in found if one.capability == 100}
    assert {"mla_decode_kernel", "quantize_kernel", "topk_kernel", "quantize_nvfp4_kernel"} <= kernels
    assert all(one.registers > 0 for one in found)


def test_hopper_has_kernels_of_its_own_whose_addresses_stay_out_of_local_memory():
    cases = {
        "mla_decode, batch 256, 128 heads, pages of 128": {"mla_decode_pairs_kernel", "merge_parts_kernel"},
        "mla_decode, batch 128, 16 heads, 4 query tokens": {"mla_decode_pairs_kernel", "merge_parts_kernel"},
        "mla_decode, batch 256, 16 heads, E4M3 cache": {
            "float16_queries_kernel",
            "mla_decode_e4m3_kernel",
            "merge_parts_kernel",
        },
        "mla_decode, batch 256, 16 heads": {"mla_decode_few_kernel", "merge_parts_kernel"},
    }
    found = compile_all((90,), cases=[*cases])
    assert {one.kernel for one in found} == set().union(*cases.values())
    for one in found:
        assert one.kernel in cases[one.case]
        assert 0 <= one.shared <= one.limit == 227 * 1024
        # With the addresses of all products in local memory a call took 1.5 times as long: 640 and 728 bytes
        # of the kernel of pairs. It has none with Triton 3.6, up to 256 with 3.9.
        assert one.stack < 400, one


@pytest.mark.parametrize(
    ("capability", "kernel", "case", "found", "problem"),
    [
        (80, "k", "c", {"warnings": ("ptxas warning : x",)}, "ptxas warning : x"),
        (80, "k", "c", {"error": "CompilationError: at 1:1"}, "CompilationError: at 1:1"),
        # Spills are accepted for float32, and for the tile that was measured, on Hopper alone.
        (100, "mla_decode_kernel", "batch 1, float32", {"spilled": 8}, None),
        (100, "mla_decode_kernel", "c", {"spilled": 8}, "8 bytes of registers spilled"),
        (90, "topk_kernel", "c", {"spilled": 8}, "8 bytes of registers spilled"),
        (90, "mla_decode_kernel", "c", {}, None),
    ],
)
def test_what_stops_a_kernel_or_slows_it_down_is_a_problem(capability, kernel, case, found, problem):
    compiled = Compiled(capability, kernel, case, **found)
    assert compiled.problems == ([problem] if problem else [])
    (row,) = architectures.summary([compiled])
    assert row["problems"] == [f"{case}: {one}" for one in compiled.problems]
    assert bool(row["accepted"]) == bool(compiled.spilled and compiled.accepted)


@pytest.mark.parametrize(("error", "code"), [(None, 0), ("CompilationError: at 1:1", 1)])
def test_the_command_ends_with_1_if_there_are_problems(monkeypatch, error, code):
    found = [Compiled(90, "k", "c", error=error)]
    monkeypatch.setattr(architectures, "compile_all", lambda capabilities: found)
    assert architectures.main(["90"]) == code


def test_an_unknown_architecture_is_refused_in_one_line(capsys):
    with pytest.raises(ValueError, match=r"capability: expected one of 80.*, got 121"):
        compile_all((90, 121))
    assert architectures.main(["121"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_compiler_that_is_missing_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "cases")
    import jobs

    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    ended = children.call(jobs.compile_without_ptxas_blackwell, timeout_s=60, env=env)
    [found] = ended.answer()
    assert found.error == "RuntimeError: Cannot find ptxas-blackwell"
    monkeypatch.setattr(architectures, "has_compiler", lambda: False)
    assert architectures.main(["90"]) == 2
    assert (
        capsys.readouterr().err
        == "staleproof: triton: expected one that compiles for NVIDIA GPUs, got none\n"
    )


def test_the_recorded_table_is_of_all_architectures_and_has_no_problems():
    path = architectures.store.checkout() / "workbook" / architectures.NAME
    kept = json.loads(path.read_text())
    assert {row["capability"] for row in kept["rows"]} == {*KNOWN}
    assert all(row["problems"] == [] and row["shared"] <= row["limit"] for row in kept["rows"])
    assert kept["versions"]["triton"]


def test_what_ptxas_says_of_registers_and_spills_is_read():
    log = "Used 40 registers, 8 bytes cumulative stack size\n16 bytes spill stores, 24 bytes spill loads\n"
    made = SimpleNamespace(name="_k", num_warps=4, shared=512)
    read = architectures._read("a call", made, log, SimpleNamespace(capability=100, shared=1024))
    want = Compiled(100, "k", "a call", warps=4, registers=40, spilled=16, stack=8, shared=512, limit=1024)
    assert read == want
    assert "lost" in architectures._read("a call", made, "", SimpleNamespace(capability=100, shared=1)).error
