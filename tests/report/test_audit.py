"""The command, its table, the comparison and the heat map."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from made import drawn_words, texts
from staleproof.cases.finding import Finding, read_findings, write_findings
from staleproof.cli import app as cli
from staleproof.contract import cases
from staleproof.contract.contract import BREAKS, CLAUSES, CONTRACT, HOLDS, UNDEFINED
from staleproof.report import audit

ROW = Finding(
    *(CONTRACT, "E", "decode", BREAKS, "bad", "kernels 1.0"),
    machine={"name": "CPU x"}, note="NaN is written", script="assert 0\n",
)  # fmt: skip
ROWS = [
    ROW,
    replace(ROW, question="T", verdict=HOLDS, note="", script=""),
    replace(ROW, question="B", verdict=UNDEFINED, note="documented: mask it", script=""),
    replace(ROW, variant="prefill", verdict="not run", outcome="not run", note="needs a CUDA GPU", script=""),
]


@pytest.fixture(name="answers")
def answers_fixture(monkeypatch):
    def answer(*rows: Finding) -> None:
        monkeypatch.setattr(cases, "audit", lambda *args, **kwargs: iter(rows))

    return answer


def test_the_table_has_a_sign_a_clause_and_a_line_a_break(capsys):
    audit.print_table(ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "package      subject  E  T  B",
        "-----------  -------  -  -  -",
        "kernels 1.0  decode   X  +  u",
        "+ holds  X breaks  u undefined  . not run",
        *(f"{clause}: {CLAUSES[clause]}" for clause in "ETB"),
        "breaks  E  kernels 1.0 decode: NaN is written",
        "undefined  B  kernels 1.0 decode: documented: mask it",
        "not run  kernels 1.0 prefill: needs a CUDA GPU",
        "INTERPRETED on CPU x: 1 of 2 subjects ran",
    ]
    assert audit.cells(ROWS) == (["", "E", "T", "B"], [["decode", "X", "+", "u"], ["prefill", ".", "", ""]])
    # Releases side by side, though an audit onto an earlier one has its new rows last.
    later = [replace(row, release="kernels 2.0") for row in ROWS[:1]]
    assert [line[0] for line in audit.cells([*later, *ROWS])[1]] == ["decode", "prefill", "decode"]
    audit.print_table(ROWS[3:])
    assert capsys.readouterr().out.splitlines() == [
        "not run  kernels 1.0 prefill: needs a CUDA GPU",
        "INTERPRETED on CPU x: 0 of 1 subjects ran",
    ]
    audit.print_table([])
    assert capsys.readouterr().out == ""


def test_each_reason_is_said_once_and_a_module_without_a_kernel_is_no_subject(capsys):
    gap = replace(ROW, verdict="not run", outcome="not run", note="not checked, no reference", script="")
    gaps = [replace(gap, question=clause, variant=name) for name in ("decode", "verify") for clause in "EB"]
    ran = [replace(ROWS[1], variant=name) for name in ("decode", "verify")]
    module = replace(ROW, variant="mine.py", question="0", note="does not import: SyntaxError", script="")
    # A package that does not import here is a subject that did not run.
    absent = replace(gap, variant="other", note="does not import here: no libcuda")
    audit.print_table([*gaps, *ran, module, absent])
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "not run  E B: not checked, no reference",
        "not run  kernels 1.0 other: does not import here: no libcuda",
        "not tested  mine.py: does not import: SyntaxError",
        "INTERPRETED on CPU x: 2 of 3 subjects ran",
    ]
    # Nor is one whose decorator is at fault a kernel that did not run.
    wrong = replace(module, variant="route", note="wrong setting: reference: raises")
    unasked = replace(gap, variant="route", question="T", note="not asked: wrong setting")
    audit.print_table([*ran, wrong, unasked, replace(wrong, question="R")])
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "not tested  route: wrong setting: reference: raises",
        "not tested  R  route: wrong setting: reference: raises",
        "INTERPRETED on CPU x: 2 of 3 subjects ran",
    ]
    audit.print_table([*gaps[:2], *ran])
    assert "not run  E B (decode): not checked, no reference" in capsys.readouterr().out.splitlines()
    audit.print_table([module])
    assert capsys.readouterr().out.splitlines()[-1] == "INTERPRETED on CPU x: 0 of 0 subjects ran"


def test_a_break_of_anothers_kernel_is_a_finding_and_of_yours_a_failure(
    answers, capsys, monkeypatch, tmp_path
):
    answers(*ROWS)
    assert cli.main(["audit", "--json", str(tmp_path / "a.jsonl"), "--scripts", str(tmp_path / "s")]) == 0
    assert read_findings(tmp_path / "a.jsonl", recorded=False) == ROWS
    (script,) = (tmp_path / "s").iterdir()
    assert (script.name, script.read_text()) == ("kernels_1.0_decode_E.py", "assert 0\n")
    mine = tmp_path / "mine.py"
    mine.touch()
    to = ["--scripts", str(tmp_path / "s")]
    scripts, module = "add --scripts FOLDER for the counterexamples; then ", "registers no kernel"
    for more, note, script, last, says in (
        (to, "", "x\n", f"counterexamples: 1 in {to[1]}", "1 clause is broken"),
        (to, "", "", "no counterexample  E  yours decode", "1 clause is broken"),
        (
            [],
            "",
            "x\n",
            f'next: {scripts}mend the kernel, or say documented={{"E": "..."}}',
            "1 clause is broken",
        ),
        ([], "", "", 'next: mend the kernel, or say documented={"E": "..."}', "1 clause is broken"),
        # A module without a kernel has none to mend.
        ([], module, "", "INTERPRETED on CPU x: 0 of 0 subjects ran", "1 module was not tested"),
        (
            [],
            "wrong setting: make",
            "",
            "INTERPRETED on CPU x: 0 of 0 subjects ran",
            "1 kernel was not tested",
        ),
    ):
        answers(replace(ROW, release="yours", expected=HOLDS, note=note, script=script))
        capsys.readouterr()
        assert cli.main(["audit", str(mine), *more]) == 1
        said = capsys.readouterr()
        assert said.out.splitlines()[-1] == last
        assert said.err == f"staleproof: {says}\n"
    yours = replace(ROW, release="yours", expected=HOLDS)
    # A wrong result cannot be documented, what came beside it can.
    for others, last in (
        ([], "mend the kernel"),
        ([yours], 'mend the kernel, or say documented={"E": "..."}'),
    ):
        answers(replace(yours, question="0", script=""), *others)
        assert cli.main(["audit", str(mine)]) == 1
        assert capsys.readouterr().out.splitlines()[-1].endswith(last)
    # The module is first, and one of two breaks has a script.
    lost = replace(yours, question="B", note=module, script="")
    answers(lost, replace(yours, question="T", script=""), yours)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["audit", "mine"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f'next: {scripts}mend the kernel, or say documented={{"T": "..."}}'
    assert said.err == "staleproof: 2 clauses are broken; 1 module was not tested\n"


def test_a_name_that_no_subject_has_is_bad_input(answers, capsys, tmp_path):
    answers()
    path = tmp_path / "a.jsonl"
    assert cli.main(["audit", "--only", "decoed", "--json", str(path)]) == 2
    assert "only: expected a part of a package, a version or a subject, got" in capsys.readouterr().err
    assert not path.exists()
    # An earlier audit that answered all of it leaves nothing to ask.
    write_findings(path, ROWS)
    assert cli.main(["audit", "--only", "decode", "--onto", str(path)]) == 0
    assert cli.main(["audit", "--only", "decoed", "--onto", str(path)]) == 2


def test_a_picture_is_drawn_of_all_answers_and_named(answers, monkeypatch, tmp_path, capsys):
    answers(*ROWS)
    drawn = []
    monkeypatch.setattr(audit, "draw", lambda *given: drawn.append(given))
    assert cli.main(["audit", "--picture", str(tmp_path / "a.svg")]) == 0
    assert drawn == [(ROWS, tmp_path / "a.svg")]
    assert capsys.readouterr().out.splitlines()[-1] == f"heat map: {tmp_path / 'a.svg'}"


def test_again_asks_what_breaks_documented_or_not(monkeypatch, tmp_path):
    asked = []

    def ask(*_, again, known, limit_s, progress, **__):
        # What the earlier audit answered is not asked again, and a clause has a minute.
        assert (known, limit_s, callable(progress)) == (ROWS, 60, True)
        asked.append({*again})
        return iter(ROWS)

    monkeypatch.setattr(cases, "audit", ask)
    path = tmp_path / "a.jsonl"
    write_findings(path, ROWS)
    for option in ([], ["--again"]):
        assert cli.main(["audit", "--onto", str(path), *option]) == 0
    assert asked == [set(), {BREAKS, UNDEFINED}]


def test_an_audit_that_is_ended_keeps_the_subjects_it_had(monkeypatch, tmp_path):
    def ask(*_, **__):
        yield from ROWS
        raise KeyboardInterrupt

    monkeypatch.setattr(cases, "audit", ask)
    path = tmp_path / "a.jsonl"
    assert cli.main(["audit", "--json", str(path)]) == 130
    assert read_findings(path, recorded=False) == ROWS[:3]


def test_a_path_that_cannot_be_written_is_bad_input(answers, tmp_path, capsys):
    answers(*ROWS)
    assert cli.main(["audit", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("staleproof: ")


def test_compare_says_what_a_release_changed(tmp_path, capsys):
    new = [replace(row, release="kernels 2.0", verdict=HOLDS, note="") for row in ROWS[:2]]
    other = replace(ROW, variant="verify", release="kernels 2.0")
    old_path, new_path, both = (tmp_path / f"{name}.jsonl" for name in ("old", "new", "both"))
    write_findings(old_path, ROWS[:3])
    write_findings(new_path, [*new, other])
    write_findings(both, [*ROWS[:2], *new])
    changed = "E  kernels 2.0 decode: breaks (1.0) -> holds"
    absent = "E  kernels 2.0 verify: not asked -> breaks: NaN is written"
    asked = "B  kernels 1.0 decode: not asked -> undefined: documented: mask it"
    mine = [replace(row, release="yours") for row in (ROWS[0], replace(ROWS[0], verdict=HOLDS, note=""))]
    for row, path in zip(mine, (tmp_path / "mine.jsonl", tmp_path / "mended.jsonl"), strict=True):
        write_findings(path, [row])
    mended = "E  yours decode: breaks -> holds"
    back = "E  kernels 1.0 decode: holds (2.0) -> breaks: NaN is written"
    for before, after, lines, code in (
        (old_path, new_path, ["2 changes, 1 for the worse", changed, absent], 1),
        (new_path, old_path, ["2 changes, 1 for the worse", back, asked], 1),
        (tmp_path / "mine.jsonl", path, ["1 change, 0 for the worse", mended], 0),
        (old_path, old_path, ["0 changes, 0 for the worse"], 0),
        # One audit of two releases is compared with itself.
        (both, both, ["1 change, 0 for the worse", changed], 0),
        (both, both.parent / ".." / both.parent.name / both.name, ["1 change, 0 for the worse", changed], 0),
    ):
        assert cli.main(["compare", str(before), str(after)]) == code
        assert capsys.readouterr().out.splitlines() == lines


def test_the_picture_shows_each_verdict_and_leaves_out_what_did_not_run(tmp_path):
    pytest.importorskip("seaborn")
    gpu = replace(ROW, release="others 1.0", question="R", machine={"name": "H200"}, provenance="MEASURED")
    axes, others = audit.heat_map([*ROWS, gpu]).axes
    # A map a package, each with the clauses that were put to it.
    assert texts(others.get_xticklabels()) == ["R"]
    signs = "+ holds  X breaks  u undefined  . not run"
    titles = [one.get_title(loc="left") for one in (axes, others)]
    assert titles == [f"kernels:  {signs}", f"others:  {signs}"]
    # Beside what a GPU measured, what was interpreted says so.
    assert texts(axes.get_yticklabels()) == ["1.0 decode (CPU)"]
    assert texts(others.get_yticklabels()) == ["1.0 decode"]
    assert texts(axes.get_xticklabels()) == ["E", "T", "B"]
    assert {label.get_rotation() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())} == {0}
    # What did not run on the GPU is not what it measured.
    (alone,) = audit.heat_map([*ROWS[:3], replace(ROWS[3], provenance="MEASURED")]).axes
    assert texts(alone.get_yticklabels()) == ["1.0 decode"]
    two = audit.heat_map([*ROWS, replace(ROW, variant="verify", question="N")])
    (mesh,) = two.axes[0].collections
    colours = [to_hex(colour) for colour in mesh.get_facecolor()]
    signs = texts(two.axes[0].texts)
    shown = {sign: audit.COLOURS[verdict] for verdict, sign in (*audit.SIGNS.items(), ("not run", ""))}
    assert sorted(signs) == ["", "", "", "", "+", "X", "X", "u"]
    assert colours == [shown[sign] for sign in signs]
    path = tmp_path / "new" / "folder" / "map.svg"
    for _ in range(2):
        audit.draw(ROWS, path)
        assert path.read_text().startswith("<?xml")


def test_of_a_kernel_that_ran_on_several_machines_the_gpu_answers_all_clauses():
    gpu = replace(ROW, verdict=HOLDS, machine={"name": "H200"}, provenance="MEASURED")
    for rows in ([gpu, *ROWS[:2]], [*ROWS[:2], gpu]):
        assert audit.by_machine(rows) == [gpu]
    assert audit.by_machine([replace(gpu, verdict="not run", outcome="not run"), *ROWS[:2]]) == ROWS[:2]
    other = replace(ROWS[0], variant="of a CPU only")
    assert audit.by_machine([gpu, *ROWS[:2], other]) == [gpu, other]


def test_no_label_of_the_recorded_audits_is_cut(monkeypatch):
    """And no package's picture is higher than a few screens."""
    rows = audit.recorded_audits()
    # As they were recorded: what a GPU measured is not called RECORDED in them.
    assert "MEASURED" in {row.provenance for row in rows}
    shown = []
    monkeypatch.setattr("staleproof.report.plots.picture", lambda *given: shown.append(given))
    for package in ("flashinfer-python", "torch"):
        audit.picture(rows, package)
        figure, alt, caption = shown.pop()
        assert figure.bbox.height < 20 * figure.dpi
        mine = [row for row in rows if row.release.split(" ")[0] == package]
        subjects = len({(row.release, row.variant) for row in mine if row.ran})
        counts = Counter(row.verdict for row in audit.by_machine(mine))
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in audit.SIGNS)
        assert alt == f"The padding contract of {package}, {subjects} subjects that ran by clause: {told}."
        assert caption.startswith("RECORDED")
        assert drawn_words(figure)
