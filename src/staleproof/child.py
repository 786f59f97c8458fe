"""Child processes: for code that may crash, hang or run out of memory without harming the caller.

A child runs one importable function. It reports with :func:`report` as it goes, so that its
answers survive a later crash. Every child has a time limit, and a process group of its own, so that the
processes it starts end with it. :func:`end_all` ends whatever still runs; the question runner calls
it when it stops, for whatever reason.

Where kernels are interpreted, a child is forked from a server that has imported torch
(:mod:`multiprocessing.forkserver`), since a new interpreter would import it again, for seconds. Elsewhere,
and on a GPU always, a child is a new interpreter. The server imports :data:`PRELOADED` and nothing of ours,
and touches no GPU, so that a child finds what it would find in a new interpreter.

>>> import math
>>> call(math.sqrt, 2.25, timeout_s=60).answer()
1.5
>>> call(os._exit, 3, timeout_s=60).code
3
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from staleproof.check import require

# Names the file of a child's answers. Not its standard output: libraries print there.
REPORT = "STALEPROOF_CHILD_REPORT"

# The line of a traceback that says what was raised; vLLM puts the rank before it.
ERROR = r"(\[rank\d+\]: +)?[\w.]+(Error|Exception): "
# What the server imports, as far as the caller has.
PRELOADED = ("numpy", "torch", "triton")
# Read when they are used, so that they may differ between children of one server. Every other variable is
# read by some library's import: a child with another value is a new interpreter.
READ_LATE = ("STALEPROOF_", "NCCL_", "GLOO_SOCKET_IFNAME", "PYTEST_", "PYTHONPATH", "COLUMNS", "LINES")

_running: set[Child] = set()
_deadline = math.inf
_lock = threading.RLock()
# The process that started the server, and the variables that the server's imports may have read.
_server: tuple[int, Mapping[str, str]] | None = None


class ChildError(RuntimeError):
    """A child ended without an answer; the text says how, in one line."""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        answers: what it passed to :func:`report`, in order, also if it crashed afterwards.
        code: its exit code, or ``None`` if the time limit ended it.
        stdout: its standard output.
        stderr: its standard error.
        limit_s: the time limit it had, in seconds.
    """

    answers: list[Any]
    code: int | None
    stdout: str
    stderr: str
    limit_s: float

    @property
    def last_line(self) -> str:
        """The last line of its standard error that is not blank, or ``""``."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def answer(self) -> Any:
        """The last answer.

        Raises:
            ChildError: it was too slow, ended with an error, or gave no answer.
        """
        if self.code is None:
            raise ChildError(f"gave no answer within {self.limit_s:.0f} s")
        if self.code != 0 or not self.answers:
            # Libraries print warnings behind the traceback, as NCCL does.
            errors = [line for line in self.stderr.splitlines() if re.match(ERROR, line)]
            why = errors[-1].strip() if errors else self.last_line or "no output"
            raise ChildError(f"ended with {self.code}: {why}")
        return self.answers[-1]


class Forked:
    """A forked process, with the part of :class:`subprocess.Popen` that :class:`Child` uses."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self.pid, self._process = process.pid, process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a child", timeout or 0.0)
        return code


def _may_fork(env: Mapping[str, str]) -> bool:
    """Whether a child with this environment may be forked; see the module's text."""
    return sys.platform == "linux" and "torch" in sys.modules and env.get("TRITON_INTERPRET") == "1"


def _forked(env: Mapping[str, str], files: Mapping[str, Path]) -> Forked | None:
    """A child of the fork server, or ``None`` if it must be a new interpreter.

    Args:
        env: its whole environment.
        files: ``order``, ``stdout`` and ``stderr``: what it runs, and where it prints.
    """
    global _server
    if not _may_fork(env):
        return None
    read = {name: value for name, value in env.items() if not name.startswith(READ_LATE)}
    with _lock:
        if _server is None:
            _server = os.getpid(), read
        # A process that was forked from the one with the server cannot use it.
        if _server != (os.getpid(), read):
            return None
        path = [*filter(None, sys.path)]
        arguments = dict(env), os.getcwd(), path, {name: str(file) for name, file in files.items()}
        # Ended at the latest with this process.
        return fork(_run_forked, arguments, [name for name in PRELOADED if name in sys.modules], daemon=True)


def fork(
    target: Callable[..., object], arguments: Sequence[Any], preload: Sequence[str], *, daemon: bool
) -> Forked | None:
    """A process of the fork server, or ``None`` if the server turns out to have been killed.

    Args:
        target: importable; what the process runs.
        arguments: picklable.
        preload: what the server imports if this starts it.
        daemon: whether the process ends with this one, and may fork none of its own.
    """
    global _server
    with _lock:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*preload])
        process = context.Process(target=target, args=tuple(arguments), daemon=daemon)
        # Python would run the caller's main file in the child once more.
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            _start_server()
            process.start()
        except (OSError, EOFError):
            # The next one starts another.
            _server = None
            return None
        finally:
            sys.modules["__main__"] = main
        return Forked(process)


def _start_server() -> None:
    """Start the server, if none runs, without SIGINT: Ctrl-C would show where it was importing torch."""
    # First, since this unblocks SIGINT in Python 3.11.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become(env: Mapping[str, str], folder: str, path: list[str], stdout: str, stderr: str) -> None:
    """In a process of :func:`fork`, whose group is its own: be as a new interpreter, and end with the caller.

    Args:
        env: the whole environment.
        folder: the current one.
        path: where modules are looked for.
        stdout, stderr: files.
    """
    threading.Thread(target=_end_with_caller, daemon=True).start()
    for number, name in ((1, stdout), (2, stderr)):
        file = os.open(name, os.O_WRONLY)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = path
    # As the last thing: the server blocks it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_caller() -> None:
    """End this process's group when the caller of :func:`fork` is gone. The server outlives a killed one."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.killpg(0, signal.SIGKILL)


def _run_forked(env: Mapping[str, str], folder: str, path: list[str], files: Mapping[str, str]) -> NoReturn:
    """In a forked child: become what a new interpreter with this order would be, and run the order."""
    os.setpgid(0, 0)
    become(env, folder, [folder, *path], files["stdout"], files["stderr"])
    sys.argv[:] = sys.argv[:1]
    # Skip the finalizers of the server's imports: torch's deregister operators, half a short child's life.
    for finalizer in [*getattr(weakref.finalize, "_registry", ())]:
        finalizer.atexit = False
    run_order(Path(files["order"]).read_bytes())
    # End as Python does, but do not take its modules apart: with torch, half a second.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Child:
    """One running child process; see :func:`start`."""

    def __init__(self, order: bytes, env: Mapping[str, str], command: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="staleproof-")
        names = ("order", "report", "stdout", "stderr")
        self._files = files = {name: Path(self._folder.name) / name for name in names}
        files["order"].write_bytes(order)
        whole = {**os.environ, **env, REPORT: str(files["report"])}
        with (
            files["order"].open("rb") as stdin,
            files["stdout"].open("wb") as stdout,
            files["stderr"].open("wb") as stderr,
        ):
            # Files, not pipes: a child blocks on a full pipe that nobody reads.
            new = [*command] or [sys.executable, "-m", "staleproof.child"]
            self._process = (None if command else _forked(whole, files)) or subprocess.Popen(
                new, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, env=whole
            )
        _running.add(self)

    def wait(self, timeout_s: float) -> Ended:
        """Wait for the child, end it after ``timeout_s`` seconds, and return its answers; once.

        Inside :func:`within`, the time left there is the limit if it is shorter.
        """
        timeout_s = _at_most(timeout_s)
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.end()
        answers = _read_answers(self._files["report"])
        stdout, stderr = (self._files[name].read_text(errors="replace") for name in ("stdout", "stderr"))
        self._folder.cleanup()
        return Ended(answers, code, stdout, stderr, timeout_s)

    def poll(self) -> int | None:
        """Its exit code, or ``None`` while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kill the child and every process it started."""
        if self not in _running:
            return  # its number may belong to another process by now
        # The process itself too: one that was forked a moment ago has no group of its own yet. macOS refuses
        # to signal a group whose only member has ended.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _running.discard(self)


def _read_answers(path: Path) -> list[Any]:
    """A child's answers; a crash can cut the last one short, and then it is left out."""
    answers: list[Any] = []
    if not path.exists():
        return answers
    with path.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            answers.append(pickle.load(file))
    return answers


def start(function: Callable[..., object], *args: Any, env: Mapping[str, str] | None = None) -> Child:
    """Start ``function(*args)`` in a process of its own.

    Args:
        function: importable by its module and name.
        args: picklable.
        env: variables to set beside the caller's.

    Returns:
        The child, for :meth:`Child.wait`. The function's result is its last answer, unless it is
        ``None``. On Linux a child also ends with the thread that started it, or if it was forked with
        the process, so that it does not outlive a caller that is killed.

    Raises:
        ValueError: the function is of ``__main__``, a lambda or local to a function.
    """
    _require_importable(function)
    order = pickle.dumps((function.__module__, function.__qualname__, args))
    # The child must be able to import whatever the caller can.
    paths = os.pathsep.join(filter(None, sys.path))
    return Child(order, {"PYTHONPATH": paths, **(env or {})})


def _require_importable(function: Callable[..., object]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    importable = function.__module__ != "__main__" and "<" not in name
    require(importable, "function", "one that another process can import", name)


def call(
    function: Callable[..., object], *args: Any, timeout_s: float, env: Mapping[str, str] | None = None
) -> Ended:
    """Run ``function(*args)`` in a process of its own and wait for it; see :func:`start`."""
    return start(function, *args, env=env).wait(timeout_s)


def call_ranks(
    function: Callable[..., object],
    ranks: int,
    *args: Any,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, meeting, *args)`` as the ranks of one process group on this machine.

    Args:
        function: importable by its module and name; joins ``torch.distributed`` through
            ``init_method=meeting``.
        ranks: how many processes.
        args: picklable, the same for all ranks.
        timeout_s: for all ranks together; they are ended then.
        env: variables to set beside the caller's.

    Returns:
        What each rank returned, in their order.

    Raises:
        ChildError: a rank failed or was too slow; all are ended.
        ValueError: as :func:`start`.
    """
    _require_importable(function)
    # All ranks run on this machine: the loopback interface exists, and the machine's name need not
    # resolve. NVLink multicast (NVLS) needs rights that a shared machine may not give.
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    local = {name: os.environ.get(name, value) for name, value in local.items()}
    env = {**local, "NCCL_NVLS_ENABLE": "0", **(env or {})}
    timeout_s = _at_most(timeout_s)
    deadline = time.monotonic() + timeout_s
    started: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="staleproof-") as folder:
        try:
            for rank in range(ranks):
                started.append(start(function, rank, f"file://{folder}/meeting", *args, env=env))
            # The first rank that fails has the reason; the others then fail or wait for it.
            while time.monotonic() < deadline:
                codes = [child.poll() for child in started]
                if None not in codes or any(codes):
                    break
                time.sleep(0.05)
            else:
                raise ChildError(f"the ranks gave no answer within {timeout_s:.0f} s")
            answers = {}
            for rank in sorted(range(ranks), key=lambda rank: not codes[rank]):
                try:
                    answers[rank] = started[rank].wait(0).answer()
                except ChildError as error:
                    raise ChildError(f"rank {rank} {error}") from error
            return [answers[rank] for rank in range(ranks)]
        finally:
            for child in started:
                child.end()


def _at_most(limit_s: float) -> float:
    """Seconds of a limit, or those left :func:`within` another."""
    return max(0.0, min(limit_s, _deadline - time.monotonic()))


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Give the children of a ``with`` block ``limit_s`` seconds together, or less by their own limits."""
    global _deadline
    before, _deadline = _deadline, min(_deadline, time.monotonic() + limit_s)
    try:
        yield
    finally:
        _deadline = before


def report(answer: Any) -> None:
    """Called in a child: report one picklable answer now, so that it survives a later crash."""
    with open(os.environ[REPORT], "ab") as file:
        file.write(pickle.dumps(answer))


def end_all() -> None:
    """End every child that still runs."""
    for child in [*_running]:
        child.end()


# Also for a caller that ends by an exception.
atexit.register(end_all)


def run_order(order: bytes) -> None:
    """In a child: run what the order says, and report the result."""
    if sys.platform == "linux":
        # A caller that is killed cannot end its children, so the kernel does: PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    module, name, args = pickle.loads(order)
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    answer = function(*args)
    if answer is not None:
        report(answer)


if __name__ == "__main__":
    run_order(sys.stdin.buffer.read())
