"""The HTML report, and executing the notebooks it shows."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from tests.made import finding, not_run, off_on_off

from staleproof.cases import predictions, store
from staleproof.cases.finding import RunFileError
from staleproof.cli import app as cli
from staleproof.contract.contract import Row, Verdict
from staleproof.report import html, notebooks
from staleproof.report.notebooks import Execution
from staleproof.report.page.kept import Kept

CELLS = [
    v4.new_markdown_cell(
        "# First of all\n\n[next](01_next.ipynb), [upstream](https://a.test), "
        "[words](../workbook/glossary.md)"
    ),
    v4.new_code_cell("import sys, os\nprint(sys.executable, os.getcwd())"),
    v4.new_markdown_cell("## The `symptom`"),
    v4.new_code_cell(
        "import matplotlib.pyplot as plt\n%config InlineBackend.figure_formats = ['svg']\nplt.plot([1, 2]);"
    ),
    v4.new_code_cell("import ipywidgets\nipywidgets.IntSlider(description='live rows')"),
    v4.new_code_cell("from IPython.display import Javascript\nJavascript('alert(1)')"),
]


def write(path: Path, cells: list) -> Path:
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Execution:
    folder = tmp_path_factory.mktemp("notebooks")
    source = write(folder / "00_first.ipynb", CELLS)
    before = source.read_bytes()
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        # A machine where another Python has registered itself as "python3".
        other = folder / "jupyter/kernels/python3"
        other.mkdir(parents=True)
        spec = {"argv": ["/no/such/python"], "display_name": "another", "language": "python"}
        (other / "kernel.json").write_text(json.dumps(spec))
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        execution = notebooks.execute(source, folder / "out", lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert source.read_bytes() == before
    return execution


def test_a_copy_is_executed_by_this_python_in_the_notebooks_folder(executed):
    assert executed.error is None
    copy = nbformat.read(executed.path, as_version=4)
    printed = copy.cells[1].outputs[0].text.split()
    assert printed == [sys.executable, str(executed.path.parents[1])]
    assert [c.execution_count for c in copy.cells if c.cell_type == "code"] == [1, 2, 3, 4]
    assert [p.name for p in executed.path.parent.iterdir()] == ["00_first.ipynb"]


def test_the_page_loads_nothing(executed):
    page = html.page([finding("a", "q", "v", "clean")], [], [executed])
    assert "default-src 'none'" in page
    assert not re.search(r"<script[^>]*src|<link|<iframe|@import", page, re.IGNORECASE)
    assert not re.search(r"\bsrc\s*=\s*[\"'](?!data:)", page, re.IGNORECASE)
    assert not re.search(r"url\(\s*[\"']?(?!#|data:)", page, re.IGNORECASE)
    assert '<svg role="img" aria-label="The symptom"' in page
    assert "IntSlider(value=0" in page
    assert page.count("<script") == 1
    # A link that a reader may follow is not a thing the page loads.
    assert 'href="https://a.test"' in page


def test_the_contents_lead_to_every_section(executed):
    page = html.page([], [], [executed], Kept(documents={"glossary.md": "# Words\n\n**a row** - One line."}))
    contents = page[page.index("<nav") : page.index("</nav>")]
    anchors = re.findall(r'href="#([^"]+)"', contents)
    assert anchors[:2] == ["triage", "incidents"]
    assert anchors[-5:] == ["verdicts", "00_first", "00_first-the-symptom", "glossary", "api"]
    for anchor in anchors:
        assert len(re.findall(rf"\bid=['\"]{anchor}['\"]", page)) == 1
    assert ">First of all</a>" in contents
    assert '<a href="#glossary">words</a>' in page


def test_a_link_to_a_file_that_the_page_does_not_hold_becomes_its_text(executed):
    page = html.page([], [], [executed])
    assert 'href="01_next.ipynb"' not in page
    assert "<p>next, <a" in page


def test_light_and_dark(executed):
    page = html.page([], [], [])
    assert "color-scheme: light dark" in page
    assert page.count("@media (prefers-color-scheme: dark)") == 1


def test_recorded_runs_stand_beside_with_their_mark(tmp_path, monkeypatch):
    row = {"kernel": "<clear>", "provider": "ours", "p50": 2.125, "unit": "us"}
    store.write(tmp_path / "a", [finding("a", "q", "v", "clean")], [row])
    monkeypatch.setattr("staleproof.cases.finding.source_digest", lambda incident: "another")
    page = html.page([finding("a", "q", "v", "leaked")], store.read_all(tmp_path), [])
    assert "source changed since: a. This machine" in page
    assert "0 match, 1 mismatch" in page
    assert "<b>RECORDED</b>" in page
    assert "<td>&lt;clear&gt;</td>" in page
    assert '<td class="num">2.125</td>' in page


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "code cell 2 raised ZeroDivisionError: division by zero"),
        ("import os; os.write(2, b'device-side assert'); os._exit(139)", "the kernel died"),
        ("import time; time.sleep(60)", "code cell 2 took longer than 2 s"),
    ],
)
def test_a_notebook_that_stops_says_where_and_the_rest_is_kept(tmp_path, code, said):
    cells = [v4.new_code_cell("print('so far')"), v4.new_code_cell(code), v4.new_code_cell("3")]
    source = write(tmp_path / "01_stops.ipynb", cells)
    execution = notebooks.execute(source, tmp_path / "out", lambda *at: None, cell_timeout_s=2)
    assert execution.error is not None
    assert said in execution.error
    page = html.page([], [], [execution])
    assert "so far" in page
    assert "This notebook stopped: " in page
    if "died" in said:
        assert "device-side assert" in (tmp_path / "out/01_stops.log").read_text()


def test_a_spoilt_notebook_is_refused(tmp_path):
    (tmp_path / "00_cut.ipynb").write_text('{"cells": [')
    with pytest.raises(RunFileError, match="cannot be read"):
        notebooks.execute(tmp_path / "00_cut.ipynb", tmp_path / "out", lambda *at: None)


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("notebooks", "workbook/runs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(store, "checkout", lambda: tmp_path)
    monkeypatch.setattr(cli, "INCIDENTS", {})
    return tmp_path


def test_report_shows_committed_notebooks_as_they_are(root, capsys):
    source = write(root / "notebooks/00_first.ipynb", [v4.new_markdown_cell("# As committed")])
    before = source.read_bytes()
    assert cli.main(["report"]) == 0
    page = root / "workbook/_build/index.html"
    assert capsys.readouterr().out == f"report: {page}\n"
    assert "As committed" in page.read_text()
    assert source.read_bytes() == before


def test_report_shows_what_the_patches_change(root):
    answers = {
        "0.18.1": {"ids <pending>": ["600", "0"], "rows": ["none", "none"]},
        "0.33.0": {"ids <pending>": ["0", "0"]},
    }
    (root / "workbook/patches.json").write_text(json.dumps(answers))
    assert cli.main(["report"]) == 0
    page = (root / "workbook/_build/index.html").read_text()
    assert '<th scope="col">0.33.0</th>' in page
    row = page[page.index("ids &lt;pending&gt;") :]
    assert row.startswith('ids &lt;pending&gt;</th><td class="cured">600 → 0</td><td class="absent">0</td>')
    assert 'rows</th><td class="absent">none</td><td class="absent">-</td>' in page
    assert 'href="#patched"' in page


def test_report_execute_exits_1_where_a_notebook_stops_and_still_writes(root, capsys):
    write(root / "notebooks/00_good.ipynb", [v4.new_code_cell("print('went', 'well')")])
    write(root / "notebooks/01_bad.ipynb", [v4.new_code_cell("assert 0, 'no verdict'")])
    assert cli.main(["report", "--execute"]) == 1
    captured = capsys.readouterr()
    assert "01_bad.ipynb: code cell 1 raised AssertionError: no verdict" in captured.err
    page = (root / "workbook/_build/index.html").read_text()
    assert "went well" in page
    assert "This notebook stopped" in page
    assert str(root / "workbook/_build/index.html") in captured.out


def _meet(name: str) -> list:
    """A notebook that waits for another, in the folder above, which says how many threads torch has."""
    return [
        v4.new_code_cell(
            "import os, time, pathlib\n"
            f"pathlib.Path('{name}').write_text(os.environ['OMP_NUM_THREADS'])\n"
            "while len([*pathlib.Path('.').glob('at_*')]) < 2: time.sleep(0.02)"
        )
    ]


def test_notebooks_are_executed_beside_what_the_command_does(root, monkeypatch):
    monkeypatch.setattr(notebooks, "_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = root / "notebooks"
    sources = [write(folder / f"0{i}.ipynb", _meet(f"at_{i}")) for i in range(2)]
    with notebooks.Beside(sources, root / "out", 1) as beside:
        # The first of them waits for the second, which begins once nothing is left to do here.
        end = time.monotonic() + 60
        while not (folder / "at_0").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert not (folder / "at_1").exists()
        done = beside.finish()
    assert [(one.path.name, one.error) for one in done] == [("00.ipynb", None), ("01.ipynb", None)]
    # Two processes on four cores.
    assert (folder / "at_0").read_text() == "2"
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_error_of_the_command_stops_the_notebooks_beside_it(root):
    cells = [
        v4.new_code_cell(f"open('cell_{i}', 'w').close()\nimport time; time.sleep(0.3)") for i in range(9)
    ]
    source = write(root / "notebooks/00_long.ipynb", cells)
    with pytest.raises(KeyError), notebooks.Beside([source], root / "out", 1) as beside:
        raise KeyError
    for thread in beside._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not (root / "notebooks/cell_8").exists()


@pytest.mark.parametrize(
    ("kind", "cores", "lanes"), [("cuda", 16, 0), ("cpu", 1, 0), ("cpu", 2, 1), ("cpu", 16, 3)]
)
def test_no_notebook_runs_beside_questions_on_a_gpu(monkeypatch, kind, cores, lanes):
    monkeypatch.setattr(notebooks, "select", lambda device: kind)
    monkeypatch.setattr(notebooks, "_cores", lambda: cores)
    assert notebooks.lanes("auto") == lanes


def test_the_page_shows_what_was_compiled_for_other_gpus():
    row = {"capability": 120, "kernel": "k<1>", "specialisations": 2, "warps": 8, "registers": 255}
    row |= {"spilled": 0, "shared": 213_544, "limit": 101_376, "accepted": []}
    kept = {"date": "2026-11-21", "versions": {"triton": "3.9.0"}, "rows": [row | {"problems": ["too much"]}]}
    page = html.page([], [], [], Kept(compiled=kept))
    assert '<td class="harm">sm_120</td>' in page
    assert "k&lt;1&gt;" in page
    assert "too much" in page
    assert "triton 3.9.0" in page
    assert 'id="compiled"' not in html.page([], [], [])


def test_the_page_shows_predictions_the_refuted_first_in_red():
    one = predictions.Prediction("a", "q<1>", "theirs", "nan", "its source", "zero", "2026-11-21", "0")
    found = predictions.outcomes(
        [replace(one, question="open"), one, replace(one, question="right")],
        [finding("a", "q<1>", "theirs", "zero"), finding("a", "right", "theirs", "nan")],
    )
    page = html.page([], [], [], Kept(predicted=found))
    states = re.findall(r"<td(?: class=\"(\w+)\")?>(\w+)</td><td>a</td><td>([^<]+)</td>", page)
    assert states == [
        ("harm", "refuted", "q&lt;1&gt;"),
        ("clean", "confirmed", "right"),
        ("", "open", "open"),
    ]
    assert 'id="predicted"' not in html.page([], [], [])


def test_a_card_without_a_proof_of_this_machine_shows_a_recorded_one(tmp_path):
    three = {"off": "leaked", "on": "clean", "off_again": "leaked"}
    theirs = [off_on_off(one, "theirs", **three, wrong=None) for one in ("mla_padding", "decode_buffer")]
    store.write(tmp_path / "other", theirs, [])
    own = off_on_off("mla_padding", "own", **three, wrong=None)
    missing = not_run("decode_buffer", "off/on/off", "own", "no device")
    page = html.page([own, missing], store.read_all(tmp_path), [])
    cards = page.partition('id="verdicts"')[0]
    assert re.findall(r'<th scope="row">(own|theirs)</th>', cards) == ["own", "theirs"]


def test_whole_engines_have_a_section_of_their_own(tmp_path):
    store.write(tmp_path / "engine", [finding("engine", "boot", "off", "dies")], [])
    page = html.page([], store.read_all(tmp_path), [], Kept(engine="<p>engines</p>"))
    assert '<section id="engine">\n<h2>In a real engine</h2>\n<p>engines</p>' in page
    assert page.index('<section id="engine">') < page.index('<section id="verdicts">')
    assert "<td>boot</td>" not in page
    assert 'id="engine"' not in html.page([], [], [])


def test_the_page_shows_the_audit():
    row = Row("decode", "kernels", "1.0", "E", Verdict.BREAKS, "NaN", "CPU", "INTERPRETED")
    page = html.page([], [], [], Kept(audited=[row]))
    assert '<section id="audited">' in page
    assert "kernels 1.0 decode" in page
    assert 'id="audited"' not in html.page([], [], [])
