"""A sample of the edits turns red, all of them still apply, and the runner is not easily satisfied."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mutate
from mutate import GONE, RED, SURVIVED, Edit

EDITS = mutate.edits()
# Nothing changes for whoever calls the function.
SAME = {"old": "states[kept.any(1)] = 1", "new": "states[kept.any(1)] = 0 + 1", "breaks": "Nothing."}
RED_IN = "evidence/test_canary.py::test_states"
NOTHING = Edit("evidence", "evidence/canary.py", "row_states", **SAME, red=RED_IN)


def test_every_edit_applies():
    gone = [e for e in EDITS if mutate.applied(e, mutate.placed(mutate.CHECKOUT, e).read_text()) is None]
    assert [(e.room, e.file, e.function, e.old) for e in gone] == []
    twice = [key for key, count in Counter((e.file, e.old, e.new) for e in EDITS).items() if count > 1]
    assert twice == []


def test_an_edit_is_found_whatever_its_layout_and_only_in_its_function():
    edit = replace(NOTHING, function="Rows.live", old="n <= 0", new="n == 0")
    code = "class Rows:\n  def live(self, n):\n    return not (\n      {}n <= 0)\ndef live(n): n <= 0\n"
    assert "(\n      n == 0)\n" in mutate.applied(edit, code.format(""))
    for other in ("self.", "n <= 0 or "):
        assert mutate.applied(edit, code.format(other)) is None
    assert mutate.applied(replace(edit, function="Rows.alive"), code.format("")) is None


def test_every_test_that_is_named_exists():
    for edit in EDITS:
        if edit.is_verdict:
            assert edit.red.count(" | ") == 3, edit.red
            continue
        file, _, name = edit.red.partition("::")
        text = (mutate.CHECKOUT / "tests" / file).read_text()
        assert f"def {name.partition('[')[0]}(" in text, edit.red


def test_a_sample_is_noticed():
    sample = [edit for edit in EDITS if edit.sample]
    assert {edit.room for edit in sample} == {edit.room for edit in EDITS}
    tried = {edit.breaks: mutate.tried(edit) for edit in sample}
    assert {breaks: said for breaks, said in tried.items() if said[0] != RED} == {}


def test_an_edit_that_nothing_notices_survives_and_one_that_does_not_run_shows_nothing():
    news = "ROW_STATES[kept]", "states[kept.any(1)] = ="
    edits = NOTHING, replace(NOTHING, old="nowhere(kept)"), *(replace(NOTHING, new=new) for new in news)
    (same, _), (gone, _), (unknown, said), (spoilt, _) = map(mutate.tried, edits)
    assert (same, gone, unknown, spoilt) == (
        SURVIVED,
        GONE,
        "the edited file does not run",
        "exit 4, not a red test",
    )
    assert "ROW_STATES" in said
