"""Executing copies of the notebooks with this environment's Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from staleproof.harness.findings import RunFileError

CELL_TIMEOUT_S = 600


@dataclass(frozen=True)
class Execution:
    """One executed copy.

    Attributes:
        path: the copy, with the outputs so far. What the kernel's process wrote to its own stderr
            (driver messages, device asserts) lies beside it as ``.log`` where there was an error.
        error: one line on what stopped it, or ``None``.
    """

    path: Path
    error: str | None


def execute(
    source: Path, folder: Path, progress: Callable[[int, int], None], cell_timeout_s: int = CELL_TIMEOUT_S
) -> Execution:
    """Execute a copy of one notebook in its own folder's directory.

    Args:
        source: the notebook; it is not written.
        folder: where the copy goes, under the same name.
        progress: called with (code cell about to run, code cells), from 1.
        cell_timeout_s: seconds one cell may take.

    Returns:
        The copy and what stopped it: a raising cell, a cell out of time, or a dead kernel.

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
    # No folder of kernelspecs is searched, so "python3" is the ipykernel beside this interpreter.
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
