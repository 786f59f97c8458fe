"""Wraps functions of vLLM: at once if their module is imported, otherwise as soon as it is.

vLLM is never imported from here. Importing one of its MLA backends allocates 128 MiB on the device,
and a plugin is loaded in every process that vLLM starts.

A failure of ours must not stop vLLM. It is logged once, and vLLM's function runs with the arguments
it was given. While torch.compile traces a call nothing is logged, because it cannot trace logging.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from staleproof.vllm.sources import PatchError, Sources, file_of

# A child of vLLM's logger, so that vLLM's handlers and levels apply.
logger = logging.getLogger("vllm.staleproof")

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Around = Callable[[Arguments, Keywords], AbstractContextManager[None]]
Before = Callable[[Arguments, Keywords], tuple[Arguments, Keywords] | None]
# Returns NotImplemented to let vLLM's function run.
Instead = Callable[[Arguments, Keywords], Any]
After = Callable[[Any, Arguments, Keywords], Any]


@dataclass(frozen=True)
class Target:
    """One function of vLLM, and the hooks that run at each call of it.

    Attributes:
        module: full name of its module.
        name: ``function`` or ``Class.method``.
        arguments: the leading argument names that the hooks rely on.
        around: returns a context manager; the call runs inside it.
        before: returns other arguments for the call, or ``None`` to keep them.
        instead: replaces the call. If it raises, vLLM's function runs, so it may write only outputs
            that vLLM's function overwrites.
        after: takes vLLM's result and returns the one that the caller gets.
        versions: the first and last release with this function; ``None`` for all of the patch's.
    """

    module: str
    name: str
    arguments: tuple[str, ...]
    around: Around | None = None
    before: Before | None = None
    instead: Instead | None = None
    after: After | None = None
    versions: tuple[str, str] | None = None

    def check(self, sources: Sources) -> None:
        """Check that vLLM has this function, with these leading arguments.

        Raises:
            PatchError: it has not.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "ops.py").write_text("def double(x, y=0): return 2 * x + y")
        ...     Target("vllm.ops", "double", ("z",)).check(Sources(Path(folder)))
        Traceback (most recent call last):
        staleproof.vllm.sources.PatchError: vllm/ops.py:1 double takes (x, y), not what was expected
        """
        function = sources.function(file_of(self.module), self.name)
        if function.arguments[: len(self.arguments)] != self.arguments:
            got = ", ".join(function.arguments)
            raise PatchError(f"vllm/{function.place} {self.name} takes ({got}), not what was expected")


def argument(args: Arguments, kwargs: Keywords, position: int, name: str, default: Any = None) -> Any:
    """Return one argument of a call, passed by position or by name.

    >>> argument((1, 2), {"c": 3}, 1, "b"), argument((1, 2), {"c": 3}, 2, "c")
    (2, 3)
    """
    return args[position] if position < len(args) else kwargs.get(name, default)


def replaced(
    args: Arguments, kwargs: Keywords, position: int, name: str, value: Any
) -> tuple[Arguments, Keywords]:
    """Return the arguments of a call with one of them changed; the inputs stay as they are.

    >>> replaced((1, 2), {"c": 3}, 1, "b", 9), replaced((1, 2), {"c": 3}, 2, "c", 9)
    (((1, 9), {'c': 3}), ((1, 2), {'c': 9}))
    """
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, kwargs | {name: value}


# Warnings that were logged and patches that were announced: one line each, not one a step.
_warned: set[str] = set()
_announced: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, the first time this text comes."""
    if text not in _warned:
        _warned.add(text)
        logger.warning("staleproof: %s", text)


def _failed(hook: _Hook, what: str, error: Exception) -> None:
    import torch

    # torch.compile cannot trace logging: with fullgraph=True the compilation would fail.
    if not torch.compiler.is_compiling():
        reason = f"{type(error).__name__}: {error}"
        warn_once(f"{hook.owner}: {what} of {hook.target.name} failed, vLLM's own code runs: {reason}")


class _Hook(NamedTuple):
    """One target of the patch named ``owner``."""

    owner: str
    target: Target
    force: bool


def _wrapped(original: Callable[..., Any], hook: _Hook) -> Callable[..., Any]:
    """Return ``original`` with the hooks of one target around it; an error in a hook is contained."""
    target = hook.target

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if target.instead is not None:
            try:
                result = target.instead(args, kwargs)
                if result is not NotImplemented:
                    return result
            except Exception as error:
                _failed(hook, "the replacement", error)
                return original(*args, **kwargs)
        given = args, kwargs
        if target.before is not None:
            try:
                given = target.before(args, kwargs) or given
            except Exception as error:
                _failed(hook, "preparing a call", error)
        result = original(*given[0], **given[1])
        if target.after is not None:
            try:
                return target.after(result, args, kwargs)
            except Exception as error:
                _failed(hook, "finishing a call", error)
        return result

    if target.around is None:
        return call
    around = target.around

    @functools.wraps(original)
    def call_inside(*args: Any, **kwargs: Any) -> Any:
        entered = None
        try:
            context = around(args, kwargs)
            context.__enter__()
            entered = context
        except Exception as error:
            _failed(hook, "entering a call", error)
        try:
            return call(*args, **kwargs)
        finally:
            if entered is not None:
                try:
                    entered.__exit__(None, None, None)
                except Exception as error:
                    _failed(hook, "leaving a call", error)

    return call_inside


class _Place:
    """One function of vLLM and the hooks on it; several patches may share it."""

    def __init__(self, module: ModuleType, name: str) -> None:
        *path, self.attribute = name.split(".")
        self.holder: Any = module
        for part in path:
            self.holder = getattr(self.holder, part)
        self.original = vars(self.holder)[self.attribute]
        self.current = self.original
        self.hooks: list[_Hook] = []

    def add(self, hook: _Hook) -> bool:
        if any(other.owner == hook.owner for other in self.hooks):
            return False
        self.hooks.append(hook)
        self._install()
        return True

    def remove(self, owner: str) -> None:
        kept = [hook for hook in self.hooks if hook.owner != owner]
        if len(kept) == len(self.hooks):
            return
        if vars(self.holder)[self.attribute] is not self.current:
            warn_once(f"{owner} stays: another package has wrapped {self.attribute} since")
            return
        self.hooks = kept
        self._install()
        _announced.discard(owner)

    def _install(self) -> None:
        self.current = self.original
        for hook in self.hooks:
            self.current = _wrapped(self.current, hook)
        setattr(self.holder, self.attribute, self.current)


_places: dict[tuple[str, str], _Place] = {}


def _package(module: ModuleType) -> Path:
    """Return the folder of the package that a module belongs to."""
    return Path(str(sys.modules[module.__name__.partition(".")[0]].__file__)).parent


def _stranger(place: _Place, module: ModuleType) -> str | None:
    """Name the package whose function stands there; ``None`` if it is vLLM's, decorated or not."""
    home = _package(module)
    if isinstance(place.holder, type) and place.holder.__module__ != module.__name__:
        return place.holder.__module__
    function = place.original
    while True:
        code = getattr(function, "__code__", None)
        if code is None:
            return f"a {type(function).__name__}"
        path = Path(code.co_filename)
        if home in path.parents:
            return None
        # vLLM decorates some functions with torch.inference_mode().
        if "torch" not in path.parts or not hasattr(function, "__wrapped__"):
            return str(getattr(function, "__module__", None) or path)
        function = function.__wrapped__


def _install(module: ModuleType, hook: _Hook) -> None:
    """Put one hook in place; if that fails, log one line with the reason."""
    owner, target, force = hook
    try:
        key = module.__name__, target.name
        place = _places.get(key)
        if place is None or not place.hooks:
            place = _Place(module, target.name)
        stranger = _stranger(place, module)
        if stranger is not None and not force:
            raise PatchError(
                f"{target.name} was wrapped by {stranger} before; "
                f"STALEPROOF_PATCHES=+{owner} wraps it all the same"
            )
        target.check(Sources(_package(module)))
        _places[key] = place
        if place.add(hook):
            level = logging.DEBUG if owner in _announced else logging.INFO
            logger.log(level, "staleproof: %s is in place (%s)", owner, target.name)
            _announced.add(owner)
    except Exception as error:
        warn_once(f"{owner} leaves {target.name} alone: {error}")


_watched: dict[str, list[_Hook]] = {}


class _Loader(importlib.abc.Loader):
    """Runs a module's own loader, then installs our hooks."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps no trace of us: others may look at its loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for hook in _watched.get(module.__name__, ()):
            _install(module, hook)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules through the other finders, and gives them our loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _watched:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_finder = _Finder()


def wrap(owner: str, target: Target, *, force: bool = False) -> None:
    """Put the hooks of one target in place, now or when vLLM imports its module.

    Doing so twice changes nothing.

    Args:
        owner: name of the patch.
        target: the function and its hooks.
        force: wrap it even if another package has wrapped it before.
    """
    hook = _Hook(owner, target, force)
    watched = _watched.setdefault(target.module, [])
    if all(other[:2] != hook[:2] for other in watched):
        watched.append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(target.module)
    # A module that is being imported right now gets its hooks from our loader, if it uses that.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _install(module, hook)


def unwrap(owner: str) -> None:
    """Remove all hooks of one patch, and stop waiting for the modules of its targets."""
    for module, hooks in [*_watched.items()]:
        hooks[:] = [hook for hook in hooks if hook.owner != owner]
        if not hooks:
            del _watched[module]
    for place in _places.values():
        place.remove(owner)
    if not _watched and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
