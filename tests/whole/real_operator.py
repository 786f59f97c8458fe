"""What an operator does with a server from outside, while it serves; runs in a child with a real vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from staleproof.child import report
from staleproof.incidents.published_unwritten import leak
from staleproof.vllm.live import SWITCH
from staleproof.vllm.plugin import PORT
from staleproof.whole import place
from staleproof.whole.engine import Engine


def operate() -> None:
    """Serve with the patches, with one switched off by the file, and with it again; tell what comes out."""
    engine = Engine(Path(sys.prefix, place.MODEL), scheduling_policy="priority", **leak.OPTIONS)
    switch, told = Path(os.environ[SWITCH]), {}
    for state, wanted in (("installed", "in place"), ("switched off", "off"), ("back", "in place")):
        switch.write_text("unpublish") if wanted == "off" else switch.unlink(missing_ok=True)
        _wait_for(wanted)
        text = leak.visits(engine).text
        told[state] = {"text": text, "metrics": _metrics(), "live": _live()}
    report(told)


def _address() -> str:
    return f"127.0.0.1:{os.environ[PORT]}"


def _metrics() -> dict[str, Any]:
    """Counters by name, and the state of each patch in the server."""
    with urllib.request.urlopen(f"http://{_address()}/metrics", timeout=5) as answer:
        samples = [s for f in text_string_to_metric_families(answer.read().decode()) for s in f.samples]
    states = [s.labels for s in samples if s.name == "staleproof_patch_info"]
    return {s.name: s.value for s in samples if not s.labels} | {
        "patches": {s["patch"]: s["state"] for s in states if s["process"] == "server"}
    }


def _live() -> dict[str, Any]:
    command = [sys.executable, "-m", "staleproof", "patches", "--live", _address(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return {"code": done.returncode, "error": done.stderr, "health": json.loads(done.stdout or "null")}


def _wait_for(wanted: str) -> None:
    """Wait until the plugin's thread serves its port and has looked at the switch file."""
    for _ in range(150):
        with contextlib.suppress(OSError):  # the port may not be open yet on a busy machine
            if _metrics()["patches"].get("unpublish") == wanted:
                return
        time.sleep(0.2)
    raise TimeoutError(f"unpublish: expected {wanted} on {_address()} within 30 s")
