"""The port of a process: the watch's counts and what stands in the server, for Prometheus and for probes.

The engine core is a process of its own, so the API server's /metrics does not see it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from staleproof.vllm import live, process
from staleproof.vllm.hooks import warn_once
from staleproof.vllm.process import say
from staleproof.vllm.watch import LIVE, PADDING, Watch
from staleproof.vllm.watch_blocks import Blocks
from staleproof.vllm.watch_memory import Memory

ROWS = (PADDING, LIVE)
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
        from prometheus_client.core import GaugeMetricFamily

        if self.watch is not None:
            found = process.contained(lambda: [*self._counts()], "watch: its counts are out of service")
            yield GaugeMetricFamily("staleproof_watch_up", "The watch is in service", value=found is not None)
            yield from found or ()
            if found is None:
                self.watch = None
        health = live.health(os.environ.get(process.REQUIRE))
        build = GaugeMetricFamily(
            "staleproof_build_info", "Versions in this server", labels=("staleproof", "vllm")
        )
        build.add_metric((health["staleproof"], health["vllm"] or ""), 1)
        yield build
        yield GaugeMetricFamily(
            "staleproof_ok", "Nothing is refused, or required and off", value=health["ok"]
        )
        info = GaugeMetricFamily(
            "staleproof_patch_info",
            "Patches, in each process and in the whole server",
            labels=("patch", "state", "process", "pid"),
        )
        for one in [{"process": "server", "pid": "", **health}, *health["processes"]]:
            for patch, (state, _) in one["patches"].items():
                info.add_metric((patch, state, one["process"], str(one["pid"])), 1)
        yield info

    def _counts(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        assert self.watch is not None
        reading, chosen = self.watch.latest, self.watch.settings
        for name, text, counts in (
            ("bad_rows", "Rows with a NaN or Inf, of the counted steps", reading.bad),
            ("canary_rows", "Those of the bad rows that nobody wrote: they hold a canary", reading.canaries),
        ):
            family = CounterMetricFamily(f"staleproof_{name}", text, labels=("stage", "layer", "rows"))
            for (stage, layer), pair in counts.items():
                for rows, count in zip(ROWS, pair, strict=True):
                    family.add_metric((stage, layer, rows), count)
            yield family
        repeats = CounterMetricFamily(
            "staleproof_duplicate_expert_rows", "Rows that name an expert twice", labels=("layer", "rows")
        )
        for layer, pair in reading.repeats.items():
            for rows, count in zip(ROWS, pair, strict=True):
                repeats.add_metric((layer, rows), count)
        yield repeats
        for name, text, value in (
            ("steps", "Steps of the engine", reading.steps),
            ("counted_steps", "Steps whose rows were counted", reading.counted),
        ):
            yield CounterMetricFamily(f"staleproof_{name}", text, value=value)
        # A watch that does not count any more, beside steps that go on, is out of service.
        age = time.monotonic() - reading.at if reading.at else 0.0
        yield GaugeMetricFamily("staleproof_reading_age_seconds", "Since counts have last arrived", value=age)
        sample = GaugeMetricFamily("staleproof_sample", "One layer, one step in so many", labels=("of",))
        sample.add_metric(("layers",), chosen.layers)
        sample.add_metric(("steps",), chosen.steps)
        yield sample
        if self.blocks is not None:
            stale = CounterMetricFamily(
                "staleproof_stale_blocks_read",
                "KV blocks read while they held bytes of another request",
                labels=("written_as", "read_as"),
            )
            for kinds, count in {**dict.fromkeys(self.blocks.pairs, 0), **self.blocks.stale}.items():
                stale.add_metric(kinds, count)
            yield stale
        if self.memory is not None:
            unprofiled = GaugeMetricFamily(
                "staleproof_unprofiled_bytes", "Memory that the profile run did not see", labels=("owner",)
            )
            for owner, count in self.memory.latest.items():
                unprofiled.add_metric((owner,), count)
            yield unprofiled


class Port(ThreadingHTTPServer):
    """Answers ``/metrics`` and ``/health``, a few connections at a time, each for a short time."""

    daemon_threads = True

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
    host = os.environ.get(HOST, "127.0.0.1")
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
        warn_once("watch without a port: prometheus_client is not installed")
    except (OSError, OverflowError) as error:
        # The counters run on: their first bad row is still a line in the log.
        warn_once(f"watch without a port: {port} cannot be opened: {getattr(error, 'strerror', error)}")
    return None
