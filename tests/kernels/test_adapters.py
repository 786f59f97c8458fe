"""An adapter adds no fault of its own: over a kernel that keeps the padding contract every clause holds.

The kernels here are made up (:mod:`stand_ins`), so that also those of a GPU, and of packages that are not
here, show whether they get what they ask for.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import stand_ins

from staleproof.cases.case import Reading
from staleproof.cases.finding import Finding, read_findings
from staleproof.contract import attention_probes, binding, row_probes, runner
from staleproof.contract.cases import SUBJECTS, subjects_in
from staleproof.contract.contract import BREAKS, HOLDS, NO_REFERENCE
from staleproof.kernels import flashinfer, mla, packages, vllm, vllm_sources
from staleproof.kernels.subject import Subject
from staleproof.ops.reference.mla_decode import mla_decode

NOT_RUN = "not run"
ALL = {(s.package, s.name): s for module in SUBJECTS for s in subjects_in(module)}
MADE_UP = {key: s for key, s in ALL.items() if key[0] not in ("staleproof", "torch") and s.kind != "operands"}
OURS = {key: s for key, s in ALL.items() if key[0] == "staleproof"}
OF_TORCH = {key: s for key, s in ALL.items() if key[0] == "torch"}
# One scale for all rows, and rows of a masked product past its counts: a kernel without a fault has them too.
SHARED = {
    ("sglang", "Triton per_tensor_quant_mla_fp8", "R"),
    ("sgl-deep-gemm", "m_grouped_bf16_gemm_nt_masked", "U"),
}
# What a kernel is given besides tensors, where its result does not tell.
CHOSEN = {
    "flash attention 2, paged": {(2, 0)},
    "flash attention 3, paged": {(3, 0)},
    "MLA fa2": {"fa2"},
    "MLA fa3": {"fa3"},
    "paged decode": {"auto"},
    "paged prefill fa2": {"fa2"},
    "paged prefill fa3": {"fa3"},
    "fp8 per group of 128": {128},
    "per_token_group_quant_int8": {32},
    "Triton per_token_group_quant_fp8": {32},
    "Triton moe_fused_gate, softmax": {"softmax"},
    "Triton moe_fused_gate, sigmoid in groups": {"sigmoid"},
    "fused_moe.cutlass_fused_moe": {(1, 0, 8)},
    "fused_moe.cutlass_fused_moe, two ranks with all-to-all": {(2, 0, 4), (2, 1, 4)},
}


def named(subjects: dict[tuple[str, str], Subject]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("key", subjects, ids=" ".join)


def watched(subject: Subject, mode: Callable[[], object] = stand_ins.OnGpu) -> Subject:
    """The subject with its adapter run where each tensor that it makes must name a device."""

    @wraps(subject.function)
    def call(**given: object) -> object:
        with mode():
            return subject.call(**given)

    call.__signature__ = inspect.signature(subject.call)
    return replace(subject, call=call)


def said(reading: Reading) -> str:
    return f"{reading.verdict}: {reading.note}" if reading.note else reading.verdict


@pytest.fixture(name="other_scale", autouse=True)
def other_scale_fixture(monkeypatch):
    """Scores are not scaled by what a kernel takes by itself."""
    make = attention_probes.make_call

    def made(*args, **kwargs):
        call = make(*args, **kwargs)
        call.softmax_scale *= 1.5
        return call

    monkeypatch.setattr(attention_probes, "make_call", made)


@cache
def recorded() -> dict[tuple[str, str], list[Finding]]:
    """The findings of both recorded audits by package and kernel."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for file in sorted((Path(__file__).parents[2] / "workbook/audits").glob("*.jsonl")):
        for one in read_findings(file, recorded=False):
            found.setdefault((one.release.partition(" ")[0], one.variant), []).append(one)
    return found


# Kernels that no recorded audit ran, and the clauses that their adapters cannot be asked.
NEVER_RAN = {"trtllm-gen MLA": ("U", "Q"), "nvfp4_quantize, 128x4": ("0",), "topk with softmax": ("Ib", "P")}


def _unasked(key: tuple[str, str], clause: str, note: str) -> bool:
    """Whether the recorded audits say the same of a clause that they did not ask."""
    notes = {one.note for one in recorded()[key] if one.question == clause}
    return note.startswith(("takes ", NO_REFERENCE)) and (
        note in notes or clause in NEVER_RAN.get(key[1], ())
    )


@named(MADE_UP)
def test_over_a_kernel_without_a_fault_every_clause_holds(key, monkeypatch):
    subject = MADE_UP[key]
    stand_ins.CHOSEN.clear()
    if subject.kind == "rows" and "dtype" not in subject.shape:
        # A weight of another dtype than the rows shows.
        subject = replace(subject, shape={**subject.shape, "dtype": "bfloat16"})
    elif subject.kind == "experts":
        # What a compiled kernel needs is more than this takes.
        subject = replace(subject, shape={**subject.shape, "hidden": 64, "inner": 32})
    with stand_ins.installed():
        found = {clause: ask("cpu") for clause, ask in runner.probes_of(watched(subject)).items()}
    assert set(found) == set(subject.clauses)
    wrong = {}
    for clause in found.keys() - subject.skip.keys() - subject.documented.keys():
        reading = found[clause]
        if (*key, clause) in SHARED:
            right = reading.verdict == BREAKS
        elif reading.verdict == NOT_RUN:
            right = _unasked(key, clause, reading.note)
        else:
            right = reading.verdict == HOLDS
        if not right:
            wrong[clause] = said(reading)
    assert wrong == {}
    assert set(stand_ins.CHOSEN) == CHOSEN.get(key[1], set())


BIASED = {key: s for key, s in ALL.items() if "bias" in inspect.signature(s.call).parameters}


# These two add the bias to the logits.
KEPT_IN_WEIGHTS = ("Triton moe_fused_gate, softmax", "Triton fused_moe_router_cudacore")


@named(BIASED)
def test_a_bias_decides_which_experts_are_chosen_and_not_their_weights(key, device):
    subject, logits = ALL[key], row_probes._logits({}, "cpu")
    bias = torch.arange(16) * 7 % 16 / 8
    where = device if key in OURS else "cpu"
    with stand_ins.installed() if key in MADE_UP else nullcontext():
        given = logits.to(where), {"bias": bias.to(where)}
        weights, ids = (x.cpu() for x in row_probes._route(subject.call, {}, given[0], **given[1]))
    groups = (4, 2) if subject.shape.get("grouped") else (1, 1)
    scores = logits.softmax(-1) if "softmax" in key[1] else logits.sigmoid()
    if key[1] in KEPT_IN_WEIGHTS:
        scores, bias = (logits + bias).softmax(-1), None
    _, right_ids = stand_ins.route(scores, 4, bias, groups=groups)
    assert ids.sort().values.tolist() == right_ids.sort().values.tolist()
    right = scores.gather(1, ids.long())
    for of in (weights, right):
        of /= of.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, right)


@named({key: s for key, s in OURS.items() if s.kind != "attention"})
def test_our_operations_keep_every_clause(key, device):
    found = {
        c: said(ask(device)) for c, ask in runner.probes_of(OURS[key]).items() if c not in OURS[key].skip
    }
    assert found == dict.fromkeys(found, HOLDS)


@named({key: s for key, s in OURS.items() if s.kind == "attention"})
def test_our_attention_is_right_with_one_and_with_several_query_tokens(key, device):
    probes = runner.probes_of(OURS[key])
    assert probes["0"](device).verdict == HOLDS
    assert probes["E"](device).verdict == HOLDS


BACKENDS = {
    "SDPA math, boolean mask": "MATH",
    "SDPA flash of the CPU, boolean mask": "FLASH_ATTENTION",
    "SDPA memory-efficient, boolean mask": "EFFICIENT_ATTENTION",
    "SDPA cuDNN, boolean mask": "CUDNN_ATTENTION",
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@named(OF_TORCH)
def test_an_adapter_of_torch_gives_the_reference_on_clean_input(key, device, monkeypatch):
    """Backends of a GPU are left out here: the one of the CPU answers, and varlen attention is made up."""
    subject, asked = OF_TORCH[key], []

    def backend(wanted):
        asked.append(wanted.name)
        return nullcontext()

    def compiled(function, **how):
        # Without compilation flex_attention compiles a wrapper of itself, for a backend that it names.
        asked.extend([] if how else ["compiled"])
        return function

    if device == "cpu":
        if "SDPA" in key[1]:
            monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", backend)
        monkeypatch.setattr(torch, "compile", compiled)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", stand_ins.torch_attention)
        forward = SimpleNamespace(_flash_attention_forward=stand_ins.flash_attention_forward)
        if "_flash" in key[1]:
            monkeypatch.setattr(torch.ops, "aten", forward)
    elif why := packages.unavailable_reason(subject):
        pytest.skip(why)
    probes = runner.probes_of(subject)
    clauses = ("0", "Q") if subject.shape.get("q_len") == 0 else ("0",)
    found = {clause: runner.answer(probes[clause], subject, device)[0] for clause in clauses}
    if device == "cuda" and "its calls do not fit this release" in found["0"].note:
        pytest.skip(found["0"].note)
    assert {clause: said(reading) for clause, reading in found.items()} == dict.fromkeys(clauses, HOLDS)
    if device == "cpu":
        wanted = "compiled" if "compiled" in key[1] else BACKENDS.get(key[1])
        assert {*asked} == {wanted} - {None}


def test_sm90_is_what_kernels_of_hopper_need():
    hopper = {"quack-kernels", "flash-attn-4", "sgl-flash-mla", "sgl-deep-gemm"}
    assert {key for key, s in ALL.items() if s.needs == "sm90"} == {
        *((package, name) for package, name in ALL if package in hopper),
        *(("vllm", name) for name in ("flash attention 3, paged", "FlashMLA, dense")),
        *(("flashinfer-python", f"{name} fa3") for name in ("MLA", "paged prefill")),
        ("flashinfer-python", "triton.cascade.merge_state"),
        *(("flashinfer-python", name) for package, name in ALL if name.startswith("fused_moe.")),
    }  # fmt: skip


@pytest.mark.slow
@named(MADE_UP)
def test_the_calls_of_an_adapter_fit_every_release_that_is_here(key):
    releases = [release for release in packages.releases(MADE_UP[key]) if release.version != "unknown"]
    found = {release.version: binding.problem(MADE_UP[key], release) for release in releases}
    # Part of it is compiled: no file says what it takes.
    compiled = key == ("vllm", "FlashMLA, dense")
    assert {version: why for version, why in found.items() if why and not compiled} == {}


PEERS = {**flashinfer.flashinfer_peers(), "vllm_fa3": vllm.vllm_fa3(), "torch_sdpa": mla.torch_sdpa()}


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_decodes_as_the_reference(name, q_len):
    """Entries of the table past a request's pages are arbitrary, and one request is empty."""
    if q_len > 1 and name in ("torch_sdpa", "vllm_fa3", "flashinfer_cutlass"):
        pytest.skip("takes one query token a request")
    q, kv_cache = torch.randn(3, q_len, 16, 576), torch.randn(7, 64, 576)
    block_table = torch.tensor([[4, 2, 6], [3, 99, -1], [-1, 5, 5]], dtype=torch.int32)
    seq_lens, out = torch.tensor([130, 64, 0], dtype=torch.int32), torch.empty(3 * q_len, 16 * 512)
    scale = 192**-0.5 if name == "flashinfer_cutlass" else 0.07
    peer = replace(PEERS[name], unavailable_reason=None)
    stand_ins.CHOSEN.clear()
    with stand_ins.installed(), stand_ins.OnGpu():
        found, lse = peer(q, kv_cache, block_table, seq_lens, softmax_scale=scale, out=out)
    want, want_lse = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=scale)
    if q_len == 1:
        want, want_lse = want[:, 0], want_lse[:, 0]
    torch.testing.assert_close(found[:2], want[:2], rtol=1e-4, atol=1e-4)
    assert found.data_ptr() == out.data_ptr()
    backend = name.rpartition("_")[2]
    chosen = {"vllm_fa3": [(3, 0)], "torch_sdpa": [], "flashinfer_trtllm": []}
    assert chosen.get(name, [backend]) == stand_ins.CHOSEN
    if name in ("flashinfer_fa2", "flashinfer_fa3"):
        torch.testing.assert_close(lse[:2], want_lse[:2], rtol=1e-4, atol=1e-4)
    else:
        assert lse is None


SOURCES = (
    r"(vllm\.v1\.attention\.ops\.(triton|prefix)|vllm\.model.*\.mamba|sglang|flashinfer\.triton\.(norm|act))"
)
# What they import for other dtypes and GPUs.
NOT_REACHED = {
    *("int4_per_token_head", "per_token_group_quant", "per_tensor_quant_fp8", "fp8_kernel"),
    "per_token_group_quant_8bit_v2",
}


def test_sources_that_run_without_their_package_bring_the_files_that_they_import():
    for key, subject in MADE_UP.items():
        sources = {name for name in packages._imported(subject) if re.match(SOURCES, name)}
        assert sources <= {*subject.files}, key
        assert bool(sources) == bool(subject.files), key
        for folder in filter(None, (release.folder for release in packages.releases(subject))):
            for name in subject.files:
                file, beside = folder / f"{name.replace('.', '/')}.py", name.rpartition(".")[0]
                tree = ast.walk(ast.parse(file.read_text() if file.exists() else ""))
                wanted = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
                wanted = {module for module in wanted if module.rpartition(".")[0] == beside}
                left_out = wanted - {*subject.files} - vllm_sources._known(folder, True).keys()
                assert {module.removeprefix(f"{beside}.") for module in left_out} <= NOT_REACHED, key
