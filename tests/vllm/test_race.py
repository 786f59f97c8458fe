"""The race check on a release that keeps one id buffer for each batch in flight."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import environment
import warm


@pytest.mark.slow
def test_no_race_in_0_26_0():
    with environment.skipped_if_unavailable():
        variables = environment.variables("0.26.0")
    program = "import real_scheduler; print('race', real_scheduler.race(listed=False))"
    done = warm.run("-c", program, env=variables, timeout=120, cwd=Path(__file__).parent)
    assert done.stdout.splitlines()[-1:] == ["race [[1, 2], [8, 9]]"], done.stderr[-2000:]
