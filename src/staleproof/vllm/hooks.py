"""Wraps functions of vLLM: at once if their module is imported, otherwise as soon as it is.

vLLM is never imported from here. Importing one of its MLA backends allocates 128 MiB on the device,
and a plugin is loaded in every process that vLLM starts.

A failure of ours must not stop vLLM. vLLM's function runs with the arguments it was given, and the
patch steps back: from then on its hooks do nothing, nor do those of the patches that require it. One
line says so. A failure while torch.compile traces a call is noted by a function that Dynamo runs then and
there; the patch steps back when the trace is over, and the graph is not cached (``patch.py``).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from staleproof.vllm.arguments import Arguments, Keywords, names_of, package_of, python_of, stranger_at
from staleproof.vllm.sources import Evidence, PatchError, Sources, file_of
from staleproof.vllm.standing import IN_PLACE, WAITING, Installed, registry

# A child of vLLM's logger, so that vLLM's handlers and levels apply.
logger = logging.getLogger("vllm.staleproof")

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
        arguments: the leading argument names that the hooks rely on; all names if there is ``instead``.
        around: returns a context manager; the call runs inside it.
        before: returns other arguments for the call, or ``None`` to keep them.
        instead: replaces the call. If it raises, vLLM's function runs, so it may write only outputs
            that vLLM's function overwrites. A call with any other argument than ``arguments`` is left to it.
        after: takes vLLM's result and returns the one that the caller gets.
        swap: takes the original object, e.g. a Triton kernel, and returns its replacement, once and not
            at each call. The replacement keeps the original as ``staleproof_replaces``.
        versions: the first and last release with this function; ``None``: all releases of the patch.
        vital: whether the whole patch steps back if this one function cannot be wrapped.
        probe: says whether this function has the defect; ``None``: the patch's probe says it.
        single: hooks run only for objects that were passed to :func:`staleproof.vllm.single.hook`.
    """

    module: str
    name: str
    arguments: tuple[str, ...]
    around: Around | None = None
    before: Before | None = None
    instead: Instead | None = None
    after: After | None = None
    swap: Callable[[Any], Any] | None = None
    versions: tuple[str, str] | None = None
    vital: bool = False
    probe: Callable[[Sources], Evidence] | None = None
    single: bool = False

    @property
    def place(self) -> str:
        """Return ``module:name``."""
        return f"{self.module}:{self.name}"

    def check(self, sources: Sources) -> None:
        """Check that vLLM has this function, with these leading arguments.

        Raises:
            PatchError: the function is missing, or its arguments differ.

        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "ops.py").write_text("def double(x, y=0): return 2 * x + y")
        ...     Target("vllm.ops", "double", ("z",)).check(Sources(pathlib.Path(folder)))
        Traceback (most recent call last):
        staleproof.vllm.sources.PatchError: vllm/ops.py:1 double takes (x, y), not what was expected
        """
        function = sources.function(file_of(self.module), self.name)
        self._compare(function.arguments, function.place)

    def check_loaded(self, function: Any) -> None:
        """Check the function that vLLM has imported; reading its source again takes longer."""
        function = python_of(function)
        line = inspect.unwrap(function).__code__.co_firstlineno
        self._compare(names_of(function), f"{file_of(self.module)}:{line}")

    def _compare(self, arguments: tuple[str, ...], place: str) -> None:
        known = arguments if self.instead else arguments[: len(self.arguments)]
        if known != self.arguments:
            got = ", ".join(arguments)
            raise PatchError(f"vllm/{place} {self.name} takes ({got}), not what was expected")

    def knows(self, args: Arguments, kwargs: Keywords) -> bool:
        """Say whether a call gives no argument but those named in ``arguments``.

        >>> target = Target("vllm.ops", "double", ("x", "y"))
        >>> target.knows((1,), {"y": 2}), target.knows((1,), {"z": 2}), target.knows((1, 2, 3), {})
        (True, False, False)
        """
        # No difference of sets: Dynamo of torch 2.11, which vLLM 0.26.0 pins, fails to trace it.
        known = [name in self.arguments for name in kwargs]
        return len(args) <= len(self.arguments) and all(known)


# Warnings that were logged: one line each, not one a step.
_warned: set[str] = set()


def warn_once(text: str | None, level: int = logging.WARNING) -> None:
    """Log a warning, the first time this text comes; ``None`` is no warning."""
    if text is not None and text not in _warned:
        _warned.add(text)
        logger.log(level, "staleproof: %s", text)


def out_of_service(line: str | None) -> None:
    """Log that a patch is out of service. An error, so that VLLM_LOGGING_LEVEL=ERROR does not hide it."""
    warn_once(line, logging.ERROR)


def _failed(hook: _Hook, what: str, error: BaseException) -> None:
    import torch

    if torch.compiler.is_compiling():
        _note_failure(hook.patch.name, hook.target.name, what, type(error).__name__)
        return
    reason = f"vLLM's own code runs: {type(error).__name__}: {error}"
    again_at = time.monotonic()
    why = f"{what} of {hook.target.name} failed, {reason}"
    out_of_service(registry.step_back(hook.patch.name, why, again_at))


def _note_failure(patch: str, name: str, what: str, error: str) -> bool:
    """Note that a hook raised while torch.compile traced it. Dynamo runs this, and puts True in its place."""
    # By its name: Dynamo passes on nothing but constants.
    failed = registry.of(patch)
    text = f"{what} of {name} failed while torch.compile traced it ({error}), vLLM's own code is in the graph"
    failed.failed_in_trace = failed.failed_in_trace or text
    return True


# What torch.compiler.assume_constant_result does, without torch, which is not imported here.
_note_failure._dynamo_marked_constant = True  # type: ignore[attr-defined]


def settle() -> None:
    """Let the patches step back whose hooks raised in a trace. Call it when no trace runs."""
    for patch in [*registry.patches.values()]:
        if patch.failed_in_trace is not None:
            out_of_service(registry.step_back(patch.name, patch.failed_in_trace))


class _Hook(NamedTuple):
    """One target of an installed patch."""

    patch: Installed
    target: Target
    force: bool


def _wrapped(original: Callable[..., Any], hook: _Hook) -> Callable[..., Any]:
    """Return ``original`` with the hooks of one target around it; an error in a hook is contained."""
    patch, target = hook.patch, hook.target
    # A call reads only its closure: after a step of the model little else is still in the core's cache.
    instead, knows = target.instead, target.knows
    before, after, most = target.before, target.after, len(target.arguments)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if patch.reason is not None:
            return original(*args, **kwargs)
        if instead is not None and (knows(args, kwargs) if kwargs else len(args) <= most):
            try:
                result = instead(args, kwargs)
                if result is not NotImplemented:
                    return result
            except (Exception, SystemExit) as error:
                _failed(hook, "the replacement", error)
                return original(*args, **kwargs)
        given = None
        if before is not None:
            try:
                given = before(args, kwargs)
            except (Exception, SystemExit) as error:
                _failed(hook, "preparing a call", error)
        result = original(*args, **kwargs) if given is None else original(*given[0], **given[1])
        if after is not None and patch.reason is None:
            try:
                return after(result, args, kwargs)
            except (Exception, SystemExit) as error:
                _failed(hook, "finishing a call", error)
        return result

    if target.around is None:
        return call
    around = target.around

    @functools.wraps(original)
    def call_inside(*args: Any, **kwargs: Any) -> Any:
        if patch.reason is not None:
            return original(*args, **kwargs)
        entered = None
        try:
            context = around(args, kwargs)
            context.__enter__()
            entered = context
        except (Exception, SystemExit) as error:
            _failed(hook, "entering a call", error)
        try:
            return call(*args, **kwargs)
        finally:
            if entered is not None:
                try:
                    entered.__exit__(None, None, None)
                except (Exception, SystemExit) as error:
                    _failed(hook, "leaving a call", error)

    return call_inside


class _Place:
    """One function of vLLM and the hooks on it; several patches may share it."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self.module, self.name = module.__name__, name
        self.holder, self.attribute, original = _found(module, name)
        # A module may have imported the object that another module got in exchange.
        self.original = getattr(original, "staleproof_replaces", original)
        self.current = self.original
        self.hooks: list[_Hook] = []

    def add(self, hook: _Hook) -> bool:
        if any(other.patch is hook.patch for other in self.hooks):
            return False
        self.hooks.append(hook)
        try:
            self._install()
        except BaseException:
            self.hooks.pop()
            raise
        return True

    def remove(self, name: str) -> None:
        kept = [hook for hook in self.hooks if hook.patch.name != name]
        if len(kept) == len(self.hooks):
            return
        if vars(self.holder)[self.attribute] is not self.current:
            warn_once(f"{name} stays: another package has wrapped {self.attribute} since")
            return
        self.hooks = kept
        self._install()

    def _install(self) -> None:
        before, self.current = self.current, self.original
        for hook in (hook for hook in self.hooks if not hook.target.single):
            swap = hook.target.swap
            if swap is None:
                self.current = _wrapped(self.current, hook)
            elif hook.patch.reason is None:
                self.current = swap(self.current)
        setattr(self.holder, self.attribute, self.current)
        # Modules that imported it by name, before us or since, call the same.
        if isinstance(self.holder, ModuleType):
            for module, name, _ in _names({id(before), id(self.original)} - {id(self.current)}):
                setattr(module, name, self.current)
        _looked[0] = 0

    def bypassed(self) -> str | None:
        """Say why some calls do not reach what was installed here; ``None`` if all do."""
        try:
            now = _found(sys.modules[self.module], self.name)[2]
        except (KeyError, PatchError):
            return f"{self.name} is gone"
        if now is self.original is not self.current:
            return f"{self.name} was put back since"
        if now is not self.current:
            code = getattr(now, "__code__", None)
            return f"{self.name} was replaced by {code.co_filename if code else type(now).__name__} since"
        # A scrape looks as well, and looking through all names takes milliseconds.
        if _looked[0] != len(sys.modules):
            _looked[0] = len(sys.modules)
            _importers.clear()
            places = [p for p in _places.values() if isinstance(p.holder, ModuleType)]
            for module, _, function in _names(
                {id(p.original) for p in places if p.current is not p.original}
            ):
                _importers.setdefault(function, []).append(module.__name__)
        names = _importers.get(id(self.original))
        return f"{', '.join(names)} imported {self.name} by its name and calls vLLM's" if names else None


# Function (its id) -> modules that call vLLM's by its name; and how many modules there were then.
_importers: dict[int, list[str]] = {}
_looked = [0]


def _names(functions: set[int]) -> Iterator[tuple[ModuleType, str, int]]:
    """The names of these functions, by their id, in modules of vLLM."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").partition(".")[0] == "vllm":
            names = vars(module)
            if not functions.isdisjoint(map(id, [*names.values()])):
                yield from ((module, name, id(x)) for name, x in [*names.items()] if id(x) in functions)


def _found(module: ModuleType, name: str) -> tuple[Any, str, Any]:
    """The module or class that has a function, its name there, and the function.

    Raises:
        PatchError: there is none.
    """
    *path, attribute = name.split(".")
    try:
        holder: Any = functools.reduce(lambda holder, part: vars(holder)[part], path, module)
        return holder, attribute, vars(holder)[attribute]
    except (KeyError, TypeError):
        raise PatchError(f"vllm/{file_of(module.__name__)} has no {name}") from None


_places: dict[tuple[str, str], _Place] = {}


def checked(patch: str) -> dict[str, str]:
    """Return the targets of a patch and their states, of which ``in place`` is looked at anew.

    The state of one that is bypassed is who calls something else there.
    """
    states = registry.targets(patch)
    for place in [*_places.values()]:
        key = f"{place.module}:{place.name}"
        if states.get(key) == IN_PLACE and any(hook.patch.name == patch for hook in place.hooks):
            states[key] = place.bypassed() or IN_PLACE
    return states


def renew() -> None:
    """Put in place what came back in service, and vLLM's own objects back where an exchange is out of it."""
    for name, watched in [*_watched.items()]:
        for hook in [*watched]:
            if name in sys.modules and hook.patch.targets.get(hook.target.place) == WAITING:
                _install(sys.modules[name], hook)
    for place in [*_places.values()]:
        if any(hook.target.swap for hook in place.hooks) and place.bypassed() is None:
            place._install()


def _install(module: ModuleType, hook: _Hook) -> None:
    """Put one hook in place; if that fails, log one line with the reason."""
    patch, target, force = hook
    if patch.reason is not None:
        return
    try:
        if target.probe is not None and not target.probe(Sources(package_of(module))).needed:
            patch.targets[target.place] = "not needed"
            return
        key = module.__name__, target.name
        place = _places.get(key)
        if place is None or not place.hooks:
            place = _Place(module, target.name)
        stranger = stranger_at(place.holder, place.original, module)
        if stranger is not None and not force:
            raise PatchError(
                f"{target.name} was wrapped by {stranger} before; "
                f"STALEPROOF_PATCHES=+{patch.name} wraps it all the same"
            )
        if stranger is None:  # Otherwise it may take any arguments and pass them on.
            target.check_loaded(place.original)
        _places[key] = place
        if place.add(hook):
            patch.targets[target.place] = IN_PLACE
            level = logging.INFO if _is_news(patch) else logging.DEBUG
            logger.log(level, "staleproof: %s is in place (%s)", patch.name, target.name)
    except (Exception, SystemExit) as error:
        patch.targets[target.place] = str(error)
        if target.vital:
            out_of_service(registry.step_back(patch.name, f"{target.name} is left alone: {error}"))
        else:
            warn_once(f"{patch.name} leaves {target.name} alone: {error}")


def _is_news(patch: Installed) -> bool:
    """Whether a patch works since now: its vital targets are wrapped, and one of the others, if any."""
    ours = {hook.target for hooks in _watched.values() for hook in hooks if hook.patch is patch}
    vital = [patch.targets[target.place] == IN_PLACE for target in ours if target.vital]
    others = [patch.targets[target.place] == IN_PLACE for target in ours if not target.vital]
    if patch.announced or not all(vital) or (others and not any(others)):
        return False
    patch.announced = True
    return True


_watched: dict[str, list[_Hook]] = {}


class _Loader(importlib.abc.Loader):
    """Runs a module's own loader, then installs our hooks."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        # E.g. get_source and get_code, which runpy and inspect ask for.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps no trace of us: others may look at its loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        # importlib.reload has made new functions, without our hooks.
        for place in [place for place in _places if place[0] == module.__name__]:
            del _places[place]
        for hook in [*_watched.get(module.__name__, ())]:
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


def wrap(name: str, *targets: Target, requires: Sequence[str] = (), force: bool = False) -> None:
    """Put the hooks of a patch in place, now or when vLLM imports their modules; twice changes nothing.

    It steps back if a vital target cannot be wrapped, or if a patch that it requires stepped back.

    Args:
        name: of the patch.
        targets: the functions and their hooks.
        requires: patches without which this one would do harm.
        force: wrap a function even if another package has wrapped it before.
    """
    out_of_service(registry.install(name, requires))
    patch = registry.of(name)
    if patch.reason is not None:
        return
    for target in targets:
        hook = _Hook(patch, target, force)
        patch.targets.setdefault(target.place, WAITING)
        watched = _watched.setdefault(target.module, [])
        if all(other[:2] != hook[:2] for other in watched):
            watched.append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for target in targets:
        module = sys.modules.get(target.module)
        # A module that is being imported right now gets its hooks from our loader, if it uses that.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _install(module, _Hook(patch, target, force))


def unwrap(name: str) -> None:
    """Remove all hooks of one patch, and stop waiting for the modules of its targets."""
    for module, hooks in [*_watched.items()]:
        hooks[:] = [hook for hook in hooks if hook.patch.name != name]
        if not hooks:
            del _watched[module]
    for place in _places.values():
        place.remove(name)
    registry.forget(name)
    if not _watched and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
