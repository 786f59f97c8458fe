"""Runs a program of this folder with a real vLLM, and says what it found to fit."""

from __future__ import annotations

import sys
from pathlib import Path

VLLM_TESTS = Path(__file__).resolve().parents[1] / "vllm"


def fits(program: str, version: str) -> tuple[list[str], str]:
    """The lines it prints that begin with ``fits``, and the end of its errors; skips without that release."""
    sys.path.insert(0, str(VLLM_TESTS))
    import environment
    import warm

    variables = environment.variables(version)
    path = Path(__file__).with_name(program)
    done = warm.run(str(path), env=variables, timeout=300, cwd=VLLM_TESTS)
    return [line for line in done.stdout.splitlines() if line.startswith("fits ")], done.stderr[-3000:]
