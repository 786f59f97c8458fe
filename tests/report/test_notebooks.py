"""Executing copies of the notebooks, beside what the command does."""

from __future__ import annotations

import os
import sys
import time
from threading import Event

import nbformat
import pytest
import torch
from nbformat import v4

from made import write
from staleproof.report import kernels, notebooks
from staleproof.runs import RunFileError


def run(source, folder, **options):
    return notebooks.execute(source, folder, Event(), **options)


def test_copy_is_executed_by_this_python_in_the_notebooks_folder(tmp_path, monkeypatch):
    # A machine where another Python has registered itself as "python3".
    other = tmp_path / "jupyter/kernels/python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(
        '{"argv": ["/no/such/python"], "display_name": "x", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    source = write(
        tmp_path / "00.ipynb", v4.new_code_cell("import sys, os\nprint(sys.executable, os.getcwd())")
    )
    before = source.read_bytes()
    done = run(source, tmp_path / "out")
    assert (done.error, source.read_bytes()) == (None, before)
    (cell,) = nbformat.read(done.path, as_version=4).cells
    assert cell.outputs[0].text.split() == [sys.executable, str(tmp_path)]
    assert [p.name for p in done.path.parent.iterdir()] == ["00.ipynb"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.write(2, b'device-side assert'); os._exit(139)", "the kernel died"),
        ("import time; time.sleep(60)", "code cell 2 took longer than 2 s"),
    ],
)
def test_notebook_that_stops_names_the_cell_and_the_rest_is_kept(tmp_path, code, said):
    """One that raises: test_html.py."""
    cells = [v4.new_code_cell(text) for text in ("print('so far')", code, "3")]
    done = run(write(tmp_path / "01.ipynb", *cells), tmp_path / "out", cell_timeout_s=2)
    assert said in str(done.error)
    assert "so far" in done.path.read_text()
    if "died" in said:
        assert "device-side assert" in (tmp_path / "out/01.log").read_text()


def test_forked_kernel_finds_what_a_new_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.shutil, "which", lambda program: None)
    code = "import os, sys\nos.write(2, b'log')\nos.environ.pop('JPY_PARENT_PID', '')\n"
    code += "print(sys.path, os.getcwd(), *sorted(os.environ.items()))\nprint(os.getppid())\n1 / 0"
    source = write(tmp_path / "00.ipynb", v4.new_code_cell(code))

    def said(folder):
        done = run(source, tmp_path / folder)
        assert "ZeroDivisionError" in str(done.error)
        assert "log" in (tmp_path / folder / "00.log").read_text()
        return nbformat.read(done.path, as_version=4).cells[0].outputs[0].text.splitlines()

    new, parent = said("new")
    with kernels.forked():
        forked, again = said("forked"), said("again")
    assert [new, str(os.getpid())] == [forked[0], parent]
    assert forked == again
    assert forked[1] != parent


def test_beside_a_gpu_each_kernel_is_new(monkeypatch):
    monkeypatch.setattr(kernels.shutil, "which", lambda program: f"/usr/bin/{program}")
    with kernels.forked():
        assert kernels.local_provisioner.launch_kernel is kernels.launch_kernel


def test_spoilt_notebook_is_refused(tmp_path):
    (tmp_path / "00_cut.ipynb").write_text('{"cells": [')
    with pytest.raises(RunFileError, match=r"00_cut\.ipynb: cannot be read"):
        run(tmp_path / "00_cut.ipynb", tmp_path / "out")


def test_notebooks_run_beside_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "_cores", lambda: 4)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    # Each waits for the other, and the second begins once nothing is left to do here.
    meet = "import os, time, pathlib\npathlib.Path('at_{}').write_text(os.environ['OMP_NUM_THREADS'])\n"
    meet += "while len([*pathlib.Path('.').glob('at_*')]) < 2: time.sleep(0.02)"
    sources = [write(tmp_path / f"0{i}.ipynb", v4.new_code_cell(meet.format(i))) for i in range(2)]
    with notebooks.beside(sources, tmp_path / "out", 1) as finish:
        end = time.monotonic() + 60
        while not (tmp_path / "at_1").exists() and time.monotonic() < end:
            time.sleep(0.02)
        # The last comes first: the command begins with the first's questions.
        assert not (tmp_path / "at_0").exists()
        done = finish()
    assert [(one.path.name, one.error) for one in done] == [("00.ipynb", None), ("01.ipynb", None)]
    assert threads == [2]
    # Two processes on four cores.
    assert (tmp_path / "at_0").read_text() == os.environ["OMP_NUM_THREADS"] == "2"


def test_an_error_of_the_command_stops_the_notebooks_beside_it(tmp_path):
    code = "open('cell_{}', 'w').close()\nimport time; time.sleep(0.3)"
    source = write(tmp_path / "00.ipynb", *(v4.new_code_cell(code.format(i)) for i in range(9)))
    with pytest.raises(KeyError), notebooks.beside([source], tmp_path / "out", 1):
        raise KeyError
    assert not (tmp_path / "cell_8").exists()


@pytest.mark.parametrize(
    ("kind", "cores", "lanes"), [("cuda", 16, 0), ("cpu", 1, 0), ("cpu", 2, 1), ("cpu", 16, 3)]
)
def test_no_notebook_runs_beside_questions_on_a_gpu(monkeypatch, kind, cores, lanes):
    monkeypatch.setattr(notebooks, "select", lambda device: kind)
    monkeypatch.setattr(notebooks, "_cores", lambda: cores)
    assert notebooks.lanes("auto") == lanes
