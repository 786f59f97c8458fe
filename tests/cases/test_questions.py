"""The table of questions and its runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from staleproof.cases import children
from staleproof.cases.answers import Answer, answer, no_answer
from staleproof.cases.case import Ablation, Question, Questions, Several
from staleproof.cases.children import ChildError
from staleproof.device import Provenance


def run(*rows, **options) -> list:
    return [*Questions("fake", *rows).run("cpu", **options)]


def verdicts(found) -> dict:
    return {(f.question, f.variant): f.verdict for f in found}


@pytest.fixture
def threads() -> Iterator[int]:
    """More than one thread of torch, so that one is a change."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import jobs

    yield jobs
    assert not children._running
    children.end_all()


def test_ask_receives_the_subject_and_the_device():
    seen = []
    rows = [
        Question("mapping", {"a": 1, "b": 2}, lambda *got: seen.append(got) or "clean"),
        Question("list", ["c"], lambda *got: seen.append(got) or "clean"),
    ]
    found = [*Questions("fake", *rows).run("cuda")]
    assert seen == [(1, "cuda"), (2, "cuda"), ("c", "cuda")]
    assert [f.key for f in found] == [
        ("fake", "mapping", "a"),
        ("fake", "mapping", "b"),
        ("fake", "list", "c"),
    ]


def test_an_answer_may_be_a_word_an_answer_or_several():
    def several(subject, device):
        yield answer("leaked", note="row 3", bad_rows=1, verdict="a number of this name")
        yield Answer("clean", question="amax", variant="other", changes={"provenance": Provenance.RECORDED})

    found = run(
        Question("word", ["v"], lambda *_: "clean"),
        Question("answer", ["v"], lambda *_: answer("leaked", rows=3)),
        Question("several", ["v"], several),
    )
    assert verdicts(found) == {
        ("word", "v"): "clean",
        ("answer", "v"): "leaked",
        ("several", "v"): "leaked",
        ("amax", "other"): "clean",
    }
    assert found[1].numbers == {"rows": 3}
    assert (found[2].note, found[2].numbers) == ("row 3", {"bad_rows": 1, "verdict": "a number of this name"})
    assert found[3].provenance == "RECORDED"
    assert all(f.machine and f.date and f.source_digest for f in found)


@pytest.mark.parametrize(
    ("expected", "want"),
    [
        ("clean", ["clean", "clean"]),
        ({"a": "clean", "b": "leaked"}, ["clean", "leaked"]),
        (lambda subject: f"verdict {subject}", ["verdict 1", "verdict 2"]),
        (None, [None, None]),
    ],
    ids=["value", "mapping", "function", "none"],
)
def test_expected_may_be_a_value_a_mapping_a_function_or_none(expected, want):
    found = run(Question("q", {"a": 1, "b": 2}, lambda *_: "clean", expected))
    assert [f.expected for f in found] == want
    assert [f.ok for f in found] == [e in (None, "clean") for e in want]


def test_an_answers_own_expectation_comes_before_the_rows():
    def ask(subject, device):
        yield Answer("clean", expected="leaked")
        yield Answer("clean", question="open", expected=None)
        yield no_answer("needs SM100", question="absent")

    # The row's mapping need not know a variant whose answers all speak for themselves.
    own, without, absent = run(Question("q", ["v"], ask, expected={}))
    assert (own.expected, own.failed) == ("leaked", True)
    assert (without.expected, without.ok) == (None, True)
    assert (absent.ran, absent.note) == (False, "needs SM100")
    with pytest.raises(KeyError):
        run(Question("q", ["v"], lambda *_: "clean", expected={}))


def test_what_is_unavailable_is_not_run_with_its_reason_and_its_further_questions():
    def ask(subject, device):
        assert subject == "here"
        yield answer("clean")
        yield Answer("zero", question="lse")

    found = run(
        Question(
            "empty row",
            ["here", "absent"],
            ask,
            unavailable=lambda subject, device: f"no {subject} on {device}" * (subject == "absent"),
            also=("lse",),
        )
    )
    assert verdicts(found) == {
        ("empty row", "here"): "clean",
        ("lse", "here"): "zero",
        ("empty row", "absent"): "not run",
        ("lse", "absent"): "not run",
    }
    assert {f.note for f in found if not f.ran} == {"no absent on cpu"}


def test_an_ablation_takes_one_ingredient_away_at_a_time():
    @dataclass(frozen=True)
    class Parts:
        padding: bool = True
        amax: bool = True

    found = run(
        Ablation(
            Parts(),
            without={"no padding": {"padding": False}, "no amax": {"amax": False}},
            ask=lambda parts, device: "leaked" if parts.padding and parts.amax else "clean",
            expected={"both": "leaked", "no padding": "clean", "no amax": "leaked"},
            whole="both",
            unavailable=lambda parts, device: None,
        )
    )
    assert verdicts(found) == {
        ("ablation", "both"): "leaked",
        ("ablation", "no padding"): "clean",
        ("ablation", "no amax"): "clean",
    }
    assert [f.ok for f in found] == [True, True, False]


def test_several_answers_name_their_question_and_variant():
    def ask(device):
        yield Answer("lives", {"gib": 3}, question="server", variant="small", expected="lives")
        yield Answer("dies", question="server", variant="large")
        yield no_answer("no GPU", question="server", variant="real")

    found = run(Several("servers", ask))
    assert [(f.verdict, f.expected) for f in found] == [("lives", "lives"), ("dies", None), ("not run", None)]
    assert found[0].numbers == {"gib": 3}
    for nameless in (Answer("lives", variant="v"), Answer("lives", question="q")):
        with pytest.raises(AssertionError, match="servers: an answer without a"):
            run(Several("servers", lambda device, said=nameless: [said]))


def test_a_begin_comes_before_all_questions_and_once():
    events = []

    def begin(device):
        events.append(f"begin on {device}")
        return "compiled"

    def ask(subject, device, begun):
        events.append((subject, begun))
        return "clean"

    rows = [
        Question("first", ["v"], lambda *got: events.append(got) or "clean"),
        Question("one", ["a", "b"], ask, begin=begin),
        Question("two", ["c"], ask, begin=begin),
    ]
    table = Questions("fake", *rows)
    assert len([*table.run("cpu")]) == 4
    order = ["begin on cpu", ("v", "cpu"), ("a", "compiled"), ("b", "compiled"), ("c", "compiled")]
    assert events == order
    events.clear()
    table.ask("two", device="cpu")
    assert events == ["begin on cpu", ("c", "compiled")]


def test_progress_says_which_step_begins():
    lines = []
    rows = [Question("empty row", ["a", "b"], lambda *_: "clean"), Several("servers", lambda device: [])]
    run(*rows, progress=lines.append)
    assert lines == ["fake 1/3: empty row, a", "fake 2/3: empty row, b", "fake 3/3: servers"]


@pytest.mark.parametrize(("one", "kind"), [(True, "cuda"), (False, "cuda"), (False, "cpu")])
def test_one_thread_holds_while_ask_runs_and_never_for_the_caller(one, kind, threads):
    seen = []

    def ask(subject, device):
        for _ in range(2):
            seen.append(torch.get_num_threads())
            yield answer("clean")

    for _ in Questions("fake", Question("q", ["v"], ask, one_thread=one)).run(kind):
        assert torch.get_num_threads() == threads
    assert seen == [1 if one or kind == "cpu" else threads] * 2


def test_the_threads_are_back_after_an_error(threads):
    def ask(subject, device):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(Question("q", ["v"], ask, one_thread=True))
    assert torch.get_num_threads() == threads


def test_each_answer_comes_before_the_next_is_worked_for():
    worked = []

    def ask(device):
        for variant in ("a", "b"):
            worked.append(variant)
            yield Answer("lives", question="server", variant=variant)

    listening = Questions("fake", Several("servers", ask)).run("cpu")
    assert next(listening).variant == "a"
    assert worked == ["a"]


@pytest.mark.parametrize("end", ["the last answer", "an error", "Ctrl-C", "abandoned", "closed"])
def test_no_child_outlives_the_runner(jobs, tmp_path, end):
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

    listening = Questions("fake", Question("q", ["a", "b"], ask, begin=begin)).run("cpu")
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


def test_ask_ends_the_children_too(jobs, tmp_path):
    def ask(subject, device, child):
        raise KeyboardInterrupt

    def begin(device):
        return children.start(jobs.sleep, str(tmp_path / "pids"))

    with pytest.raises(KeyboardInterrupt):
        Questions("fake", Question("q", ["v"], ask, begin=begin)).ask("q", device="cpu")
    assert not children._running


def test_limit_s_is_for_all_children_of_a_variant(jobs, tmp_path):
    limits = []
    # What children are forked from starts with the first of them, and may take longer than the limit.
    assert children.call(jobs.add, 1, 2, timeout_s=60).answer() == 3

    def ask(subject, device):
        for number in range(2):
            ended = children.call(jobs.sleep, str(tmp_path / f"{subject}{number}"), timeout_s=600)
            limits.append(ended.limit_s)
            yield answer("hangs" if ended.code is None else "ends")

    found = run(Question("q", ["a", "b"], ask, limit_s=0.3))
    assert [f.verdict for f in found] == ["hangs"] * 4
    assert limits == [pytest.approx(0.3, abs=0.1), 0, pytest.approx(0.3, abs=0.1), 0]


def test_a_child_that_crashes_is_an_error_of_the_row(jobs):
    def ask(subject, device):
        return children.call(jobs.fail, timeout_s=60).answer()

    with pytest.raises(ChildError, match="rows: expected 3, got 4"):
        run(Question("q", ["v"], ask))


def test_ask_puts_the_named_question_to_the_named_variants(device):
    asked = []

    def ask(subject, on):
        asked.append((subject, on))
        return "clean"

    table = Questions(
        "fake",
        Question("q", ["a", "b"], ask),
        Question("other", ["a"], lambda *_: pytest.fail("not asked for")),
        Question("q", ["c"], ask),
    )
    assert [f.variant for f in table.ask("q")] == ["a", "b", "c"]
    assert [f.variant for f in table.ask("q", "c", "b", device="cuda")] == ["b", "c"]
    assert asked == [("a", device), ("b", device), ("c", device), ("b", "cuda"), ("c", "cuda")]
    with pytest.raises(ValueError, match=r"^name: expected one of \['other', 'q'\], got 'nope'$"):
        table.ask("nope")
    with pytest.raises(ValueError, match=r"^variants: expected some of \['a', 'b', 'c'\], got \['a', 'x'\]$"):
        table.ask("q", "a", "x")
    assert len(asked) == 5
