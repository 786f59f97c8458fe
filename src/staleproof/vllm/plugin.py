"""The ``vllm.general_plugins`` entry point: puts every patch in place that fits this vLLM.

vLLM calls :func:`register` in each process it starts: API server, engine core, workers, and the one
that inspects models. It imports neither vLLM nor torch, touches no device, and raises nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from staleproof import device
from staleproof.incidents.registry import INCIDENTS
from staleproof.vllm.hooks import Evidence, NotShippedError, Patch, PatchError, Sources, logger, report_once

VARIABLE = "STALEPROOF_PATCHES"
# What the probes read in the source distributions, release by release (tests/vllm/table.py).
TABLE = Path(__file__).with_name("versions.json")
# A release, or the builds of one that upstream publishes.
RELEASE = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cu\d+|cpu))?")
CACHE_NOTE = (
    "torch.compile may have kept vLLM's own function in its cache: start once with "
    "VLLM_DISABLE_COMPILE_CACHE=1, or remove ~/.cache/vllm/torch_compile_cache"
)


@dataclass(frozen=True)
class Decision:
    """What becomes of one patch.

    Attributes:
        state: ``applied``, ``not needed``, ``refused`` or ``off``.
        why: the evidence, or the reason.
    """

    patch: Patch
    state: str
    why: str


@dataclass(frozen=True)
class Choice:
    """What the user asked for.

    Attributes:
        names: patches to apply where they are needed.
        forced: those to apply even where another package has wrapped the target.
    """

    names: frozenset[str]
    forced: frozenset[str]


@cache
def patches() -> dict[str, Patch]:
    """Every patch by name."""
    found = {}
    for incident in INCIDENTS:
        for patch in importlib.import_module(f"staleproof.vllm.patches.{incident}").PATCHES:
            found[patch.name] = patch
    return found


@cache
def table() -> dict[str, dict[str, Any]]:
    """Release -> patch -> ``needed`` and ``why``, as its source distribution was probed."""
    return dict(json.loads(TABLE.read_text()))


def chosen(text: str | None) -> Choice:
    """Read ``STALEPROOF_PATCHES``.

    Args:
        text: ``all`` (the default), ``none``, or names of patches or incidents; ``-name`` leaves
            one out, ``+name`` applies it even where another package has wrapped the target.

    Raises:
        PatchError: an unknown name.
    """
    known = patches()
    words = [word.strip() for word in (text or "all").split(",") if word.strip()]
    names: set[str] = set()
    forced: set[str] = set()
    if all(word[0] in "+-" for word in words):
        names = {*known}
    for word in words:
        bare = word.lstrip("+-")
        group = {p.name for p in known.values() if bare in (p.name, p.incident)}
        if word == "all":
            names = {*known}
        elif word == "none":
            names = set()
        elif not group:
            raise PatchError(
                f"{VARIABLE} names {bare!r}, nothing is patched; known: all, none, {', '.join(known)}"
            )
        elif word[0] == "-":
            names -= group
        else:
            names |= group
            forced |= group if word[0] == "+" else set()
    return Choice(frozenset(names), frozenset(forced))


def release(version: str) -> str:
    """The release that a version string is a build of, e.g. ``0.18.1`` for ``0.18.1+cu129``.

    Raises:
        PatchError: it is none whose sources were probed.
    """
    match = RELEASE.fullmatch(version)
    if match is None or match[1] not in table():
        kind = "is not a release we know" if match else "is not a release, but a build of its own"
        raise PatchError(f"vLLM {version} {kind}; nothing is patched")
    return match[1]


def installed() -> tuple[str, Sources]:
    """Version and sources of the installed vLLM, found without importing it.

    Raises:
        PatchError: none is installed, or half of one.
    """
    spec = importlib.util.find_spec("vllm")
    version = device.version_of("vllm")
    if spec is None and version is None:
        raise PatchError("no vLLM is installed")
    if spec is None or not spec.submodule_search_locations or spec.origin is None:
        raise PatchError(f"vLLM {version} is half installed: no importable package; nothing is patched")
    if version is None:
        raise PatchError("vLLM is half installed: its metadata is missing; nothing is patched")
    flashinfer = device.version_of("flashinfer-python")
    return version, Sources(Path(spec.origin).parent, flashinfer=flashinfer)


def evidence(patch: Patch, version: str, sources: Sources | None) -> Evidence:
    """What the probe finds in these sources; the recorded probe where they cannot tell.

    Args:
        version: a release of the table.
        sources: of an installed vLLM, or ``None`` for the recorded probes alone.

    Raises:
        PatchError: the probe finds nothing to read.
    """
    recorded = table()[version][patch.name]
    from_table = Evidence(recorded["needed"], recorded["why"])
    if sources is None:
        return from_table
    try:
        try:
            found = patch.is_needed(sources)
        except NotShippedError:
            why = f"{from_table.why} (recorded from the source of {version})"
            found = Evidence(from_table.needed, why)
        for target in patch.targets_for(version) if found.needed else ():
            target.check(sources)
        return found
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(f"the probe failed: {type(error).__name__}: {error}") from error


def decide(patch: Patch, version: str, sources: Sources | None, choice: Choice) -> Decision:
    """What becomes of one patch on one release; see :func:`evidence`."""
    if patch.name not in choice.names:
        return Decision(patch, "off", f"{VARIABLE} leaves it out")
    try:
        found = evidence(patch, version, sources)
    except PatchError as error:
        return Decision(patch, "refused", str(error))
    if not found.needed:
        return Decision(patch, "not needed", found.why)
    if not patch.applies_to(version):
        return Decision(patch, "refused", f"{found.why}; no patch for {version}")
    for name in patch.requires:
        other = decide(patches()[name], version, sources, choice)
        if other.state != "applied":
            return Decision(patch, "refused", f"needs {name}, which is {other.state}")
    return Decision(patch, "applied", found.why)


def decisions(version: str, sources: Sources | None = None, choice: Choice | None = None) -> list[Decision]:
    """What becomes of every patch.

    Args:
        version: as vLLM or the user spells it.
        sources: see :func:`evidence`.
        choice: by default what ``STALEPROOF_PATCHES`` says.

    Raises:
        PatchError: an unknown version, or an unknown name in the choice.
    """
    known = release(version)
    choice = choice or chosen(os.environ.get(VARIABLE))
    return [decide(patch, known, sources, choice) for patch in patches().values()]


def as_text(version: str, is_installed: bool, found: Sequence[Decision]) -> str:
    """Decisions as a table: state, patch, incident, and the evidence or the reason."""
    origin = "installed, probed now" if is_installed else "recorded probes of its source"
    rows = [["state", "patch", "incident", "evidence"]]
    rows += [[d.state, d.patch.name, d.patch.incident, d.why] for d in found]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ["-" * width for width in (*widths, 8)])
    lines = [
        "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in rows
    ]
    return "\n".join([f"vLLM {version}, {origin}", "", *lines])


def as_json(version: str, is_installed: bool, found: Sequence[Decision]) -> str:
    """The same for programs."""
    patches_ = [
        {
            "patch": d.patch.name,
            "incident": d.patch.incident,
            "state": d.state,
            "why": d.why,
            "summary": d.patch.summary,
        }
        for d in found
    ]
    answer = {"vllm": version, "installed": is_installed, "patches": patches_}
    return json.dumps(answer, indent=1)


def explanation(name: str) -> str:
    """Everything about one patch, by its name.

    Raises:
        PatchError: no patch has this name.
    """
    if name not in patches():
        raise PatchError(f"unknown patch {name!r}; known: {', '.join(patches())}")
    patch = patches()[name]
    spans = ", ".join(f"{first} to {last}" for first, last in patch.versions)
    where = [f"{target.module}: {target.name}" for target in patch.targets]
    lines = [
        f"{name}: {patch.summary}",
        "",
        *textwrap.wrap(patch.mechanism, 88),
        "",
        f"releases   {spans}, where the probe finds it",
        f"wraps      {where[0]}",
        *(f"           {place}" for place in where[1:]),
        f"upstream   {', '.join(patch.threads)}",
        f"cost       {patch.cost}",
    ]
    if patch.requires:
        lines.append(f"needs      {', '.join(patch.requires)}")
    if patch.traced:
        lines.append(f"cache      {CACHE_NOTE}")
    else:
        lines.append("cache      torch.compile does not see it: nothing to clear")
    lines.append(f"notebook   notebooks/{INCIDENTS[patch.incident].notebook}")
    return "\n".join(lines)


def register() -> None:
    """What vLLM calls. Logs one line, whatever happens."""
    try:
        if os.environ.get(VARIABLE, "").strip() == "none":
            logger.info("staleproof: off by %s", VARIABLE)
            return
        choice = chosen(os.environ.get(VARIABLE))
        version, sources = installed()
        found = decisions(version, sources, choice)
        by_state: dict[str, list[str]] = {}
        for decision in found:
            by_state.setdefault(decision.state, []).append(decision.patch.name)
            if decision.state == "applied":
                decision.patch.apply(release(version), force=decision.patch.name in choice.forced)
        summary = "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())
        traced = any(d.patch.traced for d in found if d.state == "applied")
        note = f" ({CACHE_NOTE})" if traced else ""
        refused = [f"{d.patch.name} ({d.why})" for d in found if d.state == "refused"]
        if refused:
            report_once(f"on vLLM {version}, refused: {'; '.join(refused)}")
        logger.info("staleproof on vLLM %s: %s%s", version, summary, note)
    except PatchError as error:
        report_once(str(error))
    except Exception as error:
        report_once(f"nothing is patched: {type(error).__name__}: {error}")
