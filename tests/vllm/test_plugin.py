"""What the plugin decides: by probe first and number second, and never in vLLM's way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Space

import made_up
import pytest
import warm
from made_up import planted

from staleproof.vllm import hooks, live, plugin, process, releases, standing
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.plugin import Choice
from staleproof.vllm.sources import Evidence, PatchError, Sources
from staleproof.vllm.standing import registry

ROOT = Path(__file__).parents[2]
ALL = Choice(frozenset(plugin.patches()), frozenset())


def _states(version, sources=None, choice=ALL):
    return {d.patch.name: d.state for d in plugin.decisions(version, sources, choice)}


def test_patches_by_release():
    counts = {v: [*_states(v).values()].count("affected") for v in releases.table()}
    assert counts["0.18.1"] == 17
    assert counts["0.33.0"] == 9
    assert _states("0.19.1")["decode_buffer"] == "affected"
    assert _states("0.20.2")["decode_buffer"] == "not needed"
    assert _states("0.18.1+cu129") == _states("0.18.1")
    refused = {v: [n for n, s in _states(v).items() if s == "refused"] for v in releases.table()}
    first = ["mla_padding", "fp8_scale", "topk_nan", "duplicate_experts", "routing_simulator", "dummy_slots"]
    assert refused.pop("0.16.0") == [*first, "scale_padding"]
    assert refused.pop("0.17.0") == refused.pop("0.17.1") == ["scale_padding"]
    assert not any(refused.values())


def test_what_only_cuda_sources_could_tell_is_recorded_of_a_known_release_alone(tmp_path):
    """A wheel has none of them, and what a release had says nothing about another."""
    patch, wheel = plugin.patches()["topk_nan"], Sources(tmp_path)
    found = plugin.evidence(patch, plugin.Base("0.18.1"), wheel)
    assert found.needed
    assert found.why.endswith("(recorded from the source of 0.18.1)")
    with pytest.raises(PatchError, match="only it could tell"):
        plugin.evidence(patch, plugin.Base("0.18.1", "a build of its own"), wheel)


def test_choice():
    every = frozenset(plugin.patches())
    chosen = plugin.chosen
    assert chosen(None).names == chosen("all").names == chosen("").names == every
    assert chosen("none").names == frozenset()
    assert chosen("mla_padding, scale_padding").names == {"mla_padding", "scale_padding"}
    # An incident's name stands for all its patches.
    routing = {"topk_nan", "topk_nan_bias", "hash_topk_nan", "duplicate_experts", "routing_simulator"}
    assert chosen("moe_routing").names == routing
    assert chosen("-mla_padding").names == every - {"mla_padding"}
    assert chosen("all,-kv_reuse").names == {
        n for n, p in plugin.patches().items() if p.incident != "kv_reuse"
    }
    assert chosen("+topk_nan") == Choice(every, frozenset({"topk_nan"}))
    named = frozenset({"mla_padding", "topk_nan"})
    assert chosen("mla_padding,+topk_nan") == Choice(named, frozenset({"topk_nan"}))
    assert chosen("+moe_routing") == Choice(every, frozenset(routing))
    with pytest.raises(PatchError, match="names 'mla_pading', nothing is patched; known: all"):
        chosen("mla_pading")


def test_a_patch_that_needs_another_is_refused_without_it():
    states = _states("0.18.1", choice=Choice(ALL.names - {"undrained_ids"}, frozenset()))
    assert states["undrained_ids"] == "off"
    # One leads to the next: recorded blocks would pile up, and zeroing has none to zero.
    assert states["mla_recording"] == states["mla_zeroing"] == "refused"
    assert _states("0.18.1", choice=plugin.chosen("-mla_padding"))["decode_buffer"] == "refused"


def test_the_probe_counts_before_the_number(tmp_path, monkeypatch):
    patch = plugin.patches()["undrained_ids"]
    found = {}
    for needed in (True, False):
        fake = replace(patch, probe=lambda s, n=needed: Evidence(n, "seen"), targets=())
        for version in ("0.18.1", "0.33.0"):
            of = plugin.base(version)
            found[needed, version] = plugin.decide(fake, of, Sources(tmp_path), ALL).state
    needed = {(True, "0.18.1"): "will be patched", (True, "0.33.0"): "refused"}
    assert found == needed | {(False, version): "not needed" for version in ("0.18.1", "0.33.0")}


def test_a_probe_that_raises_is_one_line_and_none_where_the_patch_is_left_out(tmp_path):
    """A refusal turns the server's health bad; what nobody asked for does not."""
    broken = replace(plugin.patches()["undrained_ids"], probe=lambda s: 1 / 0)
    asked, left_out = (
        plugin.decide(broken, plugin.base("0.18.1"), Sources(tmp_path), choice)
        for choice in (ALL, plugin.chosen("none"))
    )
    assert (asked.state, asked.needed) == ("refused", None)
    assert asked.why == "the probe failed: ZeroDivisionError: division by zero"
    assert (left_out.state, left_out.needed) == ("off", None)


def _register(caplog) -> list[str]:
    with caplog.at_level(logging.INFO, "vllm.staleproof"):
        plugin.register()
    return caplog.messages


UNKNOWN = "vLLM 0.99.0 is not a release we know (nearest: 0.33.0); nothing is patched"


@pytest.mark.parametrize(
    ("version", "package", "names", "line"),
    [
        (None, False, "", "no vLLM is installed"),
        ("0.18.1", False, "", "vLLM 0.18.1 is half installed: no importable package; nothing is patched"),
        (None, True, "", "vLLM is half installed: its metadata is missing; nothing is patched"),
        ("0.99.0", True, "", f"{UNKNOWN}; its own sources need nothing; STALEPROOF_UNKNOWN=probe"),
        ("0.18.1", True, "mla_pading", "STALEPROOF_PATCHES names 'mla_pading', nothing is patched"),
    ],
)
def test_bad_input_is_one_line_and_vllm_starts(installed, caplog, monkeypatch, version, package, names, line):
    installed(version, {} if package else None)
    monkeypatch.setenv(plugin.VARIABLE, names)
    # Only "probe" asks for an unknown release.
    monkeypatch.setenv(plugin.UNKNOWN, "yes")
    misspelled, said = _register(caplog)
    assert misspelled.startswith("staleproof: STALEPROOF_UNKNOWN: expected probe, got 'yes': ")
    assert said.startswith(f"staleproof: {line}")


def test_a_vllm_without_its_files(installed, caplog):
    installed("0.18.1", {})
    lines = _register(caplog)
    assert len(lines) == 2
    gone = "mla_padding (vllm/v1/attention/ops/triton_decode_attention.py is not there)"
    assert gone in lines[0]
    # Known by its number alone, and yet not without the file it is for.
    assert "topk_nan (vllm/_custom_ops.py is not there)" in lines[0]
    assert lines[1].startswith("staleproof on vLLM 0.18.1: refused: mla_padding")
    assert "will be patched" not in lines[1]


def test_a_folder_of_that_name_is_no_package(installed, caplog, tmp_path):
    (tmp_path / "vllm").mkdir()
    installed("0.18.1", None)
    said = "staleproof: vLLM 0.18.1 is half installed: no importable package; nothing is patched"
    assert _register(caplog) == [said]


def test_none_reads_nothing(caplog, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "none")
    monkeypatch.setattr(plugin, "installed", lambda: 1 / 0)
    assert _register(caplog) == ["staleproof: off by STALEPROOF_PATCHES"]
    off = "off", "STALEPROOF_PATCHES=none"
    assert live.health()["patches"] == dict.fromkeys(plugin.patches(), off)


def test_whatever_else_goes_wrong_stays_inside(caplog, monkeypatch):
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "installed", lambda: 1 / 0)
    assert _register(caplog) == ["staleproof: nothing is patched: ZeroDivisionError: division by zero"]


@pytest.fixture(name="applied")
def applied_fixture(monkeypatch):
    """Registers with three made-up patches on a vLLM 0.18.1; the second is broken in a way of the test's."""

    def make(fails) -> None:
        made = [
            made_up.patch(Target(f"vllm.{name}", "f", ("x",), after=lambda r, a, k: r), name=name)
            for name in "abcd"
        ]
        made[2] = replace(made[2], requires=("b",))
        apply = Patch.apply

        def applied(self, version, *, force=False):
            apply(self, version, force=force)
            if self.name == "b":
                fails()

        monkeypatch.setattr(Patch, "apply", applied)
        monkeypatch.setattr(plugin, "patches", lambda: {patch.name: patch for patch in made})
        monkeypatch.setattr(plugin, "installed", lambda: ("0.18.1", None))
        decided = [plugin.Decision(patch, "will be patched", "there", True) for patch in made]
        monkeypatch.setattr(plugin, "decisions", lambda *_: decided)
        monkeypatch.setattr(plugin, "chosen", lambda text: ALL)

    yield make
    for name in ("a", "b", "c", "d", standing.REPORT):
        hooks.unwrap(name)
    assert not hooks._watched


def test_only_the_patches_with_a_plus_are_forced(applied, monkeypatch):
    applied(lambda: None)
    forced = {}
    monkeypatch.setattr(Patch, "apply", lambda self, version, *, force: forced.update({self.name: force}))
    monkeypatch.setattr(plugin, "chosen", lambda text: Choice(frozenset("abcd"), frozenset("b")))
    plugin.register()
    assert forced == {"a": False, "b": True, "c": False, "d": False}


def _leaves():
    raise SystemExit("planted")


@pytest.mark.parametrize("fails", [planted, _leaves])
def test_a_patch_that_cannot_be_applied_leaves_the_others_and_says_so(applied, caplog, fails):
    applied(fails)
    lines = _register(caplog)
    # c would do harm without b.
    assert {name for name in "abcd" if registry.targets(name)} == {"a", "d"}
    assert registry.in_service() == ["a", "d"]
    assert sum("b: applying it failed" in line and "out of service: b" in line for line in lines) == 1
    assert any("c: needs b, which stepped back" in line for line in lines)
    assert not any("nothing is patched" in line for line in lines)
    expected = {**dict.fromkeys("ad", ("will be patched", "")), **dict.fromkeys("bc")}
    assert live.health()["patches"] | {"b": None, "c": None} == expected
    assert not live.health()["ok"]


@pytest.mark.parametrize("fails", [planted, _leaves])
def test_what_fails_after_the_patches_says_what_stands(applied, caplog, monkeypatch, fails):
    applied(lambda: None)
    monkeypatch.setattr(process, "watch", lambda ready: fails())
    lines = _register(caplog)
    assert any(line.startswith("staleproof: a, b, c, d stand, no others: ") for line in lines)
    assert live.health()["vllm"] == "0.18.1"
    assert {state for state, _ in live.health()["patches"].values()} == {"will be patched"}
    assert registry.in_service() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("module", ["import no_such_module", "raise SystemExit"])
def test_a_broken_watch_takes_no_patch_along(applied, caplog, monkeypatch, tmp_path, module):
    applied(lambda: None)
    monkeypatch.setenv("STALEPROOF_WATCH", "1")
    (tmp_path / "watch_hooks.py").write_text(module)
    package = importlib.import_module("staleproof.vllm")
    monkeypatch.setattr(package, "__path__", [str(tmp_path), *package.__path__])
    monkeypatch.delitem(sys.modules, "staleproof.vllm.watch_hooks", raising=False)
    monkeypatch.delattr(package, "watch_hooks", raising=False)
    lines = _register(caplog)
    monkeypatch.delitem(sys.modules, "staleproof.vllm.watch_hooks", raising=False)
    assert sum(line.startswith("staleproof: no watch: ") for line in lines) == 1
    assert registry.in_service() == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("require", "fails", "said"),
    [
        ("a", planted, None),
        ("a, b", planted, "b is refused (applying it failed: RuntimeError: planted)"),
        ("c", planted, "c is refused (needs b, which stepped back)"),
        ("mla", lambda: None, "mla is no patch (known: a, b, c, d, contain, poison)"),
    ],
)
def test_vllm_does_not_start_without_what_is_required(applied, monkeypatch, require, fails, said):
    applied(fails)
    monkeypatch.setenv(process.REQUIRE, require)
    if said is None:
        plugin.register()
        return
    with pytest.raises(process.RequirementError) as refused:
        plugin.register()
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"vLLM does not start: STALEPROOF_REQUIRE={require}: ")


def test_what_is_required_must_stand_when_the_engine_is_ready(applied, monkeypatch, made_up):
    core = "class EngineCore:\n    def __init__(self):\n        import vllm.a\n"
    made_up({"a": "def f(x): return x", "v1.engine.core": core})
    applied(lambda: None)
    monkeypatch.setenv(process.REQUIRE, "a")
    plugin.register()
    core = importlib.import_module("vllm.v1.engine.core")
    core.EngineCore()
    sys.modules["vllm.a"].f = lambda x: x
    with pytest.raises(process.RequirementError, match=r"a is refused \(f was replaced by"):
        core.EngineCore()


def test_nothing_patched_is_not_what_was_required(monkeypatch):
    monkeypatch.setenv(process.REQUIRE, "mla_padding")
    monkeypatch.setattr(plugin, "installed", planted)
    with pytest.raises(process.RequirementError, match=r"mla_padding is refused \(RuntimeError: planted"):
        plugin.register()


def test_loading_imports_nothing_heavy(installed):
    """In a process of its own, with a vLLM that says so if it is imported."""
    folder = installed("0.18.1", {"__init__": "raise SystemExit('vllm was imported')"})
    program = (
        "import sys; from staleproof.vllm.plugin import register; register(); "
        "heavy = 'torch', 'triton', 'vllm', 'numpy', 'rich', 'typer', 'staleproof.ops'; "
        "print([n for n in heavy if n in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "src")))}
    assert warm.new("-c", program, env=env).stdout.strip() == "[]"


def test_the_entry_point_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]["vllm.general_plugins"]
    assert declared == {"staleproof": "staleproof.vllm.plugin:register"}
    (installed,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="staleproof")
    assert installed.load() is plugin.register


def test_a_ready_engine_tells_its_model_and_what_was_refused_and_not_what_needs_nothing(monkeypatch):
    """And its thread runs, which looks at the switch and lets patches come back."""
    said, beats = [], []
    monkeypatch.setattr(plugin.process, "say", said.append)
    monkeypatch.setattr(plugin.live, "beat", lambda: beats.append("beat"))
    decided = {"a": ("refused", "no Triton"), "b": ("not needed", "no defect")}
    here = plugin.live.Here("0.22.1", decided=decided)
    model = Space(model_config=Space(served_model_name="a model"))
    plugin._ready(here, Space(vllm_config=model))
    assert (here.ready, here.model, beats) == (True, "a model", ["beat"])
    plugin._ready(here, None)
    # A spawned engine core is ready once more when its scheduler is made: that is no news.
    assert said == [" on vLLM 0.22.1, this process: refused: a (no Triton)"]


@pytest.mark.parametrize(
    ("variables", "asked", "done"),
    [({}, False, []), ({plugin.WATCH: "1"}, True, []), ({plugin.PORT: "7"}, True, [(None, 7), "beat"])],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_server_that_can_be_asked_has_a_folder_and_its_first_process_a_port(
    monkeypatch, variables, asked, done, first
):
    found, here = [], live.Here()
    for name in (plugin.WATCH, plugin.PORT):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(live, "enter", lambda *given: found.append(given) or first)
    monkeypatch.setattr("staleproof.vllm.watch_port.serve", lambda *given: found.append(given))
    monkeypatch.setattr(live, "beat", lambda: found.append("beat"))
    plugin._open(here)
    assert found == [(here, asked), *(done if first else [])]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WATCH", "yes", "no watch: STALEPROOF_WATCH: expected 1, on or true, got 'yes'"),
        ("SWITCH", "/no/off", "STALEPROOF_SWITCH: expected a file in a folder that exists, got '/no/off': "),
        (
            "PORT",
            "abc",
            "the state of this server cannot be asked: STALEPROOF_PORT: expected 1 to 65535, got 'abc'",
        ),
    ],
)
def test_a_variable_that_has_no_effect_is_one_line_in_the_log(caplog, monkeypatch, variable, value, said):
    monkeypatch.setenv(plugin.VARIABLE, "none")
    monkeypatch.setenv(f"STALEPROOF_{variable}", value)
    (line,) = [line for line in _register(caplog) if "off by" not in line]
    assert line.startswith(f"staleproof: {said}")


def test_a_check_that_fails_refuses_the_patch(monkeypatch):
    patch = plugin.patches()["unpublish"]
    needed = Evidence(True, "there")
    monkeypatch.setattr(plugin, "evidence", lambda *_: needed)
    monkeypatch.setattr(Patch, "check", lambda *_: planted())
    decided = plugin.decide(patch, plugin.Base("0.22.1"), Sources(Path("/nowhere")), ALL)
    expected = "refused", "there; its check failed: RuntimeError: planted", True
    assert (decided.state, decided.why, decided.needed) == expected
