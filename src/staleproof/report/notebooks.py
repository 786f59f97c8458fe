"""Executing copies of the notebooks with the Python of this environment."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from staleproof.cases.finding import RunFileError
from staleproof.device import select
from staleproof.report import terminal

CELL_TIMEOUT_S = 600
# Of torch, in processes that are started with it.
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Execution:
    """One executed copy.

    Attributes:
        path: the copy, with the outputs so far. If there was an error, the stderr of the kernel's
            process (driver messages, device asserts) is beside it as ``.log``.
        error: one line on what stopped it, or ``None``.
    """

    path: Path
    error: str | None


def execute(
    source: Path, folder: Path, progress: Callable[[int, int], None], cell_timeout_s: int = CELL_TIMEOUT_S
) -> Execution:
    """Execute a copy of one notebook, with the notebook's own folder as current directory.

    Args:
        source: the notebook; it is not changed.
        folder: where the copy goes, under the same name.
        progress: called before each code cell with its number, from 1, and the number of them.
        cell_timeout_s: seconds one cell may take.

    Returns:
        The copy and what stopped it: a cell that raised, a cell that took too long, or a kernel
        that died.

    Raises:
        RunFileError: the notebook cannot be read, or the copy cannot be written.
    """
    try:
        notebook = nbformat.read(source, as_version=4)
    except (OSError, ValueError) as error:
        raise RunFileError(f"{source}: cannot be read: {error}") from error
    todo = [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for _, cell in todo:
        cell.outputs, cell.execution_count = [], None
    # Without folders to search for kernelspecs, "python3" is the ipykernel of this interpreter.
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels),
        timeout=cell_timeout_s,
        resources={"metadata": {"path": str(source.parent)}},
        store_widget_state=False,
    )
    error_line = None
    path = folder / source.name
    log_path = path.with_suffix(".log")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = log_path.open("wb")
    except OSError as error:
        raise RunFileError(f"{log_path}: cannot be written: {error.strerror}") from error
    try:
        with log, client.setup_kernel(cleanup_kc=True, stderr=log):
            for number, (index, cell) in enumerate(todo, 1):
                progress(number, len(todo))
                client.execute_cell(cell, index, execution_count=number)
    except CellTimeoutError:
        error_line = f"code cell {number} took longer than {cell_timeout_s} s"
    except CellExecutionError as error:
        first_line = next(iter(error.evalue.splitlines()), "")
        error_line = f"code cell {number} raised {error.ename}: {first_line}"
    except DeadKernelError:
        error_line = f"the kernel died in code cell {number}"
    nbformat.write(notebook, path)
    if error_line is None:
        log_path.unlink()
    else:
        error_line += f" (its stderr: {log_path})"
    return Execution(path, error_line)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def lanes(device: str) -> int:
    """How many notebooks are executed beside the questions of a run.

    None on a GPU, whose memory and times are part of the answers. On a CPU one for each core but one, at
    most three.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
    """
    return min(_cores() - 1, 3) if select(device) == "cpu" else 0


@contextmanager
def _shared_cores(processes: int) -> Iterator[None]:
    """Give torch its share of the cores, here and in the processes that are started meanwhile.

    More threads than cores mostly wait for each other.
    """
    import torch

    given, before = os.environ.get(THREADS), torch.get_num_threads()
    os.environ[THREADS] = given or str(max(1, _cores() // processes))
    torch.set_num_threads(int(os.environ[THREADS]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if given is None:
            del os.environ[THREADS]


class Stopped(Exception):
    """The command ended while a notebook ran beside it."""


class Beside:
    """Executes copies of the notebooks in threads, beside what the caller does meanwhile.

    As a context manager: the threads start at its beginning. At its end, unless an error left it,
    :meth:`finish` waits for them and works too.

    Args:
        sources: the notebooks.
        folder: where the copies go.
        threads: notebooks at a time while the caller does something else; 0 leaves all to
            :meth:`finish`.
    """

    def __init__(self, sources: Sequence[Path], folder: Path, threads: int) -> None:
        self._sources, self._folder = sources, folder
        self._left = deque(sources)
        self._done: dict[Path, Execution] = {}
        self._errors: list[Exception] = []
        self._at: dict[Path, str] = {}
        self._stopped = False
        # Daemons: an interrupted command does not wait for them, and their kernels end with this process.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Beside:
        self._stack = ExitStack()
        if self._threads:
            self._stack.enter_context(_shared_cores(1 + len(self._threads)))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._stopped = error is not None
        self._stack.close()

    def _work(self) -> None:
        while not self._stopped:
            try:
                source = self._left.popleft()
            except IndexError:
                return

            def on_cell(number: int, cells: int, source: Path = source) -> None:
                if self._stopped:
                    raise Stopped
                self._at[source] = f"{source.name}: code cell {number} of {cells}"

            try:
                self._done[source] = execute(source, self._folder, on_cell)
            except Stopped:
                return
            except Exception as error:
                self._errors.append(error)
            finally:
                self._at.pop(source, None)

    def finish(self) -> list[Execution]:
        """Execute what is left, saying in the terminal which cells run.

        Returns:
            The executions, in the order of the sources.

        Raises:
            RunFileError: a notebook cannot be read, or a copy cannot be written.
        """
        more = threading.Thread(target=self._work, daemon=True)
        more.start()
        workers = [more, *self._threads]
        with terminal.progress() as say:
            while any(worker.is_alive() for worker in workers):
                say("; ".join(self._at.copy().values()))
                for worker in workers:
                    worker.join(0.1)
        if self._errors:
            raise self._errors[0]
        return [self._done[source] for source in self._sources]
