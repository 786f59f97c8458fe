"""The real consumer: FlashInfer's ``cutlass_fused_moe`` over distinct and duplicate expert ids.

Runs the reduced module of :mod:`staleproof.incidents.moe_routing.moe_module` through FlashInfer's own Python
entry, each case in a process that may die of it. What an unwritten map entry holds is what the
allocator's free memory held, so that is filled first.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from staleproof import device
from staleproof.harness import environment
from staleproof.incidents.moe_routing import moe_module
from staleproof.incidents.moe_routing.moe_module import ModuleError

if TYPE_CHECKING:
    import torch

# Qwen3-30B-A3B's, the model of vLLM #39593.
HIDDEN, INTERMEDIATE = 2048, 768
RIGHT, ILLEGAL_ACCESS, SILENT = "right", "illegal memory access", "wrong, silent"
REFUSED, TIMED_OUT, DIED = "refused", "timed out", "died"
OURS, WARP = "NaN through topk_softmax", "NaN through the warp argmax"
NEGATIVE, PAST, INT64 = "negative", "past the last expert", "distinct, int64"
BYTES, ZEROS, PREVIOUS, FRESH = "0x7f bytes", "zeros", "previous map", "fresh"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        tokens, top_k: the batch.
        ids: ``distinct``, ``all equal``, ``partly equal`` (a fifth of the rows), :data:`NEGATIVE`
            or :data:`PAST` (in a fifth of the rows), :data:`INT64`, or a fifth of NaN rows through
            a routing: :data:`OURS`, :data:`WARP`.
        experts: of the layer.
        check: whether the finalise kernel has its bounds check, as FlashInfer from 0.6.10 on.
        tail: what the memory of the map held: :data:`BYTES`, :data:`ZEROS`, :data:`PREVIOUS` (a
            call with other, distinct ids came before) or :data:`FRESH` (whatever the driver gave).
        all_to_all: rank 0 of two expert-parallel ranks behind an all-to-all.
    """

    tokens: int
    top_k: int
    ids: str
    experts: int = 128
    check: bool = True
    tail: str = BYTES
    all_to_all: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        parts = [
            f"{self.tokens} tokens",
            f"top {self.top_k}",
            f"{self.experts} experts",
            self.ids,
            "checked" if self.check else "without check",
            self.tail,
        ]
        return ", ".join(parts + ["all-to-all"] * self.all_to_all)


@dataclass(frozen=True)
class Row:
    """What became of one case.

    Attributes:
        case: the case.
        outcome: :data:`RIGHT`, :data:`ILLEGAL_ACCESS`, :data:`SILENT`, :data:`REFUSED` (an error
            before the launch), :data:`TIMED_OUT` or :data:`DIED`.
        wrong_rows: tokens whose output is wrong.
        wrong_clean_rows: of these, tokens with distinct experts.
        error: what the process said, one line.
    """

    case: Case
    outcome: str
    wrong_rows: int = 0
    wrong_clean_rows: int = 0
    error: str = ""


@dataclass(frozen=True)
class Sanitized:
    """What compute-sanitizer's memcheck said.

    Attributes:
        errors: how many.
        first_error: its text.
        kernel: the kernel it happened in, without template arguments.
    """

    errors: int
    first_error: str
    kernel: str


def _table() -> Iterator[tuple[Case, str | None]]:
    for ids in ("distinct", "all equal", "partly equal"):
        yield Case(128, 8, ids), RIGHT
    yield Case(256, 8, "all equal", check=False), RIGHT
    yield Case(257, 8, "all equal", check=False), ILLEGAL_ACCESS
    yield Case(512, 8, "distinct", check=False), RIGHT
    yield Case(512, 8, "all equal", check=False), ILLEGAL_ACCESS
    yield Case(512, 8, "partly equal", check=False), ILLEGAL_ACCESS
    yield Case(512, 8, "all equal", check=False, tail=FRESH), None
    yield Case(512, 8, "all equal", check=False, tail=ZEROS), SILENT
    yield Case(512, 8, "all equal", check=False, tail=PREVIOUS), SILENT
    yield Case(512, 8, "partly equal", check=False, tail=PREVIOUS), SILENT
    yield Case(512, 8, "all equal"), SILENT
    yield Case(512, 8, "partly equal"), SILENT
    yield Case(512, 8, "distinct", all_to_all=True), RIGHT
    yield Case(512, 8, "all equal", all_to_all=True), ILLEGAL_ACCESS
    yield Case(1, 10, "all equal", check=False), ILLEGAL_ACCESS
    yield Case(4, 10, "all equal", check=False), ILLEGAL_ACCESS
    yield Case(4, 8, "all equal", experts=512, check=False), ILLEGAL_ACCESS
    yield Case(512, 8, NEGATIVE, check=False), RIGHT
    yield Case(512, 8, PAST, check=False), RIGHT
    yield Case(128, 8, INT64), REFUSED
    yield Case(512, 8, WARP, check=False), ILLEGAL_ACCESS
    yield Case(512, 8, OURS, check=False), RIGHT


# Each case and what it must come to; None is asked openly.
TABLE = tuple(_table())


def why_not(check: bool = True) -> str | None:
    """One line why the real module cannot run in this process, or ``None``."""
    if device.provenance() is not device.Provenance.MEASURED:
        return "needs a CUDA device"
    if device.machine().capability != "sm_90":
        return f"needs an SM90 GPU (H100, H200); this is {device.machine().capability}"
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed"
    try:
        moe_module.built(check=check)
    except ModuleError as error:
        return str(error)
    return None


def run_cases(cases: Sequence[Case], *, timeout_s: float = 120, processes: int = 6) -> list[Row]:
    """Run each case in a process of its own, or in one that no case has killed yet.

    Args:
        cases: the cases.
        timeout_s: how long a process may take, its start included.
        processes: how many at a time.

    Returns:
        One row a case, in their order.

    Raises:
        ModuleError: a module was not built.
    """
    lanes: list[tuple[Path, list[int]]] = []
    for check in (True, False):
        # One module a process: two that define the same kernels would get in each other's way.
        group = [index for index, case in enumerate(cases) if case.check is check]
        share = max(1, processes * len(group) // max(1, len(cases)))
        if group:
            module = moe_module.built(check=check)
            lanes += [(module, group[first::share]) for first in range(min(share, len(group)))]

    def run(lane: tuple[Path, list[int]]) -> list[tuple[int, Row]]:
        module, indices = lane
        rows = _run_lane(module, [cases[index] for index in indices], timeout_s)
        return [*zip(indices, rows, strict=True)]

    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        done = dict(pair for pairs in pool.map(run, lanes) for pair in pairs)
    return [done[index] for index in range(len(cases))]


def sanitizer_missing() -> str | None:
    """One line where compute-sanitizer is not installed, or ``None``."""
    missing = environment.tool("compute-sanitizer") is None
    return "compute-sanitizer is not installed" if missing else None


def sanitize(case: Case, *, timeout_s: float = 300) -> Sanitized:
    """Run one case under compute-sanitizer's memcheck.

    Raises:
        ModuleError: the module or the sanitizer is missing, or it said nothing in time.
    """
    tool = environment.tool("compute-sanitizer")
    if tool is None:
        raise ModuleError(str(sanitizer_missing()))
    module = moe_module.built(check=case.check)
    said, _, _ = _work(module, [case], timeout_s, [str(tool), "--tool", "memcheck"])
    summary = re.search(r"ERROR SUMMARY: (\d+) error", said)
    if summary is None:
        raise ModuleError(f"compute-sanitizer gave no summary: {_last_line(said)}")
    error = re.search(r"=+ (Invalid .*)\n=+ +at (.*)\n(?:=.*\n)*?=+ +(?:and )?is (.*)", said)
    if error is None:
        return Sanitized(int(summary.group(1)), "", "")
    kernel = re.search(r"\w*Kernel\b", error.group(2))
    return Sanitized(
        int(summary.group(1)),
        f"{error.group(1)}, {error.group(3)}",
        kernel.group() if kernel else error.group(2),
    )


def _run_lane(module: Path, lane: Sequence[Case], timeout_s: float) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < len(lane):
        left = lane[len(rows) :]
        said, error, code = _work(module, left, timeout_s)
        told = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("row ")]
        rows += [Row(case, **about) for case, about in zip(left, told, strict=False)]
        if len(told) < len(left) and (not told or told[-1]["outcome"] != ILLEGAL_ACCESS):
            # It ended in the middle of a case, and could not say why.
            outcome = TIMED_OUT if code is None else DIED
            rows.append(Row(left[len(told)], outcome, error=_last_line(error)))
    return rows


def _work(
    module: Path, cases: Sequence[Case], timeout_s: float, prefix: Sequence[str] = ()
) -> tuple[str, str, int | None]:
    """Output, errors and exit code of one process; no exit code where it ran out of time."""
    paths = os.pathsep.join(filter(None, sys.path))
    order = {"module": str(module), "cases": [asdict(case) for case in cases]}
    try:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", __spec__.name, json.dumps(order)],
            env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said, wrong = (x.decode() if isinstance(x, bytes) else x or "" for x in (error.stdout, error.stderr))
        return said, wrong, None
    return done.stdout, done.stderr, done.returncode


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# What follows runs in the process that may die.


def _entry(module: str) -> Callable[..., Any]:
    """``cutlass_fused_moe`` over the module of our own build."""
    import tvm_ffi

    core: Any = importlib.import_module("flashinfer.fused_moe.core")
    built = SimpleNamespace(build_and_load=lambda: tvm_ffi.load_module(module))
    core.gen_cutlass_fused_moe_sm90_module = lambda *_: built
    return core.cutlass_fused_moe


def _fill_free_memory(byte: int) -> None:
    """Write every block that the caching allocator would hand out next."""
    import torch

    def free_sizes() -> Iterator[int]:
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                size, small = block["size"], segment["segment_type"] == "small"
                # Up to 1 MiB the allocator serves from small segments, and above from large ones.
                if block["state"] == "inactive" and small is (size <= 2**20):
                    yield size
                elif block["state"] == "inactive" and small:
                    yield from (2**20, size - 2**20)

    taken = [torch.empty(n, dtype=torch.uint8, device="cuda").fill_(byte) for n in free_sizes()]
    torch.cuda.synchronize()
    del taken


def _route(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of a case."""
    import torch

    from staleproof.incidents.moe_routing import broken, consumer
    from staleproof.ops.topk import topk_softmax

    generator = torch.Generator(device="cuda").manual_seed(4)
    shape = (case.tokens, case.experts)
    logits = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    fifth = -(-case.tokens // 5)
    logits[:fifth] = float("nan")
    if case.ids == OURS:
        return topk_softmax(logits, case.top_k)
    if case.ids == WARP:
        return broken.route(broken.warp_keeps_its_first_column, logits, case.top_k)
    kind = case.ids if case.ids in consumer.IDS else "distinct"
    ids = consumer.make_ids(kind, case.tokens, case.top_k, case.experts, seed=1, device="cuda")
    if case.all_to_all and kind == "all equal":
        # An expert of rank 0.
        ids %= case.experts // 2
    if case.ids == NEGATIVE:
        ids[:fifth] = -1
    elif case.ids == PAST:
        ids[:fifth] = case.experts + 1
    weights = torch.rand(ids.shape, generator=generator, device="cuda").softmax(1)
    return weights, ids.long() if case.ids == INT64 else ids


def _layer(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The right answer of the experts that are here, in float32."""
    import torch

    out = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(w1):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            up, gate = (x[token].float() @ w1[expert].float().T).chunk(2, 1)
            inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            rows = weights[token, slot, None] * (inner @ w2[expert].float().T)
            out.index_add_(0, token, rows)
    return out


def _run_case(case: Case, fused_moe: Callable[..., Any]) -> dict[str, Any]:
    """Outcome of one case, as the fields of a row."""
    import torch

    from staleproof.incidents.moe_routing import broken, consumer

    # Nothing of the case before is free memory of this one.
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    ranks = 2 if case.all_to_all else 1
    here = case.experts // ranks

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)

    w1, w2 = random(here, 2 * INTERMEDIATE, HIDDEN), random(here, HIDDEN, INTERMEDIATE)
    x = random(case.tokens, HIDDEN) * HIDDEN**0.5
    weights, ids = _route(case)
    earlier = consumer.make_ids("distinct", case.tokens, case.top_k, case.experts, seed=3, device="cuda")

    # Its own memory for both calls, so that the workspace finds the block it had before.
    out = torch.zeros_like(x)

    def call(chosen: torch.Tensor) -> None:
        out.zero_()
        fused_moe(
            x,
            chosen,
            weights,
            w1,
            w2,
            torch.bfloat16,
            quant_scales=None,
            output=out,
            ep_size=ranks,
            ep_rank=0,
            enable_alltoall=case.all_to_all,
        )
        torch.cuda.synchronize()

    try:
        if case.tail != FRESH:
            # Its workspace goes back to the allocator, map and all, and comes again in the next.
            call(earlier)
        if case.tail in (BYTES, ZEROS):
            _fill_free_memory(0x7F if case.tail == BYTES else 0)
        call(ids)
    except Exception as error:  # whatever it says is the result
        text = str(error).strip().splitlines()[0]
        illegal = ILLEGAL_ACCESS in text
        return {"outcome": ILLEGAL_ACCESS if illegal else REFUSED, "error": text}
    expected = _layer(x, weights, ids, w1, w2)
    distance = (out.float() - expected).norm(dim=1)
    wrong = ~(distance <= 0.05 * expected.norm(dim=1) + 1e-6)
    clean = ~broken.rows_with_duplicates(ids)
    return {
        "outcome": SILENT if bool(wrong.any()) else RIGHT,
        "wrong_rows": int(wrong.sum()),
        "wrong_clean_rows": int((wrong & clean).sum()),
    }


def _main(order: dict[str, Any]) -> None:
    device.select("cuda")
    fused_moe = _entry(order["module"])
    for fields in order["cases"]:
        row = _run_case(Case(**fields), fused_moe)
        print("row " + json.dumps(row), flush=True)
        if row["outcome"] == ILLEGAL_ACCESS:
            # The context is gone.
            os._exit(3)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
