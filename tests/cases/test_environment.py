"""What a machine can run, and which combinations of packages fail."""

from __future__ import annotations

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
