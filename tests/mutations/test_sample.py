"""A sample of the edits turns red, all of them still apply, and the runner is not easily satisfied."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mutate
from mutate import GONE, RED, SURVIVED, Edit

EDITS = mutate.edits()
COMMENT = Edit(
    "evidence",
    "evidence/canary.py",
    "Nothing: a comment has another word.",
    "# Per format: integer type",
    "# By format: integer type",
    "evidence/test_canary.py::test_another_stages_canary_is_a_computed_nan",
)


def test_every_edit_applies():
    gone = [
        e for e in EDITS if mutate.applied(e, mutate.placed(mutate.CHECKOUT, e).read_text()) in (None, e.old)
    ]
    assert [(e.room, e.file, e.old) for e in gone] == []
    assert len(EDITS) >= 60
    twice = [key for key, count in Counter((e.file, e.old, e.new) for e in EDITS).items() if count > 1]
    assert twice == []


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
    name = "ROW_STATES"
    tried = [
        mutate.tried(edit)
        for edit in (
            COMMENT,
            replace(COMMENT, old="this text is nowhere"),
            replace(COMMENT, old="    words = (", new=f"    {name}\n    words = ("),
            replace(COMMENT, new="Per format integer type"),
        )
    ]
    assert [one.state for one in tried[:3]] == [SURVIVED, GONE, "the edited file does not run"]
    assert name in tried[2].says
    assert tried[3].state == "exit 4, not a red test"


def test_the_page_lists_every_edit():
    """If this fails, an edit is new or has changed: make mutations."""
    page = mutate.PAGE.read_text()
    assert f"{len(EDITS)} small edits" in page
    assert [edit.breaks for edit in EDITS if edit.breaks not in page] == []
