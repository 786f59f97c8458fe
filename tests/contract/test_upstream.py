"""The drafts of ``workbook/upstream``: each is whole, and its patch fits the sources and mends the clause.

Patches are applied to a copy of the sources in the cache; without those the tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm

from staleproof.cases import children
from staleproof.cases.case import Reading
from staleproof.cases.words import NOT_RUN
from staleproof.contract import runner
from staleproof.contract.contract import BREAKS, HOLDS
from staleproof.device import Provenance
from staleproof.kernels import packages
from staleproof.kernels.subject import Subject, load_module, subjects_of
from staleproof.report import audit

UPSTREAM = Path(__file__).parents[2] / "workbook/upstream"
SECTIONS = ["Environment", "Minimal script", "Expected", "Actual", "Cause", "Proposed change"]
# Draft -> module of the adapter, version, subject, clause.
PATCHED = {
    "vllm-triton-decode-empty-row": ("vllm", "0.33.0", "Triton MLA decode", "E"),
    "vllm-merge-attn-states-empty-part": ("vllm", "0.33.0", "Triton merge_attn_states", "E"),
    "sglang-mla-norope-reserved-slot": ("sglang", "0.5.23", "Triton set_mla_kv_buffer without rope", "S"),
    "sglang-triton-decode-empty-row": ("sglang", "0.5.23", "Triton decode, MLA", "E"),
    "sglang-merge-state-empty-parts": ("sglang", "0.5.23", "Triton merge_state", "E"),
    "sglang-extend-unified-empty-row": ("sglang", "0.5.23", "Triton extend, unified", "E"),
    "liger-fused-moe-negative-ids": ("liger", "0.8.5", "fused_moe", "X"),
    "fla-rows-past-cu-seqlens": ("fla", "0.6.0", "fused_recurrent_gated_delta_rule", "U"),
    "sglang-router-cudacore-nan": ("sglang", "0.5.23", "Triton fused_moe_router_cudacore", "I"),
}
# Drafts whose clause the interpreter cannot ask before the patch.
UNASKED = {"sglang-router-cudacore-nan"}
# Sources that nothing here compiles -> module of an adapter of the package, and its release.
COMPILED = {
    "vllm-topk-sigmoid-nan-bias": ("vllm", "0.33.0"),
    # A comment.
    "vllm-mxfp4-keep-the-pad": ("vllm", "0.33.0"),
    "flashinfer-finalize-unguarded-map": ("flashinfer", "0.7.2.post1"),
}
TORCH = "torch-masked-attention-nan"
CASCADE = "flashinfer-triton-merge-state-empty-parts"
CUH = "data/include/flashinfer/attention/cascade.cuh"
# Its sources are in no wheel.
ELSEWHERE = {"flashmla-empty-row-lse"}
# No kernel: tests/vllm/test_upstream_patches.py runs its script with the diff and without.
SCHEDULER = "vllm-published-before-written"


def _blocks(name: str, language: str) -> list[str]:
    text = (UPSTREAM / f"{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _ask(subject: Subject, module: str, release: packages.Release, *clauses: str) -> dict[str, Reading]:
    """What a release answers to these clauses, in a process of its own."""
    ended = children.call(runner.ask, module, [(subject.name, clauses)], release, "cpu", 60.0, timeout_s=600)
    told = {clause: said for _, clause, said, _ in ended.told if said is not None}
    # An access past the end may end the process instead.
    return {clause: told.get(clause) or runner.breaks(runner._ended(ended, 60.0)) for clause in clauses}


DRAFTS = sorted(path.stem for path in UPSTREAM.glob("*.md"))


def test_every_draft_has_a_patch_that_is_tried_or_says_why_not():
    assert set(DRAFTS) == {*PATCHED, *COMPILED, TORCH, CASCADE, *ELSEWHERE, SCHEDULER}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_is_ready_to_paste(name):
    text = (UPSTREAM / f"{name}.md").read_text()
    assert text.startswith("# ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    parts = dict(zip(SECTIONS, re.split(r"^## .+$", text, flags=re.MULTILINE)[1:], strict=True))
    assert re.search(r"\d+\.\d+", parts["Environment"])
    (script,) = _blocks(name, "python")
    assert len(script.splitlines()) < 30
    compile(script, name, "exec")
    assert "staleproof" not in script
    installs = re.findall(r"^# pip install .*==", script, re.MULTILINE)
    assert installs
    assert len(parts["Expected"].split()) > 5
    assert len(parts["Actual"].split()) > 5
    assert re.search(r"`[\w/.]+\.(py|cuh?|cpp):\d+`|\.cu`.* lines? \d+", parts["Cause"]), parts["Cause"]
    (diff,) = _blocks(name, "diff")
    assert re.search(r"[Tt]ried against|applies to|was made from", parts["Proposed change"])
    for line in re.findall(r"^@@ .*", diff, re.MULTILINE):
        assert re.match(r"@@ -\d+,\d+ \+\d+,\d+ @@", line)


def _apply(name: str, folder: Path) -> None:
    (patch,) = _blocks(name, "diff")
    subprocess.run(["git", "apply", "-p1", "-"], input=patch, text=True, cwd=folder, check=True)


def _folder(module: str, version: str) -> Path:
    """Where the sources of a release lie; without them the test is skipped."""
    subject = subjects_of(load_module(f"staleproof.kernels.{module}"))[0]
    folders = packages.unpacked(subject.package, version)
    if not folders:
        pytest.skip(f"{subject.package} {version} is not in the cache")
    return folders[-1]


def _copy(folder: Path, tmp_path: Path, *files: str) -> None:
    """Copy files or packages of a release; without one of them the test is skipped."""
    for source, copy in ((folder / file, tmp_path / file) for file in files):
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, copy)
        else:
            pytest.skip(f"{source} is not in the cache")


@pytest.mark.parametrize("name", COMPILED)
def test_a_patch_of_compiled_sources_fits_them(tmp_path, name):
    folder = _folder(*COMPILED[name])
    (patch,) = _blocks(name, "diff")
    _copy(folder, tmp_path, *re.findall(r"^--- a/(.+)$", patch, re.MULTILINE))
    _apply(name, tmp_path)


def test_the_patch_of_flex_attention_lets_the_script_end_quietly(tmp_path):
    if torch.__version__.partition("+")[0] != "2.13.0":
        pytest.skip("the patch is for torch 2.13.0")
    module = "torch/_higher_order_ops/flex_attention.py"
    _copy(Path(torch.__file__).parents[1], tmp_path, module)
    _apply(TORCH, tmp_path)
    (script,) = _blocks(TORCH, "python")
    # The module in place of the installed one, before anything imports it.
    patched = (
        "import importlib.util, sys\n"
        f"name, file = 'torch._higher_order_ops.flex_attention', {str(tmp_path / module)!r}\n"
        "class Patched:\n"
        "    def find_spec(self, wanted, path=None, target=None):\n"
        "        return importlib.util.spec_from_file_location(name, file) if wanted == name else None\n"
        "sys.meta_path.insert(0, Patched())\n"
    ) + script
    script, patched = (text.replace("torch.cuda.is_available()", "False") for text in (script, patched))
    released = warm.run("-c", script, env=os.environ, timeout=300, vllm=False)
    assert "AssertionError: expected" in released.stderr
    # With torch's own import in it, as it finds the module there.
    mended = subprocess.run([sys.executable, "-c", patched], capture_output=True, text=True, check=False)
    assert mended.returncode == 0, mended.stderr


# In a process of its own: Triton decides at the import of a kernel whether it is interpreted.
MERGES = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
torch.manual_seed(0)
a, b = torch.randn(2, 4, 2, 8).unbind()
lse_a, lse_b = torch.randn(2, 4, 2).unbind()
lse_a[1], a[1] = float("-inf"), float("nan")
lse_a[2], lse_b[2] = float("-inf"), float("-inf")
lse_b[3] = float("-inf")
out, lse = torch.empty(4, 2, 8), torch.empty(4, 2)
kernels.merge_state_kernel[(4,)](a, lse_a, b, lse_b, out, lse, 2, 8, bdx=8, bdy=2)
weight = torch.softmax(torch.stack([lse_a[0], lse_b[0]]) * 0.6931471805599453, 0)[..., None]
print(torch.allclose(out[0], weight[0] * a[0] + weight[1] * b[0], atol=1e-5))
print(torch.equal(out[1], b[1]), torch.equal(out[3], a[3]))
print(bool((out[2] == 0).all() and (lse[2] == float("-inf")).all()))
"""


def test_the_patch_of_flashinfers_merge_gives_the_other_part_and_zeros(tmp_path):
    folder = _folder("flashinfer", "0.7.2.post1")
    file, compiled = (f"flashinfer/{name}" for name in ("triton/kernels/cascade.py", CUH))
    _copy(folder, tmp_path, file, compiled)
    said = []
    for patched in (False, True):
        if patched:
            _apply(CASCADE, tmp_path)
        env = os.environ | {"TRITON_INTERPRET": "1"}
        done = warm.run("-c", MERGES, str(tmp_path / file), env=env, timeout=300, vllm=False)
        said.append(done.stdout.split() or done.stderr)
    assert said == [["True", "False", "True", "False"], ["True"] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHED)
def test_the_patch_mends_the_clause_and_changes_no_other(tmp_path, name):
    module, version, wanted, clause = PATCHED[name]
    module = f"staleproof.kernels.{module}"
    subject = next(s for s in subjects_of(load_module(module)) if s.name == wanted)
    folder = _folder(PATCHED[name][0], version)
    whole = {"fla": "fla", "liger": "liger_kernel"}.get(PATCHED[name][0], "")
    top = subject.files[0].partition(".")[0] if subject.files else whole
    files = [file.replace(".", "/") + ".py" for file in subject.files] or [whole]
    _copy(folder, tmp_path, *files)
    release = packages.Release(version, tmp_path)
    before = _ask(subject, module, release, clause)
    assert before[clause].verdict == (NOT_RUN if name in UNASKED else BREAKS)
    _apply(name, tmp_path)
    shutil.rmtree(tmp_path / top / "__pycache__", ignore_errors=True)
    # As it was released, every other clause holds or cannot be asked: the recorded audit asked them all.
    released = {
        found.key.question: found.verdict
        for found in audit.recorded_audits()
        if (found.key.variant, found.key.release) == (wanted, f"{subject.package} {version}")
        and found.provenance == Provenance.INTERPRETED
    }
    assert len(released) == len(subject.clauses)
    after = _ask(subject, module, release, *(c for c in subject.clauses if c not in subject.skip))
    assert after[clause].verdict == HOLDS, after[clause].note
    for other, said in after.items():
        # What the interpreter could not ask before may be asked now.
        unasked = name in UNASKED and released[other] == NOT_RUN
        assert other == clause or unasked or said.verdict == released[other], (other, said)
