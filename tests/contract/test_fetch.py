"""The packages that CI fetches for the audit: where they go, and one line if there is no network."""

import subprocess

import pytest
from tests.contract import fetch


@pytest.fixture(name="cache")
def cache_fixture(tmp_path, monkeypatch):
    monkeypatch.setenv("STALEPROOF_AUDIT_PACKAGES", str(tmp_path))
    return tmp_path


def test_a_release_goes_where_the_audit_looks_and_is_fetched_once(cache, monkeypatch):
    asked, folder = [], cache / "fla_core-0.6.0"
    monkeypatch.setattr(fetch.packages, "fetch", lambda *given: asked.append(given) or given[-1].mkdir())
    assert [fetch.fetch("fla-core", "0.6.0") for _ in range(2)] == [f"fla-core 0.6.0: {folder}"] * 2
    assert asked == [("fla-core==0.6.0", ".*", folder)]
    (release,) = fetch.packages._cached("fla-core")
    assert release.version == "0.6.0"


def test_without_a_network_it_is_one_line(cache, monkeypatch):
    def fails(*_):
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(fetch.packages, "fetch", fails)
    said = fetch.fetch("sglang", "0.5.23")
    assert said.startswith("sglang 0.5.23 was not fetched, its tests are skipped: ")
    assert len(said.splitlines()) == 1
