"""The triage table: one source, the same everywhere, and nothing in it that the evidence does not say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from staleproof.cases import store
from staleproof.incidents.registry import INCIDENTS
from staleproof.triage import answer, in_production, judge, table
from staleproof.triage.facts import Facts
from staleproof.vllm.plugin import decisions, patches

ROOT = Path(__file__).parents[2]
ROWS = table.rows()
KEYS = [row.key for row in ROWS]
RUN = store.find("nvidia-h200")
ENGINES = store.find("nvidia-h200-engine")


def test_the_words_people_type_are_in_it():
    seen = " ".join(row.see for row in ROWS)
    typed = "garbage, gibberish, NaN, `!!!!`, OOM after upgrade, illegal memory access, GB200"
    assert [words for words in (*typed.split(", "), "Accuracy drops with uptime") if words not in seen] == []


def test_every_incident_has_a_row_and_every_patch_one_too():
    assert {row.incident for row in ROWS} == {*INCIDENTS}
    assert {patch for row in ROWS for patch in row.patches} == {*patches()}
    assert all((ROOT / "notebooks" / row.notebook).exists() for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=KEYS)
def test_releases_agree_with_what_patches_says(row):
    """`staleproof patches --version X` names a patch of the row as needed exactly where the row says so."""
    if not row.patches:
        return
    for name in table.probes():
        needed = [d.patch.name for d in decisions(name) if d.needed and d.patch.name in row.patches]
        assert bool(needed) == (name in row.releases), (name, needed)


def test_a_release_without_a_patch_is_one_without_the_cure():
    """0.16.0 and 0.17.0 have no zeroer at all, which is why no patch is for them."""
    without = [
        name for name, row in table.probes().items() if "no KVBlockZeroer" in row["staging_race"]["why"]
    ]
    assert [row.unpatched for row in ROWS if row.unpatched] == [tuple(without)]


@pytest.mark.parametrize("row", ROWS, ids=KEYS)
def test_the_release_to_go_to_has_nothing_of_the_row(row):
    named = re.findall(r"\d+\.\d+\.\d+", row.release)
    if row.release.startswith("none"):
        assert row.releases[-1] == named[0] == [*table.probes()][-1]
    else:
        assert named
        assert not {*named} & {*row.releases}


@pytest.mark.parametrize("row", ROWS, ids=KEYS)
def test_evidence_is_what_was_found(row):
    found = {(f.incident, f.question, f.variant): f for f in (*RUN.findings, *ENGINES.findings)}
    for item in row.evidence:
        assert item.grade in table.GRADES
        if item.file:
            assert (ROOT / item.file).is_file(), item
            continue
        *about, verdict = item.finding
        finding = found[tuple(about)]
        assert finding.verdict == verdict, item
        assert finding.ran == (verdict != "not run")
        # A claim is no stronger than its finding; what shipped source says was not run.
        assert item.grade == finding.grade or (item.grade == "source" and not finding.ran), item


def test_every_rendering_holds_the_same_words_and_a_terminal_of_80_columns_cuts_none():
    said = table.plain(table.markdown(lambda row: row.notebook))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.rich_table())
    text = console.export_text()
    flat = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    for row in ROWS:
        for cell in (row.see, row.do, row.affected):
            assert table.plain(cell) in said, cell
        for cell in row.cells.values():
            assert " ".join(table.plain(cell).split()) in flat, cell


def test_a_patch_is_named_for_the_releases_that_it_does_not_refuse():
    for row in ROWS:
        for name in row.releases:
            states = {d.patch.name: d.state for d in decisions(name)}
            for patch in row.patches:
                assert (states[patch] == "refused") == (name in _spread(row.refused(patch))), (row.key, name)


def _spread(spans: str) -> list[str]:
    """The releases of some spans."""
    known = [*table.probes()]
    named = [part.split(" to ") for part in spans.split(", ") if part]
    return [known[i] for ends in named for i in range(known.index(ends[0]), known.index(ends[-1]) + 1)]


@pytest.mark.parametrize("incident", INCIDENTS)
def test_in_production_has_at_most_100_columns(incident, capsys):
    in_production(incident)
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_in_production_refuses_an_unknown_incident():
    with pytest.raises(ValueError, match=r"incident: expected one of mla_padding, .* got 'mla'"):
        in_production("mla")


def test_reading_the_table_loads_no_torch():
    program = (
        "import sys; from staleproof.triage import table, logs, judge, answer; table.rows(); "
        "table.markdown(lambda row: ''); print({'torch', 'triton', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.fixture
def made(monkeypatch):
    """A table of six rows, about two patches and three releases."""
    needed = {"0.18.0": (True, False), "0.18.1": (True, True), "0.19.0": (False, False)}
    probes = {name: {"zero": {"needed": a}, "clamp": {"needed": b}} for name, (a, b) in needed.items()}
    evidence = table.Evidence
    plain = evidence("replica", "so", file="c.md")
    rest = ("x", "-", "y", (plain,))
    made = (
        table.Row(
            *("pages", "kv_reuse", ("zero", "clamp"), ("nan", "drift")),
            *("a `NaN`", "eager", "`--one`", "run `x`"),
            (evidence("replica", "it may", file="a.md"), evidence("real", "it did", ("kv", "q", "v", "nan"))),
            {"model": ("hybrid",), "graphs": ("full",)},
            also="a long prompt",
            hints={"gpu": {"sm100": "seen on B200", "sm90": "seen on H200"}},
            signs=("zap", "zip"),
        ),
        table.Row(
            *("scales", "scale_padding", (), ("nan",), "Inf", "never", "`--two`", "look"),
            (evidence("source", "line 7", file="b.md"),),
            {"quant": ("nvfp4", "mxfp4")},
            unpatched=("0.18.0", "0.18.1"),
            weighs={"gpu": {"sm100": "clean on B200", "sm90": "clean on H200"}},
        ),
        table.Row("rows", "mla_padding", ("clamp",), ("nan", "oom"), "NaN | Inf", *rest, {"model": ("mla",)}),
        table.Row("late", "mla_padding", ("zero",), ("nan",), "late", *rest, {"phase": ("serving",)}),
        table.Row("last", "mla_padding", ("zero",), ("nan",), "last", *rest, {"phase": ("serving",)}),
        table.Row("buffer", "decode_buffer", ("zero",), ("oom",), "OOM", *rest, {"gpu": ("sm90",)}),
    )
    monkeypatch.setattr(table, "probes", lambda: probes)
    monkeypatch.setattr(table, "rows", lambda: made)
    monkeypatch.setattr(table, "_refused", lambda name: {"clamp"} if name == "0.18.1" else set())
    states = {"zero": "would apply", "clamp": "refused"}
    monkeypatch.setattr(
        answer,
        "patch_lines",
        lambda row, version: [(p, states[p], f"why {p} {version}") for p in row.patches],
    )
    return {row.key: row for row in made}


KNOWN = """\
known: symptom nan (your words), version 0.18.1 (line 3), gpu sm100 (--gpu), model hybrid
note: a note
"""
SHORT = f"""\
{KNOWN}
fits only if more is true: pages (evidence: real). a NaN
   do now    --one; release: 0.19.0 or later
   confirm   run x
   patch     zero: would apply, clamp: refused. Install beside vLLM (pip install .), restart; its
             log then says in place: zero; STALEPROOF_PATCHES=none: off
   read      notebooks/04_kv_reuse.ipynb; staleproof run kv_reuse
   but       --graphs full?; only if there is also a long prompt

may fit as well:
  scales: --quant nvfp4 or mxfp4?, clean on B200
  late: --phase serving?
  rows: --model mla?

and 1 more; -v says why, by what evidence, and what speaks against"""
FULL = f"""\
{KNOWN}
1. fits only if more is true: pages (kv_reuse)
   sees      a NaN
   because   symptom nan (your words); version 0.18.1 (line 3); model hybrid; seen on B200; the log
             names zap
   only if   there is also a long prompt
   unknown   --graphs full?
   not seen  eager
   flag      --one
   release   0.19.0 or later
   patch     zero: would apply (why zero 0.18.1)
   patch     clamp: refused (why clamp 0.18.1)
             Install beside vLLM (pip install .), restart; its log then says in place: zero;
             STALEPROOF_PATCHES=none: off
   confirm   run x
   evidence  real: third-party code showed a link of it; your server was not asked
             replica: it may [a.md]
             real: it did [kv: q / v = nan]
   read      notebooks/04_kv_reuse.ipynb; staleproof run kv_reuse

2. possible, but measured otherwise: scales (scale_padding)
   sees      Inf
   because   symptom nan (your words); version 0.18.1 (line 3)
   but       clean on B200
   unknown   --quant nvfp4 or mxfp4?
   not seen  never
   flag      --two
   release   0.19.0 or later
   patch     none: no patch
   confirm   look
   evidence  source: released code says so; nobody ran it here
   read      notebooks/05_the_revert.ipynb; staleproof run scale_padding

3. fits as far as known: late (mla_padding)
   sees      late
   because   symptom nan (your words); version 0.18.1 (line 3)
   unknown   --phase serving?
   alike     cannot be told apart from rows, last; --phase, --model may tell
   not seen  x
   flag      -
   release   0.19.0 or later
   patch     zero: would apply
   confirm   y
   evidence  replica: at best consistent with it; no released code ran
   read      notebooks/01_mla_padding.ipynb; staleproof run mla_padding

may fit as well:
  rows: fits as far as known: --model mla?
  last: fits as far as known: --phase serving?

speaks against:
  another symptom: buffer"""


@pytest.fixture
def found(made):
    """The rows of that table as they stand to some facts, in an order of our own."""
    known = Facts(
        {"symptom": "nan", "version": "0.18.1", "gpu": "sm100"},
        {"hybrid": True},
        {"symptom": "your words", "version": "line 3", "gpu": "--gpu"},
        lines="zap!",
        notes=["a note"],
    )
    order = ("pages", "scales", "late", "rows", "last", "buffer")
    return known, [judge.judge(made[key], known) for key in order]


def test_the_answer_is_this_in_short_and_in_full(found):
    assert answer.as_text(*found, 100) == SHORT
    assert answer.as_text(*found, 100, verbose=True) == FULL
    # What goes on in the next line begins below the text, or 13 columns in.
    narrow = answer.as_text(*found, 36).splitlines()
    at = narrow.index("fits only if more is true: pages")
    assert narrow[at + 1] == " " * 13 + "(evidence: real). a NaN"
    # A line of 200 columns is hard to read.
    assert answer.as_text(*found, 200) == SHORT
    known, rows = found
    assert "\n-v says why, " in answer.as_text(known, rows[:4], 100)
    assert "may fit as well" not in answer.as_text(known, rows[:1]) + answer.as_text(
        known, rows[:3], verbose=True
    )
    # Of a row of the symptom it is said what speaks against it, by the fact; without a symptom of each.
    against = "speaks against:\n  buffer: gpu sm100 (--gpu); it needs sm90"
    for symptom in ("oom", None):
        known.known.pop("symptom")
        known.known |= {"symptom": symptom} if symptom else {}
        known.origin = {"gpu": "--gpu"}
        said = answer.as_text(known, [judge.judge(rows[-1].row, known)], 100, verbose=True)
        assert said.endswith(against)
        assert (answer.NO_SYMPTOM in " ".join(said.split())) is (symptom is None)


def test_the_answer_for_programs_is_this(found):
    known, rows = found
    said = json.loads(answer.as_json(known, rows))
    first, *others = said.pop("rows")
    assert said == {
        "known": known.known | {"model": {"hybrid": True}},
        "origin": known.origin,
        "notes": ["a note"],
        "nothing_fits": False,
        "looks_like": None,
    }
    # What the text says of a row, each under its name; and the releases, which stand in the table.
    text = " ".join(FULL.split())
    for line in (
        "1. {status}: {key} ({incident})",
        "because {because[0]}; {because[1]}; {because[2]}; {because[3]}; {because[4]} only if",
        "only if there is also {also_needs} unknown --{not_known[0]} full? not seen",
        *("flag {flag} release", "release {release} patch", "confirm {confirm} evidence"),
        "patch {patches[0][patch]}: {patches[0][state]} ({patches[0][why]})",
        "patch {patches[1][patch]}: {patches[1][state]} ({patches[1][why]})",
        *("evidence {ceiling}", "read {notebook}; staleproof run {incident}"),
        "{evidence[0][grade]}: {evidence[0][says]} [{evidence[0][rests_on]}]",
        "{evidence[1][grade]}: {evidence[1][says]} [{evidence[1][rests_on]}] read",
    ):
        assert line.format(**first) in text
    assert first["affected"] == "0.18.0 to 0.18.1"
    assert first["measured_otherwise"] == first["against"] == first["cannot_be_told_apart_from"] == []
    assert [row["cannot_be_told_apart_from"] for row in others[1:4]] == [
        ["rows", "last"],
        ["late", "last"],
        ["late", "rows"],
    ]
    assert (others[0]["measured_otherwise"], others[0]["also_needs"]) == (["clean on B200"], None)
    assert others[-1]["against"] == ["its symptom is oom, not nan", "gpu sm100 (--gpu); it needs sm90"]
    del known.traits["hybrid"]
    assert "model" not in json.loads(answer.as_json(known, rows))["known"]


def test_the_rows_stand_in_this_order_and_the_next_question_is_this(found):
    known, _ = found
    order = [j.row.key for j in judge.judge_all(known)]
    assert order == ["rows", "late", "last", "scales", "pages", "buffer"]
    # Two rows ask for the phase; then the facts in the order of the questions.
    asked = ["symptom", "version"]
    for name in ("phase", "model", "graphs", None):
        assert judge.next_question(known, asked) == name
        asked.append(name)


def test_a_row_of_the_table_is_this_in_each_rendering(made, capsys):
    pages, scales, *_ = made.values()
    assert (pages.releases, pages.affected, pages.grade) == (("0.18.0", "0.18.1"), "0.18.0 to 0.18.1", "real")
    assert pages.refused("clamp") == "0.18.1"
    assert pages.cells == {
        "What you see": "a `NaN`",
        "Not seen": "eager",
        "vLLM": "0.18.0 to 0.18.1",
        "Do now": "Flag: `--one`. Release: 0.19.0 or later. Patch: `zero`, `clamp` (not on 0.18.1).",
        "Confirm": "run `x`",
        "Evidence": "real: it did",
    }
    assert scales.do == "Flag: `--two`. Release: 0.19.0 or later. Patch: none."
    lines = table.markdown(lambda row: f"n/{row.key}").splitlines()
    assert lines[1:3] == [
        "| --- | --- | --- |",
        f"| a `NaN`. vLLM 0.18.0 to 0.18.1. | {pages.do} | [04](n/pages), real |",
    ]
    assert lines[4].startswith("| NaN &#124; Inf. vLLM 0.18.1. | ")
    assert (len(lines), lines[-2:]) == (10, ["", table.CAPTION])
    in_production("kv_reuse")
    in_production("scale_padding")
    assert capsys.readouterr().out.splitlines() == [
        "a NaN",
        "  releases 0.18.0 to 0.18.1",
        "  flag     --one",
        "  release  0.19.0 or later",
        "  patch    zero, clamp (staleproof patches --explain zero)",
        "  confirm  run x",
        "Inf",
        "  releases 0.18.0 to 0.18.1",
        "  flag     --two",
        "  release  0.19.0 or later",
        "  patch    none",
        "  confirm  look",
    ]
    assert (table.symptom("kv_reuse"), table.symptom("moe_routing")) == ("a NaN", "")
    # In few columns a long word goes on in the next line.
    console = Console(width=30, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.rich_table())
    assert "notebooks/05_the_revert.ipynb" in re.sub(r"\s", "", console.export_text())
