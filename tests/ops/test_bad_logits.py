"""Rows of logits with a NaN or +Inf are found, wherever it stands; masks of -Inf are none."""

from __future__ import annotations

import pytest
import torch

from staleproof.ops.bad_logits import PART, bad_logits

NAN, INF = float("nan"), float("inf")


def _bad(logits: torch.Tensor) -> list[bool]:
    flags = bad_logits(logits)
    if logits.is_cuda:
        # The kernel writes into the host's memory; whoever reads it waits.
        torch.cuda.synchronize()
    return flags.bool().any(-1).tolist()


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
