"""The command ``audit``: its table, files and heat map."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from made import texts
from staleproof import device
from staleproof.cli import app as cli
from staleproof.contract import runner
from staleproof.contract.contract import BREAKS, CLAUSES, HOLDS, NOT_RUN, NOT_TESTED, UNDEFINED, Answer
from staleproof.report import audit

BROKEN = Answer(BREAKS, "NaN is written", "decode", "E", script="assert 0\n")
ANSWERS = [
    BROKEN,
    Answer(HOLDS, "", "decode", "T"),
    Answer(UNDEFINED, "documented: mask it", "decode", "B"),
    Answer(NOT_RUN, "needs a CUDA GPU", "prefill", "E"),
]


@pytest.fixture(name="answers")
def answers_fixture(monkeypatch):
    def answer(*rows: Answer) -> None:
        monkeypatch.setattr(runner, "audit", lambda *args, **kwargs: iter(rows))

    return answer


def where() -> str:
    return f"{device.provenance()} on {device.machine().name}"


def test_table_has_a_sign_a_clause_and_a_line_a_break(capsys):
    audit.print_table(ANSWERS)
    assert capsys.readouterr().out.splitlines() == [
        "kernel   E  T  B",
        "-------  -  -  -",
        "decode   X  +  u",
        "prefill  .",
        "+ holds  X breaks  u undefined  . not run",
        *(f"{clause}: {CLAUSES[clause]}" for clause in "ETB"),
        "breaks  E  decode: NaN is written",
        "undefined  B  decode: documented: mask it",
        "not run  E (prefill): needs a CUDA GPU",
        f"{where()}: 1 of 2 kernels ran",
    ]


def test_each_reason_is_one_line_and_a_module_without_a_kernel_is_no_kernel(capsys):
    note = "launched again; capture was not tried"
    held = [Answer(HOLDS, note, name, clause) for name in ("decode", "verify") for clause in "NA"]
    module = Answer(NOT_TESTED, "does not import: SyntaxError", "mine.py", "0")
    # Its decorator is at fault: it has a line of the table, without a blank.
    ours = [Answer(NOT_TESTED, "wrong setting: make", "ours", "0"), Answer(NOT_RUN, "no", "ours", "N")]
    audit.print_table([*held, Answer(NOT_RUN, "no mask", "verify", "P"), *ours, module])
    said = capsys.readouterr().out.splitlines()
    assert said[4].split() == ["ours", ".", "."]
    assert said[-6:] == [
        f"holds, but  N A (decode, verify): {note}",
        "not run  P (verify): no mask",
        "not run  N (ours): no",
        "not tested  ours: wrong setting: make",
        "not tested  mine.py: does not import: SyntaxError",
        f"{where()}: 2 of 3 kernels ran",
    ]


MODULE = Answer(NOT_TESTED, "registers no kernel", "{}", "0")
NEXT = "next: add --scripts FOLDER for the reproducers; then mend the kernel"


@pytest.mark.parametrize(
    ("rows", "scripts", "last", "error"),
    [
        ([BROKEN], True, "reproducers: 1 in {}", "1 clause is broken"),
        ([BROKEN], False, f'{NEXT}, or say documented={{{{"E": "..."}}}}', "1 clause is broken"),
        # A wrong result cannot be documented.
        ([replace(BROKEN, clause="0")], False, NEXT, "1 clause is broken"),
        ([MODULE], False, "0 of 0 kernels ran", "1 module was not tested"),
        (
            [BROKEN, replace(BROKEN, clause="T"), replace(MODULE, kernel="k"), MODULE],
            True,
            "reproducers: 2 in {}",
            "2 clauses are broken; 1 kernel was not tested; 1 module was not tested",
        ),
    ],
)
def test_break_is_exit_code_1_and_the_last_line_is_what_to_do(
    answers, capsys, tmp_path, rows, scripts, last, error
):
    mine, folder = tmp_path / "mine.py", tmp_path / "s"
    answers(*(replace(row, kernel=row.kernel.format(mine)) for row in rows))
    mine.touch()
    assert cli.main(["audit", str(mine), *(["--scripts", str(folder)] if scripts else [])]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].endswith(last.format(folder))
    assert said.err == f"staleproof: {error}\n"


def test_ended_audit_keeps_the_answers_it_had(monkeypatch, tmp_path):
    def ask(*_, **__):
        yield from ANSWERS
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "audit", ask)
    path = tmp_path / "a.jsonl"
    assert cli.main(["audit", "typing", "--json", str(path)]) == 130
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["kernel"], row["clause"], row["verdict"]) for row in rows] == [
        (one.kernel, one.clause, one.verdict) for one in ANSWERS
    ]
    assert {row["machine"] for row in rows} == {device.machine().name}


def test_heat_map_shows_each_verdict_by_sign_and_colour(answers, tmp_path, capsys):
    pytest.importorskip("seaborn")
    axes = audit.heat_map(ANSWERS).axes[0]
    assert texts(axes.get_yticklabels()) == ["decode", "prefill"]
    assert texts(axes.get_xticklabels()) == ["E", "T", "B"]
    (mesh,) = axes.collections
    colours = [to_hex(colour) for colour in mesh.get_facecolor()]
    signs = texts(axes.texts)
    shown = {sign: audit.COLOURS[verdict] for verdict, sign in (*audit.SIGNS.items(), ("not run", ""))}
    assert sorted(signs) == ["", "", "+", ".", "X", "u"]
    assert colours == [shown[sign] for sign in signs]
    answers(*ANSWERS[1:])
    path = tmp_path / "new" / "map.svg"
    assert cli.main(["audit", "typing", "--picture", str(path)]) == 0
    assert path.read_text().startswith("<?xml")
    assert capsys.readouterr().out.splitlines()[-1] == f"heat map: {path}"


def test_archive_has_a_line_a_kernel_release_and_machine_that_ran():
    rows = audit.archived()
    keys = [(row["machine"], row["package"], row["version"], row["kernel"]) for row in rows]
    assert len(keys) == len(set(keys)) > 100
    for row in rows:
        assert {*row["answers"].values()} <= {*audit.SIGNS}
        broken = {c for c, verdict in row["answers"].items() if verdict in ("breaks", "undefined")}
        assert broken == row["notes"].keys()
