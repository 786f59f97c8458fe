"""What operators load: alert rules, the dashboard and the runbook, against what the port really serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from environment import is_whole, sources
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard
from prometheus_client.parser import text_string_to_metric_families
from tests.made import arrived

from staleproof import device
from staleproof.vllm import live, releases, watch_port
from staleproof.vllm.standing import registry
from staleproof.vllm.watch import Settings, Watch
from staleproof.vllm.watch_blocks import ATTENTION, STATE, Blocks
from staleproof.vllm.watch_memory import Memory

DEVICE = device.select()

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "workbook"
RULES = yaml.safe_load((BOOK / "alerts.yml").read_text())["groups"][0]["rules"]
BOARD = json.loads((BOOK / "watch-dashboard.json").read_text())
PANELS = [(panel["id"], target) for panel in BOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = {f"panel {number}{target['refId']}": target["expr"] for number, target in PANELS}
EXPRESSIONS |= {rule["alert"]: rule["expr"] for rule in RULES}
# Labels that Prometheus adds.
ADDED = {"job", "instance"}


@pytest.fixture(name="served", scope="module")
def served_fixture():
    """Metric -> its labels, of a port with everything in it."""
    device.select()
    watch, memory = Watch(Settings(), DEVICE), Memory(None, lambda: 0)
    memory.ready()
    watch.begin_step(3)
    watch.observe(
        "router", "layers.0", *(torch.ones(8, 2, dtype=dtype, device=DEVICE) for dtype in (None, torch.int64))
    )
    arrived(watch)
    registry.of("undrained_ids").targets["vllm.a:b"] = "in place"
    live._here[:] = [live.Here("0.22.1", ["undrained_ids"], model="m")]
    # As the detector of incident 7 does, and contain.
    registry.of("watch").counters |= {"unwritten_hits": lambda: 2, "contained_requests": lambda: 1}
    port = watch_port.serve(watch, 0, Blocks([STATE, ATTENTION], [16, 16]), memory)
    text = port.RequestHandlerClass._metrics(type("", (), {"server": port})())[2].decode()
    port.shutdown()
    registry.forget("watch")
    live._here.clear()
    registry.forget("undrained_ids")
    assert "staleproof_unwritten_hits_total 2.0" in text
    assert 'model="m"' in text
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_what_is_asked_is_served(served):
    for name in EXPRESSIONS:
        asked = re.findall(r"\b(staleproof_\w+|up)\b(?:\{([^}]*)\})?", EXPRESSIONS[name])
        assert asked
        for metric, labels in asked:
            assert {*re.findall(r"(\w+)=", labels)} <= served[metric] | ADDED, metric
        # Lifetime sums stay red for ever; a fixed window is wrong for other scrape intervals.
        totals = re.findall(r"(\w+\()?staleproof_\w+_total", EXPRESSIONS[name])
        assert {*totals} <= {"rate(", "increase("}
        if name.startswith("panel"):
            assert {*re.findall(r"\[([^\]]*)\]", EXPRESSIONS[name])} <= {"$__rate_interval"}
            chosen = '{job=~"$job",instance=~"$instance"'
            assert EXPRESSIONS[name].count("staleproof_") == EXPRESSIONS[name].count(chosen)


def test_every_metric_has_its_place(served):
    shown = " ".join(EXPRESSIONS.values())
    assert {name for name in served if name not in shown and not name.endswith("_created")} == set()


def _lost(ours: Any, kept: Any, path: str = "") -> list[str]:
    """What of a JSON value is missing or different in another."""
    if isinstance(ours, dict) and isinstance(kept, dict):
        return [name for key in ours for name in _lost(ours[key], kept.get(key), f"{path}/{key}")]
    if isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        pairs = enumerate(zip(ours, kept, strict=True))
        return [name for at, pair in pairs for name in _lost(*pair, f"{path}/{at}")]
    return [] if ours == kept else [path]


def test_grafana_knows_every_key_of_the_board():
    plugins.register_default_plugins()

    def kept(board: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(board)))

    assert _lost(BOARD, kept(BOARD)) == []
    panel = BOARD["panels"][0] | {"gridPosition": {"h": 8}}
    misspelled = BOARD | {"panels": [panel, *BOARD["panels"][1:]]}
    assert _lost(misspelled, kept(misspelled)) == ["/panels/0/gridPosition"]


def test_every_alert_leads_to_a_section_of_the_page():
    text = (BOOK / "plugin.md").read_text()
    sections = {line[3:].lower().replace(" ", "-") for line in text.split("\n") if line.startswith("## ")}
    assert {rule["annotations"]["runbook"] for rule in RULES} <= {f"plugin.md#{name}" for name in sections}


INFO = 'staleproof_patch_info{process="server",patch="a",state='
AGE, BEGUN = "staleproof_reading_age_seconds", "staleproof_begun_steps_total"
LIVE, TWICE = 'staleproof_bad_rows_total{rows="live"', 'staleproof_duplicate_expert_rows_total{rows="live"'
PAD, HITS, UP = LIVE.replace("live", "padding"), "staleproof_unwritten_hits_total", "staleproof_watch_up"
CONTAINED = "staleproof_contained_requests_total"
RUNS, COUNTED = "staleproof_stage_runs_total", "staleproof_counted_steps_total"
DOWN = {"up": "1+0x10 0+0x40", "staleproof_ok": "1+0x10 _x40"}
# Alert, minute: series that let it fire, and such that do not.
SERIES = [
    ("BadLiveRows", 18, {LIVE: "0+0x9 1+1x10"}, {PAD: "0+5x20"}),
    ("BadLiveRows", 30, {LIVE: "0+5x40"}, {LIVE: "0+5x9 45+0x40"}),
    ("DuplicateExperts", 18, {TWICE: "0+1x20"}, {TWICE: "3+0x20"}),
    ("UnwrittenHits", 18, {HITS: "0+1x20"}, {HITS: "4+0x20"}),
    ("ContainedRequests", 18, {CONTAINED: "0+1x20"}, {CONTAINED: "4+0x20"}),
    ("PatchRefused", 18, {INFO + '"partly"': "1+0x20"}, {INFO + '"in place"': "1+0x20"}),
    ("PatchSwitchedOff", 1560, {INFO + '"off"': "1+0x2000"}, {INFO + '"off"': "1+0x20"}),
    ("WatchOutOfService", 18, {UP: "0+0x20"}, {UP: "1+0x20"}),
    ("WatchSilent", 30, {BEGUN: "0+9x40", AGE: "0+60x40"}, {BEGUN: "0+9x40", AGE: "1+0x40"}),
    ("WatchSilent", 30, {RUNS: "5+0x40", COUNTED: "0+9x40"}, {RUNS: "5+9x40", COUNTED: "0+9x40"}),
    ("WatchSilent", 30, DOWN, {BEGUN: "9+0x40", AGE: "0+60x40"}),
]


def _rule_test(alert: str, minute: int, series: dict[str, str], fires: bool) -> dict[str, Any]:
    """A unit test of promtool."""
    names = {name: name + ("," if "{" in name else "{") + 'job="j",instance="i"}' for name in series}
    expression = f'count(ALERTS{{alertname="Staleproof{alert}",alertstate="firing"}}) or vector(0)'
    expected = [{"labels": "{}", "value": int(fires)}]
    return {
        "interval": "1m",
        "input_series": [{"series": names[name], "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": f"{minute}m", "exp_samples": expected}],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's prometheus has it)")
def test_promtool_accepts_the_rules_and_they_fire_when_they_should(tmp_path):
    shutil.copy(BOOK / "alerts.yml", tmp_path)
    # The board's expressions as rules: for their syntax.
    board = [
        {"record": f"r{number}", "expr": target["expr"].replace("$__rate_interval", "5m")}
        for number, (_, target) in enumerate(PANELS)
    ]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": board}]}))
    tests = [_rule_test(a, at, series, not i) for a, at, *both in SERIES for i, series in enumerate(both)]
    assert {f"Staleproof{alert}" for alert, *_ in SERIES} == {rule["alert"] for rule in RULES}
    document = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    for words in (["check", "rules", "alerts.yml", "board.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_pip_moves_no_package_of_vllm_from_0_17_on():
    """Our ranges against what each release pins: pip changes no package of vLLM's where they admit it."""
    packaging = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {one.name: one.specifier for one in map(packaging.Requirement, project["dependencies"])}
    moved = {}
    for version in filter(is_whole, releases.table()):
        text = (sources(version) / "requirements/cuda.txt").read_text()
        pins = dict(re.findall(r"^(torch|numpy|triton)\s*==\s*([\w.]+)", text, re.M))
        moved |= {version: pins} if any(pin not in ours[name] for name, pin in pins.items()) else {}
    if not any(map(is_whole, releases.table())):
        pytest.skip("no source of vLLM is here")
    assert moved == ({"0.16.0": {"torch": "2.9.1"}} if is_whole("0.16.0") else {})
