"""What the verdicts of incident 2 rest on, and that a broken subject changes them."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from staleproof.cases.measure import Times
from staleproof.evidence.ledger import Usage
from staleproof.incidents.decode_buffer import broken, buffer, cases, driver, model
from staleproof.incidents.decode_buffer.allocator import GIB, SimulatedAllocator
from staleproof.incidents.decode_buffer.cases import SMALL, TABLE, too_small, utilisation
from staleproof.incidents.decode_buffer.outside import SYMMETRIC
from staleproof.incidents.decode_buffer.scene import DIES, LIVES
from staleproof.incidents.decode_buffer.setups import OFF, SETUPS, ServerCase, Setup, Wiring


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


def servers_that(monkeypatch, *verdicts):
    """Makes servers live or die, one after another; the servers that are then asked for."""
    tried = []

    def run(servers, device):
        tried.extend(servers)
        return [SimpleNamespace(verdict=verdict) for verdict in verdicts]

    monkeypatch.setattr(cases, "run_servers", run)
    return tried


@pytest.mark.parametrize(
    ("verdicts", "said", "dies_from"),
    [
        ((LIVES, LIVES, LIVES), "lives", None),
        ((LIVES, DIES, DIES), "dies from one on", 0.9),
        ((DIES, LIVES, DIES), "dies at some", 0.85),
    ],
)
def test_a_sweep_says_where_servers_die(monkeypatch, verdicts, said, dies_from):
    tried = servers_that(monkeypatch, *verdicts)
    sweep = ServerCase(OFF, SMALL, {"batch": 48}), (0.85, 0.9, 0.95)
    found = utilisation(sweep, "cpu")
    assert (found.verdict, found.numbers["dies_from"], found.provenance) == (said, dies_from, "INTERPRETED")
    assert [case.changes for case in tried] == [{"batch": 48, "utilisation": u} for u in (0.85, 0.9, 0.95)]


def _with_two_kernels_more(self, q, seq_lens, micro_batch=0):
    return model.Attention.decode(self, q, seq_lens, micro_batch).mul_(1).add_(0)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "question", "said"),
    [
        (model, "decode_live_rows", lambda q, seq_lens, out: out.zero_(), "layers in turn", "mixed"),
        (broken.ZerosPerLayer, "decode", _with_two_kernels_more, "captured kernels", "other kernels"),
    ],
)
def test_a_fault_that_no_variant_has_is_seen(device, monkeypatch, owner, name, fault, question, said):
    monkeypatch.setattr(owner, name, fault)
    assert verdict(question, OFF, device) == said


def test_a_driver_that_cannot_name_kernels_is_a_reason(monkeypatch):
    def refuse(setup, device):
        raise driver.DriverError("refused")

    monkeypatch.setattr(buffer, "_kernels", refuse)
    said = buffer.captured_kernels(SETUPS[OFF], "cuda")
    assert (said.verdict, said.note) == ("not run", "refused")


def test_a_ledger_that_reads_torch_alone_misses_what_torch_did_not_give(device, monkeypatch):
    for found in TABLE.ask("outside torch", device=device):
        sign = -1 if found.variant == SYMMETRIC else 1
        # What sleeps is needed again at the wake-up: a ledger read during sleep promises it twice.
        assert not found.ran or found.numbers["headroom_change_bytes"] == sign * found.numbers["taken_bytes"]
    monkeypatch.setattr(SimulatedAllocator, "usage", lambda self: Usage(self.reserved, self.reserved, 0, 0))
    assert verdict("outside torch", SYMMETRIC, "cpu") == "missed"


def test_what_a_buffer_adds_is_told_beside_no_buffer(monkeypatch):
    times = {id(SETUPS["no_buffer"]): Times(5.0, 4.0, 6.0), id(SETUPS[OFF]): Times(7.0, 6.5, 9.0)}
    monkeypatch.setattr(cases, "_layer_times", lambda setup, device: times[id(setup)])
    said = cases.added_time(SETUPS[OFF], "cuda")
    assert said.numbers == {"us": 7.0, "p20": 6.5, "p80": 9.0, "added_us": 2.0}


def test_a_ledgers_cost_is_a_step_of_each_and_their_ratio(monkeypatch):
    # A clock that goes on by a second whenever somebody looks.
    monkeypatch.setattr(cases.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cases, "SMALL", replace(SMALL, layers=2, batch=2, tokens=8))
    said = cases.ledger_cost(None, "cpu", steps=2).numbers
    half = dict.fromkeys(("off_us", "on_us", "off_again_us"), 5e5)
    assert said == {**half, "slow_down": 1, "slow_down_with_entering_and_leaving": 3, "steps": 2}


@pytest.mark.parametrize(("device", "planned"), [("cpu", (0.85, 0.9)), ("cuda", (0.7, 0.8))])
def test_another_device_leaves_as_many_bytes_outside(monkeypatch, device, planned):
    half = SimpleNamespace(total_memory=cases.REPORT.total_bytes // 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: half)
    asked = servers_that(monkeypatch, LIVES, LIVES)
    found = utilisation((ServerCase(OFF, None), (0.85, 0.9)), device)
    assert [case.changes["utilisation"] for case in asked] == pytest.approx(planned)
    assert found.numbers == {"0.85": LIVES, "0.9": LIVES, "dies_from": None}
    assert found.provenance == (None if device == "cuda" else "INTERPRETED")


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
