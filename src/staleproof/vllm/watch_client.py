"""``staleproof watch``: what the watch of a live server counts, as a table or as JSON."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from staleproof.check import require

PREFIX = "staleproof_"
TIMEOUT_S = 5.0
# The watch's own numbers without labels: every other one is a counter of a patch or of a detector.
OF_WATCH = {"steps", "counted_steps", "begun_steps", "reading_age_seconds", "watch_up", "ok"}


class WatchError(RuntimeError):
    """The port does not answer, or is not a watch's; the text is one line."""


def parse(text: str) -> list[Sample]:
    """The samples of ours in what a port answers, their names without ``staleproof_`` and ``_total``.

    >>> (one,) = parse('staleproof_bad_rows_total{stage="router",layer="layers.0",rows="live"} 3.0')
    >>> one.name, one.labels, one.value
    ('bad_rows', {'stage': 'router', 'layer': 'layers.0', 'rows': 'live'}, 3.0)
    """
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return [
        one._replace(name=one.name.removeprefix(PREFIX).removesuffix("_total"))
        for one in samples
        if one.name.startswith(PREFIX) and not one.name.endswith("_created")
    ]


def fetch(url: str) -> list[Sample]:
    """Read a watch's port.

    Args:
        url: ``host:port``, with or without ``http://`` and ``/metrics``.

    Raises:
        WatchError: nothing answers, or what answers is no watch.
    """
    address = url if "//" in url else f"http://{url}"
    address = address if address.rstrip("/").endswith("/metrics") else f"{address.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            samples = parse(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise WatchError(f"{address}: {getattr(error, 'reason', None) or error}") from error
    if not samples:
        raise WatchError(f"{address}: no metrics of staleproof there; is STALEPROOF_WATCH=1 set?")
    return samples


def as_json(samples: list[Sample]) -> str:
    """All samples as one JSON object: steps, bad rows, duplicate rows, blocks, memory, patches."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append({**sample.labels, "value": sample.value})
    return json.dumps(by_name, sort_keys=True)


def rows(samples: list[Sample]) -> list[tuple[str, str, int, int]]:
    """(stage, layer, padding rows, live rows): rows with a NaN or Inf, then experts named twice.

    >>> rows([Sample("bad_rows", {"stage": "experts", "layer": "layers.1", "rows": "live"}, 2.0)])
    [('experts', 'layers.1', 0, 2)]
    """
    table: dict[tuple[str, str], dict[str, int]] = {}
    for sample in samples:
        if sample.name in ("bad_rows", "duplicate_expert_rows"):
            stage = sample.labels.get("stage", "expert twice")
            key = stage, sample.labels["layer"]
            table.setdefault(key, {})[sample.labels["rows"]] = int(sample.value)
    return [(*key, counts.get("padding", 0), counts.get("live", 0)) for key, counts in table.items()]


def canaries(samples: list[Sample]) -> int:
    """How many of the bad rows held a canary, so that nobody wrote them.

    >>> canaries([Sample("canary_rows", {"stage": "router", "layer": "layers.1", "rows": "live"}, 2.0)])
    2
    """
    return sum(int(sample.value) for sample in samples if sample.name == "canary_rows")


def counters(samples: list[Sample]) -> str:
    """What the host counts in all processes of the server: those of contain, of poison and of incident 7.

    >>> counters([Sample("steps", {}, 9.0), Sample("contained_requests", {}, 8.0), Sample("ok", {}, 1.0)])
    'contained requests 8'
    """
    found = (sample for sample in samples if not sample.labels and sample.name not in OF_WATCH)
    return "; ".join(f"{sample.name.replace('_', ' ')} {sample.value:.0f}" for sample in found)


def heading(samples: list[Sample]) -> str:
    """Steps, and what share of them the counts are of.

    >>> steps = Sample("steps", {}, 400.0), Sample("counted_steps", {}, 100.0)
    >>> heading([*steps, Sample("sample", {"of": "layers"}, 1.0)])
    'step 400; counts are of 100 steps: of all there were about 4.0 times as many'
    """
    sums = {name: sum(s.value for s in samples if s.name == name) for name in ("steps", "counted_steps")}
    text = f"step {sums['steps']:.0f}"
    if 0 < sums["counted_steps"] < sums["steps"]:
        times = sums["steps"] / sums["counted_steps"]
        text += f"; counts are of {sums['counted_steps']:.0f} steps"
        text += f": of all there were about {times:.1f} times as many"
    layers = max((int(s.value) for s in samples if s.labels.get("of") == "layers"), default=1)
    return text + (f"; one layer in {layers}" if layers > 1 else "")


def table(samples: list[Sample]) -> Any:
    """The samples as a table of rich; a row with live rows is red."""
    from rich.table import Table

    stands = [s.labels for s in samples if s.name == "patch_info" and s.labels["process"] == "server"]
    patches = [f"{labels['patch']} {labels['state']}" for labels in stands]
    notes = [line] if (line := counters(samples)) else []
    notes.append("; ".join(patches) or "no patch")
    if (count := canaries(samples)) > 0:
        notes.append(f"{count} bad rows hold a canary: nobody wrote them")
    notes += [
        f"the first bad live row's request {s.labels['request']} read blocks {s.labels['blocks']}"
        for s in samples
        if s.name == "bad_row_blocks"
    ]
    stale = [s for s in samples if s.name == "stale_blocks_read"]
    notes += [
        f"{s.value:.0f} blocks of {s.labels['written_as']} read as {s.labels['read_as']} before written"
        # Attention masks what lies behind a request's end.
        + (" (harmless)" if {s.labels["written_as"], s.labels["read_as"]} == {"attention"} else "")
        for s in stale
    ]
    notes += [
        f"{s.value / 2**20:.1f} MiB unprofiled: {s.labels['owner']}"
        for s in samples
        if s.name == "unprofiled_bytes" and s.value
    ]
    found = Table(
        "stage", "layer", "padding rows", "live rows", title=heading(samples), caption="\n".join(notes)
    )
    for stage, layer, padding, live in rows(samples):
        found.add_row(stage, layer, str(padding), str(live), style="bold red" if live else None)
    return found


def follow(url: str, every_s: float, draw: Callable[[Any], None]) -> None:
    """Draw the table again and again, until Ctrl-C.

    Raises:
        ValueError: a period that is not positive.
        WatchError: see :func:`fetch`.
    """
    require(every_s > 0, "every_s", "a positive number of seconds", every_s)
    while True:
        draw(table(fetch(url)))
        time.sleep(every_s)
