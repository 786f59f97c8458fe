"""The hook of incident 1's patch on plain tensors; tests/vllm has it in the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.vllm.patches import mla_padding as patch

SEQ_LENS = (7, 0, 3)


def _call(out, lse, device, starts=None, needs_lse=True):
    decode = SimpleNamespace(seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=device))
    if starts is not None:
        decode.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    impl = SimpleNamespace(need_to_return_lse_for_decode=needs_lse)
    return patch._clear((out, lse), (impl, None, None, SimpleNamespace(decode=decode)), {})


def _nan_rows(out) -> list[int]:
    return [row for row, values in enumerate(out.isnan().flatten(1).any(-1).tolist()) if values]


@pytest.mark.parametrize("q_len", [1, 4])
def test_rows_of_an_empty_request(device, q_len):
    out = torch.ones(3 * q_len, 2, 16, device=device)
    out[q_len : 2 * q_len] = torch.nan
    result = _call(out, None, device)
    assert result == (out, None)
    assert not _nan_rows(out)
    assert not out[q_len : 2 * q_len].count_nonzero()
    assert out[:q_len].eq(1).all()
    assert out[2 * q_len :].eq(1).all()


def test_ragged_queries_as_many_rows_as_requests(device):
    # Request 1 is empty and owns no row; counting a row a request would clear row 1, a live one.
    out = torch.ones(3, 2, 16, device=device)
    _call(out, None, device, starts=[0, 2, 2, 3])
    assert out.eq(1).all()
    out = torch.full((5, 2, 16), torch.nan, device=device)
    out[:3] = 1
    _call(out, None, device, starts=[0, 2, 2, 3])
    assert out[:3].eq(1).all()
    assert not out[3:].count_nonzero()


def test_lse_of_another_dtype_and_of_a_part_of_the_heads(device):
    out = torch.ones(3, 2, 16, device=device)
    half = torch.full((3, 2), 0.5, dtype=torch.bfloat16, device=device)
    part = torch.full((3, 8), 0.5, device=device)[:, :2]
    for lse in (half, part):
        lse[1] = torch.nan
        assert _call(out, lse, device)[1] is lse
        assert lse.tolist() == [[0.5] * 2, [-torch.inf] * 2, [0.5] * 2]
    # Where nobody reads it, it is not touched.
    part[1] = 3.0
    _call(out, part, device, needs_lse=False)
    assert part[1].tolist() == [3.0, 3.0]


def test_no_row_at_all(device):
    out = torch.empty(0, 2, 16, device=device)
    assert _call(out, None, device)[0] is out
