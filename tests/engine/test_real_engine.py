"""Spies, faults, options and ranks fit the real vLLM, in one process a release."""

from __future__ import annotations

from pathlib import Path

import environment
import pytest
import warm

PROGRAM = Path(__file__).with_name("real_engine.py")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.22.1", "0.26.0"])
def test_spies_faults_options_and_ranks_fit_the_real_vllm(version):
    variables, folder = environment.variables(version), Path(environment.__file__).parent
    done = warm.run(str(PROGRAM), env=variables, timeout=300, cwd=folder)
    # Row 6 holds NaN and row 7 Inf, each in one of two layers.
    busy = {"live": 7, "rows": 8, "NaN": [1, 0], "Inf": [0, 1]}
    idle = {"live": 0, "rows": 8, "NaN": [0, 1], "Inf": [0, 1]}
    assert [line for line in done.stdout.splitlines() if line.startswith("fits ")] == [
        "fits attention",
        "fits stages",
        "fits logits",
        "fits routing",
        "fits ledger",
        "fits lazy_buffers",
        "fits whole_tiles",
        "fits tenants",
        "fits first_configs",
        "fits scaled_weights: norm 1.0, gain 1.0",
        "fits switches: zeroed [[3, 2]]",
        "fits routing: behind",
        "fits first_configs: 36 and 1",
        "fits watch: 20 functions",
        "fits options: []",
        "fits model: Qwen3MoeConfig 128 8",
        "fits rank 0 of 2: True",
        "fits rank 1 of 2: True",
        "fits second: serve, 1",
        f"fits steps: {[busy, idle]}",
    ], done.stderr[-3000:]
