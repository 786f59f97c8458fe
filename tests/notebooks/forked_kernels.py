"""A plugin for nbval's run: kernels are forks of a process that has imported what all notebooks import.

PYTHONPATH=tests/notebooks python -m pytest -p forked_kernels --nbval notebooks/

Those imports take as long as the cells of some notebooks. Triton, which decides at its import where kernels
run, and our own package are imported by each kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

# Seconds for each process of the run, and for a format that no notebook has: see tests/conftest.py.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

from jupyter_client.provisioning import local_provisioner

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "seaborn", "matplotlib.backends.backend_svg", "ipykernel.kernelapp"])
# Pytest's imports begin in these; those of a kernel do not.
OURS = {"", str(Path(__file__).parents[2])}


def serve(arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    """Be the kernel, in a process of its own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if path not in OURS]
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(arguments)


class Kernel:
    """With the part of :class:`subprocess.Popen` that jupyter_client uses."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], *, cwd: str, env: dict[str, str], **_: Any) -> None:
        self._process = FORKS.Process(target=serve, args=(command[command.index("-f") :], cwd, env))
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid
        # Its group is ended with it.
        while os.getpgid(self.pid) != self.pid:
            time.sleep(0.01)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


# On a GPU a kernel is a new interpreter, as the children of the incidents are.
if sys.platform == "linux" and shutil.which("nvidia-smi") is None:
    local_provisioner.launch_kernel = Kernel
