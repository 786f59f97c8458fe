"""The packages that CI fetches for the audit: where they go, and one line if there is no network."""

import subprocess
from pathlib import Path

import pytest
from tests.contract import fetch


@pytest.fixture(name="cache")
def cache_fixture(tmp_path, monkeypatch):
    monkeypatch.setenv("STALEPROOF_AUDIT_PACKAGES", str(tmp_path / "audit"))
    return tmp_path / "audit"


def test_a_release_goes_where_the_audit_looks_and_is_fetched_once(cache, monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command[-1])
        Path(command[command.index("--target") + 1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    wanted = f"fla-core 0.6.0: {cache / 'fla_core-0.6.0'}"
    assert [fetch.fetch("fla-core", "0.6.0") for _ in range(2)] == [wanted] * 2
    assert asked == ["fla-core==0.6.0"]
    assert [path.name for path in cache.iterdir()] == ["fla_core-0.6.0"]
    (release,) = fetch.packages._cached("fla-core")
    assert release.version == "0.6.0"


def test_without_a_network_it_is_one_line_and_nothing_is_left(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failed)
    said = fetch.fetch("sglang", "0.5.23")
    assert said == "sglang 0.5.23 was not fetched, so its tests are skipped: ERROR: No matching distribution"
    assert [*cache.iterdir()] == []
