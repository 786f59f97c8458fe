"""The draft for vLLM's published blocks: its script fails on 0.33.0 as released, and passes with its diff."""

from __future__ import annotations

import re
from pathlib import Path

import environment
import pytest
import warm

DRAFT = Path(__file__).parents[2] / "workbook/upstream/vllm-published-before-written.md"
FAILS = "AssertionError: 256 tokens are computed, and the prefix cache gives 288"


def _block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", DRAFT.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.mark.slow
def test_the_script_fails_as_released_and_passes_with_the_diff(tmp_path):
    script = _block("python")
    found = warm.released("0.33.0", "-c", script)
    assert found.stderr.rstrip().endswith(FAILS)
    mended = warm.run("-c", script, env=environment.patched("0.33.0", tmp_path, _block("diff")), timeout=300)
    assert mended.returncode == 0, mended.stderr[-2000:]
