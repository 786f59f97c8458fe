"""Every kernel of ours under compute-sanitizer, an operation a process, with small shapes.

Kernels whose groups of warps run functions of their own, which its racecheck cannot judge, under Triton's
concurrency sanitizer. ``make sanitize`` runs this file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from staleproof import device

START = """
import sys
import torch
from staleproof import device
device.load_triton()
import triton
D = sys.argv[1]
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["fn"].name)
torch.manual_seed(0)
def bf16(*shape): return torch.randn(*shape, device=D).bfloat16()
def ints(*values): return torch.tensor(values, dtype=torch.int32, device=D)
def padding(rows): return torch.arange(rows, device=D) % 3 == 1
"""
END = """
if D == "cuda":
    torch.cuda.synchronize()
    missing = [name for name in KERNELS if not any(found.endswith(name) for found in compiled)]
    assert not missing, (missing, compiled)
print("every kernel ran")
"""
MLA = """
from staleproof import mla_decode
seq_lens = ints(200, 1, 0, 64, 0)
for page_size, q_len, splits, heads, dtype in CASES:
    pages = -(-200 // page_size)
    table = torch.full((5, pages + 1), 2**31 - 1, dtype=torch.int32, device=D)
    for request, length in enumerate(seq_lens.tolist()):
        used = -(-length // page_size)
        table[request, :used] = torch.arange(used, dtype=torch.int32, device=D)
    kv = torch.randn(pages, page_size, 576, device=D).to(dtype)
    q = torch.randn(5, q_len, heads, 576, device=D).to(dtype)
    out, lse = mla_decode(q, kv, table, seq_lens, softmax_scale=0.07, num_kv_splits=splits)
    assert out[2].eq(0).all() and lse[4].eq(float("-inf")).all()
"""
ROUTING = """# topk_kernel
from staleproof.ops import topk
for rows in (3, 300, 5000):
    x = bf16(rows, 64)
    x[1, 5] = float("nan")
    for logits in (x, x.float()):
        CALL
"""
EQUAL_PARTS = """# KERNELS merge_parts_kernel
from staleproof import mla_decode
from staleproof.ops.mla.plan import Cut
sys.modules["staleproof.ops.mla.decode"].fastest = lambda *args: Cut("pairs", 66)
lengths = torch.randint(0, 700, (40,), device=D, dtype=torch.int32)
lengths[::5] = 0
table = torch.randint(0, 60, (40, 11), device=D, dtype=torch.int32)
kv_cache = bf16(60, 64, 576).to(torch.CACHE)
for _ in range(2):
    out, lse = mla_decode(bf16(40, HEADS, 576), kv_cache, table, lengths, softmax_scale=0.07)
assert out[::5].eq(0).all() and lse[::5].eq(float("-inf")).all()
"""
# A group of warps fills shared memory, and another one reads it; an mbarrier each way, as in PTX's manual.
HAND_OVER = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from staleproof.ops.mla.hopper import barrier
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
@gluon.jit
def give(memory, full, free, x):
    for i in range(8):
        mbarrier.wait(free, (i & 1) ^ 1)
        memory.store(gl.load(x + i * 128 + gl.arange(0, 128, layout=LINE)))
        barrier()
        mbarrier.arrive(full, count=1)
@gluon.jit
def take(memory, full, free, y):
    for i in range(8):
        mbarrier.wait(full, i & 1)
        given = memory.load(LINE)
        barrier()
        mbarrier.arrive(free, count=1)
        gl.store(y + i * 128 + gl.arange(0, 128, layout=LINE), given)
@gluon.jit
def hand_over_kernel(x, y):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    memory = gl.allocate_shared_memory(gl.float32, [128], flat)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    barrier()
    gl.warp_specialize([(give, (memory, full, free, x)), (take, (memory, full, free, y))], [4], [64])
x, y = torch.randn(1024, device=D), torch.zeros(1024, device=D)
hand_over_kernel[(132,)](x, y, num_warps=4)
assert y.equal(x)
"""
# Program of each operation; its first lines name the kernels that it must have compiled, Hopper's only there.
# Most call it twice: the second call takes the short way of a repeated call.
PROGRAMS = {
    "mla_decode, one part and several": "# _mla_decode_kernel merge_splits_kernel"
    + MLA.replace(
        "CASES",
        "((32, 1, 1, 128, torch.bfloat16), (32, 1, 3, 16, torch.float16), (16, 1, 2, 128, torch.bfloat16))",
    ),
    "mla_decode, several query tokens": "# _mla_decode_kernel"
    + MLA.replace("CASES", "((16, 4, 2, 128, torch.bfloat16), (64, 2, 1, 16, torch.float32))"),
    "mla_decode, several query tokens, Hopper": "# mla_decode_pairs_kernel merge_parts_kernel"
    + MLA.replace("CASES", "((64, 4, 2, 128, torch.bfloat16),)"),
    "mla_decode, splits of few heads, Hopper": "# mla_decode_few_kernel merge_parts_kernel"
    + MLA.replace("CASES", "((64, 1, 3, 16, torch.float16),)"),
    "mla_decode, a batch that fills Hopper": """# mla_decode_pairs_kernel mla_decode_few_kernel
from staleproof import mla_decode
from staleproof.ops.mla.plan import Cut
sys.modules["staleproof.ops.mla.decode"].fastest = lambda *args: Cut("pairs")
lengths = torch.randint(0, 130, (256,), device=D, dtype=torch.int32)
lengths[::5] = 0
table = torch.randint(0, 40, (256, 3), device=D, dtype=torch.int32)
for heads in (128, 16):
    for _ in range(2):
        out, lse = mla_decode(bf16(256, heads, 576), bf16(40, 64, 576), table, lengths, softmax_scale=0.07)
    assert out[::5].eq(0).all() and lse[::5].eq(float("-inf")).all()
""",
    **{
        f"mla_decode in equal parts, Hopper, {cache} cache, {heads} heads": (
            EQUAL_PARTS.replace("KERNELS", run).replace("CACHE", cache).replace("HEADS", str(heads))
        )
        for cache, heads, run in (
            ("bfloat16", 128, "mla_decode_pairs_kernel"),
            ("bfloat16", 32, "mla_decode_pairs_kernel"),
            ("bfloat16", 16, "mla_decode_few_kernel"),
            ("float8_e4m3fn", 128, "mla_decode_pairs_kernel float16_queries_kernel"),
            ("float8_e4m3fn", 32, "mla_decode_e4m3_kernel float16_queries_kernel"),
            ("float8_e4m3fn", 16, "mla_decode_e4m3_kernel float16_queries_kernel"),
        )
    },
    "clear_empty_rows": """# _clear_empty_rows_kernel
from staleproof import clear_empty_rows
for rows, starts in ((6, None), (12, None), (9, ints(0, 2, 3, 5, 6, 9, 9))):
    for _ in range(2):
        out, lse = bf16(rows, 16, 512), torch.zeros(rows, 16, device=D)
        clear_empty_rows(out, ints(1, 0, 3, 0, 2, 0), lse=lse, query_start_loc=starts)
    assert lse.eq(float("-inf")).any()
clear_empty_rows(torch.zeros(6, 3, 5, device=D).to(torch.float8_e4m3fn), ints(1, 0, 3, 0, 2, 0))
""",
    "quantize_fp8_per_tensor": """# _amax_kernel _quantize_kernel _whole_kernel
from staleproof import quantize_fp8_per_tensor
for x in (bf16(16, 512), bf16(37, 7168)):
    for live in (None, 5, ints(9), x[:, 0] > 0):
        for _ in range(2):
            quantize_fp8_per_tensor(x, live_rows=live)
quantize_fp8_per_tensor(x[:, :100].contiguous(), is_padding=padding(37))
quantize_fp8_per_tensor(x.float(), is_padding=padding(37))
""",
    "topk_softmax": ROUTING.replace(
        "CALL", "topk.topk_softmax(logits, 6, is_padding=padding(rows), renormalize=True)"
    ),
    "topk_sigmoid": ROUTING.replace("CALL", "topk.topk_sigmoid(logits, 6, bias=x[0].float())"),
    "topk_softplus_sqrt": ROUTING.replace("CALL", "topk.topk_softplus_sqrt(logits, 6, bias=x[0].float())"),
    "grouped_topk": ROUTING.replace(
        "CALL", "topk.grouped_topk(logits, 6, num_expert_group=8, topk_group=4, bias=x[0].float())"
    ),
    "distinct_experts": """# _distinct_kernel
from staleproof.ops.distinct_experts import distinct_experts
for dtype in (torch.int32, torch.int64):
    for _ in range(2):
        ids = torch.randint(0, 5, (37, 6), device=D, dtype=dtype)
        _, found = distinct_experts(torch.rand(37, 6, device=D), ids)
assert all(len({*row} - {-1}) == sum(e >= 0 for e in row) for row in found.tolist())
""",
    "BlockZeroer": """# _zero_kernel _zero_listed_kernel
from staleproof.ops.zero_blocks import BlockZeroer
pages = torch.full((2, 9, 101), 255, dtype=torch.uint8, device=D)
wide = torch.ones(9, 3, 4096, device=D)
zeroer = BlockZeroer([pages, wide], block_dim=[1, 0])
zeroer.zero([8, 1])
zeroer.zero(ints(-1, 0, 9, 2**31 - 1, 4))
assert pages.eq(0).sum(2).tolist() == [[0, 101, 0, 0, 101, 0, 0, 0, 101]] * 2
many = torch.ones(50, 4096, device=D)
BlockZeroer([many]).zero([*range(1, 50)])
assert many.count_nonzero() == 4096
""",
    "quantize_nvfp4": """# _quantize_nvfp4_kernel
from staleproof import quantize_nvfp4
for rows, columns in ((1, 64), (33, 7184), (70, 128), (130, 208), (300, 64)):
    for x in (bf16(rows, columns), torch.randn(rows, columns, device=D)):
        for swizzled in (True, False):
            for _ in range(2):
                quantize_nvfp4(x, torch.ones(1, device=D), swizzled=swizzled)
""",
    "Board": """# _count_rows_kernel _count_routing_kernel
from staleproof.evidence.board import NUMBERS, Board
x, weights = bf16(37, 7168), bf16(37, 6)
x[3], weights[30] = float("nan"), float("inf")
ids = torch.randint(0, 5, (37, 6), device=D, dtype=torch.int32)
board = Board(D)
board.begin(step=1, live=20, counted=True)
for _ in range(2):
    board.count(0, x)
    board.count(1, weights, ids=ids, padding=padding(37))
counts = board.numbers[: 2 * NUMBERS].tolist()
assert counts[:2] == [0, 2] and sum(counts[NUMBERS : NUMBERS + 2]) == 2
assert sum(counts[NUMBERS + 4 : NUMBERS + 6]) == 2 * sum(len({*row}) < 6 for row in ids.tolist())
""",
    "RowCounters": """# _count_rows_kernel
from staleproof.evidence import RowCounters
x = bf16(37, 7168)
x[3] = float("nan")
counters = RowCounters(["x"], D)
counters.begin()
counters.observe("x", x, torch.ones(37, dtype=torch.bool, device=D))
assert counters.first_crossing.row == 3
""",
}


KERNELS = {
    name: (*re.findall(r"\w+_kernel\b", re.match(r"(?:#.*\n)+", text)[0]),) for name, text in PROGRAMS.items()
}


# Of groups of warps, each of which runs a function of its own.
GROUPS_OF_WARPS = [name for name in PROGRAMS if "Hopper" in name]


def _require_sm90() -> None:
    if device.machine().capability != "sm_90":
        pytest.skip(f"needs an SM90 GPU; this is {device.machine().capability}")


HEARD: dict[str, Any] = {"capture_output": True, "text": True, "check": False}


def checked(tool: str, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program under one of compute-sanitizer's tools, or a skipped test where there is none."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    path = folder / "kernels.py"
    path.write_text(program)
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(path), "cuda"]
    done = subprocess.run(command, timeout=300, **HEARD)
    assert "every kernel ran" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_error_and_no_hazard(name, tmp_path):
    if "Hopper" in name:
        _require_sm90()
    program = START + PROGRAMS[name] + END.replace("KERNELS", repr(KERNELS[name]))
    # racecheck names Triton's own hand-over of work to groups of warps; there ConSan stands for it.
    for tool in ("memcheck", "synccheck", *(() if name in GROUPS_OF_WARPS else ("racecheck",))):
        done = checked(tool, program, tmp_path)
        assert done.returncode == 0, tool + done.stdout[-2000:]


# ConSan keeps its notes in memory that the caller provides.
NOTES = """
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=D))
"""
WAIT = "        mbarrier.wait(free, (i & 1) ^ 1)\n"


def instrumented(program: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program whose kernels are compiled with Triton's concurrency sanitizer (ConSan)."""
    _require_sm90()
    version = device.version_of("triton") or "0"
    if tuple(map(int, version.split(".")[:2])) < (3, 9):
        # 3.6's also stops a kernel of ours in which 3.9's finds nothing.
        pytest.skip(f"needs the ConSan of Triton 3.9; this is {version}")
    path = folder / "kernels.py"
    path.write_text(START + NOTES + program + END.replace("KERNELS", repr(KERNELS.get(name, (name,)))))
    env = os.environ | {"TRITON_INSTRUMENTATION_MODE": "consan"}
    return subprocess.run([sys.executable, str(path), "cuda"], timeout=1800, env=env, **HEARD)


@pytest.mark.gpu
def test_consan_finds_the_race_of_a_group_that_does_not_wait(tmp_path):
    assert WAIT in HAND_OVER
    right = instrumented(HAND_OVER, "hand_over_kernel", tmp_path)
    assert "every kernel ran" in right.stdout, right.stdout[-1000:] + right.stderr[-1000:]
    raced = instrumented(HAND_OVER.replace(WAIT, ""), "hand_over_kernel", tmp_path)
    assert raced.returncode != 0
    assert "outstanding" in raced.stdout + raced.stderr, raced.stderr[-1000:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPS_OF_WARPS)
def test_consan_finds_nothing_in_our_groups_of_warps(name, tmp_path):
    done = instrumented(PROGRAMS[name], name, tmp_path)
    # Triton's own list of leaks is behind the assertion that stopped the kernel.
    said = [line for line in (done.stdout + done.stderr).splitlines() if "ssertion" in line]
    assert "every kernel ran" in done.stdout, "\n".join(said[:5]) or done.stderr[:2000]
