"""The plugin in a whole vLLM with a real model, as an operator has it: nothing of vLLM is replaced.

Without .venv-whole (``make whole``) it is skipped.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tests.whole import real_operator

from staleproof.incidents.published_unwritten import leak
from staleproof.whole import place

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(name="told", scope="module")
def told_fixture(tmp_path_factory):
    if reason := place.unavailable_reason():
        pytest.skip(reason)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        "VLLM_PLUGINS": "staleproof",
        "STALEPROOF_PATCHES": "all",
        "STALEPROOF_PORT": str(port),
        "STALEPROOF_WATCH": "1",
        "STALEPROOF_WATCH_STAGES": "published",
        "STALEPROOF_SWITCH": str(tmp_path_factory.mktemp("switch") / "off"),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    return place.call(real_operator.operate, env=env, timeout_s=600).answer()


def test_patch_in_place_keeps_the_other_guests_code(told):
    for state in ("installed", "back"):
        assert told[state]["metrics"]["patches"]["unpublish"] == "in place"
        assert leak.CODE not in told[state]["text"]


def test_patch_switched_off_by_the_file_leaks_the_code(told):
    assert told["switched off"]["metrics"]["patches"]["unpublish"] == "off"
    assert leak.CODE in told["switched off"]["text"]


def test_watch_counts_unwritten_hits_only_without_the_patch(told):
    hits = [told[state]["metrics"]["staleproof_unwritten_hits_total"] for state in told]
    # Ben's own when he resumes, and Carla's.
    assert hits == [0, 2, 2]


def test_patches_live_agrees_with_metrics(told):
    for state, found in told.items():
        live = found["live"]
        assert (live["code"], live["error"]) == (0, ""), state
        assert {name: said for name, (said, _) in live["health"]["patches"].items()} == found["metrics"][
            "patches"
        ]
        assert live["health"]["vllm"] == place.release(place.python())[1]
        assert found["metrics"]["staleproof_ok"] == 1
