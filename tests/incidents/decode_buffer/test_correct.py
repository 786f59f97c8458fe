"""A fix of incident 2 whose outputs are wrong is called wrong, although its server lives."""

import contextlib

import pytest
import torch

from staleproof.incidents.decode_buffer import model, setups
from staleproof.incidents.decode_buffer.cases import TABLE
from staleproof.incidents.decode_buffer.correct import unwritten_is_nan, wrong
from staleproof.incidents.decode_buffer.setups import OFF, ServerCase
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.decode_workspace import DecodeWorkspace


def _clears_from_the_first_empty_row_on(out, seq_lens):
    out[int((seq_lens > 0).long().argmin()) if (seq_lens == 0).any() else len(out) :] = 0


def _hides_nan(out, seq_lens):
    out.nan_to_num_()
    clear_empty_rows(out, seq_lens)


def _one_percent(out, seq_lens):
    out.mul_(1.01)
    clear_empty_rows(out, seq_lens)


def _clears_all(out, seq_lens):
    out.zero_()


def _clears_unless_all_are_empty(out, seq_lens):
    if (seq_lens > 0).any():
        clear_empty_rows(out, seq_lens)


def _clears_behind_the_last_live_row(out, seq_lens):
    out[int((seq_lens > 0).nonzero().max()) + 1 if (seq_lens > 0).any() else 0 :] = 0


WRONG = (_clears_behind_the_last_live_row, _clears_from_the_first_empty_row_on, _hides_nan, _one_percent)


@pytest.mark.parametrize("clear", [*WRONG, _clears_unless_all_are_empty])
def test_rows_that_are_cleared_wrongly_are_told(monkeypatch, device, clear):
    monkeypatch.setattr(setups, "clear_empty_rows", clear)
    assert wrong(ServerCase("clear_empty_rows"), device) is not None


def test_a_server_that_lives_and_loses_its_output_is_not_fixed(monkeypatch):
    monkeypatch.setattr(setups, "clear_empty_rows", _clears_all)
    (found,) = TABLE.ask("off/on/off", "clear_empty_rows", device="cpu")
    assert (found.verdict, found.three.on, found.failed) == ("wrong", "lives", True)
    assert "live rows" in found.note


def test_a_workspace_whose_key_forgets_the_micro_batch_is_told(monkeypatch, device):
    get = DecodeWorkspace.get
    monkeypatch.setattr(DecodeWorkspace, "get", lambda self, *of, micro_batch: get(self, *of, micro_batch=0))
    assert "another micro-batch" in (wrong(ServerCase("decode_workspace"), device) or "")
    assert "another micro-batch" in (wrong(ServerCase(OFF), device) or "")


def test_a_layer_that_is_wrong_for_a_smaller_batch_alone_is_told(monkeypatch, device):
    decode = model.Attention.decode

    def wrong_for_few(self, q, seq_lens, micro_batch=0):
        out = decode(self, q, seq_lens, micro_batch)
        return out if len(q) == 12 else out * 2

    monkeypatch.setattr(model.Attention, "decode", wrong_for_few)
    assert (wrong(ServerCase("no_buffer"), device) or "").startswith("three rows in place of twelve")


@pytest.mark.parametrize("mode", [(False, False), (True, False), (True, True)])
def test_torchs_mode_is_afterwards_as_it_was(monkeypatch, mode):
    asked = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: mode[0])
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: mode[1])
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, *, warn_only: asked.append((on, warn_only))
    )
    with contextlib.suppress(ZeroDivisionError), unwritten_is_nan():
        raise ZeroDivisionError
    assert asked == [(True, True), mode]
