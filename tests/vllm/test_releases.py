"""Versions are understood, or named for what they are."""

import pytest

from staleproof.cli import app as cli
from staleproof.vllm import releases
from staleproof.vllm.plugin import patches
from staleproof.vllm.releases import table
from staleproof.vllm.sources import PatchError

VERSIONS = [
    ("0.22", r"vLLM 0\.22 is a series, not a release: name one of 0\.22\.0, 0\.22\.1; nothing"),
    ("v0.22", "is a series"),
    ("0.22.1rc1", r"is a pre-release of 0\.22\.1 \(nearest: 0\.22\.1, 0\.23\.0\); nothing is patched"),
    ("0.22.1.rc1", r"is a pre-release of 0\.22\.1 "),
    ("0.19.0rc2.dev3+gabc1234", "is a development build near 0.19.0"),
    ("0.18.1.dev0", "is a development build near 0.18.1"),
    ("0.18.1.post1", "is a post-release of 0.18.1"),
    ("0.18.1+custom", "is not a release, but a build of its own of 0.18.1"),
    ("0.20.3", r"is not a release we know \(nearest: 0\.20\.2, 0\.21\.0\)"),
    ("0.34.0", r"is not a release we know \(nearest: 0\.33\.0\)"),
    ("0.9.2", r"is not a release we know \(nearest: 0\.16\.0\)"),
    ("", "is not a version"),
    ("main", "is not a version"),
]


def test_what_a_version_is():
    for version, line in VERSIONS:
        with pytest.raises(PatchError, match=line):
            releases.release(version)


def test_releases_and_their_builds():
    for version in ("0.22.1", "v0.22.1", " 0.22.1", "0.22.1+cu129", "0.22.1+cpu"):
        assert releases.release(version) == "0.22.1"


def test_a_series_is_its_last_release_and_anything_else_is_itself():
    given = ["v0.18", "0", "0.18.0", "0.18.0+cu129", "main"]
    assert [*map(releases.last_of_series, given)] == ["0.18.1", *given[1:]]


@pytest.mark.parametrize(
    "text", ["", '{"0.18.1": {}', '{"releases": {"0.18.1": {"mla_padding": {}}}}', "\xff"]
)
def test_a_broken_table_is_one_line(tmp_path, monkeypatch, capsys, text):
    file = tmp_path / "versions.json"
    file.write_text(text, encoding="latin-1")
    monkeypatch.setattr(releases, "TABLE", file)
    releases.table.cache_clear()
    try:
        assert cli.main(["patches", "--version", "0.18.1"]) == 2
    finally:
        releases.table.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "versions.json is broken" in lines[0]
    assert "install staleproof again" in lines[0]


def test_releases_as_spans():
    names = ["0.18.0", "0.19.0", "0.20.2", "0.21.0"]
    assert (releases.spans(names), releases.spans([])) == ("0.18.0, 0.19.0, 0.20.2 to 0.21.0", "")


def test_a_patch_has_a_function_to_wrap_in_each_release_that_it_says_it_is_for():
    for patch in patches().values():
        assert not [v for v in table() if patch.applies_to(v) and not patch.targets_for(v)], patch.name
