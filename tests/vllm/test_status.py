"""What an operator reads: states, the upgrade, exit codes, JSON, and why nothing will be patched."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import pytest
import warm
from made_up import CACHE

from staleproof.cli import app as cli
from staleproof.report import patches as shown
from staleproof.vllm import live, status
from staleproof.vllm import plugin as vllm_plugin
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence

ROOT = Path(__file__).parents[2]
OPS = """
def topk_hash_softplus_sqrt(x): pass
def create_fp4_scale_tensor(m, n, device, is_sf_swizzled_layout):
    if is_sf_swizzled_layout:
        return torch.empty(
            (m, n))
    else:
        return None
"""


FILES = CACHE | {"_custom_ops": OPS}


@pytest.fixture(name="patches")
def patches_fixture(capsys):
    """``staleproof patches`` with some options: its exit code, and what it prints, or why it refuses."""

    def run(*options):
        code = cli.main(["patches", *options])
        said = capsys.readouterr()
        return code, said.err if code == 2 else said.out

    return run


def test_patches_of_a_release_that_is_not_installed_would_apply(patches):
    code, text = patches("--version", "0.18.1")
    assert code == 0
    assert text.startswith("vLLM 0.18.1, recorded probes of its source\n")
    assert "would apply  mla_padding        MLA models, and TurboQuant" in text
    assert "affected " not in text
    assert "divides by a sum that is 0 in an empty row" in text
    assert "applied" not in text
    assert "patched" not in text


@pytest.mark.parametrize("version", ["v0.18", " 0.18.1"])
def test_a_series_is_its_last_release_and_says_so(patches, version):
    code, text = patches("--version", version)
    assert (code, text[:28]) == (0, "vLLM 0.18.1, recorded probes")
    said = f"note: {version} is read as 0.18.1, the last of that series" in text
    assert said is (version.count(".") == 1)


def test_json(patches):
    rows = {row["patch"]: row for row in json.loads(patches("--version", "v0.22.1", "--json")[1])["patches"]}
    text = shown.as_text(status.answer("0.22.1"))
    assert all(f"{row['models']} " in text and f" {row['why']}" in text for row in rows.values())
    recording = rows["mla_recording"]
    assert recording["needed"] is True
    assert recording["requires"] == ["undrained_ids"]
    assert recording["traced"] is False
    assert rows["scale_padding"]["traced"] is True
    assert rows["scale_padding"]["targets"][0] == "vllm._custom_ops:create_fp4_scale_tensor"
    for name, patch in vllm_plugin.patches().items():
        assert rows[name]["targets"] == [target.place for target in patch.targets]
        assert rows[name]["urls"] == [shown.url(thread) for thread in patch.threads]
    assert rows["topk_nan"]["needed"] is False
    assert "https://github.com/vllm-project/vllm/issues/39391" in rows["topk_nan"]["urls"]


@pytest.mark.parametrize(
    ("release", "chosen", "code"),
    [("0.33.0", "all", 0), ("0.16.0", "all", 3), ("0.18.1", "-undrained_ids", 3), ("0.18.1", "none", 0)],
)
def test_exit_3_if_something_needed_is_refused(monkeypatch, patches, release, chosen, code):
    monkeypatch.setenv(vllm_plugin.VARIABLE, chosen)
    found, text = patches("--version", release)
    assert (found, "refused" in text) == (code, code == 3)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--version", "0.99"], "is not a release we know"),
        (["--explain", "mla"], "unknown patch 'mla'; known: mla_padding"),
    ],
)
def test_bad_input(patches, arguments, line):
    code, text = patches(*arguments)
    assert (code, line in text) == (2, True)


def test_an_explanation_is_printed(patches):
    code, text = patches("--explain", "topk_nan")
    assert (code, text.split()) == (0, shown.explanation("topk_nan").split())


def test_the_release_to_upgrade_to():
    assert status.answer("0.22.1").upgrade.startswith("upgrade to 0.28.0, which needs only mla_padding, ")


@pytest.mark.parametrize(
    ("needed", "release", "line"),
    [
        ([False, False], "b", "no defect that we know of"),
        ([False, None], "b", "which it needs is not known"),
        ([None, True], None, ""),
        ([True], "b", "upgrade to d, which needs none"),
        ([True], "d", "no later release has fewer of these defects"),
    ],
)
def test_the_upgrade_is_the_first_later_release_with_the_fewest_defects(monkeypatch, needed, release, line):
    names = "scale_padding", "unpublish"
    defects = {"a": 0, "b": 2, "c": 2, "d": 0, "e": 0}
    table = {r: {n: {"needed": i < count} for i, n in enumerate(names)} for r, count in defects.items()}
    monkeypatch.setattr(status, "table", lambda: table)
    monkeypatch.setattr(status, "patches", lambda: {n: vllm_plugin.patches()[n] for n in names})
    decided = [vllm_plugin.Decision(vllm_plugin.patches()["unpublish"], "affected", "", n) for n in needed]
    assert status.upgrade(decided, release) == line


@pytest.mark.parametrize("plugins", ["other", "other, staleproof"])
def test_a_plugin_that_vllm_does_not_load_patches_nothing(installed, patches, monkeypatch, plugins):
    installed("0.22.1", FILES)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    code, text = patches()
    assert (code, "will be patched" in text) == (3, False)
    assert "affected    scale_padding" in text
    assert f"warning: VLLM_PLUGINS={plugins} leaves staleproof out: nothing is patched" in text
    monkeypatch.setenv("VLLM_PLUGINS", "other,staleproof")
    assert "warning" not in patches()[1]


def test_a_missing_entry_point(installed, patches, monkeypatch):
    installed("0.22.1", FILES)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **given: ())
    _, text = patches()
    assert "warning: no entry point staleproof in vllm.general_plugins is installed" in text
    assert "will be patched" not in text


@pytest.mark.parametrize(
    ("release", "variable", "state"),
    [
        ("0.22.1", None, "will be patched"),
        ("0.22.7", None, "refused"),
        ("0.22.7", "yes", "refused"),
        ("0.22.7", "probe", "will be patched"),
    ],
)
def test_an_installed_release_is_probed_and_an_unknown_one_patched_only_if_asked(
    installed, patches, monkeypatch, release, variable, state
):
    installed(release, FILES)
    if variable:
        monkeypatch.setenv(vllm_plugin.UNKNOWN, variable)
    code, text = patches("--json")
    answer = json.loads(text)
    rows = {row["patch"]: row for row in answer["patches"]}
    assert (code, rows["scale_padding"]["state"], rows["scale_padding"]["needed"]) == (3, state, True)
    # The other files of this vLLM are missing: those probes cannot tell.
    assert rows["mla_padding"]["state"] == "refused"
    if release == "0.22.1":
        return
    # Only the CUDA sources could tell, and nothing is recorded for this release.
    assert rows["hash_topk_nan"]["state"] == "refused"
    assert rows["hash_topk_nan"]["needed"] is None
    assert answer["notes"][0].startswith(
        "note: vLLM 0.22.7 is not a release we know (nearest: 0.22.1, 0.23.0)"
    )


def test_no_upgrade_is_named_for_a_release_that_we_do_not_know(installed):
    """What later releases lack is known; whether this one has it is only what its own sources say."""
    installed("0.22.7", FILES)
    answer = status.answer()
    assert any(decision.needed for decision in answer.decided)
    assert (answer.upgrade, answer.installed, answer.version) == ("", True, "0.22.7")
    assert not status.answer("0.22.1").installed


def test_a_posix_locale_reads_every_file(installed, tmp_path):
    installed("0.22.1", FILES)
    (tmp_path / "vllm/_custom_ops.py").write_text("# \N{GREEK SMALL LETTER ALPHA}\n" + OPS, encoding="utf-8")
    path = os.pathsep.join((str(ROOT / "src"), str(tmp_path)))
    env = os.environ | {"PYTHONPATH": path, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}
    done = warm.new("-X", "utf8=0", "-m", "staleproof", "patches", text=False, env=env)
    assert (done.returncode, done.stderr) == (3, b"")
    assert b"will be patched  scale_padding" in done.stdout


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ("", ""),
        ("WATCH=0\t WATCH_PORT=no PORT=9463\t UNKNOWN=probe SWITCH=/no REQUIRE=scale_padding,topk_nan", ""),
        (
            "POISON=all",
            "poison is refused: STALEPROOF_POISON: expected kv or keys, and perhaps ,over-zeroing, got 'all'",
        ),
        ("WATCH=yes", "STALEPROOF_WATCH: expected 1, on or true, got 'yes': nothing is watched"),
        ("WATCH=1 WATCH_PORT=no", "STALEPROOF_WATCH_PORT: expected 1 to 65535, got 'no': nothing is watched"),
        ("REQUIRE=foo", "vLLM does not start: STALEPROOF_REQUIRE=foo: foo is no patch (known: mla_padding,"),
        (
            "REQUIRE=scale_padding PATCHES=topk_nan",
            "vLLM does not start: STALEPROOF_REQUIRE=scale_padding: scale_padding is off (STALEPROOF_PATCHES",
        ),
        ("UNKNOWN=prob", "STALEPROOF_UNKNOWN: expected probe, got 'prob'"),
        ("PORT=abc", "STALEPROOF_PORT: expected 1 to 65535, got 'abc': nobody can ask"),
        ("PORT=65536", "STALEPROOF_PORT: expected 1 to 65535, got '65536': nobody can ask"),
        ("SWITCH=/no/off", "STALEPROOF_SWITCH: expected a file in a folder that exists, got '/no/off'"),
        (
            "REQUIRE=poison,contain",
            "vLLM does not start: STALEPROOF_REQUIRE=poison,contain: poison is off (STALEPROOF_POISON does",
        ),
    ],
)
def test_a_variable_with_another_effect_than_it_seems_is_said(
    installed, patches, monkeypatch, variables, warning
):
    installed("0.22.1", FILES)
    for name, value in (word.split("=") for word in filter(None, variables.split(" "))):
        monkeypatch.setenv(f"STALEPROOF_{name}", value)
    _, text = patches()
    assert text.count("warning: ") == bool(warning)
    assert not warning or f"warning: {warning}" in " ".join(text.split())


@pytest.fixture(name="switched")
def switched_fixture(installed, patches, monkeypatch, tmp_path):
    """Of a vLLM that needs every patch: patch -> row, and the notes, with these words in the switch file."""

    def run(words):
        installed("0.22.1", FILES)
        monkeypatch.setattr(Patch, "is_needed", lambda *_: Evidence(True, "there"))
        monkeypatch.setattr(vllm_plugin, "_refusal", lambda *_: None)
        monkeypatch.setenv(live.SWITCH, str(tmp_path / "off"))
        if words is not None:
            (tmp_path / "off").write_text(words)
        code, text = patches("--json")
        assert code == 0
        answer = json.loads(text)
        return {row["patch"]: row for row in answer["patches"]}, answer["notes"]

    return run


@pytest.mark.parametrize(
    ("words", "off", "along"),
    [
        (None, [], []),
        ("unpublish", ["unpublish"], []),
        ("published_unwritten, mla_padding", ["mla_padding", "unpublish"], ["decode_buffer"]),
        ("", [*vllm_plugin.patches()], []),
    ],
)
def test_what_the_switch_file_names_is_off_with_what_needs_it(switched, tmp_path, words, off, along):
    rows, notes = switched(words)
    why = dict.fromkeys(off, f"switched off by {tmp_path / 'off'}; there")
    why |= dict.fromkeys(along, "needs mla_padding, which is off; there")
    off = [name for name in rows if name in why]
    assert [name for name, row in rows.items() if row["state"] == "off"] == off
    assert {row["state"] for name, row in rows.items() if name not in off} <= {"will be patched"}
    assert {name: rows[name]["why"] for name in off} == why
    said = f"warning: STALEPROOF_SWITCH: {tmp_path / 'off'} switches off {', '.join(off)}"
    assert notes == ([] if words is None else [said])


@pytest.mark.parametrize("off", [(), ("unpublish",), ("poison", "contain")])
def test_what_is_required_and_named_in_the_switch_file_is_said_to_stop_vllm(
    switched, monkeypatch, tmp_path, off
):
    for name, value in (("REQUIRE", "unpublish,contain,poison"), ("POISON", "kv"), ("CONTAIN", "1")):
        monkeypatch.setenv(f"STALEPROOF_{name}", value)
    _, notes = switched(" ".join(off) or None)
    refused = [note for note in notes if "vLLM does not start" in note]
    assert len(notes) == 2 * bool(off)
    assert len(refused) == bool(off)
    for name in off:
        assert f"{name} is off (switched off by {tmp_path / 'off'}; there)" in refused[0]


def test_a_watch_needs_a_release_that_it_knows(installed, patches, monkeypatch):
    monkeypatch.setenv("STALEPROOF_WATCH", "1")
    installed("0.19.1", FILES)
    assert "STALEPROOF_WATCH needs vLLM 0.20.0 or later: nothing is watched" in patches()[1]
    assert [status.unwatched(version) for version in ("0.20.0", "dev", "")] == [None] * 3
