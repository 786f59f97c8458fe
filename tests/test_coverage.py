"""``workbook/coverage.md``: each place is there, and each grade is the finding's."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from tests.test_pages import anchors

from staleproof.cases import store
from staleproof.cases.case import Case
from staleproof.cases.words import NOT_RUN
from staleproof.incidents import registry

WORKBOOK = Path(__file__).parents[1] / "workbook"
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| (.+) \| ([^|]+) \|$", re.MULTILINE)
ROWS = ROW.findall((WORKBOOK / "coverage.md").read_text())
FINDING = re.compile(r"`([^`]+)`, `([^`]+)`, `([^`]+)`")
LINE = re.compile(r"(vLLM|FlashInfer) \d\S* `\S+:\d+(-\d+)?`")
GRADED = {"real", "replica", "arithmetic"}


@cache
def asked() -> dict[tuple[str, ...], Case]:
    """Every question of the incidents."""
    return {case.key[:3]: case for name in registry.INCIDENTS for case in registry.table_of(name).cases}


@cache
def recorded() -> dict[tuple[str, ...], set[str]]:
    """Every recorded finding that ran and that is still asked -> its grades."""
    ran: dict[tuple[str, ...], set[str]] = {}
    for one in (found for run in store.read_all() for found in run.findings):
        if one.ran and (one.incident == "engine" or one.key[:3] in asked()):
            ran.setdefault(one.key[:3], set()).add(str(one.grade))
    return ran


def grades(key: tuple[str, ...]) -> set[str]:
    """The grades of one finding; of one that no machine recorded, its table's, if it runs without a GPU."""
    if key in recorded() or key not in asked():
        return recorded().get(key, set())
    case = asked()[key]
    if "CUDA" in (case.needs(case.subject, "cpu") or ""):
        return set()
    return {str((case.evidence(case.subject) if callable(case.evidence) else case.evidence).grade)}


@cache
def timeline() -> set[str]:
    """Days and numbers of claims."""
    held = json.loads((WORKBOOK / "timeline.json").read_text())
    return {e["date"] for e in held["events"]} | {f"claim {c['number']}" for c in held["claims"]}


def faults(number: str, thread: str, says: str, place: str, state: str) -> list[str]:
    """What is wrong with a row."""
    word, _, reason = state.partition(": ")
    found = FINDING.findall(place)
    days = re.findall(r"\(timeline\.md\), ([^;]+?)(?:;|$)", place)
    wrong = [f"no such question: {key}" for key in found if key not in asked() | recorded()]
    wrong += [f"not in the timeline: {day}" for day in days if day not in timeline()]
    for name, anchor in re.findall(r"\]\(([^()#]+)#?([^()]*)\)", place):
        page = (WORKBOOK / name).resolve()
        if not page.exists() or (anchor and anchor not in anchors(page)):
            wrong.append(f"no such page or heading: {name}#{anchor}")
    if word in GRADED:
        have = set().union(*map(grades, found))
        if word not in have:
            wrong.append(f"{word}, but its findings are {sorted(have)}")
    elif word == "source":
        if not (LINE.search(place) or "](" in place):
            wrong.append("no line of released code, and no page that has one")
    elif word == NOT_RUN:
        if len(reason.split()) < 3:
            wrong.append("not run, and no reason")
    elif word != "quoted":
        wrong.append(f"unknown state {word}")
    if word == "quoted" and "](" not in place:
        wrong.append("quoted on no page")
    if len(says.split()) >= 15:
        wrong.append("15 words or more")
    return wrong


def test_there_is_a_row_for_each_of_the_125_facts():
    assert [int(row[0]) for row in ROWS] == [*range(1, 126)]
    assert all(re.match(r"#\d{5}", row[1]) for row in ROWS)


def test_each_row_has_its_place_and_grade():
    assert {row[0]: wrong for row in ROWS if (wrong := faults(*row))} == {}


@pytest.mark.parametrize(
    ("place", "state", "fault"),
    [
        ("`kv_reuse`, `no such`, `question`", "replica", "no such question"),
        (
            "`kv_reuse`, `served with prefix caching`, `no_zeroing`",
            "real",
            "real, but its findings are ['replica']",
        ),
        ("[timeline](timeline.md), 2020-01-01", "quoted", "not in the timeline"),
        ("[reporters](reporters.md#nowhere)", "quoted", "no such page or heading"),
        ("[nobody](nobody.md)", "quoted", "no such page or heading"),
        ("`vllm/envs.py`", "source", "no line of released code"),
        ("[timeline](timeline.md), 2026-02-24", "not run", "no reason"),
        ("[timeline](timeline.md), 2026-02-24", "missing", "unknown state"),
        ("nowhere", "quoted", "quoted on no page"),
    ],
)
def test_a_row_that_is_wrong_is_seen(place, state, fault):
    assert any(fault in one for one in faults("1", "#37442", "It says.", place, state))
