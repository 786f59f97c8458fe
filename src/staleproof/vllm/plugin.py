"""The ``vllm.general_plugins`` entry point: applies the patches that the installed vLLM needs.

vLLM calls :func:`register` in each process it starts: API server, engine core, workers, and the one
that inspects models. It imports neither vLLM nor torch, touches no device and never raises, because
an exception here would stop vLLM, unless ``STALEPROOF_REQUIRE`` asks for just that.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from staleproof.vllm import backend, contain, live, poison, process
from staleproof.vllm.hooks import out_of_service, warn_once
from staleproof.vllm.patch import Patch
from staleproof.vllm.patches import NOTEBOOKS
from staleproof.vllm.releases import TABLE, neighbours, release, table
from staleproof.vllm.sources import Evidence, NotShippedError, PatchError, Sources, installed
from staleproof.vllm.standing import registry

VARIABLE = "STALEPROOF_PATCHES"
UNKNOWN = "STALEPROOF_UNKNOWN"
# The port on which a server's first process reports the patches of all processes; unset, no port is opened.
PORT, WATCH = "STALEPROOF_PORT", "STALEPROOF_WATCH"
AFFECTED, WILL, REFUSED = "affected", "will be patched", "refused"


@dataclass(frozen=True)
class Decision:
    """What the plugin does with one patch.

    Attributes:
        state: ``affected`` (the recorded probe found the defect), ``will be patched`` (so did the probe
            of the installed vLLM), ``not needed``, ``refused`` or ``off``.
        why: the evidence, or the reason.
        needed: whether the defect is there; ``None`` if the probe could not tell.
    """

    patch: Patch
    state: str
    why: str
    needed: bool | None


@dataclass(frozen=True)
class Choice:
    """The patches that ``STALEPROOF_PATCHES`` selects.

    Attributes:
        names: patches to apply if they are needed.
        forced: those to apply even if another package has wrapped the target.
    """

    names: frozenset[str]
    forced: frozenset[str]


# What is off unless its own variable asks for it. Contain comes first: it zeroes, then the other one fills.
ON_REQUEST = (contain, poison)


def on_request() -> dict[str, Patch]:
    """Return the patches of :data:`ON_REQUEST` by name."""
    return {module.NAME: module.PATCH for module in ON_REQUEST}


@cache
def patches() -> dict[str, Patch]:
    """Return every patch by name, but for those of :data:`ON_REQUEST`.

    >>> [name for name, patch in patches().items() if patch.traced]
    ['topk_nan', 'topk_nan_bias', 'hash_topk_nan', 'scale_padding']
    """
    modules = [importlib.import_module(f"staleproof.vllm.patches.{incident}") for incident in NOTEBOOKS]
    return {patch.name: patch for module in modules for patch in module.PATCHES}


def chosen(text: str | None) -> Choice:
    """Read ``STALEPROOF_PATCHES``.

    Args:
        text: ``all`` (the default), ``none``, or names of patches or incidents; ``-name`` leaves
            one out, ``+name`` applies it even if another package has wrapped the target.

    Raises:
        PatchError: an unknown name.

    >>> len(chosen("all").names), sorted(chosen("decode_buffer,+mla_padding").names)
    (20, ['decode_buffer', 'mla_padding'])
    """
    known = patches()
    words = [word.strip() for word in (text or "all").split(",") if word.strip()]
    names: set[str] = set()
    forced: set[str] = set()
    if all(word[0] in "+-" for word in words):
        names = {*known}
    for word in words:
        bare = word.lstrip("+-")
        # An incident may have a patch of its own name, which then means that patch.
        group = {bare} if bare in known else {p.name for p in known.values() if p.incident == bare}
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


class Base(NamedTuple):
    """The release of the table that a vLLM is, or comes next after.

    Attributes:
        name: the release.
        unknown: what the version is if it is not that release, in one line.
    """

    name: str
    unknown: str | None = None


def base(version: str) -> Base:
    """Find the release of the table that a version is, or else the last one before it.

    Raises:
        PatchError: no release of the table comes before it.

    >>> base("0.18.1+cu129"), base("0.20.3").name
    (Base(name='0.18.1', unknown=None), '0.20.2')
    """
    try:
        return Base(release(version))
    except PatchError as error:
        before, _ = neighbours(version)
        if before is None:
            raise
        return Base(before, str(error))


def evidence(patch: Patch, of: Base, sources: Sources | None) -> Evidence:
    """Probe these sources for a patch's defect; use the recorded probe if they cannot tell.

    Args:
        of: what these sources are.
        sources: of an installed vLLM, or ``None`` to use the recorded probe.

    Raises:
        PatchError: the probe cannot read what it needs, or only CUDA sources of an unknown release
            could tell.

    >>> evidence(patches()["decode_buffer"], Base("0.20.2"), None).needed
    False
    """
    try:
        recorded = Evidence(**table()[of.name][patch.name])
    except (LookupError, TypeError) as error:
        raise PatchError(f"{TABLE.name} does not say: {error!r}") from error
    if sources is None:
        return recorded
    try:
        return patch.is_needed(sources)
    except NotShippedError as error:
        if of.unknown:
            raise PatchError(f"{error}, and only it could tell") from error
        return Evidence(recorded.needed, f"{recorded.why} (recorded from the source of {of.name})")
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(f"the probe failed: {type(error).__name__}: {error}") from error


def decide(patch: Patch, of: Base, sources: Sources | None, choice: Choice) -> Decision:
    """Decide what to do with one patch on one release; see :func:`evidence` for the arguments.

    >>> decide(patches()["mla_padding"], Base("0.18.1"), None, chosen("none")).state
    'off'
    """
    try:
        needed, why = evidence(patch, of, sources)
    except PatchError as error:
        return Decision(patch, REFUSED if patch.name in choice.names else "off", str(error), None)
    if patch.name not in choice.names:
        return Decision(patch, "off", f"{VARIABLE} leaves it out; {why}", needed)
    if not needed:
        return Decision(patch, "not needed", why, needed)
    reason = _refusal(patch, of, sources, choice)
    if reason is not None:
        return Decision(patch, REFUSED, f"{why}; {reason}", needed)
    return Decision(patch, AFFECTED if sources is None else WILL, why, needed)


def _refusal(patch: Patch, of: Base, sources: Sources | None, choice: Choice) -> str | None:
    """Say why a needed patch cannot be put in place."""
    if not patch.applies_to(of.name):
        return f"no patch for {of.name}"
    try:
        if sources is not None:
            patch.check(of.name, sources)
    except PatchError as error:
        return str(error)
    except Exception as error:
        return f"its check failed: {type(error).__name__}: {error}"
    if of.unknown and os.environ.get(UNKNOWN) != "probe":
        return f"this release is not in the table; {UNKNOWN}=probe patches it all the same"
    for name in patch.requires:
        other = decide(patches()[name], of, sources, choice)
        if other.state not in (AFFECTED, WILL):
            return f"needs {name}, which is {other.state}"
    return None


def decisions(version: str, sources: Sources | None = None, choice: Choice | None = None) -> list[Decision]:
    """Decide what to do with every patch.

    A version that is not in the table is probed if its sources are given. Nothing is patched then,
    unless ``STALEPROOF_UNKNOWN=probe``.

    Args:
        version: as vLLM or the user spells it.
        sources: see :func:`evidence`.
        choice: by default what ``STALEPROOF_PATCHES`` says.

    Raises:
        PatchError: an unknown version without sources, or an unknown name in the choice.

    >>> decided = decisions("0.28.0", choice=chosen("all"))
    >>> [decision.patch.name for decision in decided if decision.state == "affected"][4:]
    ['routing_simulator', 'unpublish', 'uniform_decode', 'one_token_prompt']
    """
    of = Base(release(version)) if sources is None else base(version)
    choice = choice or chosen(os.environ.get(VARIABLE))
    return [decide(patch, of, sources, choice) for patch in patches().values()]


def requested() -> list[Decision]:
    """Decide about what is off unless its own variable asks for it."""
    found = []
    for module in ON_REQUEST:
        patch, needed = module.PATCH, None
        try:
            if not module.enabled(os.environ):
                state, why = process.OFF, f"{module.VARIABLE} does not ask for it"
            else:
                version, sources = installed()
                needed, why = patch.is_needed(sources)
                state = WILL if needed else process.NOT_NEEDED
                reason = _refusal(patch, base(version), sources, chosen("none"))
                if needed and reason is not None:
                    state, why = REFUSED, reason
        except (Exception, SystemExit) as error:
            state, why = REFUSED, str(error) or type(error).__name__
        found.append(Decision(patch, state, why, needed))
    return found


def misspelled() -> str | None:
    """Say what is wrong with ``STALEPROOF_UNKNOWN``; ``None``: nothing."""
    said = os.environ.get(UNKNOWN, "")
    wrong = f"{UNKNOWN}: expected probe, got {said!r}: an unknown release is not patched"
    return None if said in ("", "probe") else wrong


def register() -> None:
    """Apply the patches that this vLLM needs. vLLM calls this in each process.

    Logs what was decided, or one line that says why nothing is patched.

    Raises:
        RequirementError: a patch that ``STALEPROOF_REQUIRE`` names does not stand. Nothing else.
    """
    require, reason = os.environ.get(process.REQUIRE), ""
    here = live.Here()
    warn_once(misspelled())
    try:
        try:
            here.incidents = {patch.name: patch.incident for patch in (patches() | on_request()).values()}
            _apply(here)
        except (Exception, SystemExit) as error:
            reason = str(error) if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
            stands = f"{', '.join(here.names)} stand, no others" if here.names else "nothing is patched"
            warn_once(reason if isinstance(error, PatchError) else f"{stands}: {reason}")
            here.decided |= {name: (REFUSED, reason) for name in patches() if name not in here.names}
        process.contained(lambda: _apply_on_request(here), "nothing is poisoned or contained")
        if here.applied or here.names:
            # After the patches: what they find out when a scheduler is made counts when it is ready.
            stands = f"{', '.join(here.names) or 'none'} stand, no others"
            process.contained(lambda: process.watch(functools.partial(_ready, here)), stands)
        process.contained(lambda: _open(here), "the state of this server cannot be asked")
        if require:
            process.required(require, here.found(), here.incidents)
    finally:
        # After the patches: the watch counts what they leave. It must not take them along.
        process.contained(_watch, "no watch")


def _watch() -> None:
    if os.environ.get(WATCH):
        from staleproof.vllm import watch_hooks

        watch_hooks.install()


def _apply(here: live.Here) -> None:
    """Decide about every patch, apply those that are needed, and say what stands; ``here`` keeps it.

    Raises:
        PatchError: nothing can be patched.
    """
    if os.environ.get(VARIABLE, "").strip() == "none":
        process.say(f": off by {VARIABLE}")
        here.decided |= dict.fromkeys(patches(), (process.OFF, f"{VARIABLE}=none"))
        return
    choice = chosen(os.environ.get(VARIABLE))
    version, sources = installed()
    decided = decisions(version, sources, choice)
    of, here.version = base(version), version
    if of.unknown and os.environ.get(UNKNOWN) != "probe":
        found = ", ".join(d.patch.name for d in decided if d.needed) or "nothing"
        raise PatchError(f"{of.unknown}; its own sources need {found}; {UNKNOWN}=probe patches what it can")
    # It is used only if a server selects it.
    process.contained(lambda: backend.offer(of.name, sources), "no attention backend")
    by_state: dict[str, list[str]] = {}
    for decision in decided:
        name, state, why = decision.patch.name, decision.state, decision.why
        if state == WILL:
            try:
                decision.patch.apply(of.name, force=name in choice.forced)
                here.names.append(name)
            except (Exception, SystemExit) as error:
                # The other patches stay in place, except those that require this one.
                decision.patch.revert()
                state, why = REFUSED, f"applying it failed: {type(error).__name__}: {error}"
                out_of_service(registry.step_back(name, why))
        by_state.setdefault(state, []).append(name)
        if state != WILL:
            here.decided[name] = state, why
    refused = [f"{name} ({why})" for name, (state, why) in here.decided.items() if state == REFUSED]
    if refused:
        warn_once(f"on vLLM {version}, refused: {'; '.join(refused)}")
    summary = "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())
    process.say(f" on vLLM {version}: {summary}")
    here.applied = True


def _apply_on_request(here: live.Here) -> None:
    """Apply what its own variable asks for. What cannot be is one line, and vLLM serves without it."""
    required = (os.environ.get(process.REQUIRE) or "").split(",")
    for decision in requested():
        patch, state, why = decision.patch, decision.state, decision.why
        if state == process.OFF:
            if patch.name in map(str.strip, required):
                here.decided[patch.name] = state, why
            continue
        try:
            if state == WILL:
                version, _ = installed()
                patch.apply(base(version).name)
                here.names.append(patch.name)
                here.version = version
        except (Exception, SystemExit) as error:
            patch.revert()
            state, why = REFUSED, str(error) or type(error).__name__
        if state != WILL:
            here.decided[patch.name] = state, why
            warn_once(f"{patch.name} is {state}: {why}")


def _open(here: live.Here) -> None:
    """Take part in the server's truth; its first process opens a port if it is told to."""
    port = os.environ.get(PORT)
    if live.enter(here, bool(port or os.environ.get(WATCH))) and port:
        from staleproof.vllm import watch_port
        from staleproof.vllm.watch import number

        watch_port.serve(None, number(os.environ, PORT, 1, range(1, 65536)))
        live.beat()


def _ready(here: live.Here, engine: Any) -> None:
    """Say what stands when the engine or worker of this process is ready."""
    again, here.ready = here.ready, True
    names = getattr(getattr(engine, "vllm_config", None), "model_config", None)
    here.model = str(getattr(names, "served_model_name", here.model))
    found = here.found()
    stands = {n: state for n, state in found.items() if n in here.names or state[0] == REFUSED}
    if not again:
        process.say(process.line(here.version, stands))
    process.contained(here.publish, "the state of this process cannot be asked")
    process.contained(live.beat, "no patch comes back, and none is switched")
    process.required(os.environ.get(process.REQUIRE), found, here.incidents)
