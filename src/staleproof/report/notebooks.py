"""Executes copies of the notebooks with the Python of this environment."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from staleproof.device import select
from staleproof.lab import SHARED
from staleproof.report.kernels import forked
from staleproof.runs import RunFileError


@contextmanager
def _sharing() -> Iterator[None]:
    """Ask each question once, here and in processes started here, for a ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="staleproof-") as folder:
        before = os.environ.setdefault(SHARED, folder)
        try:
            yield
        finally:
            if before == folder:
                del os.environ[SHARED]


class Execution(NamedTuple):
    """One notebook: its executed copy, or the stored notebook, and one line on what stopped it."""

    path: Path
    error: str | None = None


class Stopped(Exception):
    """The command ended while a notebook ran beside it."""


def execute(source: Path, folder: Path, stopped: Event, cell_timeout_s: int = 600) -> Execution:
    """Execute a copy of one notebook, with the notebook's own folder as current directory.

    Args:
        source: the notebook; it is not changed.
        folder: where the copy goes, under the same name. If it stops, the stderr of its kernel (driver
            messages, device asserts) is beside it as ``.log``.
        stopped: once it is set, no further cell begins.
        cell_timeout_s: seconds one cell may take.

    Raises:
        RunFileError: the notebook cannot be read, or the copy cannot be written.
        Stopped: ``stopped`` was set.
    """
    number, error_line = 0, None

    def begin(**_: Any) -> None:
        nonlocal number
        number += 1
        if stopped.is_set():
            raise Stopped

    path = folder / source.name
    log_path = path.with_suffix(".log")
    try:
        notebook = nbformat.read(source, as_version=4)
        folder.mkdir(parents=True, exist_ok=True)
        log = log_path.open("wb")
    except (OSError, ValueError) as error:
        raise RunFileError(f"{source}: cannot be read, or {path} cannot be written: {error}") from error
    # Without folders to search for kernelspecs, "python3" is the ipykernel of this interpreter.
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels),
        timeout=cell_timeout_s,
        resources={"metadata": {"path": str(source.parent)}},
        store_widget_state=False,
        on_cell_execute=begin,
    )
    try:
        with log:
            client.execute(cleanup_kc=True, stderr=log)
    except CellTimeoutError:
        error_line = f"code cell {number} took longer than {cell_timeout_s} s"
    except CellExecutionError as error:
        error_line = f"code cell {number} raised {error.ename}: {next(iter(error.evalue.splitlines()), '')}"
    except DeadKernelError:
        error_line = f"the kernel died in code cell {number}"
    nbformat.write(notebook, path)
    if error_line is None:
        log_path.unlink()
        return Execution(path)
    return Execution(path, f"{error_line} (its stderr: {log_path})")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def lanes(device: str) -> int:
    """How many notebooks are executed beside the questions of a run.

    None on a GPU, whose memory and times are part of the answers. On a CPU one for each core but one, at
    most three.
    """
    return min(_cores() - 1, 3) if select(device) == "cpu" else 0


@contextmanager
def beside(sources: Sequence[Path], folder: Path, threads: int) -> Iterator[Callable[[], list[Execution]]]:
    """Execute copies of the notebooks beside what the caller does meanwhile.

    What both ask of an incident is asked once (:data:`staleproof.lab.SHARED`). The last notebook comes
    first, so that the two seldom ask the same at the same time.

    Args:
        sources: the notebooks.
        folder: where the copies go.
        threads: notebooks at a time while the caller does something else.

    Yields:
        A function that executes what is left, and returns the executions in the order of ``sources``. An
        error in the caller stops the notebooks before their next cell.
    """
    left, done, stopped = deque(reversed(sources)), dict[Path, Execution](), Event()

    def work() -> None:
        while not stopped.is_set():
            try:
                source = left.popleft()
            except IndexError:
                return
            done[source] = execute(source, folder, stopped)

    if threads:
        import torch

        # More threads than cores mostly wait for each other: here, and in the processes started from here.
        share = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // (1 + threads))))
        torch.set_num_threads(int(share))
    with _sharing(), forked(), ThreadPoolExecutor(threads or 1) as pool:
        working = [pool.submit(work) for _ in range(threads)]

        def finish() -> list[Execution]:
            work()
            for one in working:
                one.result()
            return [done[source] for source in sources]

        try:
            yield finish
        except BaseException:
            stopped.set()
            raise
