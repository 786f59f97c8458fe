"""A patch knows its releases and targets, and is applied for the length of a ``with``."""

from __future__ import annotations

import pytest

from staleproof.vllm import hooks
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources

PATCH = Patch(
    name="p",
    incident="i",
    summary="s",
    versions=(("1.0.0", "1.2.0"), ("2.0.0", "2.0.0")),
    targets=(
        Target("vllm.ops", "double", ("x",)),
        Target("vllm.ops", "Impl.run", ("self",), versions=("1.1.0", "2.0.0")),
    ),
    probe=lambda sources: Evidence(True, str(sources.package)),
    mechanism="m",
    threads=(),
    cost="c",
)


def test_versions_and_targets(tmp_path):
    assert [PATCH.applies_to(v) for v in ("0.9.9", "1.2.0", "1.2.1", "2.0.0")] == [False, True, False, True]
    assert [t.name for t in PATCH.targets_for("1.0.5")] == ["double"]
    assert [t.name for t in PATCH.targets_for("1.1.0")] == ["double", "Impl.run"]
    assert PATCH.is_needed(Sources(tmp_path)) == (True, str(tmp_path))


def _waits() -> None:
    with PATCH.applied("1.1.0"):
        assert [hook.target.name for hook in hooks._watched["vllm.ops"]] == ["double", "Impl.run"]
        raise KeyError


def test_reverted_after_an_error():
    with pytest.raises(KeyError):
        _waits()
    assert not hooks._watched
