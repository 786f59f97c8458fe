"""The question to the installed FlashInfer's fused MoE, with a kernel in its place that a CPU can run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from staleproof import device as devices
from staleproof.incidents.moe_routing import fused_moe
from staleproof.incidents.moe_routing.batch import Batch
from staleproof.incidents.moe_routing.questions import REAL, REAL_EXPECTED, incident

SHAPE = fused_moe.Shape(Batch(6, 4, 8), 32, 16)
# In FlashInfer's place. The map of a token has one entry an expert, so an expert that comes twice adds once.
KERNEL = """
import torch
from staleproof.incidents.moe_routing.fused_moe import _reference

def cutlass_fused_moe(x, ids, weights, w1, w2, dtype, scales, *, output, ep_size, ep_rank, enable_alltoall):
    repeated = ids.sort(1).values.diff(dim=1).eq(0).any()
    if repeated and enable_alltoall:
        {error}
    first = torch.cat([torch.ones_like(ids[:, :1]), ids[:, 1:] != ids[:, :1]], 1)
    output.copy_(_reference(x, w1, w2, weights * first, ids))
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    def install(error: str) -> None:
        package = tmp_path / "flashinfer"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
        (package / "fused_moe.py").write_text(KERNEL.format(error=error))

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_repeated_ids_lose_rows_and_crash_all_to_all(kernel):
    kernel("raise RuntimeError('CUDA error: an illegal memory access was encountered')")
    found = {name: fused_moe.call_installed(name, "cpu", SHAPE) for name in fused_moe.CALLS}
    assert {name: one.verdict for name, one in found.items()} == REAL_EXPECTED
    assert found["distinct"].numbers == {"wrong_rows": 0}
    assert found["all equal"].numbers == {"wrong_rows": 6}
    assert found["all equal, all-to-all"].note.startswith("CUDA error: an illegal memory access")


@pytest.mark.parametrize(
    ("error", "verdict", "note"),
    [
        ("__import__('os').abort()", "died", ""),
        ("raise ValueError('no such tactic')", "not run", "ValueError: no such tactic"),
        ("output.fill_(float('nan')); return", "NaN", ""),
    ],
)
def test_crash_python_error_and_nan_are_three_answers(kernel, error, verdict, note):
    kernel(error)
    found = fused_moe.call_installed("all equal, all-to-all", "cpu", SHAPE)
    assert (found.verdict, note in found.note) == (verdict, True)


def test_question_is_not_run_without_gpu_and_before_flashinfer_compiled(monkeypatch):
    assert {one.note for one in incident.ask(REAL, device="cpu")} == {"needs a CUDA device"}
    monkeypatch.setattr(devices, "flashinfer_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compiled = SimpleNamespace(is_compiled=False)
    module = SimpleNamespace(gen_cutlass_fused_moe_sm90_module=lambda: compiled)
    monkeypatch.setitem(sys.modules, "flashinfer.jit.fused_moe", module)
    fused_moe._not_compiled.cache_clear()
    (why,) = {one.note for one in incident.ask(REAL, device="cuda")}
    assert why.startswith("FlashInfer has not compiled its fused MoE here")
    fused_moe._not_compiled.cache_clear()
    compiled.is_compiled = True
    assert fused_moe.unavailable_reason("distinct", "cuda") is None
    fused_moe._not_compiled.cache_clear()


@pytest.mark.parametrize(
    ("version", "capability", "known"),
    [("0.6.18.post1", "sm_90", True), ("0.6.8.post1", "sm_90", False), ("0.7.2", "sm_100", False)],
)
def test_release_without_bounds_check_and_sm100_have_no_expected_verdict(
    monkeypatch, version, capability, known
):
    monkeypatch.setattr(devices, "version_of", lambda name: version)
    monkeypatch.setattr(devices, "machine", lambda: SimpleNamespace(capability=capability))
    monkeypatch.setattr(devices, "provenance", lambda: devices.Provenance.MEASURED)
    assert fused_moe.is_known() is known
