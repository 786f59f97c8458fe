"""Our kernels under compute-sanitizer, in a process of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from staleproof.evidence import RowCounters
from staleproof.ops.zero_blocks import BlockZeroer
from staleproof import clear_empty_rows, mla_decode, quantize_fp8_per_tensor

torch.manual_seed(0)
seq_lens = torch.tensor([200, 1, 0, 64, 0], dtype=torch.int32, device="cuda")
for page_size, q_len, splits in ((64, 1, 1), (64, 1, 3), (64, 4, 2), (16, 1, 2)):
    pages = -(-200 // page_size)
    table = torch.full((5, pages + 1), 2**31 - 1, dtype=torch.int32, device="cuda")
    for request, length in enumerate(seq_lens.tolist()):
        used = -(-length // page_size)
        table[request, :used] = torch.arange(used, dtype=torch.int32, device="cuda")
    kv = torch.randn(pages, page_size, 576, device="cuda").bfloat16()
    q = torch.randn(5, q_len, 128, 576, device="cuda").bfloat16()
    out, lse = mla_decode(q, kv, table, seq_lens, softmax_scale=0.07, num_kv_splits=splits)
    clear_empty_rows(out, seq_lens, lse=lse)
    assert out[2].eq(0).all() and lse[4].eq(float("-inf")).all()
x = torch.randn(37, 7168, device="cuda").bfloat16()
for live in (None, 5, torch.tensor([9], dtype=torch.int32, device="cuda"), x[:, 0] > 0):
    quantize_fp8_per_tensor(x, live_rows=live)
quantize_fp8_per_tensor(x, is_padding=x[:, 0] > 0)
counters = RowCounters(["x"], "cuda")
x[3] = float("nan")
counters.begin()
counters.observe("x", x, torch.ones(37, dtype=torch.bool, device="cuda"))
assert counters.first_crossing.row == 3
pages = torch.full((2, 9, 101), 255, dtype=torch.uint8, device="cuda")
wide = torch.ones(9, 3, 4096, device="cuda")
zeroer = BlockZeroer([pages, wide], block_dim=[1, 0])
zeroer.zero([8, 1])
zeroer.zero(torch.tensor([-1, 0, 9, 2**31 - 1, 4], dtype=torch.int32, device="cuda"))
assert pages.eq(0).sum(2).tolist() == [[0, 101, 0, 0, 101, 0, 0, 0, 101]] * 2
torch.cuda.synchronize()
print("every kernel ran")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_error_and_no_hazard(tool: str, tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = tmp_path / "kernels.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "every kernel ran" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.returncode == 0, done.stdout[-2000:]
