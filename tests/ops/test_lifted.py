"""The fixes as files for vLLM, in ``workbook/upstream``: they give the bits of the operations."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from staleproof import check, clear_empty_rows
from staleproof import device as devices
from staleproof.ops import topk
from staleproof.ops.zero_blocks import BlockZeroer

devices.load_triton()

import triton
import triton.language as tl
from tests.bits import assert_same_bits

UPSTREAM = Path(__file__).parents[2] / "workbook/upstream"
# Folder -> the file that vLLM would take.
FILES = {
    "mla-empty-rows": "clear_empty_rows.py",
    "topk-distinct": "distinct_topk.py",
    "kv-block-zeroing": "zero_kv_blocks.py",
}


@pytest.fixture(name="function")
def function_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[..., None]]:
    """What vLLM would call, with nothing of vLLM but its way to Triton."""
    for name, members in (("vllm", {}), ("vllm.triton_utils", {"tl": tl, "triton": triton})):
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    def of(folder: str) -> Callable[..., None]:
        path = UPSTREAM / folder / FILES[folder]
        found = runpy.run_path(str(path))[path.stem]
        check.require(callable(found), path.stem, "a function", found)
        return found  # type: ignore[no-any-return]

    return of


@pytest.mark.parametrize(
    ("dtype", "q_len"), [(torch.bfloat16, 1), (torch.float32, 2), (torch.float8_e4m3fn, None)]
)
def test_rows_of_empty_requests(device, function, dtype, q_len) -> None:
    lens = torch.tensor([3, 0, 5, 0], dtype=torch.int32, device=device)
    starts = None
    if q_len is None:
        starts = torch.tensor([0, 2, 3, 3, 5], dtype=torch.int32, device=device)
    rows = 7 if q_len is None else 4 * q_len
    out, lse = torch.randn(rows, 3, 40, device=device).to(dtype), torch.randn(rows, 3, device=device)
    lifted = out.clone(), lse.clone()
    clear_empty_rows(out, lens, lse=lse, query_start_loc=starts)
    function("mla-empty-rows")(*lifted, lens, starts)
    assert_same_bits(lifted, (out, lse))
    assert lse.isinf().any()


@pytest.mark.parametrize(
    ("dtype", "rows", "score"),
    [(torch.float32, 5, "softmax"), (torch.bfloat16, 300, "sigmoid"), (torch.bfloat16, 5, "softplus_sqrt")],
)
def test_routing(device, function, dtype, rows, score) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, 60, device=device).to(dtype)
    logits[torch.rand(rows, 60, device=device) < 0.05] = torch.nan
    logits[2] = -torch.inf
    padding = torch.arange(rows, device=device) % 4 == 3
    bias = torch.randn(60, device=device)
    bias[7] = torch.nan
    for given in (None, bias):
        options: dict[str, Any] = {
            "bias": given,
            "renormalize": True,
            "routed_scaling_factor": 2.5,
            "is_padding": padding,
        }
        want = getattr(topk, f"topk_{score}")(logits, 6, **options)
        found = [torch.empty_like(result) for result in want]
        function("topk-distinct")(score, *found, logits, **options)
        assert_same_bits(found, want)


@pytest.mark.parametrize("page_bytes", [16, 101, 4096, 9000])
def test_zeroed_blocks(device, function, page_bytes) -> None:
    pages = [torch.full((9, page_bytes), 255, dtype=torch.uint8, device=device) for _ in range(2)]
    BlockZeroer([pages[0]]).zero([8, 1, 4])
    ids = torch.tensor([8, -1, 1, 0, 9, 4], device=device)
    row = pages[1].data_ptr(), page_bytes, page_bytes, 0
    table = torch.tensor([row], dtype=torch.int64, device=device)
    aligned = all(number % 16 == 0 for number in row)
    function("kv-block-zeroing")(table, ids, 9, page_bytes, aligned)
    assert torch.equal(*pages)
    assert pages[1].eq(0).all(1).nonzero().flatten().tolist() == [1, 4, 8]
