"""JupyterLab as ``staleproof lab`` starts it: the book is inside its root."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest


@pytest.mark.slow
def test_jupyterlab_starts_as_root_and_serves_notebooks_and_book():
    pytest.importorskip("jupyterlab.labapp")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--allow-root", "--no-browser", f"--port={port}", "--ServerApp.token=mine"]
    server = subprocess.Popen(
        [sys.executable, "-m", "staleproof", "lab", "--", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for file in ("workbook/glossary.md", "workbook/timeline.md", "notebooks/00_orientation.ipynb"):
            assert (
                _answer(server, f"http://localhost:{port}/api/contents/{file}?content=0&token=mine") == file
            )
    finally:
        server.terminate()
        server.wait(30)


def _answer(server: subprocess.Popen[bytes], url: str) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        # Until it listens.
        refused = contextlib.suppress(ConnectionError, urllib.error.URLError)
        with refused, urllib.request.urlopen(url, timeout=60) as reply:
            return str(json.load(reply)["path"])
        time.sleep(0.2)
    raise AssertionError(f"no answer from {url}; exit code {server.poll()}")
