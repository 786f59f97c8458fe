"""Which patches stand in this process, and which stepped back with those that require them.

A patch steps back for the life of the process if a function that it cannot do without is not as
expected, or if one of its hooks raises. The patches that require it do the same, because half of a
fix can do harm that vLLM alone does not do.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

# Patch -> why it stepped back. The wrappers read it at each call.
stepped_back: dict[str, str] = {}
_targets: dict[str, dict[str, str]] = {}
_requires: dict[str, tuple[str, ...]] = {}
_lock = threading.Lock()
# Owner of the hooks that log what stands; it is no patch.
REPORT = "report"


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
    return None if missing is None else step_back(owner, f"needs {missing}, which stepped back")


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
    patches = [name for name in _targets if name not in stepped_back and name != REPORT]
    return [name for name in patches if lasting & {*_targets[name].values()}]


def step_back(owner: str, why: str) -> str | None:
    """Take a patch, and all patches that require it, out of service: their hooks do nothing any more.

    The wrappers stay where they are, because vLLM may hold references to them.

    Returns:
        A line for the log, or ``None`` if the patch had stepped back before.
    """
    with _lock:
        if owner in stepped_back:
            return None
        stepped_back[owner] = why
        along = [owner]
        for name in along:
            along += [n for n, needs in _requires.items() if name in needs and n not in along]
        for name in along:
            stepped_back.setdefault(name, f"needs {owner}, which stepped back")
        left = ", ".join(in_service()) or "nothing"
    return f"{owner}: {why}; out of service: {', '.join(along)}; in service: {left}"


def forget(owner: str) -> None:
    """Forget everything about a patch, when it is reverted."""
    for state in (stepped_back, _targets, _requires):
        state.pop(owner, None)
