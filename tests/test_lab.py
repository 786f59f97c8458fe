"""Questions, remedies and findings: what a run says, and what it refuses to say."""

from __future__ import annotations

import importlib
import json
import math
import time
from pathlib import Path

import pytest
import torch
from tests import jobs

from staleproof import child
from staleproof.child import ChildError
from staleproof.grades import ARITHMETIC, real
from staleproof.lab import (
    SHARED,
    Finding,
    Fix,
    Incident,
    Key,
    MissingError,
    Scene,
    bad,
    failed,
    finding,
    good,
    not_run,
    open_,
)

BAD, GOOD = bad("leaked"), good("clean")


def right(subject, device, *shared):
    return None


def one(answer, variants=("a",), expect=None, **options):
    """The findings of an incident with one question; ``answer`` may be a function of the variant."""
    incident = Incident("fake")
    ask = answer if callable(answer) else lambda subject, device, *shared: answer
    incident.question("q", variants, expect=expect, **options)(ask)
    return [*incident.run("cpu")]


def fixed(*answers, compare=right, expect="fixed", **options):
    """The finding of a remedy whose three runs give these answers."""
    given = iter(answers)
    incident = Incident("fake")
    incident.fixes(
        lambda *_: next(given), {"ours": Fix("off", "on")}, compare=compare, expect=expect, **options
    )
    (found,) = incident.run("cpu")
    return found


# --- Questions.


def test_question_gets_each_subject_and_device_and_progress_names_the_step():
    calls, lines = [], []
    incident = Incident("fake")
    for name, variants in {"mapping": {"a": 1, "b": 2}, "list": ["c"]}.items():
        incident.question(name, variants, expect="clean")(lambda *got: calls.append(got) or GOOD)
    found = [*incident.run("cuda", lines.append)]
    assert calls == [(1, "cuda"), (2, "cuda"), ("c", "cuda")]
    assert [f.key for f in found] == [
        ("fake", "mapping", "a", ""),
        ("fake", "mapping", "b", ""),
        ("fake", "list", "c", ""),
    ]
    assert lines == ["fake 1/3: mapping, a", "fake 2/3: mapping, b", "fake 3/3: list, c"]


def test_verdict_other_than_expected_fails_and_none_expects_nothing():
    found = one(GOOD, ["a", "b", "c"], {"a": "clean", "b": "leaked", "c": None})
    assert [(f.ok, f.failed) for f in found] == [(True, False), (False, True), (True, False)]


@pytest.mark.parametrize(
    ("variants", "expect", "error"),
    [
        (
            ["a"],
            {"a": "clean", "aa": "clean"},
            r"expect of q: expected a verdict of each variant, .*\['aa'\]",
        ),
        (["a", "b"], {"a": "clean"}, r"expect of q: .* got more or fewer: \['b'\]"),
        ([], "clean", "variants of q: expected at least one"),
    ],
)
def test_expectation_of_other_variants_is_refused_when_it_is_written(variants, expect, error):
    with pytest.raises(ValueError, match=f"^{error}"):
        Incident("fake").question("q", variants, expect=expect)(lambda *_: GOOD)


def test_variant_of_a_question_twice_is_refused():
    incident = Incident("fake")
    incident.question("q", ["a"], expect=None)(lambda *_: GOOD)
    with pytest.raises(ValueError, match=r"^variants of q: expected .* each once, got \['a'\]"):
        incident.question("q", ["a", "b"], expect=None)(lambda *_: GOOD)


def test_question_that_returns_a_word_is_an_error():
    with pytest.raises(ValueError, match=r"^answer of fake, q, a: expected good\(...\).* got clean"):
        one(lambda *_: "clean")


def test_ask_runs_the_named_variants_only_and_names_what_there_is():
    incident = Incident("fake")
    incident.question("q", ["a", "b"], expect=None)(lambda *_: GOOD)
    incident.question("other", ["a"], expect=None)(pytest.fail)
    assert [f.variant for f in incident.ask("q", "b", device="cpu")] == ["b"]
    with pytest.raises(ValueError, match=r"^question: expected one of \['q', 'other'\], got 'nope'$"):
        incident.ask("nope")
    with pytest.raises(ValueError, match=r"^variants: expected some of \['a', 'b'\], got \['x'\]$"):
        incident.ask("q", "x")


# --- Not run.


def test_what_is_missing_is_not_run_with_its_reason_and_expects_nothing():
    def ask(subject, device):
        if subject == "missing":
            raise MissingError("engine a: out of memory")
        if subject == "imports":
            importlib.import_module("no_such_package.at_all")
        if subject == "child":
            raise ChildError("ended with 1: no memory")
        return not_run("needs\nSM100") if subject == "refuses" else GOOD

    def needs(subject, device):
        return f"no {subject} on {device}" if subject == "absent" else None

    variants = ["here", "absent", "missing", "imports", "child", "refuses"]
    here, *others = one(ask, variants, "clean", needs=needs, evidence=real("torch"))
    assert (here.ok, here.grade, here.of) == (True, "real", real("torch").of)
    assert [f.note for f in others] == [
        "no absent on cpu",
        "engine a: out of memory",
        "no_such_package is not installed",
        "ended with 1: no memory",
        "needs SM100",
    ]
    assert {(f.verdict, f.ok, f.failed, f.expected, f.grade) for f in others} == {
        ("not run", False, False, None, "")
    }
    with pytest.raises(ValueError, match=r"^reason: expected why the question was not run"):
        not_run(" ")


def test_missing_module_of_an_installed_package_is_a_fault():
    for name in ("json.no_such_module", "staleproof.no_such_module"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            one(lambda *_, name=name: importlib.import_module(name))


def test_failed_kernel_gives_one_short_line():
    note = failed(RuntimeError("no  image\n" + "x" * 300)).note
    assert note == "failed: RuntimeError: no image " + "x" * 191


def test_evidence_is_the_answers_or_else_the_questions():
    torch_topk = real("torch", "topk")
    (given,) = one(good("clean", evidence=ARITHMETIC), evidence=torch_topk)
    (of_subject,) = one(GOOD, evidence=lambda subject: torch_topk)
    assert (given.grade, of_subject.grade, of_subject.of) == ("arithmetic", "real", torch_topk.of)
    assert fixed(BAD, BAD, BAD, expect="not fixed", evidence=torch_topk).of == torch_topk.of


# --- Scenes.


def test_scene_begins_once_when_it_is_needed():
    events = []
    scene = Scene("server", lambda device: events.append(f"begins on {device}") or [1, 2])
    incident = Incident("fake")
    incident.question("first", ["x"], expect=None)(lambda *_: events.append("x") or GOOD)
    incident.question("q", ["a", "b"], expect=None, scene=lambda subject: scene)(
        lambda subject, device, result: events.append(subject) or good("clean", result=result)
    )
    found = [*incident.run("cpu")]
    assert events == ["x", "begins on cpu", "a", "b"]
    assert [f.numbers for f in found[1:]] == [{"result": [1, 2]}] * 2


def test_scene_whose_child_fails_leaves_its_variants_not_run():
    def begin(device):
        raise ChildError("ended with 1")

    found = one(pytest.fail, ["a", "b"], "clean", scene=Scene("server", begin))
    assert [(f.verdict, f.note) for f in found] == [("not run", "server: ended with 1")] * 2


# --- Off / on / off.


@pytest.mark.parametrize(
    ("answers", "compare", "verdict", "outcome"),
    [
        ((BAD, GOOD, BAD), None, "fixed", "good"),
        ((BAD, GOOD, BAD), "rows are 3 times too large", "wrong", "bad"),
        ((BAD, BAD, BAD), None, "not fixed", "bad"),
        ((BAD, open_("now and then"), BAD), None, "not fixed", "bad"),
        ((GOOD, GOOD, BAD), None, "not reproduced", "open"),
        ((BAD, GOOD, GOOD), None, "not reproduced", "open"),
        ((BAD, GOOD, not_run("out of memory")), None, "not run", "not run"),
    ],
)
def test_fixed_is_bad_good_bad_and_a_right_result(answers, compare, verdict, outcome):
    found = fixed(*answers, compare=lambda *_: compare)
    assert (found.verdict, found.outcome) == (verdict, outcome)
    assert found.ok is (verdict == "fixed")


def test_remedy_runs_off_on_off_and_is_compared_whatever_is_expected():
    calls = []

    def ask(subject, device, result):
        calls.append(subject)
        return good("clean", note="a remark", rows=0) if subject == "on" else bad("leaked", rows=len(calls))

    def compare(subject, device, result):
        calls.append(f"compare {subject} {result}")
        return "3 times too large"

    incident, scene = Incident("fake"), Scene("s", lambda device: 7)
    pair = {"ours": Fix("off", "on", again="third process")}
    incident.fixes(ask, pair, compare=compare, expect="not fixed", scene=scene)
    (found,) = incident.run("cpu")
    assert calls == ["off", "on", "third process", "compare on 7"]
    assert (found.verdict, found.failed, found.note) == ("wrong", True, "3 times too large")
    assert found.three.text == "leaked, clean, leaked, 3 times too large"
    assert found.numbers == {"rows_off": 1, "rows_on": 0, "rows_again": 3}


@pytest.mark.parametrize("result", [False, True, 0, ""])
def test_comparison_that_gives_neither_none_nor_a_text_is_an_error(result):
    with pytest.raises(ValueError, match=r"^compare of fake, off/on/off, ours: expected None, or a text"):
        fixed(BAD, GOOD, BAD, compare=lambda *_: result)


@pytest.mark.parametrize("missing", ["off", "on"])
def test_remedy_one_of_whose_subjects_is_missing_is_not_run(missing):
    found = fixed(needs=lambda subject, device: "needs SM100" if subject == missing else None)
    assert (found.verdict, found.note) == ("not run", "needs SM100")


# --- Findings as JSON.


def test_finding_comes_back_from_json_with_commit_and_date():
    found = fixed(BAD, GOOD, BAD)
    assert found.commit
    assert found.origin == f"{found.commit}, {found.date}"
    assert Finding.from_json(json.loads(found.to_json())) == found


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"right": None}, "wrong"),
        ({"right": False, "wrong": "too large"}, "wrong"),
        ({"outcomes": ["good", "good", "bad"], "off": "clean"}, "not reproduced"),
        ({"outcomes": ["bad", "bad", "bad"], "on": "leaked"}, "not fixed"),
    ],
)
def test_fixed_in_a_file_whose_runs_do_not_show_it_becomes_what_they_show(changes, verdict):
    row = json.loads(fixed(BAD, GOOD, BAD).to_json())
    row["three"] |= changes
    found = Finding.from_json(row)
    assert (found.verdict, found.ok) == (verdict, False)
    assert found.note.startswith("recorded as fixed, but off/on/off gave ")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"three": None}, "three: expected the runs of a remedy"),
        ({"schema": 2}, "schema: expected 4, .* got 2"),
        ({"words": "rows"}, r"finding: expected the fields of a finding, got also \['words'\]"),
        ({"outcome": "not run"}, "outcome: expected not run, exactly with the verdict not run"),
        ({"provenance": "OTHER"}, "'OTHER' is not a valid Provenance"),
        ({"three": {"off": "a", "on": "a", "again": "a", "outcomes": ["bad", "good", "bad"]}}, "outcomes: "),
    ],
)
def test_row_that_contradicts_itself_is_refused(changes, error):
    row = json.loads(fixed(BAD, GOOD, BAD).to_json()) | changes
    with pytest.raises(ValueError, match=error):
        Finding.from_json(row)


def test_fixed_cannot_be_claimed_by_a_plain_question():
    with pytest.raises(ValueError, match=r"^three: expected the runs of a remedy"):
        finding(Key("fake", "q", "v"), good("fixed"))


# --- Threads, limits, processes.


def test_one_thread_while_a_question_runs_and_the_callers_number_between():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        incident, threads = Incident("fake"), []
        incident.question("q", ["a", "b"], expect=None)(
            lambda *_: threads.append(torch.get_num_threads()) or GOOD
        )
        for _ in incident.run("cpu"):
            assert torch.get_num_threads() == 3
        assert threads == [1, 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("end", ["last answer", "error", "Ctrl-C", "closed"])
def test_no_child_outlives_a_run(tmp_path, end):
    def ask(subject, device, sleeper):
        if end in ("error", "Ctrl-C"):
            raise {"error": ZeroDivisionError, "Ctrl-C": KeyboardInterrupt}[end]
        return GOOD

    started = []

    def begin(device):
        started.append(child.start(jobs.sleep, str(tmp_path / "pids")))

    incident = Incident("fake")
    incident.question("q", ["a", "b"], expect=None, scene=Scene("sleeper", begin))(ask)
    running = incident.run("cpu")
    if end in ("error", "Ctrl-C"):
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            next(running)
    else:
        next(running)
        assert started[0].poll() is None
        running.close() if end == "closed" else [*running]
    assert started[0].poll() is not None


def test_limit_is_for_all_children_of_a_variant_and_of_a_scene():
    left = []

    def ask(*_):
        left.append(child._deadline - time.monotonic())
        return GOOD

    one(ask, ["a", "b"], limit_s=400, scene=Scene("s", ask, limit_s=300))
    assert left == [pytest.approx(limit, abs=50) for limit in (300, 400, 400)]
    assert child._deadline == math.inf


def test_processes_of_one_command_answer_a_question_once(monkeypatch, tmp_path):
    monkeypatch.setenv(SHARED, str(tmp_path))
    calls = []

    def ask(subject, device):
        calls.append((subject, device))
        return not_run("busy") if subject == "busy" else GOOD

    incident = Incident("fake")
    incident.question("q", ["a", "busy"], expect=None)(ask)
    first = [*incident.run("cpu")]
    # What was not run is asked again.
    assert [*incident.run("cpu")] == first
    assert calls == [("a", "cpu"), ("busy", "cpu"), ("busy", "cpu")]
    incident.ask("q", "a", device="cuda")
    assert calls[3:] == [("a", "cuda")]
    monkeypatch.delenv(SHARED)
    incident.ask("q", "a", device="cpu")
    assert calls[4:] == [("a", "cpu")]


def test_shared_answer_that_was_not_written_whole_is_asked_again(monkeypatch, tmp_path):
    monkeypatch.setenv(SHARED, str(tmp_path))
    write = Path.write_bytes

    def cut(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", cut)
        with pytest.raises(OSError, match="No space left"):
            one(GOOD)
    assert [found.verdict for found in one(GOOD)] == ["clean"]
