# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The router's expert ids are distinct, whatever bits logits and bias hold."""

import math
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router import (
    fused_topk_bias_router,
    fused_topk_router,
)
from vllm.platforms import current_platform

DEVICE = current_platform.device_type or "cpu"
ROWS, EXPERTS, TOPK = 37, 60, 6


def _route(logits, scoring, bias=None, renormalize=False):
    hidden = logits.new_empty(len(logits), 8)
    if bias is None:
        weights, ids, _ = fused_topk_router.fused_topk(
            hidden, logits, TOPK, renormalize, scoring_func=scoring
        )
    else:
        weights, ids = fused_topk_bias_router.fused_topk_bias(
            hidden, logits, scoring, bias, TOPK, renormalize
        )
    return weights, ids


def _assert_distinct(ids):
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    ordered = ids.sort(dim=-1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_ids_are_distinct_where_logits_are_not_finite(scoring, dtype, value, share):
    logits = torch.randn(ROWS, EXPERTS, device=DEVICE)
    logits[torch.rand(ROWS, EXPERTS, device=DEVICE) <= share] = value
    weights, ids = _route(logits.to(dtype), scoring, renormalize=True)
    _assert_distinct(ids)
    assert weights.isfinite().all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_ids_are_distinct_where_the_bias_is_nan(scoring, share):
    logits = torch.randn(ROWS, EXPERTS, device=DEVICE)
    bias = torch.randn(EXPERTS, device=DEVICE)
    bias[torch.rand(EXPERTS, device=DEVICE) <= share] = math.nan
    weights, ids = _route(logits, scoring, bias)
    _assert_distinct(ids)
    assert weights.isfinite().all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_finite_rows_choose_as_torch_does(scoring, biased):
    logits = torch.randn(ROWS, EXPERTS, device=DEVICE)
    bias = torch.randn(EXPERTS, device=DEVICE) if biased else None
    weights, ids = _route(logits, scoring, bias)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores + bias if biased else scores
    expected = choice.topk(TOPK, dim=-1).indices
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(weights, scores.gather(1, expected))


def test_padding_rows_choose_no_expert(monkeypatch):
    padding = torch.arange(ROWS, device=DEVICE) >= 5
    context = SimpleNamespace(is_padding=padding)
    monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "1")
    monkeypatch.setattr(fused_topk_router, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(fused_topk_router, "get_forward_context", lambda: context)
    logits = torch.randn(ROWS, EXPERTS, device=DEVICE)
    logits[5:] = math.nan
    weights, ids = _route(logits, "softmax")
    _assert_distinct(ids[:5])
    assert (ids[5:] == -1).all() and (weights[5:] == 0).all()
