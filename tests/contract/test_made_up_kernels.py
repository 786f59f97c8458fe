"""Counterexamples of compiled kernels that need a GPU, run alone with made-up kernels.

They say nothing of the real kernels. They show that a script of the real adapter runs, shows the fault, and
ends quietly once it is mended.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from staleproof.contract import environments, runner, scripts
from staleproof.contract.contract import Row, Verdict
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import load_module, subjects_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import alone

H200 = environments.Installed("2.11.0", "3.6.0", cuda=True)
# Where a script finds the made-up kernel.
PACKAGES = {
    "flashinfer/__init__.py": "",
    "flashinfer/fused_moe.py": "from made_up_kernels import cutlass_fused_moe\n",
    "vllm/__init__.py": "",
    "vllm/_custom_ops.py": "from made_up_kernels import moe_align_block_size\n",
}
TORCHS = (
    "import torch\nimport made_up_kernels\n"
    "torch.ops.aten._flash_attention_forward = made_up_kernels.flash_attention_forward\n"
)
ALIGN = "moe_align_block_size, then a product a block"
RANKS = "fused_moe.cutlass_fused_moe, two ranks with all-to-all"
# Package, version, subject, clause, what the H200 said of it, and the case that a probe hands on.
BROKEN = [
    ("torch", "2.11.0", "_flash_attention_forward, seqused_k", "U", "rows past the end", ("spare", "nan")),
    ("flashinfer-python", "0.6.18.post1", "fused_moe.cutlass_fused_moe", "D", "twice", ("repeated",)),
    ("flashinfer-python", "0.6.18.post1", RANKS, "D", "CUDA error", ("repeated",)),
    ("vllm", "0.20.2", ALIGN, "X", "id -1", ("range", "-1")),
    ("vllm", "0.22.1", ALIGN, "X", "id -1", ("range", "-1")),
]


@pytest.mark.parametrize("faulty", [False, True], ids=["right", "faulty"])
@pytest.mark.parametrize(
    ("package", "version", "name", "clause", "note", "case"), BROKEN, ids=[f"{b[2]} {b[1]}" for b in BROKEN]
)
def test_the_script_of_a_compiled_kernel_shows_its_fault(
    tmp_path, monkeypatch, package, version, name, clause, note, case, faulty
):
    (subject,) = (
        subject
        for module in runner.SUBJECTS
        for subject in subjects_of(load_module(module))
        if (subject.package, subject.name) == (package, name)
    )
    monkeypatch.setattr(environments, "here", lambda: H200)
    text = scripts.counterexample(subject, Release(version), clause, case)
    assert 0 < len(text.splitlines()) < 30
    for path, content in PACKAGES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    monkeypatch.setenv("FAULTY", "1" if faulty else "")
    on_cpu = (TORCHS if package == "torch" else "") + text.replace('"cuda"', '"cpu"')
    row = Row(name, package, version, clause, Verdict.BREAKS, note, "NVIDIA H200", "MEASURED", text)
    end = alone.ending(on_cpu, sys.executable, [tmp_path, HERE])
    assert alone.shows(row, end) == faulty, end
    assert bool(end) == faulty
