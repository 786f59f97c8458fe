"""Upstream's remedies over the conditions that they rely on give what the notebook says of them."""

from __future__ import annotations

import pytest

from staleproof.evidence import Verdict
from staleproof.incidents.mla_padding import broken, remedies
from staleproof.incidents.mla_padding.cases import TABLE
from staleproof.incidents.mla_padding.remedies import (
    INSIDE,
    PAST,
    REFUSED,
    BufferCase,
    NullBlockCase,
    null_block,
    three_d_buffer,
)
from staleproof.incidents.mla_padding.setups import ClearEmptyRows


def test_a_remedy_that_clears_is_clean_over_nan(device, monkeypatch):
    monkeypatch.setattr(broken, "PadWithSeqLenOne", ClearEmptyRows)
    case = NullBlockCase(broken.empty_row_not_written, "NaN")
    assert null_block(case, device).verdict == Verdict.CLEAN


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


def test_one_reference_serves_all_fills(device):
    one, other = (remedies._cleared(broken.empty_row_not_written, device) for _ in range(2))
    assert one is other
