"""The ``vllm.general_plugins`` entry point: applies the patches that the installed vLLM needs.

vLLM calls :func:`register` in each process it starts: API server, engine core, workers, and the one
that inspects models. It imports neither vLLM nor torch, touches no device and never raises, because
an exception here would stop vLLM.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from staleproof.vllm.hooks import logger, warn_once
from staleproof.vllm.patch import Patch
from staleproof.vllm.patches import NOTEBOOKS
from staleproof.vllm.sources import Evidence, NotShippedError, PatchError, Sources, installed

VARIABLE = "STALEPROOF_PATCHES"
# What the probes say of each release's source distribution; written by tests/vllm/table.py.
TABLE = Path(__file__).with_name("versions.json")
# A release, or a build of one that upstream publishes.
RELEASE = re.compile(r"(\d+\.\d+\.\d+)(?:\+(?:cu\d+|cpu))?")
CACHE_NOTE = (
    "torch.compile may have kept vLLM's own function in its cache: start once with "
    "VLLM_DISABLE_COMPILE_CACHE=1, or remove ~/.cache/vllm/torch_compile_cache"
)


@dataclass(frozen=True)
class Decision:
    """What the plugin does with one patch.

    Attributes:
        state: ``applied``, ``not needed``, ``refused`` or ``off``.
        why: the evidence, or the reason.
    """

    patch: Patch
    state: str
    why: str


@dataclass(frozen=True)
class Choice:
    """The patches that ``STALEPROOF_PATCHES`` selects.

    Attributes:
        names: patches to apply if they are needed.
        forced: those to apply even if another package has wrapped the target.
    """

    names: frozenset[str]
    forced: frozenset[str]


@cache
def patches() -> dict[str, Patch]:
    """Return every patch by name.

    >>> [name for name, patch in patches().items() if patch.traced]
    ['topk_nan', 'topk_nan_bias', 'scale_padding']
    """
    modules = [importlib.import_module(f"staleproof.vllm.patches.{incident}") for incident in NOTEBOOKS]
    return {patch.name: patch for module in modules for patch in module.PATCHES}


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return release -> patch -> ``needed`` and ``why``, as recorded from source distributions.

    >>> table()["0.20.2"]["decode_buffer"]["needed"]
    False
    """
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def chosen(text: str | None) -> Choice:
    """Read ``STALEPROOF_PATCHES``.

    Args:
        text: ``all`` (the default), ``none``, or names of patches or incidents; ``-name`` leaves
            one out, ``+name`` applies it even if another package has wrapped the target.

    Raises:
        PatchError: an unknown name.

    >>> len(chosen("all").names), sorted(chosen("decode_buffer,+mla_padding").names)
    (12, ['decode_buffer', 'mla_padding'])
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
    """Return the release that a version string is a build of.

    Raises:
        PatchError: it is not a release of the table.

    >>> release("0.18.1+cu129")
    '0.18.1'
    """
    match = RELEASE.fullmatch(version)
    if match is None or match[1] not in table():
        kind = "is not a release we know" if match else "is not a release, but a build of its own"
        raise PatchError(f"vLLM {version} {kind}; nothing is patched")
    return match[1]


def evidence(patch: Patch, version: str, sources: Sources | None) -> Evidence:
    """Probe these sources for a patch's defect; use the recorded probe if they cannot tell.

    Args:
        version: a release of the table.
        sources: of an installed vLLM, or ``None`` to use the recorded probe.

    Raises:
        PatchError: the probe cannot read what it needs, or a target is not as the patch expects.

    >>> evidence(patches()["decode_buffer"], "0.20.2", None).needed
    False
    """
    recorded = table()[version][patch.name]
    from_table = Evidence(recorded["needed"], recorded["why"])
    if sources is None:
        return from_table
    try:
        try:
            result = patch.is_needed(sources)
        except NotShippedError:
            why = f"{from_table.why} (recorded from the source of {version})"
            result = Evidence(from_table.needed, why)
        for target in patch.targets_for(version) if result.needed else ():
            target.check(sources)
        return result
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(f"the probe failed: {type(error).__name__}: {error}") from error


def decide(patch: Patch, version: str, sources: Sources | None, choice: Choice) -> Decision:
    """Decide what to do with one patch on one release; see :func:`evidence` for the arguments.

    >>> decide(patches()["mla_padding"], "0.18.1", None, chosen("none")).state
    'off'
    """
    if patch.name not in choice.names:
        return Decision(patch, "off", f"{VARIABLE} leaves it out")
    try:
        result = evidence(patch, version, sources)
    except PatchError as error:
        return Decision(patch, "refused", str(error))
    if not result.needed:
        return Decision(patch, "not needed", result.why)
    if not patch.applies_to(version):
        return Decision(patch, "refused", f"{result.why}; no patch for {version}")
    for name in patch.requires:
        other = decide(patches()[name], version, sources, choice)
        if other.state != "applied":
            return Decision(patch, "refused", f"needs {name}, which is {other.state}")
    return Decision(patch, "applied", result.why)


def decisions(version: str, sources: Sources | None = None, choice: Choice | None = None) -> list[Decision]:
    """Decide what to do with every patch.

    Args:
        version: as vLLM or the user spells it.
        sources: see :func:`evidence`.
        choice: by default what ``STALEPROOF_PATCHES`` says.

    Raises:
        PatchError: an unknown version, or an unknown name in the choice.

    >>> decided = decisions("0.33.0", choice=chosen("all"))
    >>> [decision.patch.name for decision in decided if decision.state == "applied"]
    ['mla_padding', 'topk_nan_bias', 'routing_simulator']
    """
    known = release(version)
    choice = choice or chosen(os.environ.get(VARIABLE))
    return [decide(patch, known, sources, choice) for patch in patches().values()]


def as_text(version: str, is_installed: bool, decided: Sequence[Decision]) -> str:
    """Format decisions as a table: state, patch, incident, and the evidence or the reason.

    >>> decided = decisions("0.20.2", choice=chosen("none"))
    >>> print(as_text("0.20.2", False, decided[:1]))
    vLLM 0.20.2, recorded probes of its source
    <BLANKLINE>
    state  patch        incident     evidence
    -----  -----------  -----------  --------
    off    mla_padding  mla_padding  STALEPROOF_PATCHES leaves it out
    """
    origin = "installed, probed now" if is_installed else "recorded probes of its source"
    rows = [["state", "patch", "incident", "evidence"]]
    rows += [[d.state, d.patch.name, d.patch.incident, d.why] for d in decided]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ["-" * width for width in (*widths, 8)])
    lines = [
        "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in rows
    ]
    return "\n".join([f"vLLM {version}, {origin}", "", *lines])


def as_json(version: str, is_installed: bool, decided: Sequence[Decision]) -> str:
    """Format decisions as JSON, for programs.

    >>> decided = decisions("0.20.2", choice=chosen("none"))
    >>> json.loads(as_json("0.20.2", False, decided))["patches"][0]["state"]
    'off'
    """
    rows = []
    for state, patch, why in ((d.state, d.patch, d.why) for d in decided):
        row = {"patch": patch.name, "incident": patch.incident, "state": state, "why": why}
        rows.append(row | {"summary": patch.summary})
    return json.dumps({"vllm": version, "installed": is_installed, "patches": rows}, indent=1)


def explanation(name: str) -> str:
    """Describe one patch: summary, mechanism, releases, targets, threads, cost, notebook.

    Raises:
        PatchError: no patch has this name.

    >>> print(explanation("scale_padding").splitlines()[0])
    scale_padding: allocates swizzled FP4 scales zeroed
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
        f"releases   {spans}, if the probe finds the defect",
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
    lines.append(f"notebook   notebooks/{NOTEBOOKS[patch.incident]}")
    return "\n".join(lines)


def register() -> None:
    """Apply the patches that this vLLM needs. vLLM calls this in each process.

    Logs what was decided, or one line that says why nothing is patched. Never raises.
    """
    try:
        if os.environ.get(VARIABLE, "").strip() == "none":
            logger.info("staleproof: off by %s", VARIABLE)
            return
        choice = chosen(os.environ.get(VARIABLE))
        version, sources = installed()
        decided = decisions(version, sources, choice)
        by_state: dict[str, list[str]] = {}
        for decision in decided:
            by_state.setdefault(decision.state, []).append(decision.patch.name)
            if decision.state == "applied":
                decision.patch.apply(release(version), force=decision.patch.name in choice.forced)
        summary = "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())
        traced = any(d.patch.traced for d in decided if d.state == "applied")
        note = f" ({CACHE_NOTE})" if traced else ""
        refused = [f"{d.patch.name} ({d.why})" for d in decided if d.state == "refused"]
        if refused:
            warn_once(f"on vLLM {version}, refused: {'; '.join(refused)}")
        logger.info("staleproof on vLLM %s: %s%s", version, summary, note)
    except PatchError as error:
        warn_once(str(error))
    except Exception as error:
        warn_once(f"nothing is patched: {type(error).__name__}: {error}")
