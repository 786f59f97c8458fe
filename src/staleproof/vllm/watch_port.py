"""The watch's port: its counts for Prometheus, from the worker's own process.

The engine core is a process of its own, so the API server's /metrics does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from staleproof.vllm import process
from staleproof.vllm.hooks import warn_once
from staleproof.vllm.process import say
from staleproof.vllm.watch import LIVE, PADDING, Watch
from staleproof.vllm.watch_blocks import Blocks
from staleproof.vllm.watch_memory import Memory

ROWS = (PADDING, LIVE)


class Collector:
    """What a scrape reads: counts that have arrived on the host. It touches no device.

    Args:
        watch: of this process.
        blocks: of the KV cache, if they are watched.
        memory: that no profile saw, if it is watched.
    """

    def __init__(self, watch: Watch, blocks: Blocks | None = None, memory: Memory | None = None) -> None:
        self.watch, self.blocks, self.memory = watch, blocks, memory

    def collect(self) -> Iterator[Any]:
        """The families of metrics, as prometheus_client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
        yield CounterMetricFamily("staleproof_steps", "Steps of the engine", value=reading.steps)
        yield CounterMetricFamily(
            "staleproof_counted_steps", "Steps whose rows were counted", value=reading.counted
        )
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


def serve(watch: Watch, port: int, blocks: Blocks | None = None, memory: Memory | None = None) -> None:
    """Open the port. If that cannot be, one line says so and the engine runs on without it."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(Collector(watch, blocks, memory))
        server, _ = start_http_server(port, registry=registry)
        # A scraper that goes away in the middle of its answer is not worth a traceback.
        server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        say(f": watch on port {port}: {', '.join(watch.settings.stages)}")
    except ImportError:
        warn_once("watch without a port: prometheus_client is not installed")
    except (OSError, OverflowError) as error:
        # The counters run on: their first bad row is still a line in the log.
        warn_once(f"watch without a port: {port} cannot be opened: {getattr(error, 'strerror', error)}")
