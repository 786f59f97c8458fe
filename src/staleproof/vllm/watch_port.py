"""The port of a process: the watch's counts and what stands in the server, for Prometheus and for probes.

The engine core is a process of its own, so the API server's /metrics does not see it.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from staleproof.vllm import live, process
from staleproof.vllm.hooks import out_of_service, warn_once
from staleproof.vllm.process import say
from staleproof.vllm.standing import registry
from staleproof.vllm.watch import LIVE, OWNER, PADDING, Watch
from staleproof.vllm.watch_blocks import Blocks
from staleproof.vllm.watch_memory import Memory

ROWS = (PADDING, LIVE)
Values = Sequence[tuple[Any, float]]
HOST = "STALEPROOF_WATCH_HOST"
# So many are answered at a time, and a connection that says nothing for so many seconds is closed.
CONNECTIONS, TIMEOUT_S = 8, 2.0


class Collector:
    """What a scrape reads: counts that have arrived on the host. It touches no device.

    Args:
        watch: of this process, if it has one.
        blocks: of the KV cache, if they are watched.
        memory: that no profile saw, if it is watched.
    """

    def __init__(
        self, watch: Watch | None, blocks: Blocks | None = None, memory: Memory | None = None
    ) -> None:
        self.watch, self.blocks, self.memory = watch, blocks, memory

    def collect(self) -> Iterator[Any]:
        """The families of metrics, as prometheus_client asks for them."""
        if self.watch is not None:
            rows = []
            if registry.reason(OWNER) is None:
                try:
                    rows = [*self._counts()]
                except Exception as error:
                    out_of_service(
                        registry.step_back(OWNER, f"a scrape failed: {type(error).__name__}: {error}")
                    )
            yield _gauge("watch_up", "The watch is in service", [((), registry.reason(OWNER) is None)])
            yield from rows
        health = live.health(os.environ.get(process.REQUIRE))
        names = "staleproof", "vllm", "model"
        yield _gauge("build_info", "What this server is", [([health[name] for name in names], 1)], *names)
        counts = sum((Counter(one["counts"]) for one in health["processes"]), Counter())
        for name, count in {**dict.fromkeys(registry.counters(), 0), **counts}.items():
            yield _counter(name, "Counted on the host, in all processes of this server", [((), count)])
        yield _gauge("ok", "What stands is as it should be", [((), health["ok"])])
        states = [
            ((patch, state, one["process"], str(one["pid"])), 1)
            for one in ({"process": "server", "pid": "", **health}, *health["processes"])
            for patch, (state, _) in one["patches"].items()
        ]
        labels = "patch", "state", "process", "pid"
        yield _gauge("patch_info", "Patches, in each process and in the whole server", states, *labels)

    def _counts(self) -> Iterator[Any]:
        assert self.watch is not None
        reading, chosen = self.watch.latest, self.watch.settings
        for name, text, counts in (
            ("bad_rows", "Rows with a NaN or Inf, of the counted steps", reading.bad),
            ("canary_rows", "Those of the bad rows that nobody wrote: they hold a canary", reading.canaries),
        ):
            yield _counter(name, text, _by_rows(counts), "stage", "layer", "rows")
        twice = _by_rows({(layer,): pair for layer, pair in reading.repeats.items()})
        yield _counter("duplicate_expert_rows", "Rows that name an expert twice", twice, "layer", "rows")
        # If stage_runs stops for a stage while counted_steps goes on, bad rows of that stage are missed.
        runs = [*reading.runs.items()]
        yield _counter("stage_runs", "How often the kernel that counts a stage ran", runs, "stage", "layer")
        yield _counter("steps", "Steps of the engine", [((), reading.steps)])
        yield _counter("counted_steps", "Steps whose rows were counted", [((), reading.counted)])
        # If the first goes on and the second grows, the watch counts no more.
        yield _counter("begun_steps", "Steps that the watch saw begin", [((), self.watch.steps)])
        age = time.monotonic() - reading.at if reading.at else 0.0
        yield _gauge("reading_age_seconds", "Since counts have last arrived", [((), age)])
        sample = [(("layers",), chosen.layers), (("steps",), chosen.steps)]
        yield _gauge("sample", "One layer, one step in so many", sample, "of")
        if self.blocks is not None:
            stale = {**dict.fromkeys(self.blocks.pairs, 0), **self.blocks.stale}
            text = "KV blocks read while they held bytes of another request"
            yield _counter("stale_blocks_read", text, [*stale.items()], "written_as", "read_as")
        if self.watch.bad_blocks:
            read = [
                ((self.watch.bad_request, part.text(self.watch.bad_request)), len(part.blocks))
                for part in self.watch.bad_blocks
            ]
            text = "KV blocks that the request of the first bad live row read, by who wrote them last"
            yield _gauge("bad_row_blocks", text, read, "request", "blocks")
        if self.memory is not None:
            owners = [((owner,), count) for owner, count in self.memory.latest.items()]
            yield _gauge("unprofiled_bytes", "Memory that the profile run did not see", owners, "owner")


def _by_rows(counts: Mapping[Any, tuple[int, int]]) -> Values:
    return [((*at, rows), n) for at, pair in counts.items() for rows, n in zip(ROWS, pair, strict=True)]


def _family(kind: str, name: str, text: str, values: Values, labels: tuple[str, ...]) -> Any:
    from prometheus_client import core

    family = getattr(core, f"{kind}MetricFamily")(f"staleproof_{name}", text, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family


def _gauge(name: str, text: str, values: Values, *labels: str) -> Any:
    return _family("Gauge", name, text, values, labels)


def _counter(name: str, text: str, values: Values, *labels: str) -> Any:
    return _family("Counter", name, text, values, labels)


class Port(ThreadingHTTPServer):
    """Answers ``/metrics`` and ``/health``, a few connections at a time, each for a short time."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, address: tuple[str, int], collector: Collector) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        self.collector, self._free = collector, threading.BoundedSemaphore(CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if one is free; otherwise close the connection."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and be free again."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away in the middle of its answer is not worth a traceback."""


class Handler(BaseHTTPRequestHandler):
    """One question."""

    timeout = TIMEOUT_S
    server: Port

    def do_GET(self) -> None:
        """Answer it; what fails is one line in the log, and 503."""
        answer = {"/metrics": self._metrics, "/health": self._health}.get(self.path.partition("?")[0])
        if answer is None:
            self.send_error(404)
            return
        status, kind, body = process.contained(answer, f"port: {self.path}") or (503, "text/plain", b"")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _metrics(self) -> tuple[int, str, bytes]:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self.server.collector)
        return 200, CONTENT_TYPE_LATEST, generate_latest(registry)

    def _health(self) -> tuple[int, str, bytes]:
        health = live.health(os.environ.get(process.REQUIRE))
        return (200 if health["ok"] else 503), "application/json", json.dumps(health).encode()

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape each few seconds is not worth a line."""


def serve(
    watch: Watch | None, port: int, blocks: Blocks | None = None, memory: Memory | None = None
) -> Port | None:
    """Open the port. If that cannot be, one line says so and the engine runs on without it.

    Args:
        watch: of this process, if it has one.
        port: on the address that ``STALEPROOF_WATCH_HOST`` names, this machine alone by default.
        blocks, memory: see :class:`Collector`.
    """
    host, what = os.environ.get(HOST) or "127.0.0.1", "watch" if watch else "state"
    try:
        import prometheus_client  # noqa: F401

        server = Port((host, port), Collector(watch, blocks, memory))
        threading.Thread(target=server.serve_forever, name="staleproof port", daemon=True).start()
        # A forked child must not keep it open.
        os.register_at_fork(after_in_child=server.socket.close)
        say(
            f": watch on port {port}: {', '.join(watch.settings.stages)}"
            if watch
            else f": state on port {port}"
        )
        return server
    except ImportError:
        warn_once(f"{what} without a port: prometheus_client is not installed")
    except (OSError, OverflowError, UnicodeError) as error:
        # The counters run on: their first bad row is still a line in the log.
        fault = f"{port} cannot be opened"
        is_host = isinstance(error, socket.gaierror | UnicodeError)
        if is_host or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            fault = f"{HOST}: expected a name or address of this machine, got {host!r}"
        warn_once(f"{what} without a port: {fault}: {getattr(error, 'strerror', error)}")
    return None
