"""Figures in prose that name the finding or the file they come from, so that a test can compare them.

On a page an HTML comment behind a sentence names the source of the sentence's figures:

    12 blocks reach attention. <!-- finding: engine | off/on/off | staging_race, late copies, no wait -->
    788,070 ids stay. <!-- file: soak-cpu.json -->
    It knows 26 releases, 0.16.0 to 0.33.0. <!-- releases -->
    The buffer came with 0.18.0 and went with 0.20.0. <!-- releases: decode_buffer -->

Marks that follow each other are for the same text. `source` names what was read, and `by hand` says where and
when something was measured that no recorded run holds.

>>> unbound("12 blocks of 3.94 GiB, and 7 more (vLLM #123, `--port 8000`)", '{"blocks": 12, "b": 4227907584}')
['7']
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from staleproof.cases.finding import Finding
from staleproof.vllm.releases import spans

MARK = re.compile(r"<!-- (finding|file|releases|source|by hand)(?:: (.*?))? -->", re.DOTALL)
# Text, and the marks behind it.
GROUP = re.compile(rf"((?:(?!<!-- ).)*)((?:\s*{MARK.pattern})+)", re.DOTALL)
# A measured quantity in prose: what a sentence may not say without its source.
MEASURED = re.compile(
    r"(?<![\w.#/-])\d[\d,]*(?:\.\d+)?\s?"
    r"(?:us|ms|s|%|per cent|GiB|MiB|KiB|GB|MB|TFLOP/s|TB/s|GB/s|of [\d,]+"
    r"|times as|requests|steps|engines)(?!\w)"
)
# A range of releases of vLLM.
RANGE = re.compile(r"\b(0\.\d\d\.\d)`? (?:to|through) `?(0\.\d\d\.\d)\b")
# Kinds of marks that no test can compare.
READ = {"source", "by hand"}
# What else names a source: a file and line of somebody's source, or a thread upstream.
LINE = re.compile(r"\.(?:py|cuh?|hpp|h|cpp)`?(?:\]\([^)]*\))?:\d+|`:\d+")
CITED = re.compile(rf"#\d{{4,}}|{LINE.pattern}")
# A figure, with its unit if that is one of bytes; no part of a name such as H200, and no number of an issue.
_FIGURE = re.compile(r"(?<![\w.#/])(\d[\d,]*(?:\.\d+)*(?:\.post\d+)?)(?: (GiB|MiB|KiB|ms))?")
# What a file counts in bytes and seconds.
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "ms": 1e-3}


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
        scaled = [round(value / by, decimals) for value in values for by in {1, scale}]
        if not is_number or float(plain) not in scaled:
            missing.append(figure)
    return missing


def paragraphs(page: str) -> list[str]:
    """The paragraphs, entries of lists and rows of tables of a page, without blocks of code."""
    return re.split(r"\n\s*\n|\n(?=- |\| )", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))


def passages(page: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Of each group of marks of a page: the text before it in its paragraph, and kind and name of each mark.

    >>> [*passages("Eight of 8, in 3 us. <!-- file: a --> <!-- file: b --> No.")]
    [('Eight of 8, in 3 us.', [('file', 'a'), ('file', 'b')])]
    """
    for paragraph in paragraphs(page):
        for group in GROUP.finditer(paragraph):
            marks = [(mark[1], " ".join((mark[2] or "").split())) for mark in MARK.finditer(group[2])]
            yield group[1].strip(), marks


def unnamed(page: str) -> list[str]:
    """The paragraphs and tables of a page that state a measured quantity and name no source of it.

    >>> unnamed("It takes 3 us.\\n\\nIt takes 3 us. <!-- file: a -->\\n\\n#12345 measured 3 us.\\n\\n3 rows.")
    ['It takes 3 us.']
    """
    page = re.sub(r"^```.*?^```|<!-- written by .*?<!-- end of", "", page, flags=re.DOTALL | re.MULTILINE)
    return [
        paragraph
        for paragraph in re.split(r"\n\s*\n|\n(?=- )", page)
        if MEASURED.search(re.sub(r"`[^`]*`", "", paragraph))
        and not (MARK.search(paragraph) or CITED.search(paragraph))
    ]


def source_of(
    kind: str,
    name: str,
    findings: Mapping[tuple[str, ...], Sequence[Finding]],
    book: Path,
    probes: Mapping[str, Mapping[str, Mapping[str, object]]],
) -> str:
    """The text that a mark's figures must be in.

    Args:
        kind: of the mark.
        name: what it names: incident, question and variant (``*`` for any text), a file of the workbook, or a
            patch, whose releases are the ends of the ranges that have its defect, and of those that have not.
        findings: of all recorded runs, by these three.
        book: the workbook.
        probes: release of vLLM -> patch -> what its probe said.

    Raises:
        KeyError: no recorded run has the finding.
    """
    if kind == "file":
        return (book / name).read_text("utf-8")
    if kind == "releases":
        having = [release for release in probes if not name or probes[release][name]["needed"]]
        lacking = [release for release in probes if release not in having]
        return f"{len(having)} {spans(having)}; {spans(lacking)}"
    named = [key for key in findings if fnmatch.fnmatchcase(" | ".join(key), name)]
    if not named:
        raise KeyError(f"no recorded finding {name}")
    return "\n".join(_said(found) for key in named for found in findings[key])


# Fields of a finding whose numbers are neither counts nor measurements.
_BOOKKEEPING = ("date", "machinery", "schema", "script", "source_digest")


def _said(found: Finding) -> str:
    fields = {name: value for name, value in asdict(found).items() if name not in _BOOKKEEPING}
    return json.dumps(fields, default=str)
