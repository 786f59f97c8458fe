"""The hooks of incident 3's patches on plain tensors; tests/vllm has them in the real vLLM."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace as Space

import pytest
import torch
from real_routing import first_wins

from staleproof import device as devices
from staleproof.ops import topk
from staleproof.vllm import routing_calls as calls
from staleproof.vllm import simulated_routing as simulated
from staleproof.vllm.hooks import Target
from staleproof.vllm.patches import moe_routing as patch

DEVICE = devices.select()


@pytest.fixture(autouse=True)
def _tensors_are_where_kernels_run(device):
    with torch.device(device):
        yield


def _draws(distribution: str, tokens: int, experts: int, top_k: int, **params) -> torch.Tensor:
    torch.manual_seed(0)
    router = Space(distribution=distribution, distribution_params=params)
    where = torch.device(DEVICE)
    return simulated.sample((router, tokens, experts, top_k, where, torch.int32), {})


@pytest.mark.parametrize("params", [{"mean": 0.0, "std": 1.0}, {"mean": 1.0, "std": 0.5}])
def test_the_first_draw_has_the_strategys_distribution(params):
    experts = 8
    ids = _draws("normal", 40000, experts, 1, **params)
    seen = torch.bincount(ids[:, 0].cpu().long(), minlength=experts) / len(ids)
    # vLLM maps a normal sample to floor(sigmoid(sample) * experts).
    samples = torch.normal(params["mean"], params["std"], (40000,))
    theirs = torch.bincount((samples.sigmoid() * experts).long(), minlength=experts) / 40000
    torch.testing.assert_close(seen, theirs, rtol=0, atol=0.015)


def test_draws_are_distinct_even_where_experts_are_improbable():
    # Nearly all of it falls to one expert; some have probability 0 in float64.
    for ids in (_draws("normal", 200, 16, 8, mean=30.0, std=0.1), _draws("uniform", 200, 16, 16)):
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert ids.dtype == torch.int32
        assert 0 <= int(ids.min()) <= int(ids.max()) < 16


def test_what_the_simulator_cannot_draw_is_left_to_vllm():
    assert _draws("zipf", 2, 8, 2) is NotImplemented
    assert _draws("uniform", 2, 4, 8) is NotImplemented


def test_cleaned_inputs_keep_infinities_and_everything_finite():
    bias = torch.tensor([torch.nan, 1.5, torch.inf, -torch.inf])
    args, _ = calls.clean_bias((0, 0, 0, 0, False, bias), {})
    assert args[5].tolist() == [0.0, 1.5, torch.inf, -torch.inf]
    assert bias.isnan().any()
    assert calls.clean_bias((0, 0, 0, 0), {}) == ((0, 0, 0, 0), {})
    _, kwargs = calls.clean_bias((0, 0, 0, 0), {"e_score_correction_bias": bias})
    assert kwargs["e_score_correction_bias"][0] == 0
    # A row that softmax makes NaN has a NaN or +inf; -inf masks an expert and stays.
    logits = torch.tensor([[1.0, -torch.inf], [torch.inf, 0.0], [torch.nan, 0.0]])
    args, _ = calls.clean_logits((0, 0, 0, logits), {})
    assert args[3].tolist() == [[1.0, -torch.inf], [0.0, 0.0], [0.0, 0.0]]
    assert args[3].softmax(-1).isfinite().all()
    args, _ = calls.clean_sigmoid_logits((0, 0, 0, logits), {})
    assert args[3][2].sigmoid().tolist() == [0.0, 0.5]
    assert args[3][1].tolist() == [torch.inf, 0.0]
    args, _ = calls.clean_sigmoid_logits((0, 0, 0, logits, False, bias), {})
    assert args[5][0] == 0
    # Grouped routing takes logits, or scores, as by default: what scores 0 is the lowest logit, or 0 itself.
    for scoring, zero in (((1,), torch.finfo(logits.dtype).min), ((0,), 0.0), ((), 0.0)):
        args, _ = calls.clean_scores((logits, 1, 1, 1, False, 1.0, bias, *scoring), {})
        assert args[0][2].tolist() == [zero, 0.0]
        assert args[0][:2].equal(logits[:2])
        assert args[6][0] == 0


def test_hash_selection_cleans_logits_and_both_biases():
    nan = torch.tensor([torch.nan, 1.0, torch.inf])
    args, kwargs = calls.clean_hash((0, 0, 0, nan, False, 1.0, nan, None, None), {"bias_vl": nan})
    assert torch.nn.functional.softplus(args[3]).sqrt()[0] == 0
    assert args[3].tolist()[1:] == args[6].tolist()[1:] == [1.0, torch.inf]
    assert args[6][0] == kwargs["bias_vl"][0] == 0
    # By position, as vLLM may pass them; a missing bias stays missing.
    args, kwargs = calls.clean_hash_bias((0, 0, 0, nan, False, 1.0, None, None, None, None, nan), {})
    assert args[3] is nan
    assert args[6] is None
    assert args[10][0] == 0
    assert not kwargs


HASH = "topk_hash_softplus_sqrt"
SCORES = {
    "topk_softmax": lambda x: x.softmax(-1),
    "topk_sigmoid": torch.sigmoid,
    "grouped_topk": torch.sigmoid,
    HASH: lambda x: torch.nn.functional.softplus(x).sqrt(),
}
# The first and the last release of each list of arguments.
RELEASES = dict.fromkeys(("topk_softmax", "topk_sigmoid"), ("0.20.0", "0.25.1", "0.26.0", "0.27.0", "0.33.0"))
RELEASES |= {"grouped_topk": ("0.20.2",), HASH: ("0.20.0", "0.26.0", "0.27.1", "0.28.0", "0.33.0")}


def _target(name: str, release: str = "0.20.2") -> Target:
    """The one target of this release in the patches of a bias and of DeepSeek-V4's selection."""
    owners = [p for p in patch.PATCHES if p.name in ("topk_nan_bias", "hash_topk_nan")]
    (target,) = [t for owner in owners for t in owner.targets_for(release) if t.name == name]
    return target


def _routed(name: str, release: str, logits: torch.Tensor, bias: torch.Tensor | None, **more):
    """(result of the hook, weights, ids)."""
    target = _target(name, release)
    weights = torch.full((len(logits), 4), torch.nan)
    ids = torch.full((len(logits), 4), -7, dtype=more.pop("dtype", torch.int32))
    if name == "grouped_topk":
        result = target.instead((logits, 4, 2, 4, True, 2.5, bias, 1), {})
        return (result, *(result if isinstance(result, tuple) else (weights, ids)))
    if name == HASH:
        args = weights, ids, torch.empty_like(ids), logits, True, 2.5, bias
    else:
        args, more = (
            (weights, ids, ids, logits),
            {"renormalize": True, "e_score_correction_bias": bias, **more},
        )
    assert target.knows(args, more)
    return target.instead(args, more), weights, ids


_hashed = partial(_routed, HASH)


@pytest.mark.parametrize("name", SCORES)
def test_with_a_bias_the_replacement_chooses_as_vllm_does(name):
    for release in RELEASES[name]:
        for ties in (False, True):
            _chooses_as_vllm_does(name, release, ties)


def _chooses_as_vllm_does(name, release, ties):
    generator = torch.Generator(DEVICE).manual_seed(3)
    logits, bias = torch.randn(9, 24, generator=generator), torch.randn(24, generator=generator)
    if ties:
        # Few values, so that most choices are between equal sums.
        logits, bias = logits.round(), bias.round() * 4
    result, weights, ids = _routed(name, release, logits, bias)
    assert result is None or name == "grouped_topk"
    scores = SCORES[name](logits.double())
    choice = scores.float()
    if name == "grouped_topk":
        groups = (choice + bias).view(9, 4, 6).topk(2).values.sum(-1)
        # The lower group of equal ones, as in the kernel.
        closed = groups.argsort(descending=True, stable=True)[:, 2:]
        choice.view(9, 4, 6)[torch.arange(9)[:, None], closed] = -1000.0
    kept, wanted = first_wins(scores, choice + bias, 4)
    assert torch.equal(ids.long(), wanted)
    expected = (2.5 if name in ("grouped_topk", HASH) else 1.0) * kept / kept.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SCORES)
def test_a_nan_bias_repeats_no_expert_and_changes_no_finite_weight(name):
    logits = torch.randn(6, 24, generator=torch.Generator(DEVICE).manual_seed(5))
    bias = torch.zeros(24)
    bias[:22] = torch.nan
    _, repeated = first_wins(logits, logits.sigmoid() + bias, 4)
    assert all(len({*row}) < 4 for row in repeated.tolist())
    for release in RELEASES[name]:
        _, weights, ids = _routed(name, release, logits, bias)
        _, expected_weights, expected = _routed(name, release, logits, torch.zeros(24))
        assert torch.equal(ids, expected)
        assert torch.equal(weights, expected_weights)
        assert all(len({*row}) == 4 for row in ids.tolist())


def test_arguments_of_later_releases_reach_the_replacement():
    logits, bias = torch.randn(3, 24), torch.zeros(24)
    padding = torch.tensor([False, True, False])
    _, once, _ = _routed("topk_sigmoid", "0.26.0", logits, bias, routed_scaling_factor=1.0)
    _, weights, ids = _routed(
        "topk_sigmoid", "0.33.0", logits, bias, routed_scaling_factor=2.0, is_padding=padding
    )
    assert torch.equal(weights[::2], 2 * once[::2])
    # vLLM's own id of a padding row, which its kernels skip.
    assert ids[1].tolist() == [-1] * 4
    assert weights.isfinite().all()
    _, _, ids = _routed("topk_softmax", "0.33.0", logits, bias, is_padding=padding, dtype=torch.uint32)
    assert ids[1].tolist() == [2**32 - 1] * 4


@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid", "grouped_topk"])
def test_what_the_replacement_does_not_take_gets_vllms_kernel_and_a_clean_bias(name):
    logits, bias = torch.randn(3, 24), torch.full((24,), torch.nan)
    target = _target(name)
    unfit = {
        "no bias": (logits, None),
        "no token": (logits[:0], bias),
        "dtype": (logits.double(), bias),
        "rows apart in memory": (logits.t().contiguous().t(), bias),
        "a bias of another length": (logits, bias[:23]),
    }
    for why, (x, b) in unfit.items():
        result, weights, ids = _routed(name, "0.20.2", x, b)
        assert result is NotImplemented, why
        if name != "grouped_topk":
            assert weights.isnan().all(), why
            assert (ids == -7).all(), why
    args = (logits, 4, 2, 4, True, 2.5, bias, 1) if name == "grouped_topk" else (0, 0, 0, logits, True, bias)
    cleaned, _ = target.before(args, {})
    assert not any(torch.is_tensor(x) and x.isnan().any() for x in cleaned)


def test_nan_logits_repeat_no_expert_where_vllm_clamps_nothing():
    logits = torch.full((2, 24), torch.nan)
    assert not first_wins(logits, logits, 4)[1].any()
    _, weights, ids = _hashed("0.27.1", logits, None)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert not weights.count_nonzero()
    # From 0.28.0 on vLLM's kernel does that itself, so without a bias nothing is replaced.
    assert _hashed("0.28.0", logits, None)[0] is NotImplemented


def test_a_table_of_experts_or_a_bias_of_image_tokens_is_left_to_vllm():
    logits, bias = torch.randn(3, 24), torch.zeros(24)
    table = torch.zeros(100, 4, dtype=torch.int32)
    tokens = torch.zeros(3, dtype=torch.int32)
    named = {"input_tokens": tokens, "hash_indices_table": table}
    assert _hashed("0.20.0", logits, bias, **named)[0] is NotImplemented
    assert calls.clean_hash((0, 0, 0, logits, True, 2.5, bias), named) is None
    assert _hashed("0.33.0", logits, bias, bias_vl=bias)[0] is NotImplemented
    assert _hashed("0.20.0", logits.double(), bias)[0] is NotImplemented
    padding = torch.tensor([False, True, False])
    _, weights, ids = _hashed("0.33.0", logits, bias, is_padding=padding)
    assert ids[1].tolist() == [-1] * 4
    assert not weights[1].count_nonzero()


@pytest.fixture(name="repeated")
def repeated_fixture(monkeypatch):
    """The addresses of each launch that did not go through Triton's own way."""
    launched, found = topk.launched, []

    def launches(kernel, grid, tensors, sizes, **options):
        launched(kernel, grid, tensors, sizes, **options)
        return lambda *addresses: found.append(addresses)

    monkeypatch.setattr(topk, "launched", launches)
    monkeypatch.setattr(topk, "_SEEN", topk.Seen())
    return found


@pytest.mark.parametrize("name", SCORES)
def test_a_repeated_call_goes_straight_to_the_launch(name, repeated, monkeypatch):
    def call(rows: int, bias: torch.Tensor):
        logits = torch.randn(rows, 24)
        return logits, *_routed(name, "0.20.2", logits, bias)[1 if name == "grouped_topk" else 0 :]

    bias = torch.zeros(24)
    for rows in (9, 5):
        call(rows, bias)
    assert not repeated
    monkeypatch.setattr(topk, "route", None)
    for rows in (5, 9, 5):
        logits, *_, weights, ids = call(rows, bias)
        at = (logits.data_ptr(), bias.data_ptr(), None, weights.data_ptr(), ids.data_ptr())
        assert repeated.pop() == at
        assert (weights.shape, weights.dtype, ids.dtype) == ((rows, 4), torch.float32, torch.int32)
    with pytest.raises(TypeError, match="not callable"):
        call(5, torch.zeros(24).bfloat16())
    assert not repeated


def test_grouped_routing_by_name_is_that_by_position_and_what_has_no_rows_is_vllms():
    given = (torch.randn(3, 24), 4, 2, 4, True, 2.5, torch.randn(24), calls.SIGMOID)
    by_name = dict(zip(calls.GROUPED, given, strict=True))
    named = {"num_expert_group": 4, "topk_group": 2, "renormalize": True, "routed_scaling_factor": 2.5}
    expected = topk.grouped_topk(given[0], 4, bias=given[6], **named)
    for args, kwargs in ((given, {}), ((), by_name), (given[:2], {n: by_name[n] for n in calls.GROUPED[2:]})):
        assert all(map(torch.equal, calls.grouped(args, kwargs), expected))
    assert calls.grouped((torch.empty(0, 24), *given[1:]), {}) is NotImplemented
    none = torch.empty(0, 4), torch.empty(0, 4, dtype=torch.int32), None, torch.empty(0, 24)
    assert calls.softmax(none, {}) is calls.sigmoid(none, {}) is NotImplemented
    # Scores instead of logits, also by default.
    for scoring in ({"scoring_func": 0}, {}):
        assert calls.grouped(given[:1], dict([*by_name.items()][1:7]) | scoring) is NotImplemented
    for positional in (given[:7], (*given[:7], 0)):
        assert calls.grouped(positional, {}) is NotImplemented


def _apart(values: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, ``by`` elements behind an address that is a multiple of 16."""
    return torch.empty(values.numel() + by, dtype=values.dtype)[by:].view(values.shape).copy_(values)


@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid", "grouped_topk"])
def test_a_kernel_for_aligned_tensors_is_not_launched_on_others(name, repeated):
    logits, bias = torch.randn(5, 24), torch.zeros(24)
    target = _target(name)
    weights, ids = torch.zeros(5, 4), torch.zeros(5, 4, dtype=torch.int32)
    given = [logits, bias] if name == "grouped_topk" else [logits, bias, weights, ids]

    def call(logits, bias, weights=None, ids=None):
        if name == "grouped_topk":
            return target.instead((logits, 4, 2, 4, True, 2.5, bias, 1), {})
        return target.instead((weights, ids, ids, logits, True, bias), {})

    call(*given)
    for place in range(len(given)):
        call(*[_apart(x, 1) if at == place else x for at, x in enumerate(given)])
        assert not repeated, place
    call(*given)
    assert len(repeated) == 1


def test_the_simulators_ids_are_int32_unless_the_caller_says_otherwise():
    given = ("router", "hidden", "logits", 2)
    assert simulated.int32_ids(given, {}) == (given, {"indices_type": torch.int32})
    assert simulated.int32_ids((*given, None), {}) == ((*given, torch.int32), {})
    assert simulated.int32_ids((*given, torch.int64), {}) is None
    assert simulated.int32_ids(given, {"indices_type": torch.int64}) is None
