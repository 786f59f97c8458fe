"""topk_softmax, topk_sigmoid, topk_softplus_sqrt and grouped_topk against their reference, bit for bit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.bits import assert_same_bits, moved

from staleproof.ops import topk as kernels
from staleproof.ops.reference import topk as reference

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
DTYPES = list(INTEGERS)
GROUPED = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "topk_softmax": {},
    "topk_sigmoid": {},
    "topk_softplus_sqrt": {},
    "grouped_topk": GROUPED,
}
UNGROUPED = [name for name in FUNCTIONS if name != "grouped_topk"]
NAN, INF = float("nan"), float("inf")

Routed = tuple[torch.Tensor, torch.Tensor]


def from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.int32)).to(INTEGERS[dtype]).view(dtype)


def any_bits(rows: int, experts: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, half of them replaced with the values that comparisons trip over."""
    random = np.random.default_rng(seed)
    x = from_bits(random.integers(0, 2**32, (rows, experts)), dtype)
    special = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, 1e-40, -1e-40, 6e-8], dtype=dtype)
    picks = torch.from_numpy(random.integers(0, len(special), (rows, experts)))
    # From rows without a special value to rows of nothing else.
    rate = np.linspace(0, 1, rows)[:, None]
    return torch.where(torch.from_numpy(random.random((rows, experts)) < rate), special[picks], x)


def numbers(rows: int, experts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of a healthy router, every third row rounded so that many are equal."""
    x = torch.randn(rows, experts, generator=torch.Generator().manual_seed(rows + experts)) * 3
    x[::3] = x[::3].round()
    return x.to(dtype)


def assert_contract(got: Routed, experts: int) -> None:
    weights, ids = got
    assert bool(weights.isfinite().all())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts
    ordered = ids.sort(-1).values
    assert not bool((ordered[:, 1:] == ordered[:, :-1]).any())


def route(name: str, x: torch.Tensor, top_k: int, device: str, **keywords: Any) -> Routed:
    """The result on the device, after it was compared with the reference on the CPU."""
    keywords = FUNCTIONS[name] | keywords
    want = getattr(reference, name)(x, top_k, **keywords)
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
    got = getattr(kernels, name)(x.to(device), top_k, **there)
    assert_same_bits([x.cpu() for x in got], want)
    return got


@pytest.mark.parametrize(
    ("dtype", "bias", "renormalize"),
    [(torch.float32, False, True), (torch.bfloat16, True, False), (torch.float16, True, True)],
    ids=str,
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_matches_reference(
    device: str, function: str, dtype: torch.dtype, bias: bool, renormalize: bool
) -> None:
    experts, top_k = 60, 5
    values = numbers(1, experts)[0] / 10 if bias else None
    got = route(function, numbers(33, experts, dtype), top_k, device, bias=values, renormalize=renormalize)
    assert_contract(got, experts)
    if renormalize:
        factor = FUNCTIONS[function].get("routed_scaling_factor", 1.0)
        total = got[0].sum(-1).cpu()
        torch.testing.assert_close(total, torch.full_like(total, factor))


@pytest.mark.parametrize(
    ("experts", "top_k", "function"),
    zip((1, 3, 128, 160, 576, 1024), (1, 3, 8, 6, 10, 32), UNGROUPED * 2, strict=True),
)
def test_any_number_of_experts(device: str, function: str, experts: int, top_k: int) -> None:
    bits = any_bits(16, experts, torch.bfloat16, experts)
    x = torch.cat([numbers(16, experts, torch.bfloat16), bits])
    assert_contract(route(function, x, top_k, device), experts)


@pytest.mark.parametrize(
    ("experts", "groups", "topk_group", "top_k"),
    [(256, 8, 4, 8), (12, 3, 2, 5), (6, 1, 1, 3), (4, 2, 2, 4), (1000, 4, 1, 32)],
)
def test_any_grouping(device: str, experts: int, groups: int, topk_group: int, top_k: int) -> None:
    x = torch.cat([numbers(16, experts), any_bits(16, experts, torch.float32, experts)])
    got = route(
        "grouped_topk",
        x,
        top_k,
        device,
        num_expert_group=groups,
        topk_group=topk_group,
        bias=numbers(1, experts)[0] / 10,
    )
    assert_contract(got, experts)
    used = (got[1].cpu().long() // (experts // groups)).sort(-1).values
    assert int((used[:, 1:] != used[:, :-1]).sum(-1).max()) < topk_group


def test_the_reference_is_the_formula() -> None:
    x = numbers(200, 96)
    for (scores, _), want in (
        (reference.softmax(x), x.double().softmax(-1)),
        (reference.sigmoid(x), x.double().sigmoid()),
        (reference.softplus_sqrt(x), torch.nn.functional.softplus(x.double(), threshold=100).sqrt()),
    ):
        torch.testing.assert_close(scores.double(), want, rtol=2e-6, atol=0)
    steep = torch.linspace(-87, 0, 100_001)
    torch.testing.assert_close(reference.exp(steep).double(), steep.double().exp(), rtol=1.3e-7, atol=0)
    far = torch.tensor([-103.9, -95.0, -200.0, -INF, NAN])
    want = torch.tensor([-103.9, -95.0, -INF, -INF, -INF], dtype=torch.float64).exp()
    torch.testing.assert_close(reference.exp(far).double(), want, rtol=0, atol=1.5e-45)


def test_equals_are_taken_in_the_order_of_their_index(device: str) -> None:
    x = torch.zeros(3, 64)
    x[1, ::2] = -0.0
    x[2, 40:] = 1.0
    _, ids = route("topk_sigmoid", x, 8, device)
    first = torch.arange(8, dtype=torch.int32)
    assert torch.equal(ids.cpu(), torch.stack([first, first, first + 40]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_of_one_value_get_the_first_experts(device: str, function: str) -> None:
    x = torch.tensor([[NAN], [INF], [-INF], [-NAN], [3e38], [-3e38], [-0.0], [1e-45]]).repeat(1, 64)
    weights, ids = route(function, x, 8, device)
    assert torch.equal(ids.cpu(), torch.arange(8, dtype=torch.int32).expand(8, 8))
    assert bool(weights.isfinite().all())


def test_one_nan_takes_the_scores_of_a_softmax_row_and_of_no_other(device: str) -> None:
    x = numbers(4, 64)
    x[1, 50], x[2, 50] = NAN, INF
    weights, ids = route("topk_softmax", x, 8, device)
    assert torch.equal(ids[1:3].cpu(), torch.arange(8, dtype=torch.int32).expand(2, 8))
    assert int(weights[1:3].count_nonzero()) == 0
    assert_same_bits((weights[::3], ids[::3]), route("topk_softmax", x[::3], 8, device))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_nan_bias_is_no_bonus(device: str, function: str) -> None:
    x = numbers(32, 64, torch.bfloat16)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0))
    none = bias.clone()
    bias[::5], none[::5] = NAN, 0.0
    got, want = (route(function, x, 8, device, bias=b) for b in (bias, none))
    assert_same_bits(got, want)
    bias[::3], bias[1::3] = INF, -INF
    assert_contract(route(function, x, 8, device, bias=bias), 64)


def test_infinite_biases_do_not_cancel(device: str) -> None:
    x = numbers(8, 32)
    bias = torch.full((32,), -INF)
    # Of group 2 nothing but one expert of +inf, of group 1 one of no bonus, of group 3 two.
    bias[17], bias[9], bias[25:27] = INF, 0.0, 0.0
    _, ids = route("grouped_topk", x, 4, device, bias=bias)
    assert bool((ids[:, 0] == 17).all())
    assert bool(((ids[:, 1:3] == 25) | (ids[:, 1:3] == 26)).all())


@pytest.mark.parametrize(
    ("function", "dtype", "bias"),
    [
        ("topk_softmax", torch.bfloat16, False),
        ("topk_sigmoid", torch.float32, False),
        ("topk_softplus_sqrt", torch.bfloat16, True),
    ],
    ids=str,
)
def test_experts_of_minus_infinity_are_taken_once(
    device: str, function: str, dtype: torch.dtype, bias: bool
) -> None:
    x = torch.full((3, 9), -INF, dtype=dtype)
    x[0, 4], x[1, 8] = 2.0, -1.0
    values = torch.full((9,), -INF) if bias else None
    _, ids = route(function, x, 8, device, bias=values)
    if not bias:
        wanted = torch.tensor([4, 0, 1, 2, 3, 5, 6, 7], dtype=torch.int32)
        assert torch.equal(ids[0].cpu(), wanted)


def test_weights_are_scaled_last(device: str) -> None:
    x = any_bits(8, 64, torch.bfloat16, 6)
    got = route("grouped_topk", x, 4, device, renormalize=True, routed_scaling_factor=3.0)
    one = route("grouped_topk", x, 4, device, renormalize=True, routed_scaling_factor=1.0)
    assert_same_bits(got, (one[0] * 3.0, one[1]))


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    dtype = draw(st.sampled_from(DTYPES))
    experts = 4 * draw(st.integers(2, 10))
    rows = draw(st.integers(1, 4))
    top_k = draw(st.integers(1, experts // 2))
    width = 8 * dtype.itemsize
    # Exponents of all ones are NaN and infinity, of all zeros 0 and denormals.
    exponent = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
    anything = st.integers(0, 2**width - 1)
    bits = anything | anything.map(lambda b: b | exponent) | anything.map(lambda b: b & ~exponent)
    count = rows * experts
    drawn = draw(st.lists(bits, min_size=count, max_size=count))
    x = from_bits(np.array(drawn).reshape(rows, experts), dtype)
    bias = None
    if draw(st.booleans()):
        drawn = draw(st.lists(bits, min_size=experts, max_size=experts))
        bias = from_bits(np.array(drawn), dtype)
    return x, bias, min(top_k, 32)


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)
@given(case=routings(), renormalize=st.booleans())
def test_any_bits(
    device: str, function: str, case: tuple[torch.Tensor, torch.Tensor | None, int], renormalize: bool
) -> None:
    x, bias, top_k = case
    got = route(function, x, top_k, device, bias=bias, renormalize=renormalize)
    assert_contract(got, x.shape[1])


@pytest.mark.parametrize(("function", "dtype"), zip(FUNCTIONS, [*DTYPES, torch.bfloat16], strict=True))
@pytest.mark.parametrize("rows", [128, pytest.param(100_000, marks=pytest.mark.gpu)])
def test_many_rows_of_any_bits(device: str, function: str, dtype: torch.dtype, rows: int) -> None:
    x = any_bits(rows, 128, dtype, 1)
    x[::2] = numbers(rows // 2, 128, dtype)
    bias = any_bits(2, 128, torch.float32, 2)[1]
    assert_contract(route(function, x, 8, device), 128)
    assert_contract(route(function, x, 8, device, bias=bias), 128)


@pytest.mark.parametrize(("sort", "rows_each"), [(False, 4), (True, 1)], ids=["rounds", "sort"])
def test_every_plan_gives_the_same_bits(
    device: str, sort: bool, rows_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_plan", lambda *_: (sort, rows_each, 1))
    for dtype in (torch.bfloat16, torch.float32):
        route("topk_softmax", any_bits(5, 13, dtype, 3), 3, device, renormalize=True)


@pytest.mark.parametrize(
    ("function", "ids_dtype"), zip(FUNCTIONS, [torch.int32, torch.int64] * 2, strict=True)
)
def test_padding_rows_hold_the_padding_id(device: str, function: str, ids_dtype: torch.dtype) -> None:
    x = any_bits(6, 64, torch.bfloat16, 4)
    mask = torch.tensor([False, True, False, False, True, True])
    weights, ids = route(function, x, 4, device, is_padding=mask, padding_id=64, topk_ids_dtype=ids_dtype)
    assert ids.dtype == ids_dtype
    assert bool((ids[mask] == 64).all())
    assert int(weights[mask].count_nonzero()) == 0
    assert_contract((weights[~mask], ids[~mask]), 64)
    assert bool((route(function, x, 4, device, is_padding=mask)[1][mask] == -1).all())


def test_out_is_written_and_returned(device: str) -> None:
    ids_dtype = torch.int64
    x = numbers(5, 64, torch.bfloat16)
    weights = torch.full((5, 4), NAN, device=device)
    ids = torch.full((5, 4), -7, dtype=ids_dtype, device=device)
    got = kernels.topk_softmax(x.to(device), 4, out=(weights, ids))
    assert got[0] is weights
    assert got[1] is ids
    assert_same_bits([x.cpu() for x in got], reference.topk_softmax(x, 4, topk_ids_dtype=ids_dtype))


def test_rows_may_lie_apart(device: str) -> None:
    wide = numbers(9, 96, torch.bfloat16).to(device)
    got = kernels.topk_softmax(wide[::2, :60], 4)
    assert_same_bits([x.cpu() for x in got], reference.topk_softmax(wide[::2, :60].cpu(), 4))


X = torch.zeros(4, 8)
MASK = torch.zeros(4, dtype=torch.bool)
# Of topk_softmax, or of grouped_topk where a group is named.
BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"router_logits": X[0]}, r"router_logits: expected .* rank 2"),
    "dtype": ({"router_logits": X.double()}, r"router_logits: .*got torch.float64"),
    "zero tokens": ({"router_logits": X[:0]}, r"router_logits: .* one token"),
    "no experts": ({"router_logits": X[:, :0]}, r"router_logits: expected 1 to"),
    "many experts": ({"router_logits": torch.zeros(1, 1025)}, r"router_logits: expected 1 to 1024 experts"),
    "layout": ({"router_logits": X.T}, r"router_logits: expected contiguous rows"),
    "columns apart": ({"router_logits": torch.zeros(4, 16)[:, ::2]}, r"router_logits: expected contiguous"),
    "k over experts": ({"top_k": 9}, r"top_k: expected 1 to 8 experts, got 9"),
    "k zero": ({"top_k": 0}, r"top_k: expected 1 to 8 experts, got 0"),
    "k over 32": ({"router_logits": torch.zeros(1, 64), "top_k": 33}, r"top_k: .*1 to 32"),
    "k a float": ({"top_k": 2.0}, r"top_k: expected 1 to 8 experts, got 2.0"),
    "k a text": ({"top_k": "2"}, r"top_k: expected 1 to 8 experts, got '2'"),
    "factor a text": (
        {"routed_scaling_factor": "1"},
        r"routed_scaling_factor: expected a finite float32, got '1'",
    ),
    "padding id": ({"is_padding": MASK, "padding_id": 2**31}, r"padding_id: expected a 32-bit"),
    "padding id below": ({"is_padding": MASK, "padding_id": -(2**31) - 1}, r"padding_id: expected a 32-bit"),
    "ids dtype": ({"topk_ids_dtype": torch.int16}, r"topk_ids_dtype: expected"),
    "out": ({"out": X}, r"out: expected \(topk_weights, topk_ids\)"),
    "groups": ({"num_expert_group": 3}, r"num_expert_group: expected a divisor"),
    "no groups": ({"num_expert_group": 0}, r"num_expert_group: .* got 0"),
    "groups of one": ({"num_expert_group": 8}, r"num_expert_group: .* two or more"),
    "groups a float": ({"num_expert_group": 4.0}, r"num_expert_group: .* got 4.0"),
    "group a float": ({"topk_group": 2.0}, r"topk_group: expected .* got 2.0"),
    "no group": ({"topk_group": 0}, r"topk_group: expected 1 to 4 groups"),
    "too few groups": ({"top_k": 5, "topk_group": 2}, r"topk_group: .* 2 that hold top_k 5"),
    "factor": ({"routed_scaling_factor": NAN}, r"routed_scaling_factor: expected"),
    "big factor": ({"routed_scaling_factor": 1e39}, r"routed_scaling_factor: .*1e"),
    "infinite factor": ({"routed_scaling_factor": INF}, r"routed_scaling_factor:"),
    "negative infinite factor": ({"routed_scaling_factor": -INF}, r"routed_.* got -inf"),
}


def test_bad_input_is_named(device: str) -> None:
    for change, message in BAD_INPUTS.values():
        name = "topk_softmax" if {"num_expert_group", "topk_group"}.isdisjoint(change) else "grouped_topk"
        arguments = {"router_logits": X, "top_k": 2} | FUNCTIONS[name] | change
        with pytest.raises(ValueError, match=message):
            getattr(kernels, name)(**{key: moved(value, device) for key, value in arguments.items()})
