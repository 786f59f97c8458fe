"""What the verdicts of incident 2 rest on, and that a broken subject changes them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.decode_buffer import buffer, cases, model
from staleproof.incidents.decode_buffer.allocator import GIB
from staleproof.incidents.decode_buffer.cases import SMALL, TABLE, too_small
from staleproof.incidents.decode_buffer.setups import OFF, ServerCase, Setup, Wiring


def verdict(question, variant, device):
    (found,) = TABLE.ask(question, variant, device=device)
    return found.verdict


def test_the_ledger_names_the_owner_and_the_bytes_in_a_sentence():
    (found,) = TABLE.ask("ledger", OFF, device="cpu")
    assert found.note.startswith(
        "`layers.*.attn._decode_out`: 8 MiB x 61 layers = 488 MiB allocated after profiling"
    )
    assert found.note.endswith("this will not fit")


def test_a_device_that_cannot_hold_a_server_says_how_much_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * GIB, 8 * GIB))
    assert too_small(ServerCase(OFF), "cuda") == "needs 5.75 GiB of free GPU memory, 5.00 GiB is free"
    assert too_small(ServerCase(OFF, None), "cuda").startswith("needs 28.27 GiB of free GPU memory")
    assert too_small(ServerCase(OFF), "cpu") is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 * GIB, 8 * GIB))
    assert too_small(ServerCase(OFF), "cuda") is None


def test_a_decode_that_zeroes_live_rows_mixes_layers(device, monkeypatch):
    monkeypatch.setattr(model, "decode_live_rows", lambda q, seq_lens, out: out.zero_())
    assert verdict("layers in turn", OFF, device) == "mixed"


def test_whose_rows_a_pool_hands_out_is_said_to_be_the_allocators_choice(device):
    notes = {f.variant: f.note for f in TABLE.ask("in empty rows", device=device)}
    assert [name for name, note in notes.items() if "its allocator" in note] == ["no_buffer"]


@pytest.mark.parametrize(("taken", "said"), [(9_899, "off"), (9_901, "within 1 %"), (10_101, "off")])
def test_a_prediction_is_held_to_a_hundredth(taken, said):
    probed = SimpleNamespace(surprises=[SimpleNamespace(predicted=10_000)])
    outcome = SimpleNamespace(probed=probed, taken_bytes=lambda: taken)
    assert cases.prediction(ServerCase(OFF), "cpu", [outcome]).verdict == said


@pytest.mark.parametrize(
    ("late", "early", "said"), [(0, 0, "nothing kept"), (0, 1, "seen"), (1, 0, "unseen"), (1, 1, "unseen")]
)
def test_a_profile_that_saw_a_part_of_what_is_kept_did_not_see_it(late, early, said):
    """Of a surprise one byte is there already, and a buffer more is to come."""
    size = SMALL.decode_out_bytes
    surprises = [SimpleNamespace(predicted=size, bytes=1)] * late
    watched = SimpleNamespace(ready=SimpleNamespace(surprises=surprises), kept_bytes=early * size + late)
    found = cases.profile(ServerCase(OFF), "cpu", [None, watched])
    assert (found.verdict, found.numbers["buffers"]) == (said, late + early)


@pytest.mark.parametrize("full", [True, False])
def test_a_layer_that_is_wrong_in_one_of_two_steps_in_turn_is_mixed(device, full):
    class WrongInOneStep(model.Attention):
        def decode(self, q, seq_lens, micro_batch=0):
            return torch.where((seq_lens > 0).all() == full, torch.zeros_like(q), q)

    turn = buffer.in_turn(Setup(partial(Wiring, WrongInOneStep), {}), device)
    assert turn.wrong_rows == buffer.LIVE * buffer.LAYERS
    assert buffer.layers_in_turn("wrong in one step", device, turn).verdict == "mixed"
