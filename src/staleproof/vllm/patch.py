"""What a patch of vLLM is: the functions it wraps, the releases it is for, and how to tell."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from staleproof.vllm import hooks, standing
from staleproof.vllm.arguments import Arguments, Keywords
from staleproof.vllm.hooks import Target
from staleproof.vllm.sources import Evidence, PatchError, Sources, within

# vLLM names the folders of its compile caches after a hash of these factors, among others.
FACTORS = "vllm.envs", "compile_factors"
# The functions that hash them: of the cache that Dynamo's result goes to, and of the one behind it.
HASHED_IN = (
    ("compilation/caching.py", "aot_compile_hash_factors"),
    ("compilation/backends.py", "VllmBackend.__call__"),
)


@cache
def cache_key(patch: str) -> Target:
    """Make a patch a factor of vLLM's compile-cache key, by the functions it has wrapped.

    The cache is keyed by the files that were traced, and wrapping changes none of vLLM's. Without
    this factor a start with the patch would load a graph that was traced without it, and the reverse.

    Args:
        patch: its name.

    >>> target = cache_key("scale_padding")
    >>> target.place, target.after({"VLLM_USE_V1": True}, (), {})
    ('vllm.envs:compile_factors', {'VLLM_USE_V1': True, 'STALEPROOF_SCALE_PADDING': ''})
    """

    def add(result: Any, args: Arguments, kwargs: Keywords) -> Any:
        states = standing.targets(patch)
        # Waiting counts as well: each start imports its modules in another order.
        wrapped = sorted(place for place, state in states.items() if state in ("waiting", "in place"))
        return result | {f"STALEPROOF_{patch.upper()}": " ".join(wrapped)}

    return Target(*FACTORS, (), after=add, vital=True)


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
        key = [cache_key(self.name)] if self.traced else []
        hooks.wrap(self.name, *key, *self.targets_for(version), requires=self.requires, force=force)

    def revert(self) -> None:
        """Give vLLM its own functions back, and stop waiting for its imports."""
        hooks.unwrap(self.name)

    @contextmanager
    def applied(self, version: str) -> Iterator[None]:
        """``with patch.applied("0.18.1"):`` applies it here and reverts it at the end."""
        self.apply(version)
        try:
            yield
        finally:
            self.revert()
