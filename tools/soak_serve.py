"""Real servers, driven over HTTP while their watch is scraped, killed scrapers and faults included.

    python -m tools.soak_serve --seconds 120 --out soak-serve.json

Six ``vllm serve`` processes on localhost, with dummy weights and prompts as token ids: one with the watch
and one without get 24 requests a second for two minutes, and the watch is scraped each second. Every tenth
second a scraper is killed in the middle of its answer. A third has all patches, which a file
switches off in the middle and on again. Three more must start and answer all the same: one
whose port is taken, one whose watch raises an exception after some steps, one that is told an unknown stage.
Needs an importable vLLM with its compiled parts, and a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from staleproof.cli.patches import health
from staleproof.device import version_of
from staleproof.engine.models import write_config
from staleproof.engine.watching import WatchError, fetch

RATE = 24
START_S = 240.0
# What may go down: not counts.
GAUGES = {"unprofiled_bytes", "reading_age_seconds", "ok", "watch_up", "patch_info"}
# For the last answers, the last scrape and the end of the servers.
MARGIN_S = 20.0
MODEL, VOCABULARY = "deepseek_v2", 7999
# One graph size more than the requests that run at a time need, so that most steps have padding rows.
COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64]}
OPTIONS = [
    *("--host", "127.0.0.1", "--tokens-only", "--skip-tokenizer-init", "--load-format", "dummy"),
    *("--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30)),
    *("--attention-backend", "TRITON_MLA", "--moe-backend", "triton"),
    *("--compilation-config", json.dumps(COMPILATION), "--seed", "0"),
]
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The counts are those of vLLM alone: of NaN in padding rows.
    "STALEPROOF_PATCHES": "none",
}
# PORT stands for the port of the server's watch.
WATCHED = {"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_PORT": "PORT"}
# Server -> its variables.
SERVERS: dict[str, dict[str, str]] = {
    "watch": WATCHED,
    "no watch": {},
    # All patches, switched off by a file in the middle of the load, and on again.
    "switched": {**WATCHED, "STALEPROOF_PATCHES": "all", "STALEPROOF_SWITCH": "FOLDER/switch"},
    "port taken": WATCHED,
    "exception": WATCHED,
    "unknown stage": {"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_STAGES": "logits"},
}
LONG = ("watch", "no watch", "switched")
# What the log must say, once.
LOGGED = {
    "watch": "watch on port",
    "port taken": "cannot be opened",
    "exception": "a fault inside the watch",
    "unknown stage": "no watch: STALEPROOF_WATCH_STAGES",
}
# A plugin of vLLM that makes the watch fail.
FAULT = """
def register():
    from staleproof.vllm import watch
    inner = watch.Watch.begin_step
    def begin_step(self, *arguments):
        if self.steps >= 5:
            raise RuntimeError("a fault inside the watch")
        return inner(self, *arguments)
    watch.Watch.begin_step = begin_step
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(url: str, number: int, timeout_s: float = 60.0) -> float:
    """Send one request of random tokens; return the seconds until its answer.

    Raises:
        RuntimeError: the answer does not have the tokens that were asked for.
    """
    draw = random.Random(number)
    tokens = 8 + number % 57
    body = {
        "token_ids": [draw.randrange(2, VOCABULARY) for _ in range(draw.randrange(16, 200))],
        "sampling_params": {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"{url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        got = len(json.loads(answer.read())["choices"][0]["token_ids"])
    if got != tokens:
        raise RuntimeError(f"{got} tokens for {tokens}")
    return time.monotonic() - begun


def load(url: str, seconds: float, rate: float = RATE) -> dict[str, Any]:
    """Send requests at a fixed rate, whatever the answers do; return counts, errors and seconds."""
    took: list[float] = []
    errors: list[str] = []

    def one(number: int) -> None:
        try:
            took.append(ask(url, number))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:200])

    begun, sent = time.monotonic(), 0
    with ThreadPoolExecutor(128) as pool:
        while sent < round(seconds * rate):
            time.sleep(max(0.0, begun + sent / rate - time.monotonic()))
            pool.submit(one, sent)
            sent += 1
    return {"sent": sent, "answered": len(took), "errors": errors[:5], "seconds": quantiles(took)}


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest of some seconds.

    >>> quantiles([0.1, 0.2, 0.3])
    {'p50': 0.2, 'p99': 0.3, 'max': 0.3}
    """
    if not values:
        return {}
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 4), "p99": round(last, 4), "max": round(ordered[-1], 4)}


def scrape(port: int, stop: threading.Event, every_s: float = 1.0) -> dict[str, Any]:
    """Scrape until told to stop; every tenth time kill a scraper in the middle of its answer first."""
    found: dict[str, Any] = {"scrapes": 0, "failed": [], "killed": 0, "steps": [], "went_back": 0}
    took, before = [], {}
    while not stop.wait(every_s):
        if found["scrapes"] % 10 == 5:
            kill_a_scraper(port)
            found["killed"] += 1
        begun = time.monotonic()
        try:
            samples = fetch(f"127.0.0.1:{port}")
        except WatchError as error:
            found["failed"].append(str(error)[:200])
            continue
        took.append(time.monotonic() - begun)
        now = {(s.name, *sorted(s.labels.items())): s.value for s in samples if s.name not in GAUGES}
        found["went_back"] += sum(now.get(key, 0) < value for key, value in before.items())
        before = now
        found["scrapes"] += 1
        found["steps"].append(int(now.get(("steps",), 0)))
    found["last"] = {" ".join(map(str, key)): value for key, value in before.items() if value}
    return found | {"seconds": quantiles(took)}


def stands(port: int) -> dict[str, int]:
    """How many patches of a server are in each state, as ``staleproof patches --live`` reads it."""
    return dict(Counter(state for state, _ in health(f"127.0.0.1:{port}")["patches"].values()))


def flip(server: Server, seconds: float) -> list[dict[str, int]]:
    """Switch a loaded server's patches off after a third of its load and on after two thirds.

    Returns:
        What stood before, while they were off, and at the end.
    """
    found = []
    for act in (lambda: None, server.switch.touch, server.switch.unlink):
        act()
        time.sleep(seconds / 3)
        found.append(stands(server.watch_port))
    return found


def kill_a_scraper(port: int) -> None:
    """Close two connections as those of a process that is killed: in the middle of its answer, and before."""
    question = b"GET /metrics HTTP/1.1\r\n"
    with socket.create_connection(("127.0.0.1", port), 5) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        gone.sendall(question + b"Host: x\r\n\r\n")
        gone.recv(1)
    # And one that resets its connection in the middle of its question.
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(question)


class Server:
    """One ``vllm serve``.

    Args:
        name: a key of :data:`SERVERS`, unless its variables are given.
        folder: for its log, and what it needs.
        command: what is run before the arguments of ``serve``.
        variables: of its environment, beside :data:`ENVIRONMENT`.
        options: of ``serve``, beside model and port.
        code: of a plugin of vLLM that it loads besides: it defines ``register()``.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: list[str],
        variables: Mapping[str, str] | None = None,
        options: Sequence[str] = OPTIONS,
        code: str = "",
    ) -> None:
        self.name, self.port, self.watch_port = name, free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"serve-{name.replace(' ', '-')}.log"
        self.switch = folder / "switch"
        places = {"PORT": str(self.watch_port), "FOLDER": str(folder)}
        variables = dict(SERVERS[name] if variables is None else variables)
        for place, value in places.items():
            variables = {key: text.replace(place, value) for key, text in variables.items()}
        self.taken = socket.socket() if name == "port taken" else None
        if self.taken is not None:
            self.taken.bind(("", self.watch_port))
            self.taken.listen()
        env = {**os.environ, **ENVIRONMENT, **variables}
        if code := FAULT if name == "exception" else code:
            env["PYTHONPATH"] = f"{plugin(folder, code)}{os.pathsep}{env.get('PYTHONPATH', '')}"
        model = folder / "model"
        if not model.exists():
            model.mkdir()
            write_config(model, MODEL, {})
        arguments = ["serve", str(model), "--port", str(self.port), *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=log, stderr=log, env=env, start_new_session=True
            )

    def wait(self, until: float) -> float | None:
        """Wait until it answers; return the seconds, or ``None`` if it does not."""
        begun = time.monotonic()
        while self.process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return time.monotonic() - begun
            time.sleep(0.5)
        return None

    def lines(self) -> list[str]:
        """What its log says of the watch; the same in the log of the API server counts once."""
        text = self.log.read_text(errors="replace")
        found = re.findall(r"staleproof: ?(?!.*STALEPROOF_PATCHES)(.*(?:watch|first \w+ row).*)", text)
        return [*dict.fromkeys(line.strip() for line in found)]

    def end(self) -> None:
        """End it and all it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 15)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        if self.taken is not None:
            self.taken.close()


def plugin(folder: Path, code: str) -> Path:
    """A folder with a plugin of vLLM, ``soak_fault``; for ``PYTHONPATH``."""
    home = folder / "fault"
    metadata = home / "soak_fault-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (home / "soak_fault.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: soak-fault\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nsoak_fault = soak_fault:register\n")
    return home


def judged(name: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with one server's result; empty if nothing is."""
    wrong = []
    if found.get("started_s") is None:
        return ["did not start"]
    if not found["alive"]:
        wrong.append("is not alive at the end")
    if found["load"]["answered"] != found["load"]["sent"]:
        wrong.append(f"answered {found['load']['answered']} of {found['load']['sent']}")
    expected = LOGGED.get(name)
    if expected is not None and sum(expected in line for line in found["log"]) != 1:
        wrong.append(f"does not say once: {expected}")
    if name == "switched":
        before, off, after = found["stands"]
        stood = before.get("in place", 0)
        if not stood or off.get("in place") or off.get("off") != stood or after != before:
            wrong.append(f"stands before {before}, switched off {off}, switched on {after}")
    if name == "watch":
        scraped = found["scraped"]
        if scraped["failed"] or not scraped["scrapes"]:
            wrong.append(f"{len(scraped['failed'])} scrapes failed of {scraped['scrapes']}")
        if scraped["went_back"]:
            wrong.append("a count went back")
        if not scraped["steps"] or scraped["steps"][-1] <= scraped["steps"][0]:
            wrong.append("its steps do not grow")
        last = scraped["last"]
        runs = max((count for name, count in last.items() if name.startswith("stage_runs")), default=0)
        # The counts are copied before the kernels of a step run.
        if runs < (counted := last.get("counted_steps", 1)) - 1:
            wrong.append(f"its kernels ran {runs:.0f} times in {counted:.0f} counted steps")
    return wrong


@contextlib.contextmanager
def started(begun: Iterable[Server]) -> Iterator[dict[str, Server]]:
    """Start these servers at once, each as it is made; all are ended at the end."""
    servers: dict[str, Server] = {}
    try:
        for server in begun:
            servers[server.name] = server
        yield servers
    finally:
        for server in servers.values():
            server.end()


def soak(
    folder: Path,
    command: list[str],
    seconds: float,
    say: Callable[[str], None] = print,
    limit_s: float = float("inf"),
    names: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Start the servers, drive them, and say what is wrong; server -> its result.

    Args:
        folder: for logs and what the servers need.
        command: what is run before the arguments of ``serve``.
        seconds: of the long loads.
        say: takes a line.
        limit_s: for all together; the long loads are shortened to fit.
        names: some of :data:`SERVERS`; all if empty.
    """
    last = time.monotonic() + limit_s - MARGIN_S
    found: dict[str, dict[str, Any]] = {}
    begun = (Server(name, folder, command) for name in names or SERVERS)
    with started(begun) as servers, ThreadPoolExecutor(8) as pool:
        until, stop = time.monotonic() + START_S, threading.Event()
        ends = {
            name: pool.submit(drive, server, until, seconds if name in LONG else 1.0, stop, last)
            for name, server in servers.items()
        }
        for name, end in ends.items():
            found[name] = end.result()
            say(f"{name}: { ({k: v for k, v in found[name].items() if k != 'log'}) }"[:900])
    for name, server in servers.items():
        found[name].setdefault("log", server.lines()[:20])
        found[name] |= {"wrong": judged(name, found[name]), "vllm": version_of("vllm")}
        say(f"{name}: {'; '.join(found[name]['wrong']) or 'as it must be'}")
    return found


def drive(server: Server, until: float, seconds: float, stop: threading.Event, last: float) -> dict[str, Any]:
    """Wait for one server, send its requests, and note what it did; its watch is scraped meanwhile."""
    found: dict[str, Any] = {"started_s": server.wait(min(until, last))}
    if found["started_s"] is None:
        return found
    seconds = max(1.0, min(seconds, last - time.monotonic()))
    with ThreadPoolExecutor(1) as pool:
        scraped = pool.submit(scrape, server.watch_port, stop) if server.name == "watch" else None
        flipped = pool.submit(flip, server, seconds) if server.name == "switched" else None
        found["load"] = load(server.url, seconds)
        if flipped is not None:
            found["stands"] = flipped.result()
        if scraped is not None:
            # The last counts arrive with a step at least half a second later.
            time.sleep(1.0)
            with contextlib.suppress(OSError):
                ask(server.url, 0)
            time.sleep(1.5)
            stop.set()
            found["scraped"] = scraped.result()
    alive = server.process.poll() is None and server.wait(time.monotonic() + 10) is not None
    return found | {"alive": alive, "log": server.lines()[:20]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all together")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--servers", nargs="+", choices=[*SERVERS], default=[], help="all by default")
    parser.add_argument("--logs", type=Path, default=None, help="folder that keeps the servers' logs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staleproof-serve-") as temporary:
        where = given.logs or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        say = partial(print, flush=True)
        result = soak(where, vllm, given.seconds, say, given.limit, given.servers)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(any(one["wrong"] for one in result.values()))
