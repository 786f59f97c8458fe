"""The triage table: one source, the same everywhere, and nothing in it that the evidence does not say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from tools.bound import unbound

from staleproof.cases import store
from staleproof.incidents.registry import INCIDENTS
from staleproof.triage import in_production, table
from staleproof.vllm.plugin import decisions, patches

ROOT = Path(__file__).parents[2]
ROWS = table.rows()
KEYS = [row.key for row in ROWS]
RUN = store.find("nvidia-h200")
ENGINES = store.find("nvidia-h200-engine")


def test_the_words_people_type_are_in_it():
    seen = " ".join(row.see for row in ROWS)
    for words in (
        "garbage",
        "gibberish",
        "NaN",
        "`!!!!`",
        "OOM after upgrade",
        "illegal memory access",
        "Accuracy drops with uptime",
        "GB200",
    ):
        assert words in seen, words


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
            assert unbound(item.says, (ROOT / item.file).read_text()) == [], item
            continue
        *about, verdict = item.finding
        finding = found[tuple(about)]
        assert finding.verdict == verdict, item
        assert finding.ran == (verdict != "not run")
        # A claim is no stronger than its finding; what shipped source says was not run.
        assert item.grade == finding.grade or (item.grade == "source" and not finding.ran), item
        assert unbound(item.says, json.dumps(asdict(finding), default=str)) == [], item


def _cells(row: table.Row) -> list[str]:
    return [table.plain(cell) for cell in row.cells.values()]


def test_every_rendering_holds_the_same_words():
    said = table.plain(table.markdown(lambda row: row.notebook))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.rich_table())
    flat = " ".join(console.export_text().split())
    for row in ROWS:
        for cell in (row.see, row.do, row.affected):
            assert table.plain(cell) in said, cell
        for cell in _cells(row):
            assert " ".join(cell.split()) in flat, cell


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


def test_the_table_fits_80_columns_and_cuts_no_word():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.rich_table())
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = {word for row in ROWS for cell in _cells(row) for word in cell.split()}
    assert words <= {*text.split()}


@pytest.mark.parametrize("incident", INCIDENTS)
def test_in_production_is_the_row_of_the_table(incident, capsys):
    in_production(incident)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    flat = " ".join(said.split())
    for row in table.of(incident):
        for cell in (row.see, row.flag, row.release, row.confirm, row.affected):
            assert " ".join(table.plain(cell).split()) in flat


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
