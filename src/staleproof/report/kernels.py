"""Kernels of notebooks, forked from a process that has imported what all notebooks import.

Those imports take as long as the cells of some notebooks. Triton, which decides at its import where kernels
run, and our own package are imported by each kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

from jupyter_client.launcher import launch_kernel
from jupyter_client.provisioning import local_provisioner

from staleproof import child

PRELOADED = ("torch", "seaborn", "matplotlib.backends.backend_svg", "ipykernel.kernelapp")


def forked() -> AbstractContextManager[Any]:
    """Jupyter starts kernels in this way, inside a ``with``.

    Not beside a GPU, where a kernel is a new interpreter, as the children of the incidents are.
    """
    if sys.platform != "linux" or shutil.which("nvidia-smi"):
        return nullcontext()
    return patch.object(local_provisioner, "launch_kernel", _launch)


class _Kernel:
    """With the part of :class:`subprocess.Popen` that Jupyter uses."""

    stdin = stdout = stderr = None

    def __init__(self, process: child.Forked) -> None:
        self.pid, self.poll, self.wait = process.pid, process.poll, process.wait
        # Jupyter signals its group.
        while process.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@cache
def _path() -> list[str]:
    """Where a new interpreter looks for modules, which is not where a program's or pytest's does."""
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    reply = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [*filter(None, reply)]


def _launch(command: Sequence[str], *, cwd: str, env: Mapping[str, str], **given: Any) -> Any:
    """What Jupyter's ``launch_kernel`` does. If ``stderr`` is given, it is a file with a name."""
    log = getattr(given.get("stderr"), "name", os.devnull)
    arguments = [*command[command.index("-f") :]], cwd, dict(env), _path(), log
    process = child.fork(_serve, arguments, PRELOADED, daemon=False)
    return _Kernel(process) if process else launch_kernel([*command], cwd=cwd, env={**env}, **given)


def _serve(arguments: list[str], folder: str, variables: dict[str, str], path: list[str], log: str) -> None:
    """Be the kernel, in a process of its own."""
    os.setsid()
    child.become(variables, folder, path, os.devnull, log)
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(arguments)
