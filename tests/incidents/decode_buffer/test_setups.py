"""Servers with each variant: simulated here, in a process of their own on CUDA."""

import pytest

from staleproof import child
from staleproof.incidents.decode_buffer import setups
from staleproof.incidents.decode_buffer.allocator import GIB, oom_fields
from staleproof.incidents.decode_buffer.setups import OFF, SMALL, ServerCase, run_server, run_servers


def test_server_under_a_ledger_ends_as_without(device):
    plain, watched = run_servers([ServerCase(OFF), ServerCase(OFF, watched=True)], device)
    assert (plain.verdict, plain.died_in) == (watched.verdict, watched.died_in)
    assert (plain.kv_bytes, plain.peak_bytes) == (watched.kv_bytes, watched.peak_bytes)
    assert oom_fields(plain.error)["tried"] == oom_fields(watched.error)["tried"]


def test_true_size_on_another_device_leaves_as_many_bytes_outside_the_plan():
    config = setups.true_size_config(140 * GIB)
    outside = setups.REPORT.total_bytes * (1 - setups.REPORT.utilisation)
    assert config.total_bytes * (1 - config.utilisation) == pytest.approx(outside, rel=1e-9)
    assert config.decode_out_bytes == setups.REPORT.decode_out_bytes
    with pytest.raises(ValueError, match="expected at least 0"):
        setups.true_size_config(16 * GIB)


@pytest.mark.parametrize(("variant", "buffers"), [("no_buffer", 0), ("zeros_before_profile", 2)])
def test_kept_bytes_are_neither_weights_nor_kv_cache(variant, buffers):
    outcome = run_server(ServerCase(variant, changes={"layers": 2}), "cpu")
    assert outcome.kept_bytes == buffers * SMALL.decode_out_bytes
    assert outcome.kv_bytes > 0


@pytest.mark.gpu
def test_server_process_that_dies_is_an_error(device):
    with pytest.raises(child.ChildError, match="ended with 1: KeyError: 'no such variant'"):
        run_servers([ServerCase("no such variant")], device)
