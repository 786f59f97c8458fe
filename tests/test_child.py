"""Children: their answers survive them, and no process does."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests import jobs

from staleproof import child as children
from staleproof.child import ChildError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal exists on Linux alone")


NEW, FORKED = "a new interpreter", "forked"
BOTH = pytest.mark.parametrize("how", [NEW, pytest.param(FORKED, marks=LINUX)], indirect=True)


@pytest.fixture(autouse=True)
def how(request, monkeypatch):
    """How children come to be: forked from a process that has imported torch, or new interpreters."""
    way = getattr(request, "param", FORKED if sys.platform == "linux" else NEW)
    monkeypatch.setattr(children, "_may_fork", lambda env: way == FORKED)
    monkeypatch.setattr(children, "PRELOADED", ())
    return way


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def pids(place: Path) -> list[int]:
    """The processes that ``jobs.sleep`` or ``jobs.start_and_return`` named."""
    assert wait_until(place.exists)
    return [int(pid) for pid in place.read_text().split()]


def test_result_is_the_last_answer():
    ended = children.call(pow, 2, 3, timeout_s=300)
    assert (ended.answers, ended.answer(), ended.code) == ([8], 8, 0)
    # A function of a class is one that can be imported, too.
    assert children.call(Path.cwd, timeout_s=300).answer() == Path.cwd()


@BOTH
def test_child_has_the_variables_given_and_those_of_the_caller(monkeypatch):
    monkeypatch.setenv("STALEPROOF_TEST", "of the caller")
    for env, value in ((None, "of the caller"), ({"STALEPROOF_TEST": "given"}, "given")):
        assert children.call(os.getenv, "STALEPROOF_TEST", timeout_s=300, env=env).answer() == value


@BOTH
@pytest.mark.parametrize(
    ("job", "told", "code", "said"),
    [
        (jobs.report_and_crash, ["first", {"second": 2}], -signal.SIGABRT, ""),
        # An answer that a crash cut short is left out.
        (jobs.report_half_and_crash, ["whole"], 7, "no output$"),
        (jobs.fail, [], 1, "ValueError: rows: expected 3, got 4$"),
        (jobs.fail_and_warn, [], 1, r"\[rank0\]: ValueError: rows: expected 3, got 4$"),
        (gc.enable, [], 0, "no output$"),
    ],
)
def test_answers_before_a_crash_are_kept(job, told, code, said):
    """What a child told is kept; how it ended, and the last exception or line it printed, is the error."""
    ended = children.call(job, timeout_s=300)
    assert (ended.answers, ended.code) == (told, code)
    assert ended.stderr.startswith("a line before\n") is (job is jobs.fail)
    with pytest.raises(ChildError, match=f"^ended with {code}: {said}"):
        ended.answer()


@BOTH
def test_child_that_prints_much_does_not_block():
    ended = children.call(jobs.print_much, 5_000_000, timeout_s=300)
    assert (ended.answer(), len(ended.stdout), len(ended.stderr)) == (5_000_000,) * 3


@BOTH
def test_child_that_hangs_is_ended_with_what_it_started(tmp_path):
    place = tmp_path / "pids"
    child = children.start(jobs.sleep, str(place))
    started = pids(place)
    assert all(map(runs, started))
    assert child.poll() is None
    ended = child.wait(0.1)
    assert (ended.answers, ended.code) == (["started"], None)
    assert wait_until(lambda: not any(map(runs, started)))
    with pytest.raises(ChildError, match=r"gave no answer within 0 s"):
        ended.answer()


@BOTH
def test_process_left_behind_by_a_child_is_ended(tmp_path):
    place = tmp_path / "pid"
    assert children.call(jobs.start_and_return, str(place), timeout_s=300).answer() == "done"
    (left,) = pids(place)
    assert wait_until(lambda: not runs(left))


@BOTH
def test_child_killed_from_outside_has_the_signal_as_code(tmp_path):
    place = tmp_path / "pids"
    child = children.start(jobs.sleep, str(place))
    pid, grandchild = pids(place)
    os.kill(pid, signal.SIGKILL)
    ended = child.wait(60)
    assert (ended.answers, ended.code) == (["started"], -signal.SIGKILL)
    assert wait_until(lambda: not runs(grandchild))


def test_end_all_ends_every_child(tmp_path):
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        children.start(jobs.sleep, str(place))
    started = [pid for place in places for pid in pids(place)]
    children.end_all()
    assert wait_until(lambda: not any(map(runs, started)))


def test_child_that_has_ended_is_not_signalled_again(monkeypatch):
    child = children.start(gc.enable)
    child.wait(60)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("its number may be another's by now"))
    child.end()


CALLER = """
import os, signal, sys, time
# What a shell starts in the background ignores Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {folder!r})
import jobs
from staleproof import child as children
children._may_fork = lambda env: {forked}
child = children.start(jobs.sleep, {place!r})
while not os.path.exists({place!r}):
    time.sleep(0.02)
{then}
"""


@BOTH
@pytest.mark.parametrize(
    ("then", "number"),
    [
        pytest.param("raise KeyError", None, id="error"),
        pytest.param("raise SystemExit(0)", None, id="exit"),
        pytest.param("child.wait(600)", signal.SIGINT, id="Ctrl-C"),
        pytest.param("child.wait(600)", signal.SIGKILL, id="killed", marks=LINUX),
    ],
)
def test_no_child_outlives_its_caller(tmp_path, how, then, number):
    place = tmp_path / "pids"
    forked = how == FORKED
    code = CALLER.format(folder=str(Path(__file__).parent), place=str(place), then=then, forked=forked)
    # One that is killed leaves its folder.
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=env)
    child, grandchild = pids(place)
    if number is not None:
        caller.send_signal(number)
    caller.wait(60)
    assert wait_until(lambda: not runs(child))
    if number == signal.SIGKILL and not forked:
        os.kill(grandchild, signal.SIGKILL)  # nobody is left to end it
    assert wait_until(lambda: not runs(grandchild))


def test_within_limits_all_children_together(tmp_path):
    begin = time.monotonic()
    with children.within(0.5):
        ended = children.call(jobs.sleep, str(tmp_path / "pids"), timeout_s=600)
        again = children.call(jobs.sleep, str(tmp_path / "more"), timeout_s=600)
    assert time.monotonic() - begin < 30
    assert (ended.code, again.code) == (None, None)
    assert (ended.limit_s, again.limit_s) == (pytest.approx(0.5, abs=0.2), 0)
    assert children.call(pow, 1, 1, timeout_s=300).answer() == 1


def test_the_shorter_of_two_limits_holds():
    with children.within(1):
        with children.within(600):
            assert children._deadline < time.monotonic() + 2
        with children.within(0):
            pass
        assert children._deadline > time.monotonic()


def test_function_that_a_child_cannot_import_is_refused():
    def local() -> None:
        pass

    main = type("Main", (), {"__module__": "__main__", "__qualname__": "main"})
    for function in (local, lambda: None, main):
        for start in (children.start, lambda it: children.call_ranks(it, 1, timeout_s=300)):
            with pytest.raises(ValueError, match=r"^function: expected one that another process can import"):
                start(function)


@BOTH
def test_ranks_answer_in_their_order():
    answers = children.call_ranks(jobs.meet, 3, None, timeout_s=300, env={"STALEPROOF_TEST": "told"})
    assert [rank for rank, *_ in answers] == [0, 1, 2]
    ((meeting, told),) = {(meeting, told) for _, meeting, told in answers}
    assert told == "told"
    assert meeting.startswith("file:///")


@LINUX
@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_ranks_meet_on_the_loopback_interface_unless_a_variable_names_another(monkeypatch, name):
    def told(**given):
        return children.call_ranks(jobs.variable, 1, name, timeout_s=300, **given)

    monkeypatch.delenv(name, raising=False)
    assert told() == ["lo"]
    monkeypatch.setenv(name, "eth8")
    assert (told(), told(env={name: "eth9"})) == (["eth8"], ["eth9"])


def test_failed_rank_is_named_and_the_others_are_ended():
    begin = time.monotonic()
    with pytest.raises(ChildError, match=r"^rank 1 ended with 1: RuntimeError: out of memory$"):
        children.call_ranks(jobs.meet, 2, 1, timeout_s=600)
    assert time.monotonic() - begin < 60


def test_ranks_that_hang_are_ended():
    with pytest.raises(ChildError, match=r"^the ranks gave no answer within 0 s$"):
        children.call_ranks(jobs.meet, 2, 7, timeout_s=0.3)
    begin = time.monotonic()
    # The limit that ended them is named.
    with children.within(0.3), pytest.raises(ChildError, match=r"^the ranks gave no answer within 0 s$"):
        children.call_ranks(jobs.meet, 2, 7, timeout_s=20)
    assert time.monotonic() - begin < 15


def test_child_of_a_thread_answers():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(children.call, pow, 2, 3, timeout_s=300).result().answer() == 8
