"""Figures in prose that name the finding or the file they come from, so that a test can compare them.

On a page an HTML comment behind a sentence names the source of the sentence's figures:

    12 blocks reach attention. <!-- finding: engine | off/on/off | staging_race, late copies, no wait -->
    788,070 ids stay. <!-- file: soak-cpu.json -->
    It knows 26 releases, 0.16.0 to 0.33.0. <!-- releases -->

>>> unbound("12 blocks of 3.94 GiB, and 7 more (vLLM #123, `--port 8000`)", '{"blocks": 12, "b": 4227907584}')
['7']
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from staleproof.cases.finding import Finding

MARK = re.compile(r"<!-- (finding|file|releases)(?:: (.*?))? -->")
# A figure, with its unit if that is one of bytes; no part of a name such as H200, and no number of an issue.
_FIGURE = re.compile(r"(?<![\w.#/])(\d[\d,]*(?:\.\d+)*(?:\.post\d+)?)(?: (GiB|MiB|KiB))?")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def unbound(text: str, source: str) -> list[str]:
    """The figures of a text that its source does not hold.

    Args:
        text: prose; code spans, links and dates are left out.
        source: what the figures come from, e.g. a finding as JSON.
    """
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d", " ", text)
    held = {one.replace(",", "") for one in re.findall(r"\d[\d,]*(?:\.\d+)*(?:\.post\d+)?", source)}
    values = [float(one) for one in held if re.fullmatch(r"\d+(\.\d+)?", one)]
    missing = []
    for figure, unit in _FIGURE.findall(text):
        plain = figure.rstrip(",").replace(",", "")
        if plain in held:
            continue
        decimals = len(plain.partition(".")[2])
        is_number = re.fullmatch(r"\d+(\.\d+)?", plain) is not None
        scale = _UNITS.get(unit, 1)
        if not is_number or not any(round(value / scale, decimals) == float(plain) for value in values):
            missing.append(figure)
    return missing


def passages(page: str) -> Iterator[tuple[str, str, str]]:
    """Of each mark of a page: the sentence before it, its kind and what it names."""
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\| )", page):
        begin = 0
        for mark in MARK.finditer(paragraph):
            text = paragraph[begin : mark.start()].strip()
            yield re.split(r"(?<=[.:;])\s+(?=[A-Z])", text)[-1], mark[1], mark[2] or ""
            begin = mark.end()


def source_of(
    kind: str,
    name: str,
    findings: Mapping[tuple[str, ...], Sequence[Finding]],
    book: Path,
    releases: Sequence[str],
) -> str:
    """The text that a mark's figures must be in.

    Args:
        kind: of the mark.
        name: what it names: incident, question and variant, or a file of the workbook.
        findings: of all recorded runs, by these three.
        book: the workbook.
        releases: of vLLM that were probed.

    Raises:
        KeyError: no recorded run has the finding.
    """
    if kind == "file":
        return (book / name).read_text("utf-8")
    if kind == "releases":
        return f"{len(releases)} {releases[0]} {releases[-1]}"
    key = tuple(part.strip() for part in name.split(" | "))
    return "\n".join(json.dumps(asdict(found), default=str) for found in findings[key])
