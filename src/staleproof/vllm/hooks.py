"""Patches of an installed vLLM: what they need, and how they are put in place and taken away.

vLLM is never imported from here. Importing one of its MLA backends allocates 128 MiB on the device,
and a plugin is loaded in every process it starts: a patch waits until vLLM itself has imported the
module it is for. Nothing of ours may stop vLLM: whatever goes wrong is logged once, and its own
code runs with the arguments it was given.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import logging
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

# A child of vLLM's logger, so that the lines stand among vLLM's own.
logger = logging.getLogger("vllm.staleproof")

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
# What `instead` returns where it leaves the call to vLLM is NotImplemented.
Around = Callable[[Arguments, Keywords], AbstractContextManager[None]]
Before = Callable[[Arguments, Keywords], tuple[Arguments, Keywords] | None]
Instead = Callable[[Arguments, Keywords], Any]
After = Callable[[Any, Arguments, Keywords], Any]


class NotShippedError(LookupError):
    """A probe asks for a source that wheels do not hold: then the recorded probe counts."""


class PatchError(RuntimeError):
    """A patch does not fit what is there; its text is the one line that says why."""


class Evidence(NamedTuple):
    """What a probe found.

    Attributes:
        needed: whether the defect is there.
        why: the place, and what stands there.
    """

    needed: bool
    why: str


@dataclass(frozen=True)
class Function:
    """One function of a source file: its argument names, its text and where it begins."""

    arguments: tuple[str, ...]
    text: str
    place: str


@dataclass
class Sources:
    """The source files of one vLLM, read and never executed.

    Attributes:
        package: the folder ``vllm``.
        csrc: the folder ``csrc`` of a source distribution, which no wheel holds.
        flashinfer: version of FlashInfer beside it, or ``None``.
    """

    package: Path
    csrc: Path | None = None
    flashinfer: str | None = None
    _trees: dict[str, tuple[ast.Module, str]] = field(default_factory=dict, repr=False)

    def text(self, path: str) -> str:
        """One file below ``vllm/``."""
        try:
            return (self.package / path).read_text()
        except OSError as error:
            raise PatchError(f"vllm/{path} is not there") from error

    def csrc_text(self, name: str) -> str:
        """One CUDA source by its file name, wherever it lies below ``csrc/``."""
        found = sorted(self.csrc.rglob(name)) if self.csrc else []
        if not found:
            raise NotShippedError(f"csrc {name} is not in a wheel")
        return found[0].read_text()

    def function(self, path: str, name: str) -> Function:
        """A function ``f`` or method ``Class.f`` of a file below ``vllm/``."""
        if path not in self._trees:
            text = self.text(path)
            self._trees[path] = ast.parse(text), text
        tree, text = self._trees[path]
        node: ast.AST = tree
        for part in name.split("."):
            inside = [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == part
            ]
            if not inside:
                raise PatchError(f"vllm/{path} has no {name}")
            node = inside[-1]
        if not isinstance(node, ast.FunctionDef):
            raise PatchError(f"vllm/{path}: {name} is not a function")
        names = tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args))
        return Function(names, ast.get_source_segment(text, node) or "", f"{path}:{node.lineno}")


@dataclass(frozen=True)
class Target:
    """One function of vLLM and what happens to its calls.

    Attributes:
        module: full name of its module.
        name: ``function`` or ``Class.method``.
        arguments: the leading argument names the hooks rely on.
        around: makes a context manager that each call runs in.
        before: gives other arguments, or ``None`` for the same.
        instead: gives the result; writes nothing but what vLLM's own code would write again.
        after: gives the result from vLLM's.
        versions: the first and last version that has it here; ``None`` for all of the patch's.
    """

    module: str
    name: str
    arguments: tuple[str, ...]
    around: Around | None = None
    before: Before | None = None
    instead: Instead | None = None
    after: After | None = None
    versions: tuple[str, str] | None = None

    @property
    def path(self) -> str:
        """Its file below ``vllm/``."""
        return self.module.removeprefix("vllm.").replace(".", "/") + ".py"

    def check(self, sources: Sources) -> None:
        """Whether vLLM has this function with these arguments.

        Raises:
            PatchError: it has not.
        """
        found = sources.function(self.path, self.name)
        if found.arguments[: len(self.arguments)] != self.arguments:
            got = ", ".join(found.arguments)
            raise PatchError(f"vllm/{found.place} {self.name} takes ({got}), not what was expected")


@dataclass(frozen=True)
class Patch:
    """One remedy for an installed vLLM.

    Attributes:
        name: what the user calls it.
        incident: folder of the incident it belongs to.
        summary: what it does, in one line.
        versions: ranges of releases it is for, first and last included.
        targets: what it wraps.
        probe: reads the sources and says whether the defect is there.
        mechanism: the defect and the remedy, in a few sentences.
        threads: upstream issues and pull requests.
        cost: what it costs a decode step, and where that was measured.
        requires: patches without which it would do harm.
        traced: whether torch.compile may trace what it wraps, so that a cached graph may hold the
            function as it was before.
    """

    name: str
    incident: str
    summary: str
    versions: tuple[tuple[str, str], ...]
    targets: tuple[Target, ...]
    probe: Callable[[Sources], Evidence]
    mechanism: str
    threads: tuple[str, ...]
    cost: str
    requires: tuple[str, ...] = ()
    traced: bool = False

    def is_needed(self, sources: Sources) -> Evidence:
        """Whether these sources have the defect, and where.

        Raises:
            PatchError: what the probe reads is not there.
            NotShippedError: only a source distribution could tell.
        """
        return self.probe(sources)

    def applies_to(self, version: str) -> bool:
        """Whether a release, as in ``0.18.1``, lies in the ranges this patch is for."""
        return any(within(version, span) for span in self.versions)

    def targets_for(self, version: str) -> list[Target]:
        """The targets that this release has."""
        return [t for t in self.targets if t.versions is None or within(version, t.versions)]

    def apply(self, version: str, *, force: bool = False) -> None:
        """Put it in place, now where vLLM's module is imported, else as soon as it is.

        Applying twice changes nothing.

        Args:
            version: the release whose targets are meant.
            force: also where another package has wrapped the target already.
        """
        for target in self.targets_for(version):
            _when_imported(target.module, self, target, force)

    def revert(self) -> None:
        """Take it away: vLLM's own functions are back, and no import is watched for it."""
        for target in self.targets:
            watchers = _watched.get(target.module, [])
            watchers[:] = [w for w in watchers if w.patch is not self]
            if not watchers:
                _watched.pop(target.module, None)
            place = _places.get((target.module, target.name))
            if place is not None:
                place.remove(self)
        if not _watched and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)

    def applied(self, version: str) -> Applied:
        """``with patch.applied("0.18.1"):`` applies here and reverts at the end."""
        return Applied(self, version)


class Applied(AbstractContextManager["Applied"]):
    """A patch for the length of a ``with``."""

    def __init__(self, patch: Patch, version: str) -> None:
        self.patch, self.version = patch, version

    def __enter__(self) -> Applied:
        self.patch.apply(self.version)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.patch.revert()


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``0.6.8.post1`` is (0, 6, 8)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("post")[0])[:3])


def within(version: str, span: tuple[str, str]) -> bool:
    """Whether a release lies between two, both included."""
    return numbers(span[0]) <= numbers(version) <= numbers(span[1])


def argument(args: Arguments, kwargs: Keywords, position: int, name: str, default: Any = None) -> Any:
    """One argument of a call, however it was passed."""
    return args[position] if position < len(args) else kwargs.get(name, default)


def replaced(
    args: Arguments, kwargs: Keywords, position: int, name: str, value: Any
) -> tuple[Arguments, Keywords]:
    """The arguments of a call with one of them changed."""
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, kwargs | {name: value}


# Failures that were reported and patches that were announced: one line each, not one a step.
_reported: set[str] = set()
_announced: set[str] = set()


def report_once(text: str) -> None:
    """Warn in one line, the first time."""
    if text not in _reported:
        _reported.add(text)
        logger.warning("staleproof: %s", text)


def _failed(patch: Patch, target: Target, what: str, error: Exception) -> None:
    report_once(
        f"{patch.name}: {what} of {target.name} failed, vLLM's own code runs: {type(error).__name__}: {error}"
    )


def _wrapped(original: Callable[..., Any], patch: Patch, target: Target) -> Callable[..., Any]:
    """``original`` with one target's hooks around it, none of which can raise."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if target.instead is not None:
            try:
                result = target.instead(args, kwargs)
                if result is not NotImplemented:
                    return result
            except Exception as error:
                _failed(patch, target, "the replacement", error)
                return original(*args, **kwargs)
        given = args, kwargs
        if target.before is not None:
            try:
                given = target.before(args, kwargs) or given
            except Exception as error:
                _failed(patch, target, "preparing a call", error)
        result = original(*given[0], **given[1])
        if target.after is not None:
            try:
                return target.after(result, args, kwargs)
            except Exception as error:
                _failed(patch, target, "finishing a call", error)
        return result

    if target.around is None:
        return call
    around = target.around

    @functools.wraps(original)
    def call_inside(*args: Any, **kwargs: Any) -> Any:
        stack = ExitStack()
        try:
            stack.enter_context(around(args, kwargs))
        except Exception as error:
            _failed(patch, target, "entering a call", error)
        try:
            return call(*args, **kwargs)
        finally:
            try:
                stack.close()
            except Exception as error:
                _failed(patch, target, "leaving a call", error)

    return call_inside


class _Place:
    """One function of vLLM that patches share."""

    def __init__(self, module: ModuleType, name: str) -> None:
        *path, self.attribute = name.split(".")
        self.holder: Any = module
        for part in path:
            self.holder = getattr(self.holder, part)
        self.original = vars(self.holder)[self.attribute]
        self.current = self.original
        self.layers: list[tuple[Patch, Target]] = []

    def add(self, patch: Patch, target: Target) -> bool:
        if any(layer is patch for layer, _ in self.layers):
            return False
        self.layers.append((patch, target))
        self._install()
        return True

    def remove(self, patch: Patch) -> None:
        kept = [layer for layer in self.layers if layer[0] is not patch]
        if len(kept) == len(self.layers):
            return
        if vars(self.holder)[self.attribute] is not self.current:
            report_once(f"{patch.name} stays: another package has wrapped {self.attribute} since")
            return
        self.layers = kept
        self._install()
        _announced.discard(patch.name)

    def _install(self) -> None:
        self.current = self.original
        for patch, target in self.layers:
            self.current = _wrapped(self.current, patch, target)
        setattr(self.holder, self.attribute, self.current)


_places: dict[tuple[str, str], _Place] = {}


def _package(module: ModuleType) -> Path:
    """The folder of the package that a module belongs to."""
    return Path(str(sys.modules[module.__name__.partition(".")[0]].__file__)).parent


def _stranger(place: _Place, module: ModuleType) -> str | None:
    """Whose function stands there, if neither vLLM's own nor one that vLLM has decorated."""
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


def _install(module: ModuleType, watcher: _Watcher) -> None:
    """Put one target's hooks in place; the reason why not is one line."""
    patch, target = watcher.patch, watcher.target
    try:
        key = module.__name__, target.name
        place = _places.get(key)
        if place is None or not place.layers:
            place = _Place(module, target.name)
        stranger = _stranger(place, module)
        if stranger is not None and not watcher.force:
            raise PatchError(
                f"{target.name} was wrapped by {stranger} before; "
                f"STALEPROOF_PATCHES=+{patch.name} wraps it all the same"
            )
        target.check(Sources(_package(module)))
        _places[key] = place
        if place.add(patch, target):
            level = logging.DEBUG if patch.name in _announced else logging.INFO
            logger.log(level, "staleproof: %s is in place (%s)", patch.name, target.name)
            _announced.add(patch.name)
    except Exception as error:
        report_once(f"{patch.name} leaves {target.name} alone: {error}")


class _Watcher(NamedTuple):
    patch: Patch
    target: Target
    force: bool


_watched: dict[str, list[_Watcher]] = {}


class _Loader(importlib.abc.Loader):
    """A module's own loader, and our hooks after it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as it would have been without us.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for watcher in _watched.get(module.__name__, ()):
            _install(module, watcher)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as the other finders do, and lends them our loader."""

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


def _when_imported(name: str, patch: Patch, target: Target, force: bool) -> None:
    watcher = _Watcher(patch, target, force)
    if all(w[:2] != watcher[:2] for w in _watched.get(name, ())):
        _watched.setdefault(name, []).append(watcher)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    # One that is being imported right now runs through the finder's loader, or not at all.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _install(module, watcher)
