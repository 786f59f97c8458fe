"""The questions of incident 2 give the verdicts that the matrix promises."""

from __future__ import annotations

import functools

import pytest
import torch

from staleproof.cases.finding import FIXED, NOT_RUN, OFF_ON_OFF
from staleproof.incidents.decode_buffer.allocator import GIB
from staleproof.incidents.decode_buffer.questions import QUESTIONS, too_small
from staleproof.incidents.decode_buffer.scene import DIES, LIVES
from staleproof.incidents.decode_buffer.setups import ATTENTION, FREED, MIXED, OFF, SETUPS, Case
from staleproof.ops.decode_workspace import DecodeWorkspace

# Several tests look at the answers of one long question.
ask = functools.cache(QUESTIONS.ask)


def answers(question, row):
    return {f.variant: f for f in ask(row) if f.question == question}


@pytest.mark.parametrize("question", ["server", "ledger", "profile"])
def test_every_server_gives_its_verdict(question):
    found = answers(question, "server")
    assert [*found] == [*SETUPS]
    assert [f for f in found.values() if not f.ok] == []


def test_servers_die_live_and_die_again():
    fixes = answers(OFF_ON_OFF, OFF_ON_OFF)
    assert set(fixes) == {"decode_workspace", "clear_empty_rows"}
    for fix in fixes.values():
        assert fix.verdict == FIXED
        assert [fix.numbers[k] for k in ("off", "on", "off_again")] == [DIES, LIVES, DIES]


def test_a_server_dies_of_a_real_out_of_memory():
    numbers = answers("server", "server")[OFF].numbers
    assert numbers["died_in"] == "serve"
    assert numbers["oom_tried"] == "126.00 MiB"
    # The same fields, from torch's own message and from ours.
    fields = ("tried", "total", "free", "in_use", "allocated", "unallocated")
    assert {k for k in numbers if k.startswith("oom_")} == {f"oom_{field}" for field in fields}


def test_the_ledger_said_so_before():
    found = answers("ledger", "server")
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


def test_each_ingredient_is_necessary():
    found = {name: f.verdict for name, f in answers("ablation", "ablation").items()}
    assert found.pop("all four") == DIES
    assert set(found.values()) == {LIVES}
    assert len(found) == 4


def test_the_reports_size():
    found = ask("true_size")
    if not found[0].ran:
        pytest.skip(found[0].note)
    assert [f for f in found if not f.ok] == []
    assert found[0].numbers["oom_tried"] == "3.94 GiB"
    # The buffers, and the segments that they pin without filling them.
    assert found[0].numbers["taken_bytes"] > 15.25 * GIB
    prediction = found[-1]
    assert (prediction.question, prediction.variant) == ("prediction", OFF)
    assert prediction.numbers["predicted_bytes"] == 15.25 * GIB
    assert abs(prediction.numbers["taken_bytes"] / prediction.numbers["predicted_bytes"] - 1) < 0.01


def test_a_device_that_cannot_hold_a_server_says_how_much_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 8 * GIB))
    assert too_small(Case(OFF), "cuda") == "needs 5.75 GiB of free GPU memory, 5.00 GiB is free"
    assert too_small(Case(OFF, None), "cuda").startswith("needs 28.27 GiB of free GPU memory")
    assert too_small(Case(OFF), "cpu") is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * GIB, 8 * GIB))
    assert too_small(Case(OFF), "cuda") is None


@pytest.mark.parametrize("question", ["overlap", "other_model", "growth", "empty_rows"])
@pytest.mark.parametrize("name", ATTENTION)
def test_each_buffer_gives_its_verdict(device, question, name):
    (found,) = QUESTIONS.ask(question, name, device=device)
    assert found.expected is not None
    assert found.verdict == found.expected, found.numbers


def test_micro_batches_mix_as_soon_as_the_key_forgets_them(device, monkeypatch):
    whole = DecodeWorkspace.get
    monkeypatch.setattr(
        DecodeWorkspace,
        "get",
        lambda self, shape, dtype, device, micro_batch=0: whole(self, shape, dtype, device, micro_batch=0),
    )
    assert QUESTIONS.ask("overlap", "decode_workspace", device=device)[0].verdict == MIXED


def test_a_workspace_that_is_not_locked_writes_freed_memory(device, monkeypatch):
    monkeypatch.setattr(DecodeWorkspace, "lock", lambda self: None)
    assert QUESTIONS.ask("growth", "decode_workspace", device=device)[0].verdict == FREED


def test_the_wrong_shape_is_of_the_other_model(device):
    numbers = QUESTIONS.ask("other_model", "module_singleton", device=device)[0].numbers
    assert (numbers["asked"], numbers["got"]) == ([8, 8, 64], [8, 4, 32])


@pytest.mark.parametrize("question", ["added_time", "ledger_cost"])
def test_timings_need_a_gpu(question):
    for found in QUESTIONS.ask(question, device="cpu"):
        assert found.verdict == NOT_RUN
        assert not found.numbers
        assert found.note == "timings need a CUDA GPU"


@pytest.mark.gpu
def test_on_cuda_the_ledgers_cost_is_told(device):
    numbers = QUESTIONS.ask("ledger_cost", device=device)[0].numbers
    assert numbers["slow_down"] > 0
    assert numbers["off_us"] > 0
