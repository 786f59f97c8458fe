"""The table of releases: what was probed, and from which release on a patch is no longer needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tools import vllm_table


def test_a_patch_ends_behind_the_last_release_that_needs_it(monkeypatch, tmp_path):
    needed = {"never": "", "first": "a", "gap": "ac", "until c": "abc", "newest": "bd"}
    found = {
        release: {name: {"needed": release in of, "why": "read"} for name, of in needed.items()}
        for release in "abcd"
    }
    monkeypatch.setattr(vllm_table, "TABLE", tmp_path / "versions.json")
    vllm_table.write(found)
    assert json.loads((tmp_path / "versions.json").read_text()) == {
        "no longer needed from": {"never": "a", "first": "b", "gap": "d", "until c": "d", "newest": None},
        "releases": found,
    }


def test_each_patch_is_asked_by_its_name(monkeypatch):
    def patch(name):
        return SimpleNamespace(is_needed=lambda sources: SimpleNamespace(_asdict=lambda: {"needed": name}))

    monkeypatch.setattr(vllm_table.vllm_plugin, "patches", lambda: {name: patch(name) for name in "ab"})
    assert vllm_table.probed(None) == {"a": {"needed": "a"}, "b": {"needed": "b"}}
