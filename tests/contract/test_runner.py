"""The runner: a row for each kernel that misbehaves, and the audit goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from staleproof.contract import runner
from staleproof.contract.contract import Verdict
from staleproof.kernels import vllm_matmul_ogs

HERE = Path(__file__).parent


MISDEEDS = {
    ("raises", "0"): "raises RuntimeError: no such configuration",
    ("hangs", "0"): "no answer within 10 s",
    ("ends its process", "R"): "ended its process with signal 6",
    ("wrong shape", "0"): "returns shape (1, 2), expected (3, 2, 32)",
    ("writes past its output", "0"): "writes outside out",
    ("another dtype", "0"): "raises AssertionError: expected float8",
}


# One test: the kernels are audited together, once.
def test_each_misdeed_is_a_row_and_the_audit_goes_on(device):
    found = [
        row for rows in runner.audit([str(HERE / "bad_kernels.py")], device, limit_s=10.0) for row in rows
    ]
    rows = {(row.subject, row.clause): row for row in found}
    assert {key: row.note for key, row in rows.items() if row.verdict is Verdict.BREAKS} == MISDEEDS
    assert [rows["right", clause].verdict for clause in "0RWO"] == [Verdict.HOLDS] * 4
    # A process that ends does not take the next clause with it.
    assert [rows["ends its process", clause].verdict for clause in "0W"] == [Verdict.HOLDS] * 2
    # A kernel that is wrong on clean input is asked nothing more.
    for clause in "RW":
        assert rows["raises", clause].verdict is Verdict.NOT_RUN
        assert rows["raises", clause].note == "not asked: wrong on clean input"


def test_a_module_that_does_not_import_or_registers_nothing_is_a_row(tmp_path, device):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "nothing.py").write_text("x = 1\n")
    modules = [str(tmp_path / name) for name in ("broken.py", "nothing.py", "absent.py")]
    found = [*runner.audit(modules, device)]
    assert [len(rows) for rows in found] == [1, 1, 1]
    notes = [rows[0].note for rows in found]
    assert "No module named 'no_such_module'" in notes[0]
    assert notes[1] == "registers no kernel"
    assert "is no Python file" in notes[2] or "absent.py" in notes[2]
    assert {rows[0].verdict for rows in found} == {Verdict.BREAKS}


def test_the_examples_break_what_their_docstrings_say(device):
    found = {rows[0].subject: rows for rows in runner.audit(["staleproof.contract.examples"], device)}
    broken = {
        name: [row.clause for row in rows if row.verdict is Verdict.BREAKS] for name, rows in found.items()
    }
    assert broken == {
        "masked by a weight of 0": ["E", "T", "B"],
        "masked by selection": [],
        "fp8, one scale for the tensor": ["R"],
        "fp8, a scale for each row": [],
    }


def test_a_subject_that_cannot_run_here_says_why_and_whether_it_binds(monkeypatch, device):
    monkeypatch.setattr(runner.packages, "unavailable_reason", lambda subject: "needs an SM100 GPU")
    found = [*runner.audit(["staleproof.kernels.torch"], device, only="torch.topk, softmax")]
    assert found == []
    (rows,) = runner.audit(["staleproof.kernels.torch"], device, only="rms_norm")
    assert {row.verdict for row in rows} == {Verdict.NOT_RUN}
    assert rows[0].note == "needs an SM100 GPU; its calls fit the signatures of this release"


def test_vllms_mxfp4_product_depends_on_the_byte_behind_its_scales(device):
    if vllm_matmul_ogs.unavailable_reason(device):
        pytest.skip("triton_kernels of vLLM's wheel cannot run here")
    found = [*runner.audit(["staleproof.kernels.vllm"], device, only="matmul_ogs")]
    if not found:
        pytest.skip("vLLM 0.22.1 is not in the cache")
    clean, behind = found[0]
    assert (clean.clause, clean.verdict) == ("0", Verdict.HOLDS), clean.note
    assert (behind.verdict, behind.note) == (Verdict.BREAKS, "0xff behind scale changes the result")
