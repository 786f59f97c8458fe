"""The watch's port: its counts for Prometheus, from the worker's own process.

The engine core is a process of its own, so the API server's /metrics does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from staleproof.vllm import process
from staleproof.vllm.hooks import warn_once
from staleproof.vllm.process import say
from staleproof.vllm.watch import Watch

ROWS = ("padding", "live")


class Collector:
    """What a scrape reads: counts that have arrived on the host. It touches no device.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def collect(self) -> Iterator[Any]:
        """The families of metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        reading = self.watch.latest
        bad = CounterMetricFamily(
            "staleproof_bad_rows", "Rows with a NaN or Inf", labels=("stage", "layer", "rows")
        )
        for (stage, layer), counts in reading.bad.items():
            for rows, count in zip(ROWS, counts, strict=True):
                bad.add_metric((stage, layer, rows), count)
        yield bad
        repeats = CounterMetricFamily(
            "staleproof_duplicate_expert_rows", "Rows that name an expert twice", labels=("layer", "rows")
        )
        for layer, counts in reading.repeats.items():
            for rows, count in zip(ROWS, counts, strict=True):
                repeats.add_metric((layer, rows), count)
        yield repeats
        yield CounterMetricFamily("staleproof_steps", "Steps of the engine", value=reading.steps)
        info = GaugeMetricFamily(
            "staleproof_patch_info", "Patches in this process", labels=("patch", "state")
        )
        for name in _patches():
            info.add_metric((name, process.state(name)[0]), 1)
        yield info


def _patches() -> list[str]:
    from staleproof.vllm.plugin import patches
    from staleproof.vllm.standing import targets

    return [name for name in patches() if targets(name)]


def serve(watch: Watch, port: int) -> None:
    """Open the port. If that cannot be, one line says so and the engine runs on without it."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(Collector(watch))
        start_http_server(port, registry=registry)
        say(f": watch on port {port}: {', '.join(watch.settings.stages)}")
    except ImportError:
        warn_once("watch without a port: prometheus_client is not installed")
    except OSError as error:
        warn_once(f"watch without a port: {port} cannot be opened: {error.strerror}")
