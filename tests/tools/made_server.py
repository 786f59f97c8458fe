"""A server that is made up in vLLM's place: it answers as the code before it says."""

from __future__ import annotations

import sys
from pathlib import Path

SERVER = """
import importlib.util, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): ...
    def say(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.say(b"{}")
    def do_POST(self):
        self.say(answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
%s
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def command(folder: Path, code: str) -> list[str]:
    """What starts the server; the code may define ``answer(body)``, and ends the process where it must."""
    script = folder / "fake.py"
    script.write_text(SERVER % code)
    return [sys.executable, str(script)]
