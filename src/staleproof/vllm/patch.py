"""What a patch of vLLM is: the functions it wraps, the releases it is for, and how to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from staleproof.vllm import hooks
from staleproof.vllm.hooks import Target
from staleproof.vllm.sources import Evidence, Sources, within


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
        traced: whether torch.compile may trace a target. Its cache may then hold a graph that was
            traced without the patch.
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

    def apply(self, version: str, *, force: bool = False) -> None:
        """Wrap the targets, now or when vLLM imports them. Applying twice changes nothing.

        Args:
            version: the release, which decides which targets exist.
            force: wrap a target even if another package has wrapped it before.
        """
        for target in self.targets_for(version):
            hooks.wrap(self.name, target, force=force)

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
