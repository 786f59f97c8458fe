"""Upstream's remedies over the conditions that they rely on: what the verdicts rest on."""

from functools import partial

import pytest
import torch

from staleproof.evidence import Verdict, plant
from staleproof.incidents.mla_padding import broken, remedies
from staleproof.incidents.mla_padding.remedies import null_block, three_d_buffer
from staleproof.incidents.mla_padding.setups import ClearEmptyRows
from staleproof.ops.mla.decode import mla_decode


def test_a_remedy_that_clears_is_clean_over_nan(device, monkeypatch):
    monkeypatch.setattr(broken, "PadWithSeqLenOne", ClearEmptyRows)
    assert null_block((broken.empty_row_not_written, plant, ""), device).verdict == Verdict.CLEAN


def test_what_a_null_block_is_filled_with():
    held = {}
    for name, (write, _) in remedies._FILLS.items():
        block = torch.ones(3, 5)
        write(block)
        held[name] = [row.isnan().all().item() or row.tolist() for row in block]
    other = [[-4 + 8 * (5 * row + at) / 14 for at in range(5)] for row in range(3)]
    zeros = [0.0] * 5
    assert [held["NaN"], held["zeros"]] == [[True] * 3, [zeros] * 3]
    assert held["NaN after its first token"] == [zeros, True, True]
    assert held["other numbers"] == [pytest.approx(row, abs=1e-5) for row in other]


def test_rows_past_a_buffer_are_counted_and_a_refusal_after_the_write_is_told_apart(device):
    found = three_d_buffer((broken.empty_row_not_written, 4, ""), device)
    assert found.numbers["rows_past_the_end"] == 3 * found.numbers["rows"]

    assert three_d_buffer((mla_decode, 4, ""), device).note.startswith("out: expected ")

    def too_late(q, *args, softmax_scale, out, behind=False):
        (out._base[-1:] if behind else out).zero_()
        raise ValueError("out: expected another shape")

    for kernel in (too_late, partial(too_late, behind=True)):
        assert three_d_buffer((kernel, 4, ""), device).verdict == "refused too late"
