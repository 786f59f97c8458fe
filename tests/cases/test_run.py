"""Cases, and the one runner that puts them."""

from __future__ import annotations

import importlib
import math
import time
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.cases import jobs

from staleproof.cases import children
from staleproof.cases import run as cases_run
from staleproof.cases.case import (
    Case,
    MissingError,
    Reading,
    Scene,
    ablation,
    absent,
    each,
    failed,
    fix,
    reading,
)
from staleproof.cases.children import ChildError
from staleproof.cases.finding import ARITHMETIC, Key, real
from staleproof.cases.run import Table
from staleproof.device import Provenance

OPEN = {"reason": "a test"}


def run(*rows, device="cpu", **options) -> list:
    return [*Table("fake", *rows).run(device, **options)]


@pytest.fixture
def threads():
    """More than one thread of torch, so that one is a change."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def right(subject, device, *told):
    return None


# --- What a table refuses, before anything runs.


OURS = partial(fix, "ours", "rows", off=0, on=1, ask=print)
ONE = each("q", "rows", ["a"], print, **OPEN)
WHOLE = {"words": "rows", "subjects": ["a"], "ask": print, **OPEN}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Case(Key("", "q", "v"), "rows", print), "expect: expected a verdict for q, v, or a reason"),
        (lambda: Case(Key("", "q", "v"), "nope", print, **OPEN), "words: expected a family of .* got 'nope'"),
        (
            lambda: Case(Key("", "q", "v"), "rows", print, expect="leeked"),
            "^expect of q, v: expected a word of the family rows .*got 'leeked'",
        ),
        (lambda: each("q", "rows", print, ONE), "^subjects of q: expected variant -> subject, or variants"),
        (lambda: each("q", "rows", [print], print), "^subjects of q: .* got .<built-in function print>"),
        (lambda: each("q", "rows", "ab", print, **OPEN), "^subjects of q: .* got ab"),
        (lambda: Case(Key("", "q", print), "rows", print, **OPEN), "^key: expected a Key of texts"),
        (lambda: Case("v", "rows", print, **OPEN), "^key: expected a Key of texts: .* got v"),
        *(
            (lambda wrong=wrong: each("q", **WHOLE | wrong), f"^{name} of q, a: expected {kind}, got {got}")
            for wrong, name, kind, got in (
                ({"words": print}, "words", "str", "<built-in"),
                ({"ask": "clean"}, "ask", "Callable", "'clean'"),
                ({"expect": True}, "expect", "str or Callable or NoneType", "True"),
                ({"reason": 3}, "reason", "str", "3"),
                ({"needs": None}, "needs", "Callable", "None"),
                ({"evidence": "real"}, "evidence", "Evidence or Callable", "'real'"),
                ({"scene": "server"}, "scene", "Scene or NoneType", "'server'"),
                ({"limit_s": "9"}, "limit_s", "int or float", "'9'"),
            )
        ),
        (lambda: Scene("server", "tell"), "^tell of scene server: expected Callable, got 'tell'"),
        (lambda: OURS(wrong="a text"), "wrong: expected a comparison of ours with a reference, got a text"),
        (
            lambda: Table("fake", each("q", "rows", ["a"], print, expect={"a": "clean", "aa": "clean"})),
            r"^expect of fake, q, a: expected variants of fake, got \['aa'\]",
        ),
        (lambda: each("q", "rows", ["a", "b"], print, expect={"a": "clean"}), "a verdict for q, b, or a"),
        (lambda: OURS(wrong=None), "wrong: expected a comparison of ours with a reference, got None"),
        (lambda: OURS(wrong=None, expect="not fixed"), "wrong: expected a comparison of ours"),
        (lambda: OURS(wrong=right, expect="clean"), "expect of off/on/off, ours: .* fix .*got 'clean'"),
        (lambda: Table("fake", ONE, ONE), r"one case of each key, got several of \['fake, q, a'\]"),
    ],
)
def test_a_case_that_is_not_defined_is_refused_before_anything_runs(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_mapping_of_expected_verdicts_may_serve_several_questions():
    both = {"a": "clean", "b": "leaked"}
    found = run(*(each(q, "rows", [v], lambda *_, q=q: both[q], expect=both) for q, v in ("aa", "bb")))
    assert all(f.ok for f in found)


def test_an_expected_word_that_a_device_gives_is_checked_too():
    case = Case(Key("", "q", "v"), "rows", lambda *_: "clean", expect=lambda device: "leeked")
    with pytest.raises(ValueError, match=r"^expect of fake, q, v: .* family rows .*got 'leeked'"):
        run(case)
    # In every family.
    assert Case(Key("", "q", "v"), "rows", print, expect="not run").expected("cpu") == "not run"


def test_a_word_of_another_family_is_an_error_of_the_ask():
    with pytest.raises(ValueError, match=r"family rows .*got 'zero'"):
        run(each("q", "rows", ["v"], lambda *_: "zero", **OPEN))


# --- Asking.


def test_ask_receives_the_subject_and_the_device_and_progress_says_which_case_begins():
    seen, lines = [], []
    questions = {"mapping": {"a": 1, "b": 2}, "list": ["c"]}
    ask = lambda *got: seen.append(got) or "clean"  # noqa: E731
    rows = [each(question, "rows", subjects, ask, **OPEN) for question, subjects in questions.items()]
    found = run(*rows, device="cuda", progress=lines.append)
    assert seen == [(1, "cuda"), (2, "cuda"), ("c", "cuda")]
    expected = [Key("fake", "mapping", "a"), Key("fake", "mapping", "b"), Key("fake", "list", "c")]
    assert [f.key for f in found] == expected
    assert lines == ["fake 1/3: mapping, a", "fake 2/3: mapping, b", "fake 3/3: list, c"]


def test_an_answer_is_a_word_or_a_reading():
    said = reading("leaked", note="row 3", bad_rows=1, words="a number of this name")
    found = run(
        each("word", "rows", ["v"], lambda *_: "clean", **OPEN),
        each("reading", "rows", ["v"], lambda *_: said, **OPEN),
        each("recorded", "rows", ["v"], lambda *_: Reading("clean", provenance=Provenance.RECORDED), **OPEN),
    )
    assert [f.verdict for f in found] == ["clean", "leaked", "clean"]
    assert (found[1].note, found[1].numbers) == ("row 3", {"bad_rows": 1, "words": "a number of this name"})
    assert found[2].provenance == "RECORDED"
    assert all(f.machine and f.date and f.source_digest for f in found)


@pytest.mark.parametrize(
    ("expect", "want"),
    [
        ("clean", ["clean", "clean"]),
        ({"a": "clean", "b": "leaked"}, ["clean", "leaked"]),
        (lambda subject: ("clean", "leaked")[subject], ["clean", "leaked"]),
        (None, [None, None]),
    ],
    ids=["value", "mapping", "function", "none"],
)
def test_expected_is_a_value_a_mapping_a_function_or_none(expect, want):
    found = run(each("q", "rows", {"a": 0, "b": 1}, lambda *_: "clean", expect=expect, **OPEN))
    assert [f.expected for f in found] == want
    assert [f.ok for f in found] == [e in (None, "clean") for e in want]


def test_an_expectation_may_depend_on_the_device():
    expect = lambda device: "leaked" if device == "cuda" else None  # noqa: E731
    case = Case(Key("", "q", "v"), "rows", lambda *_: "clean", expect=expect, reason="interpreted")
    assert [run(case, device=device)[0].expected for device in ("cpu", "cuda")] == [None, "leaked"]


def test_a_package_that_is_missing_is_named_and_a_missing_module_of_one_that_is_here_is_a_fault():
    def ask(subject, device):
        importlib.import_module(subject)

    found = run(each("q", "rows", ["no_such_package.at_all"], ask, expect="clean"))
    assert [(f.verdict, f.note) for f in found] == [("not run", "no_such_package is not installed")]
    for here in ("json.no_such_module", "staleproof.no_such_module"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            run(each("q", "rows", [here], ask, expect="clean"))


def test_what_is_absent_is_not_run_with_its_reason_and_expects_nothing():
    def ask(subject, device):
        if subject == "missing":
            raise MissingError("engine a: out of memory")
        return absent("needs SM100") if subject == "refuses" else "clean"

    found = run(
        each(
            *("q", "rows", ["here", "absent", "missing", "refuses"], ask),
            expect="clean",
            needs=lambda subject, device: f"no {subject} on {device}" * (subject == "absent") or None,
            evidence=real("torch"),
        )
    )
    assert [(f.verdict, f.note, f.expected, f.grade, f.of) for f in found] == [
        ("clean", "", "clean", "real", real("torch").of),
        ("not run", "no absent on cpu", None, "", ""),
        ("not run", "engine a: out of memory", None, "", ""),
        ("not run", "needs SM100", None, "", ""),
    ]


def test_a_kernel_that_failed_is_not_run_with_the_start_of_its_text_in_one_line():
    said = failed(RuntimeError("no  image\n" + "x" * 300))
    assert said == absent("failed: RuntimeError: no image " + "x" * 191)


def test_an_ablation_takes_one_ingredient_away_at_a_time():
    @dataclass(frozen=True)
    class Parts:
        padding: bool = True
        amax: bool = True

    def ask(parts, device):
        return "leaked" if parts.padding and parts.amax else "clean"

    without = {"no padding": ({"padding": False}, "clean"), "no amax": ({"amax": False}, "leaked")}
    found = run(ablation(Parts(), "rows", without=without, ask=ask, expect="leaked", whole="both"))
    assert {f.question for f in found} == {"ablation"}
    expected = [("both", "leaked", True), ("no padding", "clean", True), ("no amax", "clean", False)]
    assert [(f.variant, f.verdict, f.ok) for f in found] == expected


def test_a_case_says_whose_code_it_asks():
    whose = real("torch", "topk")
    rows = (
        each("q", "rows", ["a"], lambda *_: "leaked", evidence=lambda subject: whose, **OPEN),
        each("r", "rows", ["a"], lambda *_: Reading("clean", evidence=ARITHMETIC), evidence=whose, **OPEN),
        fix("ours", "rows", off=0, on=1, ask=lambda *_: "leaked", wrong=right, evidence=whose),
        each("plain", "rows", ["a"], lambda *_: "leaked", **OPEN),
    )
    assert [(f.question, f.grade, f.of) for f in run(*rows)] == [
        ("q", "real", whose.of),
        ("r", "arithmetic", ""),
        ("off/on/off", "real", whose.of),
        ("plain", "replica", ""),
    ]


# --- Scenes.


def test_a_scene_happens_once_and_only_for_those_who_need_it():
    events = []

    def tell(device):
        events.append(f"tell on {device}")
        return [1, 2]

    def ask(subject, device, told):
        events.append(subject)
        return reading("clean", told=told)

    scene = Scene("server", tell)
    rows = [
        each("first", "rows", ["x"], lambda *_: events.append("x") or "clean", **OPEN),
        each("one", "rows", ["a", "b"], ask, scene=scene, **OPEN),
        each("two", "rows", ["c"], ask, scene=scene, **OPEN),
    ]
    found = run(*rows)
    assert events == ["x", "tell on cpu", "a", "b", "c"]
    assert [f.numbers for f in found[1:]] == [{"told": [1, 2]}] * 3
    events.clear()
    Table("fake", *rows).ask("two", device="cpu")
    assert events == ["tell on cpu", "c"]


def test_an_early_scene_begins_before_all_cases_unless_nobody_can_use_it():
    events = []
    scene = Scene("build", lambda device: events.append("begin"), early=True)
    first = each("first", "rows", ["x"], lambda *_: events.append("x") or "clean", **OPEN)
    needs = lambda subject, device: "needs nvcc" * (subject == "b") or None  # noqa: E731
    late = each("late", "rows", ["a", "b"], lambda *_: "clean", scene=scene, needs=needs, **OPEN)
    run(first, late)
    assert events == ["begin", "x"]
    events.clear()
    run(first, each("late", "rows", ["a"], print, scene=scene, needs=lambda *_: "needs nvcc", **OPEN))
    assert events == ["x"]


def test_a_child_that_fails_leaves_its_cases_open_and_no_others():
    def fails(*_):
        raise ChildError("ended with 1 and said: no memory")

    found = run(
        each("scene", "rows", ["a", "b"], print, expect="clean", scene=Scene("server", fails)),
        each("ask", "rows", ["c"], fails, expect="clean"),
        fix("d", "rows", off=0, on=1, ask=lambda *_: "leaked", wrong=right, expect="not fixed"),
        fix("e", "rows", off=0, on=1, ask=fails, wrong=right),
        each("last", "rows", ["f"], lambda *_: "clean", expect="clean"),
    )
    why = "ended with 1 and said: no memory"
    assert [(f.verdict, f.note) for f in found] == [
        *[("not run", f"server: {why}")] * 2,
        ("not run", why),
        ("not fixed", ""),
        ("not run", why),
        ("clean", ""),
    ]


@pytest.mark.parametrize("last", ["put", "absent", "failed"])
def test_what_a_scene_told_is_kept_until_its_last_case_and_no_longer(last):
    class Server:
        pass

    servers = []

    def tell(device):
        server = Server()
        servers.append(weakref.ref(server))
        return server

    def ask(subject, device, server):
        assert servers[0]() is server
        if subject == "b" and last == "failed":
            raise ChildError("ended with 1")
        return "clean"

    def gone(subject, device):
        return "clean" if servers[0]() is None else "leaked"

    needs = {"needs": lambda subject, device: "no GPU" if (subject, last) == ("b", "absent") else None}
    found = run(
        each("q", "rows", ["a", "b"], ask, scene=Scene("server", tell), **needs, **OPEN),
        each("after", "rows", ["c"], gone, **OPEN),
    )
    assert [f.verdict for f in found] == ["clean", "clean" if last == "put" else "not run", "clean"]


# --- Off / on / off.


@pytest.mark.parametrize(
    ("answers", "expect", "verdict", "ok"),
    [
        (["leaked", "clean", "leaked"], "fixed", "fixed", True),
        (["leaked", "leaked", "leaked"], "fixed", "not fixed", False),
        (["leaked", "leaked", "leaked"], "not fixed", "not fixed", True),
        (["clean", "clean", "leaked"], "fixed", "not reproduced", False),
        (["leaked", "clean", "clean"], "fixed", "not reproduced", False),
        (["pad_only", "clean", "wrong, finite"], "fixed", "fixed", True),
    ],
)
def test_a_fix_is_asked_off_on_off_in_this_order(answers, expect, verdict, ok):
    asked, said = [], iter(answers)

    def ask(subject, device):
        asked.append((subject, device))
        return reading(next(said), step=len(asked))

    (found,) = run(fix("ours", "rows", off="broken", on="fixed", ask=ask, wrong=right, expect=expect))
    assert asked == [("broken", "cpu"), ("fixed", "cpu"), ("broken", "cpu")]
    assert (found.key, found.verdict, found.ok) == (Key("fake", "off/on/off", "ours"), verdict, ok)
    assert [found.three.off, found.three.on, found.three.again] == answers
    assert found.numbers == {"step_off": 1, "step_on": 2, "step_again": 3}


@pytest.mark.parametrize("expect", ["fixed", "not fixed", "wrong"])
def test_a_fix_is_compared_with_a_reference_whatever_is_expected(expect):
    said, compared = iter(["leaked", reading("clean", note="a remark"), "leaked"]), []

    def wrong(subject, device):
        compared.append((subject, device))
        return "rows are 3 times too large"

    case = fix("ours", "rows", off=0, on=1, ask=lambda *_: next(said), wrong=wrong, expect=expect)
    (found,) = run(case)
    assert compared == [(1, "cpu")]
    assert (found.verdict, found.three.right) == ("wrong", False)
    assert found.note == found.three.wrong == "rows are 3 times too large"
    assert found.three.text == "leaked, clean, leaked, rows are 3 times too large"


@pytest.mark.parametrize("compared", [False, True, 0])
def test_a_comparison_that_gives_neither_none_nor_a_text_is_an_error(compared):
    said = iter(["leaked", "clean", "leaked"])
    case = fix("ours", "rows", off=0, on=1, ask=lambda *_: next(said), wrong=lambda *_: compared)
    with pytest.raises(ValueError, match=f"^wrong of fake, off/on/off, ours: .*None, .* got {compared}"):
        run(case)


def test_the_finding_of_a_fix_has_what_the_run_with_it_said():
    whose = real("torch", "topk")
    on = Reading("clean", {"rows": 0}, "a note", "a script", whose, Provenance.RECORDED)
    said = iter([reading("leaked", rows=1), on, reading("leaked", rows=2)])
    expect = {"cuda": "fixed"}.get
    case = fix("ours", "rows", off=0, on=1, ask=lambda *_: next(said), wrong=right, expect=expect)
    (found,) = run(case, device="cuda")
    assert (found.note, found.script, found.of, found.expected) == ("a note", "a script", whose.of, "fixed")
    expected = "RECORDED", "fix", "leaked, clean, leaked, right"
    assert (found.provenance, found.words, found.three.text) == expected
    assert found.numbers == {"rows_off": 1, "rows_on": 0, "rows_again": 2}


def test_the_third_run_may_be_another_process_and_all_see_the_scene():
    asked = []

    def ask(subject, device, told):
        asked.append(subject)
        return told[subject]

    told = {"off": "leaked", "on": "clean", "off again": "leaked"}
    runs = {"off": "off", "on": "on", "again": "off again"}
    scene = Scene("engines", lambda device: told)
    case = fix("ours", "rows", **runs, ask=ask, wrong=lambda subject, device, told: None, scene=scene)
    assert run(case)[0].verdict == "fixed"
    assert asked == ["off", "on", "off again"]


@pytest.mark.parametrize("absent_one", ["broken", "fixed"])
def test_a_fix_that_cannot_be_asked_is_not_run(absent_one):
    def needs(subject, device):
        return "needs SM100" if subject == absent_one else None

    case = fix("ours", "rows", off="broken", on="fixed", ask=pytest.fail, wrong=right, needs=needs)
    (found,) = run(case)
    assert (found.verdict, found.note, found.words) == ("not run", "needs SM100", "fix")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_fix_one_of_whose_runs_has_no_answer_is_not_run(number):
    calls = []

    def ask(subject, device):
        calls.append(subject)
        return absent("out of memory") if len(calls) == number else "leaked"

    (found,) = run(fix("ours", "rows", off=0, on=1, ask=ask, wrong=right))
    assert (found.verdict, found.note, len(calls)) == ("not run", "out of memory", number)


# --- Threads, time limits, child processes.


def test_one_thread_holds_while_ask_runs_and_never_for_the_caller(threads):
    seen = []

    def ask(subject, device):
        seen.append(torch.get_num_threads())
        return "clean"

    for _ in Table("fake", each("q", "rows", ["a", "b"], ask, **OPEN)).run("cpu"):
        assert torch.get_num_threads() == threads
    assert seen == [1, 1]
    with pytest.raises(ZeroDivisionError):
        run(each("q", "rows", ["v"], lambda *_: 1 / 0, **OPEN))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("end", ["the last answer", "an error", "Ctrl-C", "abandoned", "closed"])
def test_no_child_outlives_the_runner(tmp_path, end):
    def ask(subject, device, child):
        if end == "an error":
            raise ZeroDivisionError
        if end == "Ctrl-C":
            raise KeyboardInterrupt
        return "clean"

    started = []

    def begin(device):
        started.append(children.start(jobs.sleep, str(tmp_path / "pids")))
        return started[0]

    rows = each("q", "rows", ["a", "b"], ask, scene=Scene("sleeper", begin, early=True), **OPEN)
    listening = Table("fake", rows).run("cpu")
    if end in ("an error", "Ctrl-C"):
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            next(listening)
    else:
        assert next(listening).verdict == "clean"
        assert started[0].poll() is None
    if end == "the last answer":
        assert len([*listening]) == 1
    elif end == "closed":
        listening.close()
    del listening
    assert started[0].poll() is not None


@pytest.mark.parametrize("early", [False, True])
def test_limit_s_is_for_all_children_of_a_case_and_of_a_scene(early):
    """Each has its own time, in which its children must end together; a machine may be busy meanwhile."""
    left = []

    def ask(*_):
        left.append(children._deadline - time.monotonic())
        return "clean"

    scene = Scene("s", ask, early=early, limit_s=300)
    told = each("of a scene", "rows", ["c"], ask, scene=scene, limit_s=400, **OPEN)
    run([*each("q", "rows", ["a", "b"], ask, limit_s=200, **OPEN), *told])
    limits = [300, 200, 200, 400] if early else [200, 200, 300, 400]
    assert left == [pytest.approx(limit, abs=50) for limit in limits]
    assert children._deadline == math.inf


def test_ask_puts_the_named_question_to_the_named_variants(device):
    asked = []

    def ask(subject, on):
        asked.append((subject, on))
        return "clean"

    table = Table(
        "fake",
        each("q", "rows", ["a", "b"], ask, **OPEN),
        each("other", "rows", ["a"], pytest.fail, **OPEN),
        each("q", "rows", ["c"], ask, **OPEN),
    )
    assert [f.variant for f in table.ask("q")] == ["a", "b", "c"]
    assert [f.variant for f in table.ask("q", "c", "b", device="cuda")] == ["b", "c"]
    assert asked == [("a", device), ("b", device), ("c", device), ("b", "cuda"), ("c", "cuda")]
    assert len(table.ask("q", "a", "b", "c")) == 3
    with pytest.raises(ValueError, match=r"^question: expected one of \['other', 'q'\], got 'nope'$"):
        table.ask("nope")
    with pytest.raises(ValueError, match=r"^variants: expected some of \['a', 'b', 'c'\], got \['a', 'x'\]$"):
        table.ask("q", "a", "x")
    assert len(asked) == 8


def test_processes_of_one_command_put_a_case_once(monkeypatch):
    monkeypatch.delenv(cases_run.SHARED, raising=False)
    asked = []

    def ask(subject, device):
        asked.append((subject, device))
        return absent("busy") if subject == "busy" else reading("clean", rows=3)

    row = each("q", "rows", ["a", "busy"], ask, **OPEN)
    scene = Scene("server", lambda device: asked.append("server"))
    served = each("served", "rows", ["b", "c"], lambda *_: "clean", scene=scene, **OPEN)
    table = Table("fake", row, served)
    with cases_run.sharing():
        first = [*table.run("cpu")]
        assert asked == [("a", "cpu"), ("busy", "cpu"), "server"]
        # What was not run is asked again, in a process that came later too.
        assert [*table.run("cpu"), *table.ask("served", device="cpu")] == [*first, *first[2:]]
        assert asked[3:] == [("busy", "cpu")]
        table.ask("q", "a", device="cuda")
        Table("other", row).ask("q", "a", device="cpu")
        # Cases of no incident: their keys may name others elsewhere.
        [*cases_run.run(row[:1], "cpu")]
        assert asked[4:] == [("a", "cuda"), ("a", "cpu"), ("a", "cpu")]
    table.ask("q", "a", device="cpu")
    assert asked[7:] == [("a", "cpu")]


def test_a_finding_that_was_not_written_whole_is_asked_again(monkeypatch):
    monkeypatch.delenv(cases_run.SHARED, raising=False)
    table, write = Table("fake", each("q", "rows", ["a"], lambda *_: "clean", **OPEN)), Path.write_bytes

    def cut(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with cases_run.sharing():
        with monkeypatch.context() as full:
            full.setattr(Path, "write_bytes", cut)
            with pytest.raises(OSError, match="No space left"):
                [*table.run("cpu")]
        assert [found.verdict for found in table.run("cpu")] == ["clean"]
