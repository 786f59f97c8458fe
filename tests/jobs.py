"""What the child processes of the tests run; importable by them, as test modules are not."""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

from staleproof.child import REPORT, report


def born(module: str) -> dict[str, object]:
    """Where this process comes from, and whether ``module`` was loaded, or can be."""
    loaded = module in sys.modules
    return {
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "parent": os.getppid(),
        "folder": os.getcwd(),
        "loaded": loaded,
        "importable": importlib.util.find_spec(module) is not None,
    }


def sigint() -> list[object]:
    """What SIGINT does in this process."""
    return [signal.getsignal(signal.SIGINT), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())]


def report_and_crash() -> None:
    report("first")
    report({"second": 2})
    os.abort()


def report_half_and_crash() -> None:
    report("whole")
    with Path(os.environ[REPORT]).open("ab") as file:
        file.write(pickle.dumps("an answer that is cut short")[:-9])
    os._exit(7)


def fail() -> None:
    print("a line before", file=sys.stderr)
    raise ValueError("rows: expected 3, got 4")


def fail_and_warn() -> None:
    """Fail as a rank of vLLM does; a library warns as the process ends."""
    print(
        "[rank0]: ValueError: rows: expected 3, got 4\n[rank0]:[W1129] Warning: not called", file=sys.stderr
    )
    raise SystemExit(1)


def print_much(characters: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * characters)
    return characters


def sleep(place: str, seconds: float = 600) -> None:
    """Write the numbers of this process and of one that it starts to ``place``, and sleep."""
    code = f"import time; time.sleep({seconds})"
    grandchild = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)
    draft = Path(place).with_suffix(".part")
    draft.write_text(f"{os.getpid()} {grandchild.pid}")
    # Before the file is there: the caller may end this process at once.
    report("started")
    draft.rename(place)
    time.sleep(seconds)


def start_and_return(place: str) -> str:
    """Leave a process behind."""
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(place).write_text(str(grandchild.pid))
    return "done"


def meet(rank: int, meeting: str, failing: int | None) -> tuple[int, str, str | None]:
    """Wait for all ranks at the meeting place, but for the rank that fails."""
    if rank == failing:
        raise RuntimeError("out of memory")
    if failing is not None:
        time.sleep(600)
    return rank, meeting, os.environ.get("STALEPROOF_TEST")


def variable(rank: int, meeting: str, name: str) -> str | None:
    return os.environ.get(name)


def end_late() -> int:
    """Leaves a thread, what is to be done at the end, and text that is not written yet."""
    weakref.finalize(end_late, print, "its finalizer")
    atexit.register(print, "at its end")
    threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
    sys.stdout.write("at once, ")
    return 1
