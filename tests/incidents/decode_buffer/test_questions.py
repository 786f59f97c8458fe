"""The questions of incident 2 give the verdicts that the matrix promises."""

from __future__ import annotations

import pytest
import torch

from staleproof.harness.findings import FIXED, OFF_ON_OFF
from staleproof.incidents.decode_buffer import questions as experiment
from staleproof.incidents.decode_buffer.questions import (
    ATTENTION,
    OFF,
    SETUPS,
    SMALL,
    Case,
    Headroom,
    ablation,
    added_time,
    arithmetic,
    empty_rows,
    growth,
    headroom,
    headroom_figure,
    ledger_cost,
    other_model,
    overlap,
    run_server,
    run_servers,
    servers,
    table,
    true_size,
)
from staleproof.incidents.decode_buffer.scene import DIES, GIB, LIVES, MIB, oom_fields
from staleproof.ops.decode_workspace import DecodeWorkspace


def test_servers_die_live_and_die_again(asked):
    found = asked(servers)
    assert [f for f in found if not f.ok] == []
    fixes = {f.variant: f for f in found if f.question == OFF_ON_OFF}
    assert set(fixes) == {"decode_workspace", "clear_empty_rows"}
    for fix in fixes.values():
        assert fix.verdict == FIXED
        assert [fix.numbers[k] for k in ("off", "on", "off_again")] == [DIES, LIVES, DIES]


def test_a_server_dies_of_a_real_out_of_memory(asked):
    dead = next(f for f in asked(servers) if (f.question, f.variant) == ("server", OFF))
    assert dead.numbers["died_in"] == "serve"
    assert dead.numbers["oom_tried"] == "126.00 MiB"
    # The same fields, from torch's own message and from ours.
    assert {k for k in dead.numbers if k.startswith("oom_")} == {
        "oom_tried",
        "oom_total",
        "oom_free",
        "oom_in_use",
        "oom_allocated",
        "oom_unallocated",
    }


def test_the_ledger_said_so_before(asked):
    found = {f.variant: f for f in asked(servers) if f.question == "ledger"}
    note = found[OFF].note
    assert note.startswith(
        "`layers.*.attn._decode_out`: 8 MiB x 61 layers = 488 MiB allocated after profiling; "
    )
    assert note.endswith("this will not fit")
    # On CUDA the failed request's own query is still alive, and is named after it.
    owners = found["lazy_moe_workspace"].numbers["owners"]
    assert owners[0] == "layers.*.experts._decode_workspace"
    singleton = found["module_singleton"].numbers["owners"]
    assert singleton == ["staleproof.incidents.decode_buffer.broken:_shared_out"]
    for name in ("no_buffer", "zeros_before_profile", "decode_workspace", "clear_empty_rows"):
        assert found[name].numbers["owners"] == []


def test_each_ingredient_is_necessary(device):
    found = {f.variant: f.verdict for f in ablation(device)}
    assert found.pop("all four") == DIES
    assert set(found.values()) == {LIVES}
    assert len(found) == 4


def test_one_layer_is_enough_for_the_ledger(device):
    (seen,) = run_servers([Case(OFF, watched=True)], device)
    (owner,) = seen.probed.surprises
    assert (owner.name, owner.holders, owner.layers) == ("layers.*.attn._decode_out", 1, 61)
    assert owner.predicted == seen.kept_bytes == 61 * SMALL.decode_out_bytes
    assert owner.source.startswith("decode_buffer/broken.py:")


def test_the_ledger_changes_no_outcome(device):
    plain, watched = run_servers([Case(OFF), Case(OFF, watched=True)], device)
    assert (plain.verdict, plain.died_in) == (watched.verdict, watched.died_in)
    assert (plain.kv_bytes, plain.peak_bytes) == (watched.kv_bytes, watched.peak_bytes)
    assert oom_fields(plain.error)["tried"] == oom_fields(watched.error)["tried"]


def test_the_reports_size(asked):
    found = asked(true_size)
    if not found[0].ran:
        pytest.skip(found[0].note)
    assert [f for f in found if not f.ok] == []
    by_name = {f.variant: f for f in found if f.question == "true_size"}
    assert by_name[OFF].numbers["oom_tried"] == "3.94 GiB"
    # The buffers, and the segments that they pin without filling them.
    assert by_name[OFF].numbers["taken_bytes"] > 15.25 * GIB
    prediction = found[-1].numbers
    assert prediction["predicted_bytes"] == 15.25 * GIB
    assert abs(prediction["taken_bytes"] / prediction["predicted_bytes"] - 1) < 0.01


@pytest.mark.parametrize("question", [overlap, other_model, growth, empty_rows])
@pytest.mark.parametrize("name", ATTENTION)
def test_each_variant_gives_its_verdict(device, question, name):
    found = question(name, device)
    assert found.expected is not None
    assert found.verdict == found.expected, found.numbers


def test_micro_batches_mix_as_soon_as_the_key_forgets_them(device, monkeypatch):
    whole = DecodeWorkspace.get
    monkeypatch.setattr(
        DecodeWorkspace,
        "get",
        lambda self, shape, dtype, device, micro_batch=0: whole(self, shape, dtype, device, micro_batch=0),
    )
    assert overlap("decode_workspace", device).verdict == experiment.MIXED


def test_a_workspace_that_is_not_locked_writes_freed_memory(device, monkeypatch):
    monkeypatch.setattr(DecodeWorkspace, "lock", lambda self: None)
    assert growth("decode_workspace", device).verdict == experiment.FREED


def test_the_wrong_shape_is_of_the_other_model(device):
    numbers = other_model("module_singleton", device).numbers
    assert (numbers["asked"], numbers["got"]) == ([8, 8, 64], [8, 4, 32])


def test_both_readings_are_computed_from_shapes():
    capture_size, max_num_seqs = arithmetic()
    assert (capture_size.batch, capture_size.layer_bytes) == (2048, 256 * MIB)
    assert capture_size.total_bytes == 15.25 * GIB
    assert (max_num_seqs.batch, max_num_seqs.layer_bytes) == (1024, 128 * MIB)
    assert max_num_seqs.total_bytes == 7.625 * GIB


def test_the_headroom_line_moves():
    reported, half, fewer = headroom(), headroom(batch=1024), headroom(heads=16)
    assert str(reported).startswith("256.00 MiB x 61 layers = 15.25 GiB, headroom ")
    assert [h.verdict for h in (reported, half, fewer)] == [DIES, LIVES, LIVES]
    assert reported.left < reported.needed < half.left < fewer.left
    assert headroom(utilisation=0.8).verdict == LIVES
    assert headroom(layers=30).verdict == LIVES
    with pytest.raises(ValueError, match=r"utilisation: expected a number in \(0, 1\]"):
        headroom(utilisation=1.5)


def test_the_headroom_picture_holds_the_numbers():
    case = Headroom(1, 4 * GIB, 2 * GIB, GIB, 10 * GIB, 3 * GIB, LIVES)
    axes = headroom_figure({"a": case}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [4.0, 2.0, 1.0]
    assert list(axes.lines[0].get_xdata()) == [7.0, 7.0]
    assert case.left == 3 * GIB


def test_the_table_shows_no_time_that_no_gpu_took(asked, device):
    found = asked(servers)
    asked_of_each = (overlap, growth)
    found = [*found, *(ask(name, device) for name in ATTENTION for ask in asked_of_each)]
    rows = table(found).splitlines()
    assert rows[2].split() == [
        "zeros_per_layer",
        "15.25",
        "GiB",
        "unseen",
        "mixed",
        "writes",
        "freed",
        "memory",
        "-",
    ]
    assert rows[5].split()[:4] == ["decode_workspace", "256.00", "MiB", "seen"]


def test_timings_need_a_gpu():
    for found in (*added_time("cpu"), ledger_cost("cpu")):
        assert not found.ran
        assert not found.numbers
        assert "timings need a CUDA GPU" in found.note


@pytest.mark.gpu
def test_on_cuda_the_ledgers_cost_is_told(device):
    numbers = ledger_cost(device).numbers
    assert numbers["slow_down"] > 0
    assert numbers["off_us"] > 0


@pytest.mark.gpu
def test_a_process_without_an_answer_is_an_error(device):
    with pytest.raises(RuntimeError, match=r"process ended with [1-9]"):
        run_servers([Case("no such variant")], device)


def test_variants_leave_nothing_behind(device):
    overlap("module_singleton", device)
    run_server(Case("module_singleton"), "cpu")
    assert experiment.broken._shared_out == {}
    assert all(setup.server in (DIES, LIVES) for setup in SETUPS.values())
    assert torch.is_grad_enabled()
