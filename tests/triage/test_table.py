"""The triage table: one source, the same everywhere, and nothing in it that the evidence does not say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from staleproof import runs
from staleproof.incidents.registry import INCIDENTS
from staleproof.triage import in_production, table
from staleproof.vllm.plugin import decisions, patches

ROOT = Path(__file__).parents[2]
ROWS = table.rows()
KEYS = [row.key for row in ROWS]
RUN = runs.find("nvidia-h200")
ENGINES = runs.find("nvidia-h200-engine")


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


def test_a_row_without_a_patch_has_the_releases_that_the_sources_say():
    recorded = table.engine()["defects"]
    assert {*recorded} == {row.key for row in ROWS if not row.patches and not row.unpatched}
    assert all(row.releases == tuple(recorded[row.key]) for row in ROWS if row.key in recorded)
    assert table.engine()["releases"] == [*table.probes()]


def test_readme_names_releases_by_model_as_the_rows_have_them():
    by_model = (ROOT / "README.md").read_text().partition("| Model |")[2].partition("\n\n")[0]
    ends = {end for row in ROWS for end in (row.releases[0], row.releases[-1])}
    named = {*re.findall(r"\d+\.\d+\.\d+", by_model)}
    assert named
    assert named <= ends


def test_in_production_shows_the_control_of_each_row():
    """A control of one incident proves nothing about another."""
    assert len({row.control for row in ROWS}) > len(INCIDENTS)
    for name in INCIDENTS:
        shown = in_production(name)
        text, page = " ".join(repr(shown).split()), shown._repr_html_()
        for row in table.of(name):
            assert table.plain(row.control) in text
            assert re.sub("`([^`]+)`", r"<code>\1</code>", row.control) in page


def test_the_release_to_go_to_has_nothing_of_the_row():
    for row in ROWS:
        named = re.findall(r"\d+\.\d+\.\d+", row.release)
        if row.release.startswith("none"):
            assert row.releases[-1] == named[0] == [*table.probes()][-1], row.key
        else:
            assert named, row.key
            assert not {*named} & {*row.releases}, row.key


def test_evidence_is_what_was_found():
    found = {(f.incident, f.question, f.variant): f for one in runs.read_all() for f in one.findings}
    found |= {(f.incident, f.question, f.variant): f for f in (*RUN.findings, *ENGINES.findings)}
    for item in (item for row in ROWS for item in row.evidence):
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


def test_in_production_has_at_most_100_columns():
    for incident in INCIDENTS:
        assert 80 < max(map(len, repr(in_production(incident)).splitlines())) <= 100, incident


def test_in_production_refuses_an_unknown_incident():
    with pytest.raises(ValueError, match=r"incident: expected one of mla_padding, .* got 'mla'"):
        in_production("mla")


def test_reading_the_table_loads_no_torch():
    program = (
        "import sys; from staleproof.triage import table, read, judge, answer; table.rows(); "
        "table.markdown(lambda row: ''); print({'torch', 'triton', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr
