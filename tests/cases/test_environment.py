"""What a machine can run, and which combinations of packages fail."""

from __future__ import annotations

import pytest

from staleproof import device
from staleproof.cases import machine


def test_every_capability_says_its_version_or_what_is_skipped():
    found = machine.capabilities()
    assert len({one.name for one in found}) == len(found) > 6
    assert all(one.detail and "\n" not in one.detail for one in found)


def test_a_program_is_found_on_the_path_or_in_the_toolkits_folder(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/no-such-tool").touch()
    assert machine.tool("no-such-tool") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert machine.tool("no-such-tool") == tmp_path / "bin/no-such-tool"


@pytest.mark.parametrize(
    ("triton", "numpy", "interpreting", "warned"),
    [
        ("3.6.0", "2.4.6", True, True),
        ("3.6.0", "2.5.2", False, False),
        ("3.6.0", "2.3.5", True, False),
        ("3.7.1", "2.4.6", True, False),
        ("3.10.0", "2.10.0", True, False),
    ],
)
def test_a_combination_that_fails_is_warned_of(monkeypatch, triton, numpy, interpreting, warned):
    versions = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(device, "version_of", versions.get)
    monkeypatch.setattr(device, "interpreting", lambda: interpreting)
    assert bool(machine.warnings()) is warned
