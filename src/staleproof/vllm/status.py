"""What an operator asks about patches: what is needed, why nothing would be patched, what to upgrade to."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from staleproof.vllm import live, process
from staleproof.vllm.plugin import (
    AFFECTED,
    PORT,
    REFUSED,
    WATCH,
    WILL,
    Decision,
    base,
    decisions,
    misspelled,
    on_request,
    patches,
    requested,
)
from staleproof.vllm.releases import last_of_series, release, table
from staleproof.vllm.sources import PatchError, installed, numbers
from staleproof.vllm.standing import SWITCHED
from staleproof.vllm.watch import OLDEST, number, settings

GROUP, NAME = "vllm.general_plugins", "staleproof"
MISSING = f"no entry point {NAME} in {GROUP} is installed"


def inactive() -> str | None:
    """Say why vLLM would not load the plugin; ``None`` if it would.

    >>> os.environ.get("VLLM_PLUGINS") is not None or inactive() in (None, MISSING)
    True
    """
    if not importlib.metadata.entry_points(group=GROUP, name=NAME):
        return MISSING
    chosen = os.environ.get("VLLM_PLUGINS")
    # vLLM strips no blanks.
    if chosen is not None and NAME not in chosen.split(","):
        return f"VLLM_PLUGINS={chosen} leaves {NAME} out"
    return None


def unwatched(version: str = "") -> str | None:
    """Say why ``STALEPROOF_WATCH`` is set but has no effect; ``None`` if it works or is not set.

    Args:
        version: of vLLM; "" or a build without a number: any release.

    >>> os.environ.get("STALEPROOF_WATCH") is not None or unwatched() is None
    True
    """
    try:
        if settings(os.environ) is None:
            return None
    except PatchError as error:
        return str(error)
    known = numbers(version)
    return f"{WATCH} needs vLLM {OLDEST} or later" if known and known < numbers(OLDEST) else None


def _warnings(version: str, decided: Sequence[Decision]) -> Iterator[str]:
    """What the variables of the plugin would do here that nobody may have meant."""
    if (why := unwatched(version)) is not None:
        yield f"{why}: nothing is watched"
    states = {d.patch.name: (d.state, d.why) for d in decided}
    try:
        process.required(os.environ.get(process.REQUIRE), states, patches() | on_request())
    except process.RequirementError as error:
        yield str(error)
    for name in on_request():
        if states[name][0] not in (WILL, process.OFF):
            yield f"{name} is {states[name][0]}: {states[name][1]}"
    if (wrong := misspelled()) is not None:
        yield wrong
    try:
        if os.environ.get(PORT):
            number(os.environ, PORT, 1, range(1, 65536))
    except PatchError as error:
        yield f"{error}: nobody can ask for the server's state"


def _switched(decided: Sequence[Decision]) -> tuple[list[Decision], list[str]]:
    """The decisions as the switch file leaves them, and what to say about it."""
    path, found = os.environ.get(live.SWITCH), [*decided]
    if not path:
        return found, []
    try:
        names, wrong = live.named(path, {d.patch.name: d.patch.incident for d in decided})
    except PatchError as error:
        return found, [str(error)]
    off: list[str] = []
    for at, one in enumerate(found):
        # What needs a patch comes behind it.
        needs = next((name for name in one.patch.requires if name in off), None)
        if one.state == WILL and (one.patch.name in names or needs):
            why = SWITCHED + path if one.patch.name in names else f"needs {needs}, which is off"
            found[at] = replace(one, state=process.OFF, why=f"{why}; {one.why}")
            off.append(one.patch.name)
    said = [wrong] if wrong else []
    if Path(path).exists():
        said.append(f"{live.SWITCH}: {path} switches off {', '.join(off) or 'nothing that is needed here'}")
    return found, said


# What a patch would do to a release that is not installed here.
WOULD = "would apply"


class Answer(NamedTuple):
    """What is known about one vLLM.

    Attributes:
        version: as it names itself, or as the user spelled it.
        installed: whether it was probed where it is installed.
        decided: one decision a patch.
        notes: lines for the reader: what the version is, why nothing is patched.
        upgrade: which release has fewer of these defects, in one line; empty if the release is not known.
    """

    version: str
    installed: bool
    decided: list[Decision]
    notes: list[str]
    upgrade: str = ""


def answer(version: str | None = None) -> Answer:
    """Decide about a release of the table, or the installed vLLM, and add what a reader should know.

    Raises:
        PatchError: an unknown version, no vLLM, or an unknown name in ``STALEPROOF_PATCHES``.

    >>> answer("0.28.0").decided[0].state, answer("v0.18").version
    ('would apply', '0.18.1')
    """
    if version is not None:
        name = release(last_of_series(version))
        decided = [replace(d, state=WOULD) if d.state == AFFECTED else d for d in decisions(name)]
        notes = [] if name in version else [f"note: {version} is read as {name}, the last of that series"]
        return Answer(name, False, decided, notes, upgrade(decided, name))
    version, sources = installed()
    decided, of, why = decisions(version, sources), base(version), inactive()
    notes = [f"note: {of.unknown}"] if of.unknown else []
    if why is not None:
        decided = [replace(d, state=AFFECTED) if d.state == WILL else d for d in decided]
        notes.append(f"warning: {why}: nothing is patched")
    else:
        every, switched = _switched([*decided, *requested()])
        decided = every[: len(decided)]
        notes += [f"warning: {said}" for said in (*_warnings(version, every), *switched)]
    return Answer(version, True, decided, notes, upgrade(decided, None if of.unknown else of.name))


def must_worry(decided: Sequence[Decision]) -> bool:
    """Say whether something that this vLLM is, or may be, affected by is refused.

    >>> from staleproof.vllm.plugin import decisions, chosen
    >>> must_worry(decisions("0.18.1", choice=chosen("all")))
    False
    >>> must_worry(decisions("0.18.1", choice=chosen("-undrained_ids")))
    True
    """
    return any(d.state == REFUSED for d in decided)


def upgrade(decided: Sequence[Decision], release: str | None) -> str:
    """Say in one line which later release needs the fewest of these patches.

    Args:
        release: the release of the table that was decided about, or ``None``.

    >>> from staleproof.vllm.plugin import decisions, chosen
    >>> upgrade(decisions("0.20.2", choice=chosen("mla_padding")), "0.20.2")[:17]
    'upgrade to 0.28.0'
    """
    if not any(d.needed for d in decided):
        known = all(d.needed is False for d in decided)
        return "no defect that we know of" if known else "which it needs is not known"
    if release is None:
        return ""
    later = [*table()][[*table()].index(release) :]
    needs = {name: [patch for patch in patches() if table()[name][patch]["needed"]] for name in later}
    # The first of those that need the fewest.
    best = min(needs, key=lambda name: len(needs[name]))
    if best == release:
        return "no later release has fewer of these defects"
    only = f"only {', '.join(needs[best])}" if needs[best] else "none"
    return f"upgrade to {best}, which needs {only}"
