"""Servers with each variant: simulated here, in a process of their own on CUDA."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch

from staleproof.cases import children
from staleproof.incidents.decode_buffer import broken
from staleproof.incidents.decode_buffer.allocator import GIB, oom_fields
from staleproof.incidents.decode_buffer.scene import LIVES
from staleproof.incidents.decode_buffer.setups import (
    OFF,
    REPORT,
    SETUPS,
    SMALL,
    ServerCase,
    run_server,
    run_servers,
    true_size_config,
)


def test_one_layer_is_enough_for_the_ledger(device):
    (outcome,) = run_servers([ServerCase(OFF, watched=True)], device)
    (owner,) = outcome.probed.surprises
    assert (owner.name, owner.holders, owner.layers) == ("layers.*.attn._decode_out", 1, 61)
    assert owner.predicted == outcome.kept_bytes == 61 * SMALL.decode_out_bytes
    assert owner.source.startswith("decode_buffer/broken.py:")


def test_the_ledger_changes_no_outcome(device):
    plain, watched = run_servers([ServerCase(OFF), ServerCase(OFF, watched=True)], device)
    assert (plain.verdict, plain.died_in) == (watched.verdict, watched.died_in)
    assert (plain.kv_bytes, plain.peak_bytes) == (watched.kv_bytes, watched.peak_bytes)
    assert oom_fields(plain.error)["tried"] == oom_fields(watched.error)["tried"]


def test_the_true_size_leaves_as_much_outside_the_plan_on_any_device():
    config = true_size_config(140 * GIB)
    outside = REPORT.total_bytes * (1 - REPORT.utilisation)
    assert config.total_bytes * (1 - config.utilisation) == pytest.approx(outside, rel=1e-9)
    assert config.decode_out_bytes == REPORT.decode_out_bytes


def test_a_process_leaves_no_module_level_memory():
    assert run_server(ServerCase("module_singleton"), "cpu").verdict == LIVES
    assert broken._shared_out == {}
    with contextlib.suppress(ZeroDivisionError), SETUPS["module_singleton"].process():
        broken._shared_out["out"] = torch.zeros(1)
        raise ZeroDivisionError
    assert broken._shared_out == {}


def test_cases_and_outcomes_travel_between_processes():
    case = ServerCase("no_buffer", changes={"layers": 2}, watched=True)
    outcome = run_server(case, "cpu")
    assert pickle.loads(pickle.dumps((case, outcome))) == (case, outcome)


@pytest.mark.gpu
def test_a_process_without_an_answer_is_an_error(device):
    with pytest.raises(children.ChildError, match="ended with 1 and said: KeyError: 'no such variant'"):
        run_servers([ServerCase("no such variant")], device)
