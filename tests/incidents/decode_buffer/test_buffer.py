"""Who else writes the buffer of one layer: other layers, threads, and what a captured step launches."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from staleproof.evidence.ledger import Usage
from staleproof.incidents.decode_buffer import buffer, driver, model, questions
from staleproof.incidents.decode_buffer.allocator import SimulatedAllocator
from staleproof.incidents.decode_buffer.buffer import (
    MORE_NODES,
    ONE_BUFFER,
    SAME_NODES,
    TWO_BUFFERS,
    WHOSE_ROWS,
    captured_kernels,
    first_use,
    layers_in_turn,
    threads,
)
from staleproof.incidents.decode_buffer.outside import AS_FREE, COUNTED, MISSED, SYMMETRIC
from staleproof.incidents.decode_buffer.questions import QUESTIONS, SMALL, Sweep, utilisation
from staleproof.incidents.decode_buffer.scene import DIES, LIVES
from staleproof.incidents.decode_buffer.setups import ANOTHER, ITS_OWN, MIXED, SEPARATE, SETUPS
from staleproof.ops.decode_workspace import DecodeWorkspace

OWN, SHARED = "zeros_per_layer", "module_singleton"


@pytest.mark.parametrize(
    "question", ["layers in turn", "threads", "first use in two threads", "captured kernels", "largest graph"]
)
def test_every_answer_is_the_expected_one(device, question):
    found = QUESTIONS.ask(question, device=device)
    assert found
    assert [f for f in found if f.failed] == []


def test_sharing_across_layers_spares_live_rows_and_shows_other_layers_stale_ones(device):
    found = QUESTIONS.ask("layers in turn", OWN, SHARED, device=device)
    says = {(f.variant, f.question): f.verdict for f in found}
    assert {says[name, "layers in turn"] for name in (OWN, SHARED)} == {SEPARATE}
    assert (says[OWN, WHOSE_ROWS], says[SHARED, WHOSE_ROWS]) == (ITS_OWN, ANOTHER)


def test_a_layer_that_loses_its_output_is_seen(device, monkeypatch):
    monkeypatch.setattr(model, "decode_live_rows", lambda q, seq_lens, out: out.zero_())
    assert next(layers_in_turn(SETUPS[OWN], device)).verdict == MIXED


def test_threads_mix_as_soon_as_the_key_forgets_the_micro_batch(device, monkeypatch):
    whole = DecodeWorkspace.get
    monkeypatch.setattr(
        DecodeWorkspace,
        "get",
        lambda self, shape, dtype, device, micro_batch=0: whole(self, shape, dtype, device, micro_batch=0),
    )
    assert threads(SETUPS["decode_workspace"], device).verdict == MIXED


def test_without_its_lock_the_workspace_gives_two_buffers(device, monkeypatch):
    assert first_use(SETUPS["decode_workspace"], device).verdict == ONE_BUFFER
    whole = DecodeWorkspace.__init__

    def without_lock(self):
        whole(self)
        self._growing = contextlib.nullcontext()

    monkeypatch.setattr(DecodeWorkspace, "__init__", without_lock)
    assert first_use(SETUPS["decode_workspace"], device).verdict == TWO_BUFFERS


def test_a_captured_step_is_compared_by_its_kernels(device, monkeypatch):
    assert captured_kernels(SETUPS[OWN], device).verdict == SAME_NODES
    assert captured_kernels(SETUPS["clear_empty_rows"], device).verdict == MORE_NODES

    def zeroing(self, q, seq_lens, micro_batch=0):
        return model.Attention.decode(self, q, seq_lens, micro_batch).mul_(1).add_(0)

    from staleproof.incidents.decode_buffer.broken import ZerosPerLayer

    monkeypatch.setattr(ZerosPerLayer, "decode", zeroing)
    assert captured_kernels(SETUPS[OWN], device).verdict == "other kernels"


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ((LIVES, LIVES, LIVES), LIVES),
        ((LIVES, DIES, DIES), "dies from 0.9"),
        ((DIES, LIVES, DIES), "dies at 0.85, 0.95"),
    ],
)
def test_a_sweep_says_where_servers_die(verdicts, said, monkeypatch):
    class Ended:
        def __init__(self, verdict):
            self.verdict = verdict

    seen = []
    monkeypatch.setattr(
        questions, "run_servers", lambda cases, device: seen.extend(cases) or list(map(Ended, verdicts))
    )
    answer = utilisation(Sweep(SMALL, {"batch": 48}, (0.85, 0.9, 0.95)), "cpu")
    assert answer.verdict == said
    assert [case.changes for case in seen] == [{"batch": 48, "utilisation": u} for u in (0.85, 0.9, 0.95)]
    assert answer.changes["provenance"] == "INTERPRETED"


def test_the_sizes_of_the_report_die_where_the_notebook_says():
    says = {
        f.variant: f.numbers for f in QUESTIONS.ask("utilisation", "1024 rows", "2048 rows", device="cpu")
    }
    # The report's utilisation, and one at which the smaller size dies too: "the server lives" holds for 0.9.
    assert (says["1024 rows"]["0.9"], says["2048 rows"]["0.9"]) == (LIVES, DIES)
    assert says["1024 rows"]["0.95"] == DIES


def test_the_node_of_the_driver_has_its_size():
    assert ctypes.sizeof(driver._KernelNode) == 72
    assert driver._KernelNode.kernel.offset == 56


@pytest.mark.gpu
def test_kernels_of_a_cuda_graph_have_names(device):
    x = torch.ones(64, device=device)
    names = driver.kernel_nodes(lambda: x.add_(1).sin_())
    assert len(names) == 2
    assert all("grid" in name for name in names)


def test_the_ledger_counts_what_torch_did_not_give_and_names_nobody(device):
    taken, asleep = QUESTIONS.ask("outside torch", device=device)
    assert (taken.verdict, taken.numbers["headroom_change_bytes"]) == (COUNTED, -taken.numbers["taken_bytes"])
    if asleep.ran:
        # The wake-up needs it again: a ledger read during sleep promises it twice.
        assert (asleep.verdict, asleep.numbers["headroom_change_bytes"]) == (
            AS_FREE,
            taken.numbers["taken_bytes"],
        )


def test_a_ledger_that_reads_torch_alone_misses_it(monkeypatch):
    monkeypatch.setattr(SimulatedAllocator, "usage", lambda self: Usage(self.reserved, self.reserved, 0, 0))
    assert QUESTIONS.ask("outside torch", SYMMETRIC, device="cpu")[0].verdict == MISSED


def test_the_allocation_of_the_driver_has_its_size():
    assert ctypes.sizeof(driver._Allocation) == 32


def test_a_driver_that_is_absent_is_a_reason_and_no_crash(monkeypatch):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(driver.DriverError, match="no CUDA driver"):
        driver._driver("cuMemCreate")
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: object())
    with pytest.raises(driver.DriverError, match="the CUDA driver has no cuMemCreate"):
        driver._driver("cuMemCreate")

    def refuse(fn):
        raise driver.DriverError("refused")

    monkeypatch.setattr(buffer, "_kernels", lambda setup, device: refuse(setup))
    said = captured_kernels(SETUPS[OWN], "cuda")
    assert (said.verdict, said.note) == ("not run", "refused")
