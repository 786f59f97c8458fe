"""A benchmark times no wrong result: a peer's is left out, ours ends the run."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleproof.harness import measure
from staleproof.ops.zero_blocks import BlockZeroer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def routing(provider: str) -> object:
    topk = runpy.run_path(str(BENCHMARKS / "topk.py"))
    x = torch.randn(4, 8)
    want = topk["softmax_then_topk"](x, 2)
    return topk["measured"]("topk_softmax", "mode", [x], want, {provider: lambda x: (want[0] + 1, want[1])})


def zeroing(provider: str, wrong: bool = True) -> object:
    bench: Any = runpy.run_path(str(BENCHMARKS / "zero_blocks.py"))["Bench"]
    pool = SimpleNamespace(blocks=8, segments=1, page=16)
    cache = torch.zeros(1, 8, 16, dtype=torch.uint8)
    zeroer = BlockZeroer([cache], block_dim=1)
    self = SimpleNamespace(pool=pool, caches=[cache])
    return bench.is_right(self, provider, "mode", lambda ids: zeroer.zero(ids[wrong:]), [3, 5])


@pytest.mark.parametrize("benchmark", [routing, zeroing])
def test_a_wrong_result_of_ours_ends_the_run(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert not benchmark("a peer")
    assert "a peer" in capsys.readouterr().out
    with pytest.raises(measure.WrongResult, match="staleproof"):
        benchmark("staleproof")


def test_a_right_result_is_timed() -> None:
    assert zeroing("staleproof", wrong=False)
