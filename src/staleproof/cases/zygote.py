"""Child processes forked from one that has imported torch: an import that takes longer than most children.

:mod:`~staleproof.cases.children` asks here first. There is a process to fork from where kernels are
interpreted, torch is loaded in the caller and the system is Linux; elsewhere, and on a GPU always, a
child is a new interpreter. The process imports :data:`PRELOADED` and nothing of ours, starts no thread
and touches no GPU, so that a child finds what it would find in a new interpreter. It ends when its
caller does, and every child's process group with it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

# What the process imports, as far as the caller has.
PRELOADED = ("numpy", "torch", "triton")
# Read when they are used, so that they may differ between children of one process. Every other variable
# is read by some library's import: a child with another value gets a process of its own to fork from.
READ_LATE = ("STALEPROOF_", "NCCL_", "GLOO_SOCKET_IFNAME", "PYTEST_", "PYTHONPATH", "COLUMNS", "LINES")
# Processes to fork from at once. Each holds as much memory as an imported torch.
MOST = 2
START_S = 120.0

_lock = threading.Lock()
_processes: dict[Any, Zygote] = {}


class Forked:
    """One child, with the part of :class:`subprocess.Popen` that ``children`` uses."""

    def __init__(self, pid: int, code: Path, parent: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        self._code, self._parent = code, parent
        self._ended: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or ``None`` while it runs."""
        if self._ended is None:
            # In this order: the code is written before the process is gone.
            gone = self._parent.poll() is not None or not _exists(self.pid)
            if self._code.exists():
                self._ended = int(self._code.read_text())
            elif gone:
                # With the process that it was forked from, or at the caller's exit, which has removed
                # the folder of the code.
                self._ended = -signal.SIGKILL
        return self._ended

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs for longer than ``timeout`` seconds.
        """
        end, pause = time.monotonic() + (float("inf") if timeout is None else timeout), 0.001
        while (code := self.poll()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a child", timeout or 0.0)
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.05)
        return code


def _exists(pid: int) -> bool:
    """Whether there is such a process, or one that has ended and that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Zygote:
    """A process to fork from, as its caller sees it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(START_S)
        loaded = [name for name in PRELOADED if name in sys.modules]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *loaded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=dict(env),
            )
        self._file = self._socket.makefile("rwb")

    def fork(self, env: Mapping[str, str], files: Mapping[str, Path]) -> Forked:
        """A child with this environment, whose order and output are in ``files``."""
        order = {
            "env": dict(env),
            "cwd": os.getcwd(),
            "path": [*filter(None, sys.path)],
            "files": {name: str(path) for name, path in files.items()},
        }
        pickle.dump(order, self._file)
        self._file.flush()
        return Forked(pickle.load(self._file), files["code"], self.process)

    def end(self) -> None:
        """End it, and with it every child that still runs."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._socket.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _wanted(env: Mapping[str, str]) -> bool:
    """Whether a child with this environment may be forked; see the module's text."""
    return sys.platform == "linux" and "torch" in sys.modules and env.get("TRITON_INTERPRET") == "1"


def forked(env: Mapping[str, str], files: Mapping[str, Path]) -> Forked | None:
    """A child, or ``None`` if it must be a new interpreter.

    Args:
        env: its whole environment.
        files: ``order`` (its standard input), ``stdout``, ``stderr``, and ``code``, which will hold its
            exit code.
    """
    if not _wanted(env):
        return None
    read = {name: value for name, value in env.items() if not name.startswith(READ_LATE)}
    key = frozenset(read.items())
    with _lock:
        for old in [old for old, process in _processes.items() if process.owner != os.getpid()]:
            _processes.pop(old).end()  # a copy from before a fork: it serves the parent
        if key not in _processes:
            if len(_processes) >= MOST:
                return None
            _processes[key] = Zygote(env)
        try:
            return _processes[key].fork(env, files)
        except (OSError, EOFError):
            # It could not start, or was killed. The next child gets another.
            _processes.pop(key).end()
            return None


@atexit.register
def end_all() -> None:
    """End every process to fork from."""
    with _lock:
        while _processes:
            _processes.popitem()[1].end()


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each order until the caller is gone. Returns in each child, with its order."""
    parent = os.getppid()
    running: dict[int, Path] = {}
    noticed, wakes = socket.socketpair()
    noticed.setblocking(False)
    wakes.setblocking(False)
    # select returns when a child ends, so that its exit code is there at once.
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    orders = connection.makefile("rwb")
    while os.getppid() == parent:
        ready, _, _ = select.select([connection, noticed], [], [], 1.0)
        if noticed in ready:
            noticed.recv(4096)
        for pid in [*running]:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                killed = ended.si_code != os.CLD_EXITED
                _write_code(running.pop(pid), -ended.si_status if killed else ended.si_status)
                os.waitpid(pid, 0)
        if connection not in ready:
            continue
        try:
            order = pickle.load(orders)
        except (EOFError, OSError):
            break
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (orders, connection, noticed, wakes):
                end.close()
            return order
        # Here too: the caller may end the group before the child has run.
        os.setpgid(pid, pid)
        running[pid] = Path(order["files"]["code"])
        pickle.dump(pid, orders)
        orders.flush()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _write_code(path: Path, code: int) -> None:
    # Whole or not at all. The caller may have removed the folder.
    with contextlib.suppress(OSError):
        path.with_suffix(".part").write_text(str(code))
        path.with_suffix(".part").rename(path)


def _become(order: Mapping[str, Any]) -> None:
    """Make this process what a new interpreter with this order would be."""
    os.setpgid(0, 0)
    for number, (name, flags) in enumerate(
        (("order", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))
    ):
        file = os.open(order["files"][name], flags)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[:] = [order["cwd"], *order["path"]]
    sys.argv[:] = sys.argv[:1]


def _end() -> NoReturn:
    """End this process as Python does, but do not take its modules apart: with torch, half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        for name in sys.argv[2:]:
            importlib.import_module(name)
        order = _serve(connection)
    if order is not None:
        _become(order)
        from staleproof.cases import children

        children.run_order()
        _end()


if __name__ == "__main__":
    _main()
