"""Children that are forked: what they share with the process they come from, and what they do not."""

import fractions  # noqa: F401
import gc
import os
import re
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
from tests import jobs

from staleproof import child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")


@pytest.fixture(autouse=True)
def _every_child_is_forked(monkeypatch):
    monkeypatch.setattr(child, "_may_fork", lambda env: True)
    monkeypatch.setattr(child, "PRELOADED", ("fractions",))
    end_server()
    yield
    end_server()


def end_server():
    forkserver._forkserver._stop()
    child._server = None


def server():
    return forkserver._forkserver._forkserver_pid


def test_children_share_one_server_that_has_imported_what_the_caller_has():
    first, second = (child.call(jobs.born, "fractions", timeout_s=60).answer() for _ in range(2))
    assert first["parent"] == second["parent"] == server()
    assert first["loaded"]
    assert first["pid"] != second["pid"]
    assert first["group"] == first["pid"]


def test_child_has_folder_and_modules_of_its_caller(monkeypatch, tmp_path):
    child.call(gc.enable, timeout_s=60)
    before = server()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made_later.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    born = child.call(jobs.born, "made_later", timeout_s=60).answer()
    assert (born["folder"], born["importable"]) == (str(tmp_path), True)
    assert born["parent"] == before


def test_child_ends_as_a_new_interpreter_does(monkeypatch):
    forked = child.call(jobs.end_late, timeout_s=60)
    monkeypatch.setattr(child, "_may_fork", lambda env: False)
    new = child.call(jobs.end_late, timeout_s=60)
    assert forked.stdout == new.stdout == "at once, a thread\nat its end\nits finalizer\n"
    assert (forked.code, forked.answers) == (new.code, new.answers) == (0, [1])


def test_ctrl_c_reaches_a_child_and_not_the_server(monkeypatch):
    forked = child.call(jobs.sigint, timeout_s=60).answer()
    (blocked,) = re.findall(r"SigBlk:\s(\w+)", Path(f"/proc/{server()}/status").read_text())
    assert int(blocked, 16) >> signal.SIGINT - 1 & 1
    monkeypatch.setattr(child, "_may_fork", lambda env: False)
    assert forked == child.call(jobs.sigint, timeout_s=60).answer()


def test_variable_that_an_import_may_read_makes_a_new_interpreter():
    """A child sees each variable, whether it was forked or not."""
    names = {"OMP_NUM_THREADS": os.getpid(), "STALEPROOF_TEST": None}
    child.call(gc.enable, timeout_s=60)
    for name, parent in names.items():
        assert child.call(os.getenv, name, timeout_s=60, env={name: "3"}).answer() == "3"
        born = child.call(jobs.born, "fractions", timeout_s=60, env={name: "3"}).answer()
        assert born["parent"] == (parent or server())


def test_killed_server_ends_its_children_and_is_replaced(tmp_path):
    running = child.start(time.sleep, 600)
    parent = server()
    os.kill(parent, signal.SIGKILL)
    assert running.wait(20).code not in (0, None)
    for _ in range(2):
        assert child.call(pow, 2, 3, timeout_s=60).answer() == 8
    assert parent != server()


def test_fork_of_the_caller_leaves_its_server_alone():
    child.call(gc.enable, timeout_s=60)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = child.call(pow, 2, 3, timeout_s=60).answer()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
    assert child.call(pow, 2, 2, timeout_s=60).answer() == 4


@pytest.mark.parametrize(
    ("interpreting", "loaded", "wanted"), [("1", True, True), ("0", True, False), ("1", False, False)]
)
def test_nothing_is_forked_on_a_gpu_or_without_torch(monkeypatch, interpreting, loaded, wanted):
    monkeypatch.undo()
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", sys)
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert child._may_fork({"TRITON_INTERPRET": interpreting}) is wanted
