"""The plugin in service, as the report shows it."""

from __future__ import annotations

import json
import re

import pytest

from staleproof.cases.store import checkout
from staleproof.report import service


def kept(name: str) -> dict:
    return json.loads((checkout() / "workbook" / f"{name}.json").read_text())


def soak(pending: list[int]) -> dict:
    flat = [5.0] * len(pending)
    return {
        "curves": {
            "requests": [1, 2, 3],
            "pending": pending,
            "rss_kib": flat,
            "step_us": flat,
            "log_lines": flat,
        }
    }


def test_faults_are_counted_by_what_vllm_returned():
    faults = {"one": {"first": "vLLM's own; 1 line"}, "two": {"first": "another result; 1 line"}}
    assert service.fault_counts(faults) == {"first": {"vLLM's own": 1, "another result": 1}}


def test_the_kept_table_says_vllms_own_result_everywhere():
    for fault, outcomes in service.fault_counts(kept("plugin-faults")).items():
        assert set(outcomes) <= {"vLLM's own", "no context"}, (fault, outcomes)


@pytest.mark.parametrize("name", ["soak-cpu", "soak-engine"])
def test_the_kept_soaks_are_flat_with_the_plugin_and_grow_without(name):
    pending = {state: kept(name)[state]["curves"]["pending"] for state in ("off", "on")}
    assert set(pending["on"]) == {0}
    assert pending["off"][-1] > 10 * pending["off"][0] > 0


def test_the_section_shows_each_fault_and_a_picture_for_each_soak():
    runs = {"off": soak([1, 20, 300]), "on": soak([0, 0, 0])}
    page = service.section({"hook": {"first <call>": "vLLM's own"}}, {"one": runs, "two": runs})
    assert "first &lt;call&gt;" in page
    assert len(re.findall("<svg", page)) == 2
    assert page.count(">plugin off<") == 2
    assert page.count("block ids nobody took: 300 with the plugin off, 0 with it on") == 4


def test_half_a_soak_is_refused():
    with pytest.raises(ValueError, match="soak: expected the runs off and on, got"):
        service.soak_figure({"off": soak([1, 2, 3])})
