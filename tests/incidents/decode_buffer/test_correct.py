"""A fix of incident 2 whose outputs are wrong is wrong, although its server lives."""

import pytest

from staleproof.incidents.decode_buffer import model, setups
from staleproof.incidents.decode_buffer.correct import wrong_rows
from staleproof.incidents.decode_buffer.questions import incident
from staleproof.incidents.decode_buffer.setups import OFF
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.decode_workspace import DecodeWorkspace


def _from_the_first_empty_row_on(out, seq_lens):
    out[int((seq_lens > 0).long().argmin()) if (seq_lens == 0).any() else len(out) :] = 0


def _and_nan(out, seq_lens):
    out.nan_to_num_()
    clear_empty_rows(out, seq_lens)


def _and_scales_by_a_percent(out, seq_lens):
    out.mul_(1.01)
    clear_empty_rows(out, seq_lens)


@pytest.mark.parametrize("clear", [_from_the_first_empty_row_on, _and_nan, _and_scales_by_a_percent])
def test_kernel_that_clears_other_rows_is_wrong(monkeypatch, device, clear):
    monkeypatch.setattr(setups, "clear_empty_rows", clear)
    assert wrong_rows("clear_empty_rows", device) is not None


def test_server_that_lives_without_its_output_is_not_fixed(monkeypatch):
    monkeypatch.setattr(setups, "clear_empty_rows", lambda out, seq_lens: out.zero_())
    (found,) = incident.ask("off/on/off", "clear_empty_rows", device="cpu")
    assert (found.verdict, found.three.on, found.failed) == ("wrong", "lives", True)
    assert "live rows" in found.note


def test_workspace_whose_key_lacks_the_micro_batch_is_wrong(monkeypatch, device):
    get = DecodeWorkspace.get
    monkeypatch.setattr(DecodeWorkspace, "get", lambda self, *of, micro_batch: get(self, *of, micro_batch=0))
    assert "another micro-batch" in (wrong_rows("decode_workspace", device) or "")
    assert "another micro-batch" in (wrong_rows(OFF, device) or "")


def test_layer_that_is_wrong_for_a_smaller_batch_is_wrong(monkeypatch, device):
    decode = model.Attention.decode

    def wrong_for_few(self, q, seq_lens, micro_batch=0):
        out = decode(self, q, seq_lens, micro_batch)
        return out if len(q) == 12 else out * 2

    monkeypatch.setattr(model.Attention, "decode", wrong_for_few)
    assert (wrong_rows("no_buffer", device) or "").startswith("three rows in place of twelve")
