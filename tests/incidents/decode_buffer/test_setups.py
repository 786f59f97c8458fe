"""Servers with each variant: simulated here, in a process of their own on CUDA."""

import contextlib
import pickle
from types import SimpleNamespace

import pytest
import torch

from staleproof.cases import children
from staleproof.incidents.decode_buffer import broken, setups
from staleproof.incidents.decode_buffer.allocator import GIB, SimulatedMemory, oom_fields
from staleproof.incidents.decode_buffer.scene import LIVES, Server
from staleproof.incidents.decode_buffer.setups import OFF, SETUPS, SMALL, ServerCase, run_server, run_servers


def test_the_ledger_changes_no_outcome(device):
    plain, watched = run_servers([ServerCase(OFF), ServerCase(OFF, watched=True)], device)
    assert (plain.verdict, plain.died_in) == (watched.verdict, watched.died_in)
    assert (plain.kv_bytes, plain.peak_bytes) == (watched.kv_bytes, watched.peak_bytes)
    assert oom_fields(plain.error)["tried"] == oom_fields(watched.error)["tried"]


def test_the_true_size_leaves_as_much_outside_the_plan_on_any_device():
    config = setups.true_size_config(140 * GIB)
    outside = setups.REPORT.total_bytes * (1 - setups.REPORT.utilisation)
    assert config.total_bytes * (1 - config.utilisation) == pytest.approx(outside, rel=1e-9)
    assert config.decode_out_bytes == setups.REPORT.decode_out_bytes
    # Its weights are half of what it plans with, so that it fits an H100 too.
    small = setups.true_size_config(80 * GIB)
    assert small.weight_bytes == pytest.approx((80 * GIB - outside) / 2)
    with pytest.raises(ValueError, match="expected at least 0"):
        setups.true_size_config(16 * GIB)


@pytest.mark.parametrize(("variant", "buffers"), [("no_buffer", 0), ("zeros_before_profile", 2)])
def test_what_is_kept_is_neither_weights_nor_kv_cache(variant, buffers):
    outcome = run_server(ServerCase(variant, changes={"layers": 2}), "cpu")
    assert outcome.kept_bytes == buffers * SMALL.decode_out_bytes
    assert outcome.kv_bytes > 0


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


def test_servers_on_cuda_start_in_one_process_of_their_own(monkeypatch):
    given, selected, cases = [], [], [ServerCase("no_buffer"), ServerCase(OFF)]

    def call(function, *arguments, timeout_s):
        given.append(timeout_s)
        return SimpleNamespace(answer=lambda: function(*arguments))

    monkeypatch.setattr(children, "call", call)
    monkeypatch.setattr(setups.devices, "select", selected.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(setups, "run_server", lambda case, device: (case.variant, device))
    assert run_servers(cases, "cuda") == [("no_buffer", "cuda"), (OFF, "cuda")]
    assert (given, selected) == ([setups.SERVERS_TIMEOUT_S], ["cuda"])


@pytest.mark.parametrize(
    ("config", "total", "share"), [(SMALL, SMALL.total_bytes, 0.92), (None, 100 * GIB, 0.816)]
)
def test_a_server_on_cuda_gets_a_part_of_the_device_or_all_of_it(monkeypatch, config, total, share):
    """Its memory is simulated here; the device has 100 GiB."""
    limits = []

    def memory(limit):
        limits.append(limit)
        return SimulatedMemory(limit or 100 * GIB)

    def start(server, ledger):
        return server.config, server.memory.total_bytes, ledger

    monkeypatch.setattr(setups, "CudaMemory", memory)
    monkeypatch.setattr(Server, "start", start)
    found, size, ledger = run_server(ServerCase("no_buffer", config, {"layers": 2}), "cuda")
    assert limits == [config and config.total_bytes]
    assert (size, found.total_bytes, found.layers, ledger) == (total, total, 2, None)
    assert found.utilisation == pytest.approx(share)
    assert run_server(ServerCase("no_buffer", config, {"layers": 2}, watched=True), "cuda")[2] is not None


@pytest.mark.gpu
def test_a_process_without_an_answer_is_an_error(device):
    with pytest.raises(children.ChildError, match="ended with 1 and said: KeyError: 'no such variant'"):
        run_servers([ServerCase("no such variant")], device)
