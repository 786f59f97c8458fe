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


def test_an_edit_is_found_by_its_shape_and_only_where_it_is_meant():
    edit = replace(NOTHING, function="Rows.live", old="tokens <= 0", new="tokens == 0")
    code = "class Rows:\n  def live(self, x):\n    return not (\n      {} <= 0)\ndef live(y): return y <= 0\n"
    assert "(\n      n == 0)\n" in mutate.applied(edit, code.format("n"))
    assert "(\n      tokens == 0)\n" in mutate.applied(edit, code.format("tokens"))
    # The function has another name now, and the code is the same.
    renamed = replace(edit, function="Rows.alive")
    assert mutate.applied(renamed, code.format("tokens")) is not None
    assert mutate.applied(renamed, code.format("n")) is mutate.applied(edit, code.format("self.n")) is None
    assert mutate.applied(replace(edit, old="self"), code) is None
    two = replace(edit, old="a = 1\nb = a", new="b = 1")
    assert mutate.applied(replace(two, function="module"), "x = 1\ny = x\nz = y\n") == "y = 1\nz = y\n"
    assert mutate.applied(replace(two, function="module"), "x = 1\ny = z\n") is None


def test_a_verdict_is_asked_once_without_an_edit():
    names = ["run a | q | v | nan", "run a | q | v | wrong", "run a | q | w | nan", "x.py", "y.py", "z.py"]
    assert mutate.unedited(names, 2) == [names[:2], [names[2]], ["x.py", "z.py"], ["y.py"]]


def test_every_test_that_is_named_exists():
    for edit in EDITS:
        if edit.red.startswith("run "):
            assert edit.red.count(" | ") == 3, edit.red
            continue
        file, _, name = edit.red.partition("::")
        text = (mutate.CHECKOUT / "tests" / file).read_text()
        assert f"def {name.partition('[')[0]}(" in text, edit.red


def test_a_sample_is_noticed():
    sample = [edit for edit in EDITS if edit.sample]
    assert len({edit.room for edit in sample}) >= 5
    outcomes = [mutate.tried(edit) for edit in sample]
    assert [(o.state, o.edit.file, o.edit.breaks, o.says) for o in outcomes if o.state != RED] == []


def test_an_edit_that_nothing_notices_survives_and_one_that_does_not_run_shows_nothing():
    news = "ROW_STATES[kept]", "states[kept.any(1)] = ="
    edits = NOTHING, replace(NOTHING, old="nowhere(kept)"), *(replace(NOTHING, new=new) for new in news)
    tried = [mutate.tried(edit) for edit in edits]
    assert [one.state for one in tried[:3]] == [SURVIVED, GONE, "the edited file does not run"]
    assert "ROW_STATES" in tried[2].says
    assert tried[3].state == "exit 4, not a red test"
