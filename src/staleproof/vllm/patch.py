"""What a patch of vLLM is: the functions it wraps, the releases it is for, and how to tell."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from staleproof.vllm import hooks
from staleproof.vllm.arguments import Arguments, Keywords
from staleproof.vllm.hooks import Target
from staleproof.vllm.sources import Evidence, PatchError, Sources, within
from staleproof.vllm.standing import CACHE, IN_PLACE, WAITING, Installed, registry

# vLLM names the folders of its compile caches after a hash of these factors, among others.
FACTORS = "vllm.envs", "compile_factors"
# The functions that hash them: of the cache that Dynamo's result goes to, and of the one behind it.
HASHED_IN = (
    ("compilation/caching.py", "aot_compile_hash_factors"),
    ("compilation/backends.py", "VllmBackend.__call__"),
)
# Runs Dynamo. vLLM saves its result under the factors from before, by this method of the result.
TRACED_BY = "vllm.compilation.wrapper", "TorchCompileWithNoGuardsWrapper.aot_compile"
SAVE = "save_compiled_function"
# The factors of the last key that vLLM was given, and those under which it saves what Dynamo traces now.
_factors: dict[str, str] = {}
_begun: dict[str, str] = {}
LASTING = {WAITING, IN_PLACE}
# In the key of what no later start may load.
UNPROVED = f"unproved {uuid.uuid4()}"


def key_factors() -> dict[str, str]:
    """The patches that torch.compile traces as factors of vLLM's compile-cache key, as they stand now.

    A factor names the functions that are wrapped, and called. Waiting for an import counts as well: each
    start imports its modules in another order. Where a hook raised in a trace, the factor is of no other
    process, because a part of the graph has vLLM's own code.
    """
    factors = {}
    for patch in sorted(_traced(), key=lambda patch: patch.name):
        states = hooks.checked(patch.name)
        wrapped = " ".join(sorted(place for place, state in states.items() if state in LASTING))
        if patch.failed_in_trace is not None:
            wrapped = UNPROVED
        elif patch.reason is not None:
            continue
        factors[f"STALEPROOF_{patch.name.upper()}"] = wrapped
    return factors


def _traced() -> list[Installed]:
    return [patch for patch in [*registry.patches.values()] if patch.traced]


def _add(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    _factors.clear()
    _factors.update(key_factors())
    return result | _factors


def _unproved() -> str | None:
    """Say why a graph that was just traced must not be saved under the last key."""
    bypassed = {*hooks.checked(CACHE).values()} - LASTING
    if bypassed or registry.reason(CACHE) is not None:
        return "; ".join(bypassed) or registry.reason(CACHE)
    if failed := [*filter(None, (patch.failed_in_trace for patch in registry.patches.values()))]:
        return "; ".join(failed)
    return "patches changed while it was traced" if key_factors() != _begun else None


def _begin(args: Arguments, kwargs: Keywords) -> None:
    _begun.clear()
    _begun.update(_factors)


def _prove(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Let vLLM save a graph only if all patches of its key were in place, and none failed, to the end.

    vLLM logs what the save raises, and goes on.
    """
    why: str | None = "not looked at"

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PatchError(f"staleproof: not saved, a later start traces it again: {why}")

    setattr(result, SAVE, refuse)
    why = _unproved()
    if why is None:
        delattr(result, SAVE)
    hooks.settle()
    return result


# Makes the patches factors of vLLM's compile-cache key. The cache is keyed by the files that were traced,
# and wrapping changes none of vLLM's: a start with a patch would load a graph without it, and the reverse.
CACHE_TARGETS = (
    Target(*FACTORS, (), after=_add, vital=True),
    Target(*TRACED_BY, ("self",), before=_begin, after=_prove, vital=True),
)


def check_cache_key(sources: Sources) -> None:
    """Check that vLLM hashes its compile factors where we expect it.

    Raises:
        PatchError: it does not, so that a patched function that torch.compile traces could be served
            from a graph of the unpatched one.
    """
    for path, function in HASHED_IN:
        found = sources.function(path, function)
        if "envs.compile_factors()" not in found.text:
            raise PatchError(
                f"vllm/{found.place} {function} does not hash envs.compile_factors(): torch.compile's "
                "cache could mix graphs with the patch and without"
            )
    for target in CACHE_TARGETS:
        target.check(sources)


@dataclass(frozen=True)
class Patch:
    """One fix for an installed vLLM.

    Attributes:
        name: what the user calls it.
        incident: folder of the incident it belongs to.
        summary: what it does, in one line.
        versions: ranges of releases it is for, first and last included.
        targets: the functions it wraps.
        probe: reads the sources and says whether the defect is there.
        mechanism: the defect and the fix, in a few sentences.
        threads: upstream issues and pull requests.
        cost: what it costs a decode step, and where that was measured.
        requires: patches without which this one would do harm.
        traced: whether torch.compile may trace a target. The patch is then a factor of the key of
            vLLM's compile cache.
        models: who is affected, e.g. "MLA models".
        triton: whether its kernels need Triton.
        on_host: whether its hooks run on the host at each call, and in no graph: after a hook that raised
            the patch comes back.
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
    models: str = "every model"
    triton: bool = False
    on_host: bool = False

    def is_needed(self, sources: Sources) -> Evidence:
        """Probe these sources for the defect.

        Raises:
            PatchError: a file or function that the probe reads is not there.
            NotShippedError: only a source distribution could tell.

        >>> import tempfile, pathlib
        >>> from staleproof.vllm.plugin import patches
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "_custom_ops.py").write_text("x = 1")
        ...     patches()["scale_padding"].is_needed(Sources(pathlib.Path(folder)))
        Evidence(needed=False, why='_custom_ops.py has no create_fp4_scale_tensor')
        """
        return self.probe(sources)

    def applies_to(self, version: str) -> bool:
        """Say whether a release lies in the ranges that this patch is for.

        >>> from staleproof.vllm.plugin import patches
        >>> [patches()["decode_buffer"].applies_to(version) for version in ("0.18.1", "0.20.0")]
        [True, False]
        """
        return any(within(version, span) for span in self.versions)

    def targets_for(self, version: str) -> list[Target]:
        """Return the targets that exist in this release.

        >>> from staleproof.vllm.plugin import patches
        >>> [target.module for target in patches()["duplicate_experts"].targets_for("0.18.1")]
        ['vllm.model_executor.layers.fused_moe.flashinfer_cutlass_moe']
        """
        return [t for t in self.targets if t.versions is None or within(version, t.versions)]

    def check(self, version: str, sources: Sources) -> None:
        """Check that the patch can be put in place on this vLLM.

        Raises:
            PatchError: a target is not as expected, its kernels cannot run, or torch.compile's cache
                could serve a graph without it.
        """
        if self.triton and importlib.util.find_spec("triton") is None:
            raise PatchError("its kernels need Triton, which is not installed")
        for target in self.targets_for(version):
            target.check(sources)
        if self.traced:
            check_cache_key(sources)

    def apply(self, version: str, *, force: bool = False) -> None:
        """Wrap the targets, now or when vLLM imports them. Applying twice changes nothing.

        Args:
            version: the release, which decides which targets exist.
            force: wrap a target even if another package has wrapped it before.
        """
        requires = self.requires
        if self.traced:
            # It is no patch: that it is in place is no news.
            registry.of(CACHE).announced = True
            hooks.wrap(CACHE, *CACHE_TARGETS)
            requires = (*requires, CACHE)
        installed = registry.of(self.name)
        installed.traced, installed.on_host = self.traced, self.on_host
        hooks.wrap(self.name, *self.targets_for(version), requires=requires, force=force)

    def revert(self) -> None:
        """Give vLLM its own functions back, and stop waiting for its imports."""
        hooks.unwrap(self.name)
        if self.traced and not _traced():
            hooks.unwrap(CACHE)

    @contextmanager
    def applied(self, version: str) -> Iterator[None]:
        """``with patch.applied("0.18.1"):`` applies it here and reverts it at the end."""
        self.apply(version)
        try:
            yield
        finally:
            self.revert()
