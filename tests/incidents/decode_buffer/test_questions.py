"""The answers of incident 2 change if their subject is broken."""

from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.decode_buffer import buffer, model, questions, setups
from staleproof.incidents.decode_buffer.allocator import GIB
from staleproof.incidents.decode_buffer.questions import incident, too_small
from staleproof.incidents.decode_buffer.setups import OFF, SMALL, ServerCase, Wiring


def test_ledger_of_a_buffer_a_layer_names_owner_and_bytes():
    (found,) = incident.ask("ledger", OFF, device="cpu")
    assert found.note.startswith(
        "`layers.*.attn._decode_out`: 8 MiB x 61 layers = 488 MiB allocated after profiling"
    )
    assert found.note.endswith("this will not fit")


def test_device_that_is_too_small_says_how_much_a_server_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 8 * GIB))
    assert too_small(ServerCase(OFF), "cuda") == "needs 5.75 GiB of free GPU memory, 5.00 GiB is free"
    assert too_small(ServerCase(OFF, None), "cuda").startswith("needs 28.27 GiB of free GPU memory")
    assert too_small(ServerCase(OFF), "cpu") is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * GIB, 8 * GIB))
    assert too_small(ServerCase(OFF), "cuda") is None


@pytest.mark.parametrize(("taken", "verdict"), [(9_899, "off"), (9_901, "within 1 %"), (10_101, "off")])
def test_prediction_more_than_a_hundredth_off_is_bad(taken, verdict):
    probed = SimpleNamespace(surprises=[SimpleNamespace(predicted=10_000)])
    outcome = SimpleNamespace(probed=probed, taken_bytes=lambda: taken)
    assert questions.prediction(ServerCase(OFF), "cpu", [outcome]).verdict == verdict


@pytest.mark.parametrize(
    ("late", "early", "verdict"), [(0, 0, "nothing kept"), (0, 1, "seen"), (1, 0, "unseen"), (1, 1, "unseen")]
)
def test_profile_that_missed_a_part_of_the_buffers_is_unseen(late, early, verdict):
    """Of a surprise one byte is there already, and a buffer more is to come."""
    size = SMALL.decode_out_bytes
    surprises = [SimpleNamespace(predicted=size, bytes=1)] * late
    watched = SimpleNamespace(ready=SimpleNamespace(surprises=surprises), kept_bytes=early * size + late)
    answer = questions.profile(ServerCase(OFF), "cpu", [None, watched])
    assert (answer.verdict, answer.numbers["buffers"]) == (verdict, late + early)


@pytest.mark.parametrize("full", [True, False])
def test_layer_that_is_wrong_in_one_of_two_steps_is_mixed(device, monkeypatch, full):
    class WrongInOneStep(model.Attention):
        def decode(self, q, seq_lens, micro_batch=0):
            return torch.where((seq_lens > 0).all() == full, torch.zeros_like(q), q)

    monkeypatch.setitem(setups.SETUPS, "wrong in one step", lambda: Wiring(WrongInOneStep))
    turn = buffer.in_turn("wrong in one step", device)
    assert turn.wrong_rows == buffer.LIVE * buffer.LAYERS
    assert questions.layers_in_turn("wrong in one step", device, turn).verdict == "mixed"
