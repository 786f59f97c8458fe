"""A benchmark times no wrong result: a peer's is left out, ours ends the run."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleproof import device
from staleproof.cases import measure
from staleproof.ops.zero_blocks import BlockZeroer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def routing(provider: str) -> object:
    topk = runpy.run_path(str(BENCHMARKS / "topk.py"))
    x = torch.randn(4, 8)
    want = topk["softmax_then_topk"](x, 2)
    wrong = {provider: lambda x: (want[0] + 1, want[1])}
    return [*topk["timing"]("topk_softmax", "mode", [x], want, wrong).rows()]


def zeroing(provider: str, wrong: bool = True) -> object:
    bench: Any = runpy.run_path(str(BENCHMARKS / "zero_blocks.py"))["Bench"]
    pool = SimpleNamespace(blocks=8, segments=1, page=16)
    cache = torch.zeros(1, 8, 16, dtype=torch.uint8, device=device.select())
    zeroer = BlockZeroer([cache], block_dim=1)
    self = SimpleNamespace(pool=SimpleNamespace(**vars(pool), name="pool", block_bytes=16), caches=[cache])
    self.wrong = partial(bench.wrong, self)
    calls = {provider: lambda ids: zeroer.zero(ids[wrong:])}
    given = {provider: measure.Times(1.0, 1.0, 1.0)}, None, calls, [3, 5]
    return [*bench.timing(self, "mode", 2, *given).rows()]


@pytest.mark.parametrize("timed", [routing, zeroing])
def test_a_wrong_result_of_ours_ends_the_run(timed, capsys, monkeypatch):
    monkeypatch.setattr(measure, "l2_bytes", lambda: 4096)
    assert not timed("a peer")
    assert "a peer" in capsys.readouterr().out
    with pytest.raises(measure.WrongResult, match="staleproof"):
        timed("staleproof")


def test_a_right_result_is_timed():
    assert zeroing("staleproof", wrong=False)


def choices(change: str) -> int | None:
    """What the check of the routing benchmark says of a result with one row changed."""
    topk = runpy.run_path(str(BENCHMARKS / "topk.py"))
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(1))
    weights, ids = topk["softmax_then_topk"](x, 3)
    want = weights.clone(), ids.clone()
    rows = 3 if change == "other experts in 3 %" else 1
    if change.startswith("other experts"):
        # The fourth best in place of the third, with its own weight.
        order = x.softmax(-1).sort(descending=True)
        weights[:rows, 2], ids[:rows, 2] = order.values[:rows, 3], order.indices[:rows, 3].int()
    elif change == "a repeated expert":
        ids[0, 2] = ids[0, 1]
    elif change == "an id out of range":
        ids[0, 2] = 16
    elif change == "a wrong weight":
        weights[0] *= 1.01
    return topk["other_choices"]((weights, ids), want, x)


def test_nearly_equal_experts_may_be_chosen_otherwise_and_nothing_else_may_differ():
    assert choices("nothing") == 0
    assert choices("other experts in 1 %") == 1
    for change in ("other experts in 3 %", "a repeated expert", "an id out of range", "a wrong weight"):
        assert choices(change) is None, change
