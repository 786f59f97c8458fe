"""Programs forked from a process that has imported what all of them import.

torch, inductor and transformers take most of the time until a vLLM is imported, and are the same for
every release (see :mod:`environment`). One process imports them; each program is a fork of it, and
imports its own vLLM and our package as a new interpreter would. Programs without a vLLM are forks of
another process, which has imported torch alone. Elsewhere than on Linux a program is a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# No module of vLLM, and none that a check puts a stub for.
PRELOADED = (
    *("torch", "torch._inductor.compile_fx", "functorch.compile", "transformers"),
    *("transformers.modeling_utils", "transformers.image_processing_backends", "openai", "aiohttp"),
)


Ended = subprocess.CompletedProcess[str]


@cache
def _server(vllm: bool) -> subprocess.Popen[str]:
    """The process to fork from. It ends with its input, and so with this process."""
    if vllm:
        import environment

        # As vLLM itself sets it, before it imports torch: otherwise inductor starts processes on import.
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        env = environment.shared_variables() | {"PYTHONPATH": str(environment.packages())} | threads
    else:
        env = {**os.environ, "PYTHONPATH": ""}
    return subprocess.Popen(
        # Without Triton, which looks at its import whether it interprets.
        [sys.executable, __file__, *(PRELOADED if vllm else ("torch",))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=env,
    )


def run(
    *arguments: str, env: Mapping[str, str], timeout: float, cwd: Path | None = None, vllm: bool = True
) -> Ended:
    """Run ``python *arguments``, a script with its arguments or ``-c`` and a program; see the module's text.

    Args:
        arguments: of Python.
        env: the whole environment; for a vLLM, from ``environment.variables``.
        timeout: in seconds.
        cwd: its folder, this process's by default.
        vllm: it imports a vLLM.

    Returns:
        Its exit code and what it printed. Also what its own children printed, until it ended.

    Raises:
        subprocess.TimeoutExpired: it ran for longer.
    """
    if sys.platform != "linux":
        return new(*arguments, env=env, timeout=timeout, cwd=cwd)
    server = _server(vllm)
    assert server.stdin
    assert server.stdout
    with tempfile.TemporaryDirectory() as folder:
        order = {"arguments": arguments, "env": dict(env), "cwd": str(cwd or Path.cwd()), "folder": folder}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(order), file=server.stdin, flush=True)
        pid = server.stdout.readline()
        late = not select.select([server.stdout], [], [], timeout)[0]
        if late:
            # With the processes that it started.
            os.killpg(int(pid), signal.SIGKILL)
        code = server.stdout.readline()
        if not code:
            _server.cache_clear()
            raise RuntimeError("the process to fork from is gone; its standard error says why")
        if late:
            raise subprocess.TimeoutExpired(arguments, timeout)
        said = [(Path(folder) / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(arguments, int(code), *said)


def new(*arguments: str, **options: Any) -> Ended:
    """Run ``python *arguments`` in a new interpreter, whose input is empty."""
    command = [sys.executable, *arguments]
    given = {"capture_output": True, "text": True, "check": False, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, **given | options)


def released(version: str, *arguments: str, timeout: float = 300, **variables: str) -> Ended:
    """:func:`run` with this vLLM and further variables; without it the caller's test is skipped."""
    import environment

    return run(*arguments, env=environment.variables(version) | variables, timeout=timeout)


def answer(done: Ended) -> Any:
    """What a program has printed in its last line, as JSON: what vLLM prints comes before."""
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _become(order: Mapping[str, Any]) -> None:
    """Make this fork what a new interpreter with this order would be."""
    os.setpgid(0, 0)
    # PR_SET_PDEATHSIG: it ends with the process that it was forked from.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for number, (name, flags) in enumerate(
        ((os.devnull, os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))
    ):
        file = os.open(os.path.join(order["folder"], name), flags | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None  # an import has asked for it
    first = order["arguments"][0]
    folders = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # Its own folder, or the working folder, then what PYTHONPATH names, then what the installation has.
    own = "" if first == "-c" else os.path.dirname(os.path.abspath(first))
    ours = {os.path.dirname(os.path.abspath(__file__)), *folders}
    sys.path[:] = [own, *folders, *(path for path in sys.path if path not in ours)]
    importlib.invalidate_caches()


def _run(first: str, *rest: str) -> int:
    """Run the program, with what Python does at its end, and return its exit code."""
    try:
        if first == "-c":
            sys.argv[:] = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv[:] = [first, *rest]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
    return 0


def _serve() -> dict[str, Any] | None:
    """Fork for each line until there are no more. Returns in each fork, with its order."""
    # What an import prints is no answer.
    codes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            codes.close()
            return order
        # Here too: the caller may end the group before the fork has run.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        print(pid, file=codes, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=codes, flush=True)
    return None


if __name__ == "__main__":
    order = _serve()
    if order is not None:
        _become(order)
        code = _run(*order["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        # Python would take the modules apart, one and a half seconds of them.
        os._exit(code)
