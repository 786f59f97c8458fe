"""The patches of ``workbook/upstream``: without one the clause breaks, with it the clause holds.

They are applied to a copy of the sources in the cache; without those the tests are skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from staleproof.audit import packages, registry, runner
from staleproof.audit.contract import Row, Verdict

UPSTREAM = Path(__file__).parents[2] / "workbook/upstream"
SECTIONS = ["Environment", "Minimal script", "Expected", "Actual", "Cause", "Proposed change"]
# Draft -> module of the adapter, version, subject, clause.
PATCHED = {
    "vllm-triton-decode-empty-row": ("vllm_", "0.33.0", "Triton MLA decode", "E"),
    "vllm-merge-attn-states-empty-part": ("vllm_", "0.33.0", "Triton merge_attn_states", "E"),
    "sglang-mla-norope-reserved-slot": ("sglang_", "0.5.23", "Triton set_mla_kv_buffer without rope", "S"),
    "sglang-triton-decode-empty-row": ("sglang_", "0.5.23", "Triton decode, MLA", "E"),
    "sglang-merge-state-empty-parts": ("sglang_", "0.5.23", "Triton merge_state", "E"),
    "sglang-extend-unified-empty-row": ("sglang_", "0.5.23", "Triton extend, unified", "E"),
    "liger-fused-moe-negative-ids": ("liger", "0.8.5", "fused_moe", "X"),
    "fla-rows-past-cu-seqlens": ("fla", "0.6.0", "fused_recurrent_gated_delta_rule", "U"),
}


def _blocks(name: str, language: str) -> list[str]:
    text = (UPSTREAM / f"{name}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _ask(subject: registry.Subject, module: str, folder: Path, version: str) -> dict[str, Row]:
    release = packages.Release(version, folder)
    found = runner.answers(module, [subject], release, "cpu")
    return {row.clause: row for row in runner._rows(subject, release, found[subject.name])}


def test_every_draft_has_its_sections_in_order_and_a_script():
    drafts = sorted(UPSTREAM.glob("*.md"))
    assert {path.stem for path in drafts} >= set(PATCHED)
    for path in drafts:
        text = path.read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS, path
        (script,) = _blocks(path.stem, "python")
        assert len(script.splitlines()) < 30
        compile(script, path.name, "exec")
        assert bool(_blocks(path.stem, "diff")) == (path.stem in PATCHED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHED)
def test_the_patch_mends_the_clause_and_changes_no_other(tmp_path, name):
    module, version, wanted, clause = PATCHED[name]
    module = f"staleproof.audit.subjects.{module}"
    subject = next(s for s in registry.subjects_of(registry.load_module(module)) if s.name == wanted)
    folders = [r.folder for r in packages.releases(subject) if r.version == version and r.folder]
    if not folders:
        pytest.skip(f"{subject.package} {version} is not in the cache")
    whole = {"fla": "fla", "liger": "liger_kernel"}.get(PATCHED[name][0], "")
    top = subject.files[0].partition(".")[0] if subject.files else whole
    files = [file.replace(".", "/") + ".py" for file in subject.files] or [whole]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        source = folders[0] / file
        if source.is_dir():
            shutil.copytree(source, tmp_path / file, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / file)
    before = _ask(subject, module, tmp_path, version)
    (patch,) = _blocks(name, "diff")
    subprocess.run(["git", "apply", "-p1", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / top / "__pycache__", ignore_errors=True)
    after = _ask(subject, module, tmp_path, version)
    assert before[clause].verdict is Verdict.BREAKS
    assert after[clause].verdict is Verdict.HOLDS, after[clause].note
    others = {c: row.verdict for c, row in before.items() if c != clause}
    assert {c: row.verdict for c, row in after.items() if c != clause} == others
