"""Rows of logits with a NaN or +Inf are found, wherever it stands; masks of -Inf are none."""

from __future__ import annotations

import pytest
import torch

from staleproof.ops.bad_logits import PART, find_bad_logits, parts_of

NAN, INF = float("nan"), float("inf")


def _bad(logits: torch.Tensor) -> list[bool]:
    rows, parts = len(logits), parts_of(logits.shape[1])
    flags = torch.full((rows * parts + 1,), 2, dtype=torch.uint8, device=logits.device)
    find_bad_logits(logits, flags)
    assert flags[-1] == 2
    return flags[:-1].view(rows, parts).bool().any(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [8, PART, 2 * PART + 5])
def test_one_number_anywhere_makes_its_row_bad(device, dtype, columns):
    # Rows as vLLM pads a vocabulary: behind the columns lies what nobody asked about.
    logits = torch.full((7, columns + 3), NAN, dtype=dtype, device=device)[:, :columns]
    logits.copy_(torch.randn(7, columns))
    logits[1, 0] = logits[2, -1] = logits[3, columns // 2] = NAN
    logits[4, -1] = INF
    logits[5] = -INF
    logits[6, 1:] = -INF
    for _ in range(2):
        assert _bad(logits) == [False, True, True, True, True, False, False]


def test_no_row_is_no_flag(device):
    assert _bad(torch.empty(0, 8, device=device)) == []


def test_too_few_flags_are_refused_and_none_is_written(device):
    flags = torch.full((2,), 2, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="flags: expected 3 or more, got 2"):
        find_bad_logits(torch.zeros(3, 8, device=device), flags)
    assert flags.tolist() == [2, 2]
