"""FlashInfer's own ``cutlass_fused_moe`` over distinct and duplicate expert ids.

Runs the reduced module of :mod:`staleproof.kernels.moe_module` through FlashInfer's
Python entry, in child processes, because an illegal access ends the process. An unwritten map entry
contains what the allocator's free memory contained, so that memory is filled first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from staleproof import device
from staleproof.cases import children, machine
from staleproof.cases.case import Reading, absent, reading
from staleproof.cases.compare import rounding
from staleproof.incidents.moe_routing.batch import (
    IDS,
    MISREAD,
    NAN_ROWS,
    RIGHT,
    SILENT,
    Batch,
    make_ids,
    rows_with_duplicates,
)
from staleproof.kernels import moe_module
from staleproof.kernels.moe_module import ModuleError

# Outcomes besides RIGHT, SILENT and NAN_ROWS: the text of CUDA's error, an error before the launch, and two
# ends of a process.
CUDA_ILLEGAL_ACCESS = "illegal memory access"
REFUSED, TIMED_OUT, DIED = "refused", "timed out", "died"
# Kinds of ids besides those of IDS: NaN rows through a choice, ids out of range, and int64.
VIA_TOPK_SOFTMAX, VIA_WARP_ARGMAX = "NaN through topk_softmax", "NaN through the warp argmax"
NEGATIVE, PAST, INT64 = "negative", "past the last expert", "distinct, int64"
BYTES, ZEROS, PREVIOUS, FRESH = "0x7f bytes", "zeros", "previous map", "fresh"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        tokens, top_k: the batch.
        ids: one of :data:`IDS`; or, in a fifth of the rows, :data:`NEGATIVE`, :data:`PAST`, or NaN
            logits through a choice (:data:`VIA_TOPK_SOFTMAX`, :data:`VIA_WARP_ARGMAX`); or :data:`INT64`.
        experts: of the layer.
        check: whether the finalise kernel has its bounds check, as in FlashInfer since 0.6.10.
        tail: what the memory of the map contained: :data:`BYTES`, :data:`ZEROS`, :data:`PREVIOUS` (the
            map of an earlier call with other, distinct ids) or :data:`FRESH` (whatever the driver gave).
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
    def batch(self) -> Batch:
        """The shape of the call."""
        return Batch(self.tokens, self.top_k, self.experts)

    @property
    def name(self) -> str:
        """The case in words."""
        check = "checked" if self.check else "without check"
        parts = [str(self.batch), self.ids, check, self.tail]
        return ", ".join(parts + ["all-to-all"] * self.all_to_all)


def _table() -> Iterator[tuple[Case, str | None]]:
    for ids in ("distinct", "all equal", "partly equal"):
        yield Case(128, 8, ids), RIGHT
    yield Case(256, 8, "all equal", check=False), RIGHT
    yield Case(257, 8, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, "distinct", check=False), RIGHT
    yield Case(512, 8, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, "partly equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, "all equal", check=False, tail=FRESH), None
    yield Case(512, 8, "all equal", check=False, tail=ZEROS), SILENT
    yield Case(512, 8, "all equal", check=False, tail=PREVIOUS), SILENT
    yield Case(512, 8, "partly equal", check=False, tail=PREVIOUS), SILENT
    yield Case(512, 8, "all equal"), SILENT
    yield Case(512, 8, "partly equal"), SILENT
    yield Case(512, 8, "distinct", all_to_all=True), RIGHT
    yield Case(512, 8, "all equal", all_to_all=True), CUDA_ILLEGAL_ACCESS
    yield Case(1, 10, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(4, 10, "all equal", check=False), CUDA_ILLEGAL_ACCESS
    yield Case(4, 8, "all equal", experts=512, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(128, 8, "all equal", experts=256, check=False), RIGHT
    yield Case(129, 8, "all equal", experts=256, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, NEGATIVE, check=False), RIGHT
    yield Case(512, 8, PAST, check=False), RIGHT
    yield Case(128, 8, INT64), REFUSED
    # What of the revert's int64 ids: refused as they are; read as int32 they are duplicates.
    yield Case(257, 8, MISREAD, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(257, 8, MISREAD), SILENT
    yield Case(257, 8, MISREAD, tail=PREVIOUS), None
    yield Case(512, 8, VIA_WARP_ARGMAX, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, VIA_TOPK_SOFTMAX, check=False), RIGHT


# Each case and its expected outcome; None: no expected outcome, any is recorded.
MODULE_CASES = dict(_table())

# Qwen3-30B-A3B's, the model of vLLM #39593.
HIDDEN, INTERMEDIATE = 2048, 768
# The children compile their Triton kernels, whatever the calling process does.
CHILD_ENV = {"TRITON_INTERPRET": "0"}


def outcome(
    verdict: str, error: str = "", *, wrong_rows: int = 0, wrong_clean_rows: int = 0, nan_rows: int = 0
) -> Reading:
    """What became of one case.

    Args:
        verdict: :data:`RIGHT`, :data:`CUDA_ILLEGAL_ACCESS`, :data:`NAN_ROWS`, :data:`SILENT`,
            :data:`REFUSED` (an error before the launch), :data:`TIMED_OUT` or :data:`DIED`.
        error: what the process said, one line.
        wrong_rows: tokens whose output is wrong.
        wrong_clean_rows: of these, tokens with distinct experts.
        nan_rows: tokens whose output has a NaN.
    """
    numbers = {"wrong_rows": wrong_rows, "wrong_clean_rows": wrong_clean_rows, "nan_rows": nan_rows}
    return Reading(verdict, numbers, error)


def unavailable_reason(check: bool = True) -> str | None:
    """Why the real module cannot run in this process, in one line, or ``None`` if it can."""
    if device.provenance() is not device.Provenance.MEASURED:
        return "needs a CUDA device"
    if why := device.flashinfer_missing():
        return why
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed"
    try:
        moe_module.built(check=check)
    except ModuleError as error:
        return str(error)
    return None


def run_cases(cases: Sequence[Case], *, timeout_s: float = 120, processes: int = 6) -> list[Reading]:
    """Run each case in a child process; cases share one until a case ends it.

    Args:
        cases: the cases.
        timeout_s: how long a process may take, its start included.
        processes: how many at a time.

    Returns:
        The :func:`outcome` of each case, in their order.

    Raises:
        ModuleError: a module was not built.
    """
    lanes: list[list[int]] = []
    modules = {}
    for check in (True, False):
        # One module a process: two that define the same kernels would get in each other's way.
        group = [index for index, case in enumerate(cases) if case.check is check]
        share = max(1, processes * len(group) // max(1, len(cases)))
        if group:
            modules[check] = str(moe_module.built(check=check))
            lanes += [group[first::share] for first in range(min(share, len(group)))]
    done: dict[int, Reading] = {}
    while lanes:
        started = []
        for lane in lanes:
            left = [cases[index] for index in lane]
            child = children.start(run_in_child, modules[left[0].check], left, env=CHILD_ENV)
            started.append((lane, child, time.monotonic() + timeout_s))
        lanes = []
        for lane, child, deadline in started:
            results = _results([cases[index] for index in lane], child.wait(deadline - time.monotonic()))
            done |= zip(lane, results, strict=False)
            # A case that ended its process leaves the rest of its lane to another one.
            lanes += [lane[len(results) :]] if len(results) < len(lane) else []
    return [done[index] for index in range(len(cases))]


def _results(cases: Sequence[Case], ended: children.Ended) -> list[Reading]:
    """The results that a process told before it ended, and that of the case that ended it."""
    told: list[Reading] = ended.told
    if len(told) < len(cases) and (not told or told[-1].verdict != CUDA_ILLEGAL_ACCESS):
        # It ended in the middle of a case, and could not say why.
        return [*told, outcome(TIMED_OUT if ended.code is None else DIED, ended.last_line)]
    return told


def sanitizer_missing() -> str | None:
    """One line if compute-sanitizer is not installed, or ``None``."""
    missing = machine.tool("compute-sanitizer") is None
    return "compute-sanitizer is not installed" if missing else None


def sanitize(case: Case, device: str = "cuda") -> Reading:
    """What compute-sanitizer's memcheck says of one case: how many errors, the first, and its kernel.

    It is not run where the module or the sanitizer is missing, or said nothing in time.
    """
    tool = machine.tool("compute-sanitizer")
    if tool is None:
        return absent(str(sanitizer_missing()))
    given: dict[str, Any] = {"env": CHILD_ENV, "prefix": [str(tool), "--tool", "memcheck"], "timeout_s": 300}
    module = str(moe_module.built(check=case.check))
    return memcheck(children.call(run_in_child, module, [case], **given).stdout)


def memcheck(said: str) -> Reading:
    """What a report of compute-sanitizer's memcheck says."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", said)
    if summary is None:
        last = said.strip().splitlines()[-1:]
        return absent(f"compute-sanitizer gave no summary: {''.join(last).strip()}")
    errors, note, kernel = int(summary.group(1)), "", ""
    if error := re.search(r"=+ (Invalid .*)\n=+ +at (.*)\n(?:=.*\n)*?=+ +(?:and )?is (.*)", said):
        # The kernel without its template arguments.
        name = re.search(r"\w*Kernel\b", error.group(2))
        note, kernel = f"{error.group(1)}, {error.group(3)}", name.group() if name else error.group(2)
    return reading("invalid read" if errors else "no error", note=note, kernel=kernel, errors=errors)


# The rest of this file runs in the child processes.


def run_in_child(module: str, cases: Sequence[Case]) -> None:
    """Run the cases one after another, and tell each result.

    Args:
        module: path of the built module.
        cases: all with the bounds check, or all without.
    """
    device.select("cuda")
    fused_moe = _entry(module)
    for case in cases:
        result = _run_case(case, fused_moe)
        children.tell(result)
        if result.verdict == CUDA_ILLEGAL_ACCESS:
            # The CUDA context is lost. Leave without cleanup, which would call CUDA again.
            os._exit(3)


def _entry(module: str) -> Callable[..., Any]:
    """``cutlass_fused_moe`` over the module of our own build."""
    import tvm_ffi

    core: Any = importlib.import_module("flashinfer.fused_moe.core")
    built = SimpleNamespace(build_and_load=lambda: tvm_ffi.load_module(module))
    setattr(core, f"gen_cutlass_fused_moe_sm{moe_module.architecture().number}_module", lambda *_: built)
    return core.cutlass_fused_moe


def _fill_free_memory(byte: int) -> None:
    """Fill every block that PyTorch's allocator would hand out next with ``byte``."""

    def free_sizes() -> Iterator[int]:
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                size, small = block["size"], segment["segment_type"] == "small"
                # The allocator serves up to 1 MiB from small segments, and more from large ones.
                if block["state"] == "inactive" and small is (size <= 2**20):
                    yield size
                elif block["state"] == "inactive" and small:
                    yield from (2**20, size - 2**20)

    taken = [torch.empty(n, dtype=torch.uint8, device="cuda").fill_(byte) for n in free_sizes()]
    torch.cuda.synchronize()
    del taken


def bad_logits(case: Case, device: str = "cuda") -> torch.Tensor:
    """(tokens, experts) bf16 router logits, of which the first fifth of the rows is NaN."""
    generator = torch.Generator(device=device).manual_seed(4)
    logits = torch.randn((case.tokens, case.experts), generator=generator, device=device).bfloat16()
    logits[: -(-case.tokens // 5)] = float("nan")
    return logits


def _route(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and ids of a case, both (tokens, top_k)."""
    # Here and not above: importing them loads Triton, which the calling process need not have.
    from staleproof.incidents.moe_routing import broken
    from staleproof.ops.topk import topk_softmax

    if case.ids == VIA_TOPK_SOFTMAX:
        return topk_softmax(bad_logits(case), case.top_k)
    if case.ids == VIA_WARP_ARGMAX:
        return broken.route(broken.warp_keeps_its_first_column, bad_logits(case), case.top_k)
    fifth = -(-case.tokens // 5)
    kind = case.ids if case.ids in IDS else "distinct"
    ids = make_ids(kind, case.batch, seed=1, device="cuda")
    if case.all_to_all and kind == "all equal":
        # The id of an expert of rank 0.
        ids %= case.experts // 2
    if case.ids == NEGATIVE:
        ids[:fifth] = -1
    elif case.ids == PAST:
        ids[:fifth] = case.experts + 1
    generator = torch.Generator(device="cuda").manual_seed(5)
    weights = torch.rand(ids.shape, generator=generator, device="cuda").softmax(1)
    return weights, ids.long() if case.ids == INT64 else ids


def _layer(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The right answer of this rank's experts, in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(w1):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            up, gate = (x[token].float() @ w1[expert].float().T).chunk(2, 1)
            inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            rows = weights[token, slot, None] * (inner @ w2[expert].float().T)
            out.index_add_(0, token, rows)
    return out


def _run_case(case: Case, fused_moe: Callable[..., Any]) -> Reading:
    """Run one case, and compare its output with :func:`_layer`."""
    # So that the free memory of this case has nothing of the case before.
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    ranks = 2 if case.all_to_all else 1
    here = case.experts // ranks

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)

    w1, w2 = random(here, 2 * INTERMEDIATE, HIDDEN), random(here, HIDDEN, INTERMEDIATE)
    x = random(case.tokens, HIDDEN) * HIDDEN**0.5
    weights, ids = _route(case)
    earlier = make_ids("distinct", case.batch, seed=3, device="cuda")

    # One output for both calls, so that the workspace of the second gets the block of the first.
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
            # Its workspace, with the map in it, goes back to the allocator and to the next call.
            call(earlier)
        if case.tail in (BYTES, ZEROS):
            _fill_free_memory(0x7F if case.tail == BYTES else 0)
        call(ids)
    except Exception as error:  # any error is a result
        text = str(error).strip().splitlines()[0]
        return outcome(CUDA_ILLEGAL_ACCESS if CUDA_ILLEGAL_ACCESS in text else REFUSED, text)
    # Misread ids name other experts than those that the router chose.
    meant = make_ids("distinct", case.batch, seed=1, device="cuda") if case.ids == MISREAD else ids
    expected = _layer(x, weights, meant, w1, w2)
    nan = out.isnan().any(1)
    distance = (out.float() - expected).norm(dim=1)
    # Rounded to bf16: gate, up, their product, the expert's row, the sum.
    wrong = ~(distance <= rounding(torch.bfloat16, 5) * expected.norm(dim=1) + 1e-6)
    return outcome(
        NAN_ROWS if bool(nan.any()) else SILENT if bool(wrong.any()) else RIGHT,
        wrong_rows=int(wrong.sum()),
        wrong_clean_rows=int((wrong & ~rows_with_duplicates(ids)).sum()),
        nan_rows=int(nan.sum()),
    )
