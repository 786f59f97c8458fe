"""The patches of ``workbook/upstream``: they fit vLLM 0.33.0, and their own tests fail without them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import environment
import warm

UPSTREAM = Path(__file__).parents[2] / "workbook/upstream"
PATCHES = sorted(UPSTREAM.glob("vllm-*.patch"))
# Their tests run on a CPU.
RED = ("vllm-0.33.0-mla-empty-rows", "vllm-0.33.0-fused-fp4-scales")
# Its test is of compiled kernels and is skipped without a GPU.
COMPILED = "vllm-0.33.0-router-nan-bias"
RUN = "import pytest; raise SystemExit(pytest.main('-q -p no:cacheprovider -p no:nbval tests'.split()))"
# vLLM's CUTLASS backend allocates its workspace and asks for the number of SMs when it is imported.
CONFTEST = """
import torch
import vllm.utils.platform_utils as platform

empty = torch.empty
platform.num_compute_units = lambda *_: 1


def on_cpu(*args, **kwargs):
    return empty(*args, **kwargs | ({"device": "cpu"} if str(kwargs.get("device")) == "cuda" else {}))


torch.empty = on_cpu
"""


def _sources(patch: Path) -> tuple[str, Path]:
    (version,) = re.findall(r"vllm-([\d.]+)-", patch.name)
    with environment.skipped_if_unavailable():
        return version, environment.sources(version)


def _apply(patch: Path, folder: Path, *options: str) -> None:
    # git leaves files outside a repository's own folder alone.
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", *options, str(patch)], cwd=folder, check=True)


def test_every_patch_is_tried():
    assert {patch.stem for patch in PATCHES} == {*RED, COMPILED}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_fits_the_release_that_it_names(tmp_path, patch):
    _, released = _sources(patch)
    for file in re.findall(r"^--- a/(.+)$", patch.read_text(), re.MULTILINE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(released / file, tmp_path / file)
    _apply(patch, tmp_path, "--check")
    # What it adds is vLLM's: none of ours is needed.
    assert "staleproof" not in patch.read_text()


@pytest.mark.slow
def test_their_own_tests_fail_as_released_and_pass_with_them(tmp_path):
    patches = [UPSTREAM / f"{name}.patch" for name in RED]
    version, _ = _sources(patches[0])
    variables = environment.variables(version)
    for options, expected in [
        # The tests, and a new module that they import, without the fix.
        (["--include=tests/*", "--include=*/clear_empty_rows.py"], "7 failed, 8 passed"),
        ([], "15 passed"),
    ]:
        folder = tmp_path / expected.replace(" ", "_")
        environment.linked(version, folder, "".join(patch.read_text() for patch in patches))
        (folder / "conftest.py").write_text(CONFTEST)
        for patch in patches:
            _apply(patch, folder, *options)
        path = os.pathsep.join([str(folder), variables["PYTHONPATH"]])
        done = warm.run("-c", RUN, cwd=folder, env=variables | {"PYTHONPATH": path}, timeout=300)
        assert re.search(rf"^{expected}\b", done.stdout, re.MULTILINE), done.stdout[-2000:] + done.stderr


def test_the_draft_and_the_patch_of_the_router_change_the_same_lines():
    draft = (UPSTREAM / "vllm-topk-sigmoid-nan-bias.md").read_text()
    patch = (UPSTREAM / f"{COMPILED}.patch").read_text().partition("diff --git a/tests")[0]
    changed = re.compile(r"^[+-](?!\+\+|--)(.*)$", re.MULTILINE)
    (diff,) = re.findall(r"^```diff\n(.*?)^```", draft, re.MULTILINE | re.DOTALL)
    assert changed.findall(diff) == changed.findall(patch)
