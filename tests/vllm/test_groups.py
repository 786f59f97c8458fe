"""Patches that need each other in a real vLLM: no list grows, whoever schedules and whatever fails."""

from pathlib import Path

import environment
import pytest
import warm

from staleproof.vllm import releases

pytestmark = pytest.mark.slow
TURBOQUANT = {"off": [3, 5], "on": [], "lines": []}
SCENES = Path(__file__).with_name("real_groups.py")


@pytest.mark.parametrize("version", environment.also("0.22.1"))
def test_patches_together(tmp_path, version):
    needed = [name for name, probe in releases.table()[version].items() if probe["needed"]]
    found = warm.answer(warm.released(version, str(SCENES), *needed, TMPDIR=str(tmp_path)))
    assert {scene["pending"] for scene in found.values() if "pending" in scene} == {0}
    assert found["patched"]["hybrid"] == 0
    assert found["patched"]["lines"] == found["scheduler_class"]["lines"] == []
    # The model lies in the checkout: a child of multiprocessing removes no folder at its end.
    assert [path.name for path in tmp_path.glob("staleproof-*")] == []
    assert found.get("turboquant", TURBOQUANT) == TURBOQUANT
    if "undrained_ids" not in needed:
        return
    # What does not stand, and why; the log says what does.
    first, second = found["another_plugin"]["lines"]
    assert "undrained_ids: Scheduler.schedule is left alone: Scheduler.schedule was wrapped by" in first
    assert second.startswith("staleproof: mla_recording: needs undrained_ids, which stepped back")
    (line,) = found["failing_drain"]["lines"]
    assert (
        "planted; comes back in 60 s (1 of 3); out of service: undrained_ids, mla_recording; in service: "
        in line
    )
