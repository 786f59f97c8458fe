"""Which patches stand in this process, and which are out of service with those that require them.

A patch goes out of service if a function that it cannot do without is not as expected, if one of its hooks
raises, or if the operator switches it off. The patches that require it go along, because half of a fix can
do harm that vLLM alone does not do. A patch whose hooks run on the host alone comes back after a hook that
raised, a few times.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence

# Patch -> why it is out of service. The wrappers read it at each call.
stepped_back: dict[str, str] = {}
# Patch -> its hook that raised while torch.compile traced a call. Kept apart from the above until the trace
# is over: Dynamo guards what a trace reads, and ends with an error if that changes meanwhile.
failed_in_trace: dict[str, str] = {}
_targets: dict[str, dict[str, str]] = {}
_requires: dict[str, tuple[str, ...]] = {}
_lock = threading.Lock()
# Owners that are no patches: what logs what stands, and what makes the traced patches factors of vLLM's
# compile cache.
REPORT, CACHE = "report", "compile cache"
# How often a patch comes back after a hook that raised, and how many seconds later.
RETRIES, WAIT_S = 3, 60.0
# Patches whose hooks run on the host alone. Others may be missing in a graph that was captured meanwhile.
on_host: set[str] = set()
_tries: Counter[str] = Counter()
# Patch -> when it comes back.
_due: dict[str, float] = {}
SWITCHED = "switched off by "
# Patch -> called as it goes out of service, to reset memory that its kernels in captured graphs still read.
undo: dict[str, Callable[[], None]] = {}
# Name of a metric without staleproof_ -> reads it. Patches and detectors on the host may add theirs; any
# process of the server may be asked for the sum over all.
counters: dict[str, Callable[[], int]] = {}


def arm(owner: str, requires: Sequence[str]) -> str | None:
    """Say which patches one requires, before it is put in place.

    Returns:
        A line for the log if one of those has stepped back, and this one now did as well.

    >>> arm("a", ()), arm("b", ["a"])
    (None, None)
    >>> step_back("a", "its hook raised")
    'a: its hook raised; out of service: a, b; in service: nothing'
    >>> arm("c", ["a"])
    'c: needs a, which stepped back; out of service: c; in service: nothing'
    >>> forget("a"), forget("b"), forget("c")
    (None, None, None)
    """
    _requires[owner] = tuple(requires)
    missing = next((name for name in requires if name in stepped_back), None)
    return None if missing is None else step_back(owner, _needs(missing))


def note(owner: str, place: str, state: str) -> None:
    """Keep what became of one target.

    Args:
        owner: name of the patch.
        place: ``module:function``.
        state: ``waiting`` for vLLM to import the module, ``in place``, ``not needed``, or the reason
            why the function is left alone.

    >>> note("a", "vllm.ops:double", "in place")
    >>> targets("a")
    {'vllm.ops:double': 'in place'}
    >>> forget("a")
    """
    _targets.setdefault(owner, {})[place] = state


def targets(owner: str) -> dict[str, str]:
    """Return the targets of a patch and their states; see :func:`note`.

    >>> targets("a")
    {}
    """
    return dict(_targets.get(owner, {}))


def in_service() -> list[str]:
    """Return the patches that have a target in place or waiting, and did not step back.

    >>> note("a", "vllm.ops:double", "waiting")
    >>> in_service()
    ['a']
    >>> forget("a")
    """
    lasting = {"waiting", "in place"}
    patches = [name for name in _targets if name not in stepped_back and name not in (REPORT, CACHE)]
    return [name for name in patches if lasting & {*_targets[name].values()}]


def step_back(owner: str, why: str, again_at: float | None = None) -> str | None:
    """Take a patch, and all patches that require it, out of service: their hooks do nothing any more.

    The wrappers stay where they are, because vLLM may hold references to them.

    Args:
        owner: name of the patch.
        why: the reason.
        again_at: when it failed, in seconds, if what failed may work later; see :func:`retry`.

    Returns:
        A line for the log, or ``None`` if the patch had stepped back before.
    """
    with _lock:
        if owner in stepped_back:
            return None
        if again_at is not None and owner in on_host and _tries[owner] < RETRIES:
            _tries[owner] += 1
            _due[owner] = again_at + WAIT_S
            why += f"; comes back in {WAIT_S:.0f} s ({_tries[owner]} of {RETRIES})"
        stepped_back[owner] = why
        along = [owner]
        for name in along:
            along += [n for n, needs in _requires.items() if name in needs and n not in along]
        for name in along:
            stepped_back.setdefault(name, _needs(owner))
        left = ", ".join(in_service()) or "nothing"
    for name in along:
        with contextlib.suppress(Exception):
            undo.get(name, lambda: None)()
    return f"{owner}: {why}; out of service: {', '.join(along)}; in service: {left}"


def _needs(owner: str) -> str:
    return f"needs {owner}, which stepped back"


def is_switched_off(name: str) -> bool:
    """Whether a patch is out of service because it, or one that it needs, was switched off.

    >>> note("a", "vllm.ops:double", "in place")
    >>> switch(["a"], "a file") != [], is_switched_off("a"), forget("a")
    (True, True, None)
    """
    why = stepped_back.get(name, "")
    off = [owner for owner, reason in stepped_back.items() if reason.startswith(SWITCHED)]
    return why.startswith(SWITCHED) or why in map(_needs, off)


def come_back(owner: str) -> str:
    """Put a patch back in service, with those that went along with it; return a line for the log.

    >>> step_back("a", "its hook raised") is not None, come_back("a"), "a" in stepped_back
    (True, 'a: in service again', False)
    """
    with _lock:
        back = [owner, *(name for name, why in stepped_back.items() if why == _needs(owner))]
        _due.pop(owner, None)
        for name in back:
            stepped_back.pop(name, None)
    return f"{', '.join(back)}: in service again"


def retry(now: float) -> list[str]:
    """Put back in service whose time has come, at ``now`` seconds; return lines for the log."""
    return [come_back(owner) for owner, due in [*_due.items()] if now >= due]


def switch(off: Collection[str], by: str) -> list[str]:
    """Switch these patches off, and those on again that ``by`` has switched off before.

    Args:
        off: names of patches.
        by: what switches, e.g. a file.

    >>> note("a", "vllm.ops:double", "in place")
    >>> switch(["a"], "a file"), switch([], "a file"), forget("a")
    (['a: switched off by a file; out of service: a; in service: nothing'], ['a: in service again'], None)
    """
    on = [name for name, why in stepped_back.items() if why == SWITCHED + by and name not in off]
    lines = [come_back(name) for name in on]
    known = [name for name in _targets if name in off]
    return lines + [line for name in known if (line := step_back(name, SWITCHED + by)) is not None]


def forget(owner: str) -> None:
    """Forget everything about a patch, when it is reverted."""
    undo.get(owner, lambda: None)()
    for state in (stepped_back, failed_in_trace, _targets, _requires, _due, _tries):
        state.pop(owner, None)
    on_host.discard(owner)
