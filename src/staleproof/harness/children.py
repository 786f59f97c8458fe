"""Processes of our own that may crash, hang or run out of memory without taking the caller along.

A child runs one function of the package and reports with :func:`tell` as it goes, so that what it
said before a crash is kept. Every child has a time limit and a process group of its own, and
:func:`end_all` ends whatever still runs: the question runner calls it when it stops, for whatever
reason it stops.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Where a child's answers go; its standard output belongs to the libraries it loads.
REPORT = "STALEPROOF_CHILD_REPORT"

_running: set[Child] = set()
_deadline: float | None = None


class ChildError(RuntimeError):
    """A child ended without an answer; the text says how, in one line."""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        told: what it passed to :func:`tell`, in order; kept also when it crashed afterwards.
        code: its exit code, or ``None`` if the time limit ended it.
        stdout: its standard output.
        stderr: its standard error.
        limit_s: the time limit it had, in seconds.
    """

    told: list[Any]
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
        """The last thing it told.

        Raises:
            ChildError: it was too slow, ended with an error, or told nothing.
        """
        if self.code is None:
            raise ChildError(f"gave no answer within {self.limit_s:.0f} s")
        if self.code != 0 or not self.told:
            raise ChildError(f"ended with {self.code} and said: {self.last_line or 'nothing'}")
        return self.told[-1]


class Child:
    """One running child process; see :func:`start`."""

    def __init__(self, command: Sequence[str], order: bytes, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="staleproof-")
        files = {name: Path(self._folder.name) / name for name in ("order", "report", "stdout", "stderr")}
        self._files = files
        files["order"].write_bytes(order)
        with (
            files["order"].open("rb") as stdin,
            files["stdout"].open("wb") as stdout,
            files["stderr"].open("wb") as stderr,
        ):
            # Files, not pipes: a child that says much while nobody reads must not block.
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, **env, REPORT: str(files["report"])},
            )
        _running.add(self)

    def wait(self, timeout_s: float) -> Ended:
        """Wait for the child, end it after ``timeout_s`` seconds, and return what it left.

        Inside :func:`within` the time left there is the limit if it is shorter.
        """
        if _deadline is not None:
            timeout_s = max(0.0, min(timeout_s, _deadline - time.monotonic()))
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.end()
        told = _read_answers(self._files["report"])
        stdout, stderr = (self._files[name].read_text(errors="replace") for name in ("stdout", "stderr"))
        self._folder.cleanup()
        return Ended(told, code, stdout, stderr, timeout_s)

    def end(self) -> None:
        """Kill the child and every process it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _running.discard(self)


def _read_answers(path: Path) -> list[Any]:
    """What a child told, as far as it came: a crash can cut the last answer short."""
    told: list[Any] = []
    if not path.exists():
        return told
    with path.open("rb") as report, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            told.append(pickle.load(report))
    return told


def start(
    function: Callable[..., object],
    *args: Any,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Child:
    """Start ``function(*args)`` in a process of its own.

    Args:
        function: importable by its module and name.
        args: picklable.
        env: variables to set beside the caller's.
        prefix: a program that runs the process, with its options, e.g. compute-sanitizer.

    Returns:
        The child; :meth:`Child.wait` gives what became of it. What the function returns counts as
        the last thing it told, unless it is ``None``.
    """
    order = pickle.dumps((function.__module__, function.__qualname__, args))
    # The child must find what the caller found, whatever put it on the path.
    paths = os.pathsep.join(filter(None, sys.path))
    command = [*prefix, sys.executable, "-m", "staleproof.harness.children"]
    return Child(command, order, {"PYTHONPATH": paths, **(env or {})})


def call(
    function: Callable[..., object],
    *args: Any,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Ended:
    """Run ``function(*args)`` in a process of its own and wait for it; see :func:`start`."""
    return start(function, *args, env=env, prefix=prefix).wait(timeout_s)


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
    """
    # All ranks are here: the loopback interface is there, and no name of this machine needs to
    # resolve. Multicast over NVLink needs rights that a shared machine may not give.
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    local = {name: os.environ.get(name, value) for name, value in local.items()}
    local["NCCL_NVLS_ENABLE"] = "0"
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="staleproof-") as folder:
        meeting = f"file://{folder}/meeting"
        started = [
            start(function, rank, meeting, *args, env={**local, **(env or {})}) for rank in range(ranks)
        ]
        answers = []
        try:
            for rank, child in enumerate(started):
                ended = child.wait(max(0.0, deadline - time.monotonic()))
                try:
                    answers.append(ended.answer())
                except ChildError as error:
                    limit = f"the ranks gave no answer within {timeout_s:.0f} s"
                    raise ChildError(limit if ended.code is None else f"rank {rank} {error}") from error
        finally:
            for child in started:
                child.end()
        return answers


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Give the children of a ``with`` block ``limit_s`` seconds together, whatever their own limits."""
    global _deadline
    before, _deadline = _deadline, time.monotonic() + limit_s
    try:
        yield
    finally:
        _deadline = before


def tell(answer: Any) -> None:
    """In a child: report one picklable answer now, so that it outlives a later crash."""
    with open(os.environ[REPORT], "ab") as report:
        report.write(pickle.dumps(answer))


def end_all() -> None:
    """End every child that still runs."""
    for child in [*_running]:
        child.end()


# A caller that is killed by an exception nobody caught leaves no process behind either.
atexit.register(end_all)


def _main() -> None:
    module, name, args = pickle.load(sys.stdin.buffer)
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    answer = function(*args)
    if answer is not None:
        tell(answer)


if __name__ == "__main__":
    _main()
