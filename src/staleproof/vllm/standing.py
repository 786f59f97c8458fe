"""The patches that are installed in this process: where each is in place, and whether it is in service.

A patch goes out of service if a function that it cannot do without is not as expected, if one of its hooks
raises, or if the operator switches it off. The patches that require it go along, because half of a fix can
do harm that vLLM alone does not do. A patch whose hooks run on the host alone comes back after a hook that
raised, a few times.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

# Installed like patches, and none themselves: what logs the patches, what makes the traced patches factors of
# vLLM's compile cache, and the attention backend.
REPORT, CACHE, BACKEND = "report", "compile cache", "backend"
# How often a patch comes back after a hook that raised, and how many seconds later.
RETRIES, WAIT_S = 3, 60.0
SWITCHED = "switched off by "
WAITING, IN_PLACE = "waiting", "in place"


@dataclass(eq=False)
class Installed:
    """One patch in this process.

    Attributes:
        name: of the patch.
        reason: why it is out of service; ``None``: it is in service. Its wrappers read this at each call.
        failed_in_trace: the hook that raised while torch.compile traced a call. Not ``reason``, until the
            trace is over: Dynamo guards what a trace reads, and ends with an error if that changes meanwhile.
        targets: ``module:function`` -> ``waiting`` for vLLM to import the module, ``in place``, ``not
            needed``, or the reason why the function is left alone.
        requires: the patches without which this one would do harm.
        on_host: its hooks run on the host alone. The hooks of others may be missing in a graph that was
            captured while they were out of service, so these do not come back by themselves.
        retries: how often it was scheduled to come back.
        due: when it comes back, in seconds of ``time.monotonic``.
        undo: called as it goes out of service, to reset memory that its kernels in captured graphs read.
        counters: name of a metric without ``staleproof_`` -> reads it. Any process of the server may be asked
            for the sum over all processes.
        traced: torch.compile may trace its targets.
        announced: the log has said that it is in place, or does not need to say so.
    """

    name: str
    reason: str | None = None
    failed_in_trace: str | None = None
    targets: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    on_host: bool = False
    retries: int = 0
    due: float | None = None
    undo: Callable[[], None] | None = None
    counters: dict[str, Callable[[], int]] = field(default_factory=dict)
    traced: bool = False
    announced: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether a target is in place, or waits for its import."""
        return not {WAITING, IN_PLACE}.isdisjoint(self.targets.values())

    def reset(self) -> None:
        """Forget everything but ``undo``: graphs that were captured before may be replayed after a revert."""
        vars(self).update(vars(Installed(self.name, undo=self.undo)))


def _needs(name: str) -> str:
    return f"needs {name}, which stepped back"


def _again(names: Iterable[str]) -> str:
    return f"{', '.join(names)}: in service again"


class Registry:
    """All patches of this process, and the lock under which they go out of service.

    Attributes:
        patches: by name, in the order in which they were installed.

    >>> patches = Registry()
    >>> patches.install("a", ()), patches.install("b", ["a"])
    (None, None)
    >>> patches.step_back("a", "its hook raised")
    'a: its hook raised; out of service: a, b; in service: nothing'
    >>> patches.install("c", ["a"])
    'c: needs a, which stepped back; out of service: c; in service: nothing'
    >>> patches.come_back("a"), patches.reason("a")
    ('a, b, c: in service again', None)
    """

    def __init__(self) -> None:
        self.patches: dict[str, Installed] = {}
        # A wrapper that others hold on to reads its patch for good: installed again, it is the same object.
        self._forgotten: dict[str, Installed] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> Installed:
        """Return the patch of this name; a blank one if it is not installed."""
        if name not in self.patches:
            self.patches[name] = self._forgotten.pop(name, Installed(name))
        return self.patches[name]

    def reason(self, name: str) -> str | None:
        """Return why a patch is out of service; ``None`` if it is in service, or not installed."""
        return self.patches[name].reason if name in self.patches else None

    def targets(self, name: str) -> dict[str, str]:
        """Return a copy of the targets of a patch and their states; empty if it is not installed."""
        return dict(self.patches[name].targets) if name in self.patches else {}

    def out_of_service(self) -> dict[str, str]:
        """Return the patches that are out of service, and why."""
        return {patch.name: patch.reason for patch in [*self.patches.values()] if patch.reason is not None}

    def in_service(self) -> list[str]:
        """Return the patches that have a target in place or waiting, and did not step back."""
        patches = [patch for patch in [*self.patches.values()] if patch.is_lasting and patch.reason is None]
        return [patch.name for patch in patches if patch.name not in (REPORT, CACHE, BACKEND)]

    def counters(self) -> dict[str, Callable[[], int]]:
        """Return the metrics of all patches."""
        return {name: read for patch in [*self.patches.values()] for name, read in patch.counters.items()}

    def install(self, name: str, requires: Sequence[str]) -> str | None:
        """Say which patches one requires, before it is put in place.

        Returns:
            A line for the log if one of those has stepped back, and this one now did as well.
        """
        self.of(name).requires = tuple(requires)
        missing = next((other for other in requires if self.reason(other) is not None), None)
        return None if missing is None else self.step_back(name, _needs(missing))

    def step_back(self, name: str, why: str, again_at: float | None = None) -> str | None:
        """Take a patch, and all patches that require it, out of service: their hooks do nothing any more.

        The wrappers stay where they are, because vLLM may hold references to them.

        Args:
            name: of the patch.
            why: the reason.
            again_at: when it failed, in seconds, if what failed may work later; see :meth:`retry`.

        Returns:
            A line for the log, or ``None`` if the patch had stepped back before.
        """
        with self._lock:
            patch = self.of(name)
            if patch.reason is not None:
                return None
            if again_at is not None and patch.on_host and patch.retries < RETRIES:
                patch.retries += 1
                patch.due = again_at + WAIT_S
                why += f"; comes back in {WAIT_S:.0f} s ({patch.retries} of {RETRIES})"
            patch.reason = why
            along = [patch]
            for one in along:
                along += [p for p in [*self.patches.values()] if one.name in p.requires and p not in along]
            for one in along:
                if one.reason is None:
                    one.reason = _needs(name)
            line = f"{name}: {why}; out of service: {', '.join(p.name for p in along)}; {self._in_service()}"
        for one in along:
            with contextlib.suppress(Exception):
                if one.undo is not None:
                    one.undo()
        return line

    def _in_service(self) -> str:
        return f"in service: {', '.join(self.in_service()) or 'nothing'}"

    def come_back(self, name: str) -> str:
        """Put a patch back in service, with those that went along with it; return a line for the log."""
        with self._lock:
            along = [patch for patch in self.patches.values() if patch.reason == _needs(name)]
            back = [self.of(name), *along]
            back[0].due = None
            for patch in back:
                patch.reason = None
        return _again(patch.name for patch in back)

    def retry(self, now: float) -> list[str]:
        """Put back in service whose time has come, at ``now`` seconds; return lines for the log."""
        due = [p.name for p in [*self.patches.values()] if p.due is not None and now >= p.due]
        return [self.come_back(name) for name in due]

    def switch(self, off: Collection[str], by: str) -> list[str]:
        """Switch these patches off, and those on again that ``by`` has switched off before.

        Args:
            off: names of patches.
            by: what switches, e.g. a file.

        Returns:
            Lines for the log: at most one about what came back, and one about what is off.

        >>> patches = Registry()
        >>> for name in "ab":
        ...     patches.of(name).targets[f"vllm:{name}"] = IN_PLACE
        >>> patches.switch("ab", "a file")
        ['a, b: switched off by a file; in service: nothing']
        >>> patches.switch("", "a file")
        ['a, b: in service again']
        """
        patches, before = [*self.patches.values()], self.out_of_service()
        for patch in patches:
            if patch.reason == SWITCHED + by and patch.name not in off:
                self.come_back(patch.name)
        for patch in patches:
            if patch.targets and patch.name in off:
                self.step_back(patch.name, SWITCHED + by)
        out = self.out_of_service()
        back = [name for name in before if name not in out]
        gone = [name for name in out if name not in before and self.is_switched_off(name)]
        # All that is out of service, once: an empty file switches off every patch.
        also = "" if len(out) == len(gone) else f"; out of service: {', '.join(out)}"
        lines = [_again(back)] if back else []
        if gone:
            lines.append(f"{', '.join(gone)}: {SWITCHED}{by}{also}; {self._in_service()}")
        return lines

    def is_switched_off(self, name: str) -> bool:
        """Whether a patch is out of service because it, or one that it needs, was switched off."""
        why = self.reason(name) or ""
        out = self.out_of_service()
        off = [other for other, reason in out.items() if reason.startswith(SWITCHED)]
        return why.startswith(SWITCHED) or why in map(_needs, off)

    def forget(self, name: str) -> None:
        """Forget everything about a patch, when it is reverted."""
        patch = self.patches.pop(name, None)
        if patch is not None:
            if patch.undo is not None:
                patch.undo()
            patch.reset()
            self._forgotten[name] = patch


registry = Registry()
