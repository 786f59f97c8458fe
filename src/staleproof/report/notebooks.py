"""Executing copies of the notebooks with the Python of this environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
import typer
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from staleproof.harness.findings import RunFileError
from staleproof.report import terminal

CELL_TIMEOUT_S = 600


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


def execute_all(sources: Sequence[Path], folder: Path) -> list[Execution]:
    """Execute a copy of each notebook into ``folder``, saying in the terminal which cell runs."""
    executions = []
    for source in sources:
        typer.echo(f"notebook  {source.name}")
        with terminal.progress() as say:

            def on_cell(number: int, cells: int, name: str = source.name, say: terminal.Say = say) -> None:
                say(f"{name}: code cell {number} of {cells}")

            executions.append(execute(source, folder, on_cell))
    return executions
