"""The four verdicts and pad-invariance, on toy steps whose truth is known."""

import pytest
import torch

from staleproof.evidence import CLEAN, Verdict, bad_rows, judge_rows, pad_invariance, same_bits

LIVE = 2
NAN = float("nan")


def step(mix, padding=NAN, live=1.0):
    """A step of 4 rows: ``mix`` consumes (live rows + padding rows) and returns the outputs."""

    def run(fill):
        x = torch.full((4, 3), live)
        x[LIVE:] = padding
        if fill is not None:
            fill(x[LIVE:])
        return mix(x)

    return run


def by_row(x):
    return x * 2


def by_amax(x):
    return x / x.abs().max()


def by_row_of_live_only(x):
    return torch.where(torch.arange(4)[:, None] < LIVE, x, 0.0)


VERDICTS = [
    (step(by_row, padding=7.0), Verdict.CLEAN),
    (step(by_row_of_live_only), Verdict.CLEAN),
    (step(by_row), Verdict.PAD_ONLY),
    (step(by_row, padding=float("inf")), Verdict.PAD_ONLY),
    (step(by_amax), Verdict.LEAKED),
    (step(by_row, live=NAN), Verdict.LIVE_BORN),
    (step(by_amax, padding=7.0, live=NAN), Verdict.LIVE_BORN),
]


def test_verdicts():
    for run, verdict in VERDICTS:
        assert judge_rows(run, LIVE) == verdict
        assert judge_rows(run, torch.tensor([True, True, False, False])) == verdict


def test_one_healed_row_convicts_the_padding():
    def run(fill):
        x = step(by_amax)(fill)
        x[0] = NAN
        return x

    assert judge_rows(run, LIVE) == Verdict.LEAKED


@pytest.mark.parametrize(
    ("place", "bad_with_clean_padding", "verdict"), [(0, False, Verdict.LEAKED), (2, True, Verdict.LIVE_BORN)]
)
def test_every_output_is_judged(place, bad_with_clean_padding, verdict):
    """One of three outputs has a bad live row, over the padding as it is or over clean padding too."""

    def run(fill):
        outputs = [torch.ones(4, 3) for _ in range(3)]
        if fill is None or bad_with_clean_padding:
            outputs[place][0] = NAN
        return outputs

    assert judge_rows(run, LIVE) == verdict


@pytest.mark.parametrize("place", [0, 2])
def test_every_output_is_compared(place):
    def run(fill):
        outputs = [torch.ones(4, 3) for _ in range(3)]
        outputs[place] = step(lambda x: x + x[LIVE:].abs().max())(fill)
        return outputs

    assert not pad_invariance(run, LIVE)


def test_pad_invariance_sees_wrong_finite_values_where_no_nan_check_does():
    def run(fill):
        # An fmax-style amax: NaN in padding is dropped, large finite padding is not.
        return step(lambda x: x / x.nan_to_num(0.0, 0.0, 0.0).abs().max(), padding=7.0)(fill)

    assert judge_rows(run, LIVE) == Verdict.CLEAN
    result = pad_invariance(run, LIVE)
    assert not result
    assert result.changed == ("largest", "noise")
    assert result.changed_rows == LIVE


def test_pad_invariance_holds_for_rows_that_do_not_meet():
    assert pad_invariance(step(by_row), LIVE)


def test_judging_does_not_keep_views_of_static_memory():
    static = torch.zeros(4, 3)

    def run(fill):
        static.fill_(1.0)
        static[:LIVE] = NAN if fill is not CLEAN else 1.0
        return static

    assert judge_rows(run, LIVE) == Verdict.LEAKED


def test_of_no_rows_none_is_bad():
    assert bad_rows(torch.ones(0, 3)).shape == same_bits(torch.ones(0, 3), torch.ones(0, 3)).shape == (0,)


def test_rows_are_compared_bit_for_bit():
    a = torch.tensor([[NAN, 1.0], [0.0, 1.0], [2.0, 3.0]])
    b = torch.tensor([[NAN, 1.0], [-0.0, 1.0], [2.0, 3.0]])
    assert same_bits(a, b).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_and_both_infinities_are_bad(dtype):
    # e4m3fn has no Inf.
    inf = NAN if dtype == torch.float8_e4m3fn else torch.inf
    x = torch.tensor([[1.0, 2.0], [NAN, 1.0], [1.0, inf], [-inf, 1.0], [0.0, -0.0]])
    assert bad_rows(x.to(dtype)).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: judge_rows(step(by_row), 5), "live_rows: expected 0 to 4, got 5"),
        (lambda: judge_rows(step(by_row), torch.ones(3, dtype=torch.bool)), r"live_rows.*\(4,\)"),
        (lambda: judge_rows(step(by_row), torch.ones(4)), "live_rows: expected torch.bool"),
        (lambda: judge_rows(step(by_row), -1), "live_rows: expected 0 to 4, got -1"),
        (lambda: judge_rows(step(by_row), 0), "live_rows: expected at least one live row, got none"),
        (lambda: pad_invariance(step(by_row), 0), "live_rows: expected at least one live row, got none"),
        (lambda: judge_rows(step(by_row), "2"), r"live_rows: expected a number or .* got '2'"),
        *(
            (lambda ask=ask, gave=gave: ask(lambda fill: gave, 1), message)
            for ask in (judge_rows, pad_invariance)
            for gave, message in (
                ([], "run: expected at least one output"),
                (None, "run: expected a tensor of rows or a list of them, got NoneType"),
                ("ab", "run: expected a tensor of rows or a list of them, got str"),
                ([torch.ones(2), 3], "output 1 of run: expected a torch.Tensor, got int"),
                (torch.ones(()), r"output 0 of run: expected rows, .* got a tensor of shape \(\)"),
                ([torch.ones(2), torch.ones(3)], r"run: expected outputs of as many rows each"),
            )
        ),
        (
            lambda: pad_invariance(lambda fill: torch.ones(3 + (fill is not CLEAN), 2), 2),
            r"run: expected shapes \[\(3, 2\)\] as before, got \[\(4, 2\)\]",
        ),
        (
            lambda: judge_rows(lambda fill: torch.full((3 + (fill is None), 2), NAN), 2),
            r"run: expected shapes \[\(4, 2\)\] as before, got \[\(3, 2\)\]",
        ),
        (lambda: bad_rows([1.0]), "x: expected a torch.Tensor, got list"),
        (lambda: bad_rows(torch.ones(())), "x: expected rows, at least one axis"),
        (lambda: same_bits(torch.ones(2), torch.ones(3)), r"b: expected shape \(2,\), got shape \(3,\)"),
        (lambda: same_bits(torch.ones(2), torch.ones(2).int()), "b: expected torch.float32, got torch.int32"),
        (lambda: pad_invariance(step(by_row), 2, trials=0), "trials: expected at least 1, got 0"),
        (lambda: pad_invariance(step(by_row), 2, trials="4"), "trials: expected at least 1, got '4'"),
        (lambda: pad_invariance(step(by_row), 2, trials=1.5), "trials: expected at least 1, got 1.5"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_each_trial_has_a_fill_of_its_own_and_none_of_them_is_twice():
    padding = {}

    def run(fill):
        padding[fill.name] = torch.empty(3, 8)
        fill(padding[fill.name])
        return torch.ones(4, 2)

    assert pad_invariance(run, 4, trials=7).trials == 7
    assert [*padding] == ["zeros", "nan", "inf", "largest", "noise", "noise 1", "noise 2", "noise 3"]
    largest = torch.finfo(torch.float32).max
    assert [padding[name][0, 0].item() for name in ("zeros", "inf", "largest")] == [0, torch.inf, largest]
    noise = [x for name, x in padding.items() if "noise" in name]
    assert all(x.isfinite().all() and x.std() > 50 for x in noise)
    assert len({tuple(x.flatten().tolist()) for x in noise}) == 4


def test_comparing_does_not_keep_views_of_static_memory():
    static = torch.zeros(4, 3)

    def run(fill):
        static[LIVE:] = 0.0
        fill(static[LIVE:])
        return static.copy_(static.abs().max().expand(4, 3))

    assert not pad_invariance(run, LIVE)
