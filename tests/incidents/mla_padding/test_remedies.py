"""Upstream's remedies over the conditions that they rely on give what the notebook says of them."""

from __future__ import annotations

import pytest

from staleproof.evidence import Verdict
from staleproof.incidents.mla_padding import broken, remedies
from staleproof.incidents.mla_padding.cases import TABLE
from staleproof.incidents.mla_padding.remedies import (
    FILLS,
    INSIDE,
    NULL_BLOCKS,
    PAST,
    REFUSED,
    WRONG_FINITE,
    BufferCase,
    NullBlockCase,
    null_block,
    three_d_buffer,
)
from staleproof.incidents.mla_padding.setups import ClearEmptyRows


def test_padding_with_one_token_is_right_over_zeros_only(device):
    found = TABLE.ask("null block", device=device)
    assert [f for f in found if not f.ok] == []
    by_fill = {fill: {f.verdict for f in found if NULL_BLOCKS[f.variant].fill == fill} for fill in FILLS}
    assert by_fill["zeros"] == {Verdict.CLEAN}
    assert by_fill["other numbers"] == {WRONG_FINITE}
    # Only a tile that is read whole reaches past the one token.
    assert by_fill["NaN after its first token"] == {Verdict.CLEAN, Verdict.LEAKED}


def test_a_remedy_that_clears_is_clean_over_nan(device, monkeypatch):
    monkeypatch.setattr(broken, "PadWithSeqLenOne", ClearEmptyRows)
    case = NullBlockCase(broken.empty_row_not_written, "NaN")
    assert null_block(case, device).verdict == Verdict.CLEAN


def test_the_count_decides_whether_the_slice_is_empty(device):
    padded, real = TABLE.ask("num_decodes", device=device)
    assert (padded.verdict, real.verdict) == (Verdict.LEAKED, Verdict.CLEAN)
    assert padded.ok
    assert real.ok


def test_a_kernel_that_trusts_the_query_writes_past_the_buffer(device):
    found = TABLE.ask("3-D buffer", device=device)
    assert [f.verdict for f in found] == [INSIDE, PAST, REFUSED]
    assert found[1].numbers["rows_past_the_end"] == 3 * found[1].numbers["rows"]


def test_a_refusal_after_the_write_is_told_apart(device):
    def too_late(q, *args, softmax_scale, out):
        out.zero_()
        raise ValueError("out: expected another shape")

    assert three_d_buffer(BufferCase(too_late, 4), device).verdict == "refused too late"


@pytest.mark.gpu
def test_other_free_blocks_come_first(device):
    found = TABLE.ask("growth by history", device=device)
    assert [f for f in found if not f.ok] == []
    assert found[-1].numbers["tensors_before_the_tenant"] >= found[0].numbers["tensors_before_the_tenant"]


def test_an_empty_row_is_the_same_with_every_number_of_splits(device):
    for found in TABLE.ask("empty row, by splits", device=device):
        assert not found.failed
        if found.ran:
            assert len(found.numbers["states"]) > 1


def test_one_reference_serves_all_fills(device):
    one, other = (remedies._cleared(broken.empty_row_not_written, device) for _ in range(2))
    assert one is other
