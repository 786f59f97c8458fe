"""FlashInfer's own ``cutlass_fused_moe`` over distinct and duplicate expert ids.

Runs the reduced modules of :mod:`staleproof.kernels.moe_module`, each through the Python entry of its own
release. It uses child processes, because an illegal access ends the process. An unwritten map entry contains
old bytes of the allocator's free memory, so that memory is filled first. With :data:`VIA_VLLM`, vLLM's
compiled op chooses the experts, and vLLM's own code calls FlashInfer.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from staleproof.kernels import moe_module, packages, vllm
from staleproof.kernels.moe_module import ModuleError
from staleproof.kernels.vllm_sources import executed
from staleproof.ops.reference import topk as reference
from staleproof.vllm import plugin

# Outcomes besides RIGHT, SILENT and NAN_ROWS: the text of CUDA's error, an error before the launch, and two
# ways in which a process may end.
CUDA_ILLEGAL_ACCESS = "illegal memory access"
REFUSED, TIMED_OUT, DIED = "refused", "timed out", "died"
# Kinds of ids besides IDS: chosen from NaN logits, out of range, and int64.
VIA_TOPK_SOFTMAX, VIA_WARP_ARGMAX = "NaN through topk_softmax", "NaN through the warp argmax"
VIA_VLLM = "NaN through vLLM's op"
NEGATIVE, PAST, INT64 = "negative", "past the last expert", "distinct, int64"
BYTES, ZEROS, PREVIOUS, FRESH = "0x7f bytes", "zeros", "previous map", "fresh"
BF16, FP8 = "bf16", "fp8"
# The device of the child processes.
DEVICE = "cuda"
DTYPES = {BF16: torch.bfloat16, FP8: torch.float8_e4m3fn}
# The last release of vLLM whose top-k compares NaN, its files that are executed, and its libraries.
VLLM = "0.19.1"
EXPERTS = "vllm.model_executor.layers.fused_moe"
FILES = (
    *("vllm._custom_ops", "vllm.envs", "vllm.utils.flashinfer"),
    *(f"{EXPERTS}.flashinfer_cutlass_moe", f"{EXPERTS}.activation"),
)
MOE_LIBRARY, CUDA_RUNTIME = "_moe_C.abi3.so", "libcudart.so.12"


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        tokens, top_k: the batch.
        ids: one of :data:`IDS`; or, in a fifth of the rows, :data:`NEGATIVE`, :data:`PAST`, or NaN
            logits through a choice (:data:`VIA_TOPK_SOFTMAX`, :data:`VIA_WARP_ARGMAX`, :data:`VIA_VLLM`); or
            :data:`INT64`.
        experts: of the layer.
        check: whether the finalise kernel has a bounds check. The installed FlashInfer's has one,
            :data:`moe_module.WITHOUT_CHECK` has none.
        tail: what the memory of the map contained: :data:`BYTES`, :data:`ZEROS`, :data:`PREVIOUS` (the
            map of an earlier call with other, distinct ids) or :data:`FRESH` (whatever the driver gave).
        all_to_all: run as rank 0 of two expert-parallel ranks after an all-to-all.
        dtype: of activations and weights: :data:`BF16`, or :data:`FP8` with one static scale per tensor.
        patch: name of a patch that is applied to vLLM; only with :data:`VIA_VLLM`.
        again: whether this is the second run without the patch.
    """

    tokens: int
    top_k: int
    ids: str
    experts: int = 128
    check: bool = True
    tail: str = BYTES
    all_to_all: bool = False
    dtype: str = BF16
    patch: str = ""
    again: bool = False

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
    # The int64 ids that the revert blamed: int64 is refused; read as int32 they are duplicates.
    yield Case(257, 8, MISREAD, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(257, 8, MISREAD), SILENT
    yield Case(257, 8, MISREAD, tail=PREVIOUS), None
    yield Case(512, 8, VIA_WARP_ARGMAX, check=False), CUDA_ILLEGAL_ACCESS
    yield Case(512, 8, VIA_TOPK_SOFTMAX, check=False), RIGHT


# Top-10 builds the map in three steps for any number of tokens, top-8 from 257 on.
CHAINS = {
    f"{tokens} tokens, top {top_k}, {dtype}": Case(tokens, top_k, VIA_VLLM, check=False, dtype=dtype)
    for tokens, top_k in ((4, 10), (257, 8))
    for dtype in (BF16, FP8)
}
# Each case and its expected outcome; None: no expected outcome, any is recorded.
MODULE_CASES = dict(_table())

# Qwen3-30B-A3B's, the model of vLLM #39593.
HIDDEN, INTERMEDIATE = 2048, 768
# Children compile Triton kernels even if the calling process interprets them. The second variable makes vLLM
# accept a FlashInfer whose module is compiled already.
CHILD_ENV = {"TRITON_INTERPRET": "0", "VLLM_HAS_FLASHINFER_CUBIN": "1"}


def outcome(
    verdict: str, error: str = "", *, wrong_rows: int = 0, wrong_clean_rows: int = 0, nan_rows: int = 0
) -> Reading:
    """The outcome of one case.

    Args:
        verdict: :data:`RIGHT`, :data:`CUDA_ILLEGAL_ACCESS`, :data:`NAN_ROWS`, :data:`SILENT`,
            :data:`REFUSED` (an error before the launch), :data:`TIMED_OUT` or :data:`DIED`.
        error: the error message, one line.
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
        _module(check)
    except ModuleError as error:
        return str(error)
    return None


def vllm_unavailable_reason() -> str | None:
    """Why vLLM's compiled op of :data:`VLLM` cannot run in this process, in one line, or ``None``."""
    root = _vllm()
    if root is None:
        return f"vLLM {VLLM} with {MOE_LIBRARY} is not unpacked in {packages.cache() / f'vllm-{VLLM}'}"
    try:
        ctypes.CDLL(CUDA_RUNTIME)
    except OSError:
        return f"{CUDA_RUNTIME} of vLLM {VLLM} is not there: pip install nvidia-cuda-runtime-cu12"
    if not packages.fits(root / MOE_LIBRARY):
        return f"{MOE_LIBRARY} of vLLM {VLLM} was compiled against another torch than {torch.__version__}"
    return None


def _vllm() -> Path | None:
    found = [folder / "vllm" for folder in packages.unpacked("vllm", VLLM)]
    return next((root for root in found if (root / MOE_LIBRARY).is_file()), None)


class Module(NamedTuple):
    """A built module, and the folder of the FlashInfer that it was built of."""

    library: Path
    root: Path


def _module(check: bool) -> Module:
    source = moe_module.of_release(check)
    return Module(moe_module.built(source), source.root)


def run_apart(cases: Sequence[Case], at_once: int = 8) -> list[Reading]:
    """Run each case in a process of its own, some at a time; see :func:`run_cases`.

    vLLM's modules register operators with torch, which is possible only once a process.
    """
    rounds = (cases[first : first + at_once] for first in range(0, len(cases), at_once))
    return [result for some in rounds for result in run_cases(some, processes=len(some))]


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
        # One module per process, because two modules that define the same kernels would conflict.
        group = [index for index, case in enumerate(cases) if case.check is check]
        share = max(1, processes * len(group) // max(1, len(cases)))
        if group:
            modules[check] = _module(check)
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
            # If a case ended its process, another process runs the rest of its lane.
            lanes += [lane[len(results) :]] if len(results) < len(lane) else []
    return [done[index] for index in range(len(cases))]


def _results(cases: Sequence[Case], ended: children.Ended) -> list[Reading]:
    """The results that a process reported before it ended, and the result of the case that ended it."""
    told: list[Reading] = ended.told
    if len(told) < len(cases) and (not told or told[-1].verdict != CUDA_ILLEGAL_ACCESS):
        if ended.code == 1:
            # A Python error before or after the kernel is no outcome of the kernel.
            return [*told, absent(ended.last_line)]
        # It ended in the middle of a case and could not report why.
        return [*told, outcome(TIMED_OUT if ended.code is None else DIED, ended.last_line)]
    return told


def sanitizer_missing() -> str | None:
    """One line if compute-sanitizer is not installed, or ``None``."""
    missing = machine.tool("compute-sanitizer") is None
    return "compute-sanitizer is not installed" if missing else None


def sanitize(case: Case, device: str = "cuda") -> Reading:
    """What compute-sanitizer's memcheck reports for one case: number of errors, the first, and its kernel.

    The result is absent if the module or the sanitizer is missing, or if there is no report in time.
    """
    tool = machine.tool("compute-sanitizer")
    if tool is None:
        return absent(str(sanitizer_missing()))
    given: dict[str, Any] = {"env": CHILD_ENV, "prefix": [str(tool), "--tool", "memcheck"], "timeout_s": 300}
    return memcheck(children.call(run_in_child, _module(case.check), [case], **given).stdout)


def memcheck(said: str) -> Reading:
    """Parse a report of compute-sanitizer's memcheck."""
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

# (output, weights, ids) -> nothing
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def run_in_child(module: Module, cases: Sequence[Case]) -> None:
    """Run the cases one after another, and report each result to the parent.

    Args:
        module: of the release with the bounds check, or of the one without.
        cases: all for this release.
    """
    device.select("cuda")
    fused_moe = _entry(module)
    for case in cases:
        result = _run_case(case, fused_moe)
        children.tell(result)
        if result.verdict == CUDA_ILLEGAL_ACCESS:
            # The CUDA context is lost. Leave without cleanup, which would call CUDA again.
            os._exit(3)


def _entry(module: Module) -> Callable[..., Any]:
    """``cutlass_fused_moe`` of that release, with the module that we built."""
    import tvm_ffi

    sys.path.insert(0, str(module.root))
    core: Any = importlib.import_module("flashinfer.fused_moe.core")
    assert Path(core.__file__).is_relative_to(module.root), f"{core.__file__} is of another release"
    built = SimpleNamespace(build_and_load=lambda: tvm_ffi.load_module(str(module.library)))
    setattr(core, f"gen_cutlass_fused_moe_sm{moe_module.architecture().number}_module", lambda *_: built)
    return core.cutlass_fused_moe


def _fill_free_memory(byte: int) -> None:
    """Fill every block that PyTorch's allocator would hand out next with ``byte``."""

    def free_sizes() -> Iterator[int]:
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                size, small = block["size"], segment["segment_type"] == "small"
                # The allocator serves up to 1 MiB from small segments, and more from large segments.
                if block["state"] == "inactive" and small is (size <= 2**20):
                    yield size
                elif block["state"] == "inactive" and small:
                    yield from (2**20, size - 2**20)

    taken = [torch.empty(n, dtype=torch.uint8, device=DEVICE).fill_(byte) for n in free_sizes()]
    torch.cuda.synchronize()
    del taken


def bad_logits(case: Case, device: str = "cuda") -> torch.Tensor:
    """(tokens, experts) bf16 router logits, of which the first fifth of the rows is NaN."""
    generator = torch.Generator(device=device).manual_seed(4)
    logits = torch.randn((case.tokens, case.experts), generator=generator, device=device).bfloat16()
    logits[: -(-case.tokens // 5)] = float("nan")
    return logits


def _route(case: Case, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and ids of a case, both (tokens, top_k); logits are used only for ids that are routed."""
    # Imported here, because these modules load Triton, which the calling process need not have.
    from staleproof.incidents.moe_routing import broken
    from staleproof.ops.topk import topk_softmax

    if case.ids == VIA_VLLM:
        return vllm.topk_softmax(logits.float(), case.top_k)
    if case.ids == VIA_TOPK_SOFTMAX:
        return topk_softmax(logits, case.top_k)
    if case.ids == VIA_WARP_ARGMAX:
        return broken.route(broken.warp_keeps_its_first_column, logits, case.top_k)
    fifth = -(-case.tokens // 5)
    kind = case.ids if case.ids in IDS else "distinct"
    ids = make_ids(kind, case.batch, seed=1, device=DEVICE)
    if case.all_to_all and kind == "all equal":
        # Only ids of rank 0's experts.
        ids %= case.experts // 2
    if case.ids == NEGATIVE:
        ids[:fifth] = -1
    elif case.ids == PAST:
        ids[:fifth] = case.experts + 1
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    weights = torch.rand(ids.shape, generator=generator, device=DEVICE).softmax(1)
    return weights, ids.long() if case.ids == INT64 else ids


class Layer(NamedTuple):
    """Input (tokens, hidden), the weights of the experts, and their scales.

    ``scales`` are those of ``x``, ``w1``, ``w2`` and of the product of gate and up, which is rounded to the
    same dtype.
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    scales: tuple[torch.Tensor, ...]


def _cast(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype)


def _make_layer(case: Case, experts: int) -> Layer:
    """The layer of a case, with this rank's experts."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).mul_(shape[-1] ** -0.5)

    w1, w2 = random(experts, 2 * INTERMEDIATE, HIDDEN), random(experts, HIDDEN, INTERMEDIATE)
    tensors = random(case.tokens, HIDDEN) * HIDDEN**0.5, w1, w2
    dtype, one = DTYPES[case.dtype], torch.ones((), device=DEVICE)
    scales: tuple[torch.Tensor, ...] = (one,) * 4
    if case.dtype == FP8:
        # Gate and up are about as large as x, and so is their product: a range up to 16 is enough.
        scales = (*(t.abs().amax().float() / 448 for t in tensors), one / 28)
    x, w1, w2 = map(_cast, tensors, scales, (dtype,) * 3)
    return Layer(x, w1, w2, scales)


def _expected(layer: Layer, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The right answer of this rank's experts, in float32."""
    of_x, of_w1, of_w2, of_inner = layer.scales
    x = layer.x.float() * of_x
    out = torch.zeros(x.shape, device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(layer.w1):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            up, gate = (x[token] @ (layer.w1[expert].float() * of_w1).T).chunk(2, 1)
            inner = _cast(torch.nn.functional.silu(gate) * up, of_inner, layer.x.dtype).float() * of_inner
            rows = weights[token, slot, None] * (inner @ (layer.w2[expert].float() * of_w2).T)
            out.index_add_(0, token, rows)
    return out


def _through_vllm(layer: Layer) -> Call:
    """How vLLM calls FlashInfer: ``FlashInferExperts.apply`` of its own source."""
    module = importlib.import_module(FILES[3])
    experts = module.FlashInferExperts.__new__(module.FlashInferExperts)
    quantized = None if layer.x.dtype is torch.bfloat16 else layer.x.dtype
    of_x, of_w1, of_w2, of_inner = layer.scales
    each = torch.ones(len(layer.w1), device=DEVICE)
    # The attributes that its constructor derives from the configuration of a layer on one rank.
    vars(experts).update(
        quant_dtype=quantized,
        weight_quant_dtype=quantized,
        out_dtype=torch.bfloat16,
        use_deepseek_fp8_block_scale=False,
        g1_alphas=of_x * of_w1 * each,
        a2_gscale=1 / of_inner,
        g2_alphas=of_inner * of_w2 * each,
        a1_scale=of_x,
        **dict.fromkeys(("tp_size", "ep_size", "max_capture_size"), 1),
        **dict.fromkeys(("tp_rank", "ep_rank"), 0),
    )
    silu, (x, w1, w2, _) = module.MoEActivation.SILU, layer
    return lambda out, weights, ids: experts.apply(
        out, x, w1, w2, weights, ids, silu, len(w1), *(None,) * 6, False
    )


def _run_case(case: Case, fused_moe: Callable[..., Any]) -> Reading:
    """Run one case, and compare its output with :func:`_expected`."""
    # So that no free memory has content of the previous case.
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    ranks = 2 if case.all_to_all else 1
    layer = _make_layer(case, case.experts // ranks)
    if case.ids != VIA_VLLM:
        rank: dict[str, Any] = {"ep_size": ranks, "ep_rank": 0, "enable_alltoall": case.all_to_all}
        x, w1, w2, _ = layer
        given = {"output_dtype": torch.bfloat16, "quant_scales": None, **rank}
        return _judged(case, layer, lambda out, w, ids: fused_moe(x, ids, w, w1, w2, output=out, **given))
    root = _vllm()
    assert root is not None
    torch.ops.load_library(str(root / MOE_LIBRARY))
    with executed(root, *FILES), ExitStack() as patched:
        if case.patch:
            patched.enter_context(plugin.patches()[case.patch].applied(VLLM))
        return _judged(case, layer, _through_vllm(layer))


def _judged(case: Case, layer: Layer, call: Call) -> Reading:
    """Call with other ids first, then with the case's, and compare; rows with NaN logits are not judged."""
    weights, ids = _route(case, bad_logits(case, DEVICE))
    earlier = make_ids("distinct", case.batch, seed=3, device=DEVICE)
    # One output for both calls, so that the second call's workspace gets the same block as the first's.
    out = torch.zeros_like(layer.x, dtype=torch.bfloat16)

    def run(weights: torch.Tensor, chosen: torch.Tensor) -> None:
        call(out.zero_(), weights, chosen)
        torch.cuda.synchronize()

    try:
        if case.tail != FRESH:
            # Its workspace, with the map in it, goes back to the allocator and to the next call.
            run(weights, earlier)
        if case.tail in (BYTES, ZEROS):
            _fill_free_memory(0x7F if case.tail == BYTES else 0)
        run(weights, ids)
    except Exception as error:  # any error is a result
        text = str(error).strip().splitlines()[0]
        return outcome(CUDA_ILLEGAL_ACCESS if CUDA_ILLEGAL_ACCESS in text else REFUSED, text)
    live, meant = torch.ones_like(out[:, 0], dtype=torch.bool), ids
    if case.ids == MISREAD:
        # Misread ids name experts that the router did not choose.
        meant = make_ids("distinct", case.batch, seed=1, device=DEVICE)
    elif case.ids == VIA_VLLM:
        live = ~bad_logits(case, DEVICE).isnan().any(1)
        weights, meant = reference.topk_softmax(bad_logits(case, DEVICE).float(), case.top_k)
    expected = _expected(layer, weights, meant)
    nan = out.isnan().any(1) & live
    distance = (out.float() - expected).norm(dim=1)
    # Rounded to bf16: gate, up, their product, the expert's row, the sum. FP8 rounds their product, too.
    budget = rounding(torch.bfloat16, 5) + (rounding(layer.x.dtype) if case.dtype == FP8 else 0)
    wrong = live & ~(distance <= budget * expected.norm(dim=1) + 1e-6)
    found = outcome(
        NAN_ROWS if bool(nan.any()) else SILENT if bool(wrong.any()) else RIGHT,
        wrong_rows=int(wrong.sum()),
        wrong_clean_rows=int((wrong & ~rows_with_duplicates(ids)).sum()),
        nan_rows=int(nan.sum()),
    )
    if case.ids != VIA_VLLM:
        return found
    before = out[live].clone()
    run(*_route(case, bad_logits(case, DEVICE).nan_to_num(0)))
    moved = int((out[live] != before).any(1).sum())
    repeated = int(rows_with_duplicates(ids).sum())
    more = {"rows_with_duplicates": repeated, "rows_that_padding_changes": moved}
    return replace(found, numbers={**found.numbers, **more})
