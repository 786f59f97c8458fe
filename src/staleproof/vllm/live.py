"""The state of the patches in all processes of a server; a file that switches them off; their return.

The first process makes a folder and puts its path into its environment, which its children inherit: API
server, engine core, workers. Each writes the state of its patches there, and any of them can report all. In
each process that runs an engine or a worker, a thread reads the switch file, puts patches back in service
when they are due, and writes the state again.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from staleproof.vllm import hooks, process
from staleproof.vllm.hooks import logger, warn_once
from staleproof.vllm.process import IN_PLACE, NOT_NEEDED, OFF, PARTLY, REFUSED, WAITING
from staleproof.vllm.sources import PatchError
from staleproof.vllm.standing import registry

FOLDER, SWITCH = "STALEPROOF_SERVER", "STALEPROOF_SWITCH"
BEAT_S = 1.0
# Worst first: the server's state of a patch is the first of these that any of its processes has.
ORDER = REFUSED, PARTLY, OFF, IN_PLACE, WAITING, NOT_NEEDED
BAD = REFUSED, PARTLY
State = tuple[str, str]


@dataclass
class Here:
    """This process.

    Attributes:
        version: of vLLM.
        names: the patches that were put in place, or wait for an import.
        decided: patch -> state and reason of the others, when the plugin was loaded.
        applied: whether patches were decided about.
        ready: whether its engine or worker runs.
        incidents: patch -> incident, of all that there are.
        model: as it is served, once that is known.
    """

    version: str = ""
    names: list[str] = field(default_factory=list)
    decided: dict[str, State] = field(default_factory=dict)
    applied: bool = False
    ready: bool = False
    incidents: dict[str, str] = field(default_factory=dict)
    model: str = ""

    def found(self) -> dict[str, State]:
        """Patch -> its state now, and the reason."""
        return {name: process.state(name) for name in self.names} | self.decided

    def report(self) -> dict[str, Any]:
        """What stands in this process."""
        return {
            "pid": os.getpid(),
            "process": multiprocessing.current_process().name,
            "vllm": self.version,
            "model": self.model,
            "ready": self.ready,
            "counts": {name: read() for name, read in registry.counters().items()},
            "patches": self.found(),
        }

    def publish(self) -> None:
        """Write it for the other processes of the server; not if nothing has changed."""
        text, file = json.dumps(self.report()), Path(os.environ.get(FOLDER, ""), f"{os.getpid()}.json")
        if FOLDER in os.environ and _written.get(file) != text:
            file.with_suffix(".new").write_text(text, encoding="utf-8")
            file.with_suffix(".new").replace(file)
            _written[file] = text


_written: dict[Path, str] = {}
_here: list[Here] = []
_thread: list[threading.Thread] = []


def enter(here: Here, reports: bool) -> bool:
    """Take part in the server's truth.

    Args:
        here: this process.
        reports: whether the server has a port that reports its state. If not, no folder is made.

    Returns:
        Whether this is the first process of a server with such a port.
    """
    _here[:] = [here]
    first = reports and not Path(os.environ.get(FOLDER) or "/nowhere").is_dir()
    if first:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="staleproof-")
        # Unlike atexit also at the end of a child of multiprocessing.
        Finalize(None, _leave, (folder, os.getpid()), exitpriority=0)
    look_at_switch(os.environ.get(SWITCH), here)
    here.publish()
    return first


def _leave(folder: str, pid: int) -> None:
    # A child that was forked has inherited this.
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(FOLDER, None)


def beat() -> None:
    """Start the thread of this process, unless it runs. Forked children start their own."""
    if not any(thread.is_alive() for thread in _thread):
        if not _thread:
            os.register_at_fork(after_in_child=beat)
        _thread[:] = [threading.Thread(target=_run, name="staleproof", daemon=True)]
        _thread[0].start()


def _run() -> None:
    while True:
        time.sleep(BEAT_S)
        process.contained(tick, "looking at what stands")


def tick() -> None:
    """What the thread does each second."""
    for here in _here:
        look_at_switch(os.environ.get(SWITCH), here)
        _say(registry.retry(time.monotonic()))
        here.publish()


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        # No error: an operator asked for it, or the patch works again.
        logger.warning("staleproof: %s", line)
        hooks.renew()


def named(path: str, known: Mapping[str, str]) -> tuple[set[str], str | None]:
    """Return the patches that a switch file names, and what is wrong with it, in one line.

    Args:
        path: of the file. If it does not exist, it names nothing. If it is empty, it names all patches.
            Otherwise its words are names of patches, or of incidents.
        known: patch -> incident.

    Raises:
        PatchError: it cannot be read.
    """
    wrong = None
    try:
        words = {*Path(path).read_text(encoding="utf-8").replace(",", " ").split()} or {"all"}
    except FileNotFoundError:
        words = set()
        if not os.path.isdir(os.path.dirname(path) or "."):
            wrong = f"{SWITCH}: expected a file in a folder that exists, got {path!r}: nothing is switched"
    except (OSError, ValueError) as error:
        raise PatchError(f"{SWITCH}: {path} cannot be read, nothing is switched: {error}") from error
    unknown = words - {"all", *known, *known.values()}
    if unknown:
        wrong = f"{SWITCH}: {path} names {', '.join(sorted(unknown))}, which is no patch"
    # A word that names a patch means that patch, also where its incident has the same name.
    incidents = words - {*known}
    return {name for name in known if name in words or incidents & {"all", known[name]}}, wrong


def look_at_switch(path: str | None, here: Here) -> None:
    """Switch off the patches of this process that a file names, and on again those no longer named."""
    if not path:
        return
    try:
        off, wrong = named(path, here.incidents)
    except PatchError as error:
        warn_once(str(error))
        return
    warn_once(wrong)
    _say(registry.switch([name for name in here.names if name in off], path))


def gather() -> list[dict[str, Any]]:
    """The report of this process, and the last report of every other living process of this server."""
    found = [here.report() for here in _here]
    for file in sorted(Path(os.environ.get(FOLDER, "/nowhere")).glob("*.json")):
        # The file, or the process that wrote it, may have gone meanwhile.
        with contextlib.suppress(OSError, ValueError):
            one = json.loads(file.read_text(encoding="utf-8"))
            os.kill(one["pid"], 0)
            found += [one] if one["pid"] != os.getpid() else []
    return found


def merged(processes: Iterable[Mapping[str, Any]]) -> dict[str, State]:
    """Patch -> its state in the server, which is its worst state in any process, and the reason.

    >>> merged([{"patches": {"a": ["will be patched", ""]}}, {"patches": {"a": ["in place", ""]}}])
    {'a': ('in place', '')}
    """
    found: dict[str, State] = {}
    for one in processes:
        for name, (state, why) in one["patches"].items():
            if name not in found or ORDER.index(state) < ORDER.index(found[name][0]):
                found[name] = state, why
    return found


def health(required: str | None = None) -> dict[str, Any]:
    """What stands in the server, for its port.

    Returns:
        ``ok`` (nothing is refused or partly in place, and what ``STALEPROOF_REQUIRE`` names stands),
        ``staleproof``, ``vllm``, ``model``, ``patches`` (patch -> state and reason), ``processes``.
    """
    processes = gather()
    patches = merged(processes)
    ok = bool(processes) and not any(state in BAD for state, _ in patches.values())
    try:
        process.required(required, patches, patches)
    except process.RequirementError:
        ok = False
    return {
        "ok": ok,
        "staleproof": importlib.metadata.version("staleproof"),
        "vllm": processes[0]["vllm"] if processes else "",
        "model": max((one["model"] for one in processes), default=""),
        "patches": patches,
        "processes": processes,
    }
