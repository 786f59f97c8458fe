"""The audit: a finding for each kernel and clause, also of one that misbehaves, and an earlier audit that it
goes on from."""

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from staleproof import device as devices
from staleproof.cases import children, finding
from staleproof.cases.finding import Evidence, Finding, Grade, Key, read_findings, write_findings
from staleproof.cli import app as cli
from staleproof.cli.app import main
from staleproof.contract import cases, runner
from staleproof.contract.contract import BREAKS, CONTRACT, HOLDS, breaks
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import Subject

HERE = Path(__file__).parent
MISDEEDS = {
    # Without what the kernel before it has printed.
    ("leaves", "0"): "ended its process with 3",
    ("raises", "0"): "raises RuntimeError: no such configuration",
    ("hangs", "0"): "no answer within 5 s",
    ("ends its process", "R"): "ended its process with signal 6",
    ("wrong shape", "0"): "returns shape (1, 2), expected (3, 2, 32)",
    ("writes past its output", "0"): "writes outside out",
    ("another dtype", "0"): "raises AssertionError: expected float8",
}
NOT_RUN = "not run"


# One test: the kernels are audited together, once.
def test_each_misdeed_is_a_finding_and_the_audit_goes_on(device):
    found = [*cases.audit([str(HERE / "bad_kernels.py")], device, limit_s=5.0)]
    by_name = {(one.variant, one.question): one for one in found}
    assert {key: one.note for key, one in by_name.items() if one.verdict == BREAKS} == MISDEEDS
    assert {(one.variant, one.question) for one in found if one.failed} == set(MISDEEDS)
    assert [by_name["right", clause].verdict for clause in "0RWO"] == [HOLDS] * 4
    # A process that ends does not take the next clause with it.
    assert [by_name["ends its process", clause].verdict for clause in "0W"] == [HOLDS] * 2
    # A kernel that is wrong on clean input is asked nothing more.
    for clause in "RW":
        unasked = by_name["raises", clause]
        assert (unasked.verdict, unasked.note) == (NOT_RUN, "not asked: wrong on clean input")
    assert {(one.grade, one.of, one.release) for one in found if one.ran} == {(Grade.REAL, "yours", "yours")}


def test_an_audit_that_is_interrupted_leaves_no_process_and_asks_nothing_more(device, monkeypatch):
    started, call = [], children.call
    monkeypatch.setattr(runner.children, "call", lambda *a, **given: started.append(a) or call(*a, **given))

    def interrupt(line):
        while not any(order[0] is runner.ask for order in started) or not children._running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(cases.audit([str(HERE / "bad_kernels.py")], device, limit_s=100.0, progress=interrupt))
    assert not children._running
    # One may be started between the end of the first and the word to stop; it is ended as well.
    assert [order[0] for order in started][:2] == [runner.listed, runner.ask]
    assert len(started) <= 3


def test_a_module_that_does_not_import_or_registers_nothing_is_a_finding(tmp_path, device):
    (tmp_path / "broken.py").write_text("def load():\n    import no_such_module\nload()\n")
    (tmp_path / "misnamed.py").write_text("from staleproof import audit\naudit.rows(hiden=3)(print)\n")
    (tmp_path / "nothing.py").write_text("x = 1\n")
    modules = [str(tmp_path / name) for name in ("broken.py", "nothing.py", "absent.py", "misnamed.py")]
    found = [*cases.audit(modules, device)]
    assert [(one.variant, one.question, one.failed) for one in found] == [(m, "0", True) for m in modules]
    where = f"({tmp_path / 'broken.py'}, line 2)"
    assert found[0].note.endswith(f"ModuleNotFoundError: No module named 'no_such_module' {where}")
    assert found[1].note == "registers no kernel"
    assert "absent.py" in found[2].note
    assert found[3].note.endswith(f"({tmp_path / 'misnamed.py'}, line 2)")


def test_a_kernel_that_cannot_run_here_says_why_and_whether_its_calls_fit(monkeypatch, device):
    monkeypatch.setattr(cases.packages, "unavailable_reason", lambda subject: "needs an SM100 GPU")
    assert [*cases.audit(["staleproof.kernels.torch"], device, only="torch.topk, softmax")] == []
    found = [*cases.audit(["staleproof.kernels.torch"], device, only="rms_norm")]
    assert [one.question for one in found] == ["0", "R", "W", "O"]
    assert {(one.verdict, one.note) for one in found} == {
        (NOT_RUN, "needs an SM100 GPU; its calls fit the signatures of this release")
    }


# --- Which cases an audit has

VLLM = Subject("a", "rows", print, package="vllm")
KERNELS = {
    "packages": [
        VLLM,
        replace(VLLM, name="with stand-ins", files=("vllm.x",)),
        replace(VLLM, name="newer only", versions=("2.0",)),
        replace(VLLM, name="gone", package="fla-core"),
        replace(VLLM, name="big and gone", package="fla-core", needs="sm100"),
        replace(VLLM, name="big", needs="sm100"),
        Subject("ours", "rows", print, package="staleproof", documented={"R": "one scale"}),
    ],
    "mine.py": [Subject("mine", "kv_write", print)],
    "nothing.py": [],
}
ONE, TWO = Release("1.0", Path("/cache/1.0")), Release("2.0", Path("/cache/2.0"))


@pytest.fixture
def kernels(monkeypatch):
    def subjects_in(module):
        if module == "broken.py":
            raise children.ChildError("ended with 1")
        return KERNELS[module]

    def releases(subject):
        if subject.package == "fla-core":
            return []
        if subject.package != "vllm":
            return [Release("" if not subject.package else "0.1")]
        return [one for one in (ONE, TWO) if not subject.versions or one.version in subject.versions]

    monkeypatch.setattr(cases, "subjects_in", subjects_in)
    monkeypatch.setattr(cases.packages, "releases", releases)
    monkeypatch.setattr(
        cases.packages, "unavailable_reason", lambda subject: "needs SM100" if subject.needs else None
    )
    monkeypatch.setattr(cases.binding, "problem", lambda subject, release: "no q" * (release is TWO))


def _shown(made):
    """Kernel and release -> its clauses, what is expected, whose code, what is missing, and the scene."""
    rows = {}
    for case in made:
        key = case.key
        assert (key.incident, case.words, case.limit_s) == (CONTRACT, CONTRACT, float("inf"))
        expected = "+" if case.expect == HOLDS else "."
        why = case.needs(case.subject, "cpu")
        row = rows.setdefault((key.variant, key.release), ["", "", case.grade(), why, case.scene])
        row[0] += key.question
        row[1] += expected
        assert row[2:] == [case.grade(), why, case.scene]
    return rows


def test_an_audit_asks_each_release_of_each_kernel_and_releases_share_a_process(kernels):
    begun = []
    made = cases.table(["packages", "mine.py"], lambda *given: begun.append(given) or "begun")
    real = {name: Evidence(Grade.REAL, name) for name in ("vllm 1.0", "vllm 2.0", "yours")}
    rows = _shown(made)
    fit, unfit = "its calls fit the signatures of this release", "its calls do not fit: no q"
    assert {key: row[:4] for key, row in rows.items()} == {
        ("a", "vllm 1.0"): ["0RWO", "....", real["vllm 1.0"], None],
        ("a", "vllm 2.0"): ["0RWO", "....", real["vllm 2.0"], None],
        ("with stand-ins", "vllm 1.0"): ["0RWO", "....", real["vllm 1.0"], None],
        ("with stand-ins", "vllm 2.0"): ["0RWO", "....", real["vllm 2.0"], None],
        ("newer only", "vllm 2.0"): ["0RWO", "....", real["vllm 2.0"], None],
        ("gone", "fla-core"): ["0RWO", "....", Evidence(Grade.REAL, "fla-core"), "fla-core is not here"],
        ("big and gone", "fla-core"): [
            *("0RWO", "....", Evidence(Grade.REAL, "fla-core")),
            "fla-core is not here; needs SM100",
        ],
        ("big", "vllm 1.0"): ["0RWO", "....", real["vllm 1.0"], f"needs SM100; {fit}"],
        ("big", "vllm 2.0"): ["0RWO", "....", real["vllm 2.0"], f"needs SM100; {unfit}"],
        ("ours", "staleproof 0.1"): ["0RWO", "+.++", finding.REPLICA, None],
        ("mine", "yours"): ["0SO", "+++", real["yours"], None],
    }
    scenes = list(dict.fromkeys(row[4] for row in rows.values() if row[4]))
    assert all(scene.early and scene.limit_s == float("inf") for scene in scenes)
    assert [scene.tell("cpu") for scene in scenes] == ["begun"] * 6
    # Kernels whose sources are executed with stand-ins have a process of their own.
    assert [(module, [one.name for one in group], one.version, on) for module, group, one, on in begun] == [
        ("packages", ["a"], "1.0", "cpu"),
        ("packages", ["a", "newer only"], "2.0", "cpu"),
        ("packages", ["with stand-ins"], "1.0", "cpu"),
        ("packages", ["with stand-ins"], "2.0", "cpu"),
        ("packages", ["ours"], "0.1", "cpu"),
        ("mine.py", ["mine"], "", "cpu"),
    ]
    answers = Future()
    answers.set_result({"a": {"R": breaks("row 1")}})
    assert made[1].ask(made[1].subject, "cpu", answers) == breaks("row 1")


@pytest.mark.parametrize(
    ("only", "asked"),
    [
        ("vllm 2.0", ["a", "with stand-ins", "newer only", "big"]),
        ("2.0 a", ["a"]),
        ("ours", ["ours"]),
        ("gone", []),
    ],
)
def test_an_audit_of_some_kernels_asks_those_whose_name_or_release_holds_the_text(kernels, only, asked):
    made = cases.table(["packages"], lambda *_: None, only=only)
    assert list(dict.fromkeys(case.key.variant for case in made)) == asked


def test_an_audit_goes_on_where_an_earlier_one_has_gaps(kernels):
    def found(name, release, clauses, verdict=HOLDS):
        key = Key(CONTRACT, "", name, release)
        return [
            Finding(
                *key[:1], c, name, verdict, "not run" if verdict == NOT_RUN else "open", release, note="old"
            )
            for c in clauses
        ]

    known = [
        *found("a", "vllm 1.0", "0RWO"),
        *found("a", "vllm 2.0", "0RW"),
        *found("gone", "fla-core", "0RWO", NOT_RUN),
        *found("ours", "staleproof 0.1", "0WO"),
        *found("ours", "staleproof 0.1", "R", BREAKS),
        *found("big", "vllm 1.0", "0RWO", NOT_RUN),
    ]
    made = cases.table(["packages"], lambda *_: None, known=known, again=[BREAKS])
    rows = {
        key: row[0] for key, row in _shown(made).items() if key[0] not in ("with stand-ins", "newer only")
    }
    assert rows == {
        ("a", "vllm 2.0"): "0O",
        ("gone", "fla-core"): "0RWO",
        ("big and gone", "fla-core"): "0RWO",
        ("big", "vllm 1.0"): "0RWO",
        ("big", "vllm 2.0"): "0RWO",
        ("ours", "staleproof 0.1"): "0R",
    }


def test_a_module_without_kernels_is_a_broken_clause_of_yours(kernels, monkeypatch):
    # One of ours may have none for the packages that are here.
    monkeypatch.setitem(KERNELS, cases.SUBJECTS[0], [])
    made = cases.table(["broken.py", "nothing.py", cases.SUBJECTS[0]], lambda *_: None)
    assert [(case.key, case.expect, case.ask(None, "cpu")) for case in made] == [
        (Key(CONTRACT, "0", "broken.py", "yours"), HOLDS, breaks("does not import: ended with 1")),
        (Key(CONTRACT, "0", "nothing.py", "yours"), HOLDS, breaks("registers no kernel")),
    ]


def test_two_modules_with_a_kernel_of_one_name_are_refused_before_anything_runs(kernels, monkeypatch):
    monkeypatch.setitem(KERNELS, "other.py", KERNELS["mine.py"])
    wrong = "modules: expected another name for each kernel, got 'mine' in mine.py and in other.py"
    with pytest.raises(finding.RunFileError, match=wrong):
        cases.table(["mine.py", "other.py"], lambda *_: pytest.fail("it runs"))
    assert cases.table(["mine.py", "other.py"], lambda *_: None, only="no such kernel") == []


# --- An audit that goes on from an earlier one

SUBJECT = Subject("merge", "merge", print, package="kernels")
ROW = Finding(CONTRACT, "0", "merge", HOLDS, "good", "kernels 1.0", machine={"name": "CPU"})
BROKEN = replace(ROW, question="E", verdict=BREAKS, note="NaN", script="old\n")
REST = [replace(ROW, question=clause) for clause in "RO"]
ABSENT = replace(ROW, verdict=NOT_RUN, outcome="not run", note="no GPU")
NOT_ASKED = [replace(ABSENT, question=clause) for clause in "ERO"]


EVERYTHING = ("0", "E", "R", "O")
WHOLE = [ROW, BROKEN, *REST]
OPEN = {
    "it ran": ("kernels 1.0", WHOLE, (), ()),
    "it ran, and no release is here": ("kernels", WHOLE, (), ()),
    "it did not run": ("kernels 1.0", [ABSENT], (), EVERYTHING),
    "another release ran": ("kernels 2.0", [ROW], (), EVERYTHING),
    "its decorator was at fault": (
        "kernels 1.0", [replace(BROKEN, question="0", note="wrong setting: make: raises"), *NOT_ASKED], (),
        EVERYTHING,
    ),
    "another kernel ran": ("kernels 1.0", [replace(ROW, variant="other")], (), EVERYTHING),
    "the earlier audit did not know a clause": ("kernels 1.0", [ROW, BROKEN, REST[0]], (), ("0", "O")),
    # An answer to the others all the same.
    "clause 0 has no reference": (
        "kernels 1.0", [replace(ABSENT, note="not checked, no reference"), BROKEN, *REST], (), (),
    ),
    "broken clauses again": ("kernels 1.0", WHOLE, (BREAKS,), ("0", "E")),
    "broken clauses again, and none is": (
        "kernels 1.0", [ROW, replace(BROKEN, verdict=HOLDS), *REST], (BREAKS,), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("release", "known", "again", "asked"), OPEN.values(), ids=OPEN)
def test_a_kernel_is_asked_what_an_earlier_audit_left_open(release, known, again, asked):
    assert cases.open_clauses(SUBJECT, release, known, again) == asked


RENEWED, NEWER = replace(BROKEN, script="new\n"), replace(ABSENT, note="no such GPU")
LATE = replace(ROW, verdict=BREAKS, note="no answer within 40 s")
NOWHERE = replace(ABSENT, release="kernels", note="kernels is not here")


@pytest.mark.parametrize(
    ("known", "new", "both"),
    [
        ([ABSENT], [ROW], [ROW]),
        ([ROW], [ABSENT], [ROW]),
        ([ABSENT], [NEWER], [NEWER]),
        ([ROW, BROKEN], [RENEWED], [ROW, RENEWED]),
        # What did not come in time replaces no answer.
        ([ROW], [LATE], [ROW]),
        ([LATE], [ROW], [ROW]),
        ([ABSENT], [LATE], [LATE]),
        # A package that was not there goes when a release of it came.
        ([NOWHERE], [ROW], [ROW]),
        ([ROW], [NOWHERE], [ROW]),
        ([NOWHERE], [], [NOWHERE]),
        ([NOWHERE], [replace(ROW, variant="other")], [NOWHERE, replace(ROW, variant="other")]),
    ],
)
def test_an_answer_replaces_a_gap_and_a_gap_replaces_no_answer(known, new, both):
    assert cases.merged(known, new) == both


def test_an_audit_of_another_machine_is_refused():
    for one in (ROW, ABSENT):
        with pytest.raises(finding.RunFileError, match="expected an audit of GPU, got one of CPU"):
            cases.check_machine([one, replace(one, machine={"name": "GPU"})], "GPU")


MODULE = """
from staleproof import audit

@audit.rows(name="shared scale")
def shared(x):
    return x / x.abs().max()

@audit.rows(name="right")
def right(x):
    return 2 * x
"""


def test_the_command_asks_what_was_left_open_and_writes_both(tmp_path, monkeypatch, capsys, device):
    (tmp_path / "kernels.py").write_text(MODULE)
    found = [*cases.audit([str(tmp_path / "kernels.py")], device)]
    kept = [replace(one, note="kept") if one.variant == "right" else one for one in found]
    gaps = [
        replace(one, verdict=NOT_RUN, outcome="not run") if one.variant != "right" else one for one in kept
    ]
    write_findings(tmp_path / "old.jsonl", gaps)
    new = tmp_path / "new.jsonl"
    command = ["audit", str(tmp_path / "kernels.py"), "--device", device, "--json", str(new)]
    assert main([*command, "--onto", str(tmp_path / "old.jsonl")]) == 1
    assert read_findings(new, recorded=False) == kept
    write_findings(tmp_path / "old.jsonl", [replace(one, machine={"name": "another"}) for one in found])
    assert main([*command, "--onto", str(tmp_path / "old.jsonl")]) == 2
    machine = devices.machine().name
    assert f"onto: expected an audit of {machine}, got one of another" in capsys.readouterr().err


def test_a_module_that_had_no_kernel_is_asked_again(tmp_path, capsys):
    module, answers = tmp_path / "later.py", str(tmp_path / "answers.jsonl")
    module.write_text("")
    assert cli.main(["audit", str(module), "--json", answers]) == 1
    module.write_text(
        "from staleproof import audit\n@audit.rows(reference=lambda x: x)\ndef k(x): return x + 0\n"
    )
    assert cli.main(["audit", str(module), "--onto", answers]) == 0
    assert "1 of 1 subjects ran" in capsys.readouterr().out
