"""The questions of incident 5: one function a question; it takes a variant, returns Findings."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from staleproof import device as devices
from staleproof.device import Provenance
from staleproof.evidence.rows import Fill, Verdict, judge_rows, pad_invariance
from staleproof.harness.findings import NOT_FIXED, Finding, finding, not_run, off_on_off
from staleproof.incidents.scale_padding import broken, ids, matrix, null_block
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.reference import nvfp4 as reference

INCIDENT = "scale_padding"
IN_KERNEL = "quantize_nvfp4"
WRONG, REFUSED, TWICE, DISTINCT = "wrong, finite", "refused", "an expert twice", "distinct"

# Five live rows of five blocks: 123 rows and 3 columns of the tile belong to nobody.
LIVE, N, OUT = 5, 80, 16
TRIALS = 200

# What each allocation gives on the paths 128x4, linear and 8x4, with NaN left in fresh memory.
ALLOCATIONS: dict[str, tuple[str, ...]] = {
    "empty": ("leaked", "clean", "leaked"),
    "zeros_both_layouts": ("clean", "clean", "leaked"),
    "zeros_swizzled_only": ("clean", "clean", "leaked"),
    IN_KERNEL: ("clean", "clean"),
}
# The remedy that a cause of the matrix asks for.
OWN_REMEDY = {
    "empty rows": "post_kernel_clear",
    "amax, torch.max": "amax_of_live_rows",
    "amax, fmax": "amax_of_live_rows",
    "NaN logits": "fused_sanitising",
    "duplicate ids": "distinct_ids",
    "int64 ids": "int32_ids",
    "scale padding": "in_kernel_padding",
    "tail over-read": "zero_blocks_on_allocation",
    "null block": "slot_minus_one",
    "block reuse": "zero_blocks_on_allocation",
    "cross-row reduction": "rows_kept_apart",
}


@dataclass(frozen=True)
class Product:
    """Operands of one NVFP4 product: x (live, n), weight (out, n), quantised once."""

    x: torch.Tensor
    factor: torch.Tensor
    weight: tuple[torch.Tensor, torch.Tensor]

    @property
    def alpha(self) -> float:
        """Factor of the result."""
        return 1 / float(self.factor) ** 2


def product_on(device: str, m: int = LIVE, n: int = N) -> Product:
    """The operands all padding questions are put to."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(m, n, generator=generator).to(device, torch.bfloat16)
    factor = torch.full((1,), 256.0, device=device)
    weight = torch.randn(OUT, n, generator=generator).to(device, torch.bfloat16)
    return Product(x, factor, reference.quantize_nvfp4(weight, factor))


def multiply(a: Product, packed: torch.Tensor, scales: torch.Tensor, path: broken.Path) -> torch.Tensor:
    """(live, out): tile by tile as tensor cores do, or by rows for the linear layout."""
    if path.row_tile is None:
        left = reference.dequantize_nvfp4(packed, scales, a.factor, swizzled=False)
        return left @ reference.dequantize_nvfp4(*a.weight, a.factor).T
    return reference.block_scaled_mm(packed, scales, *a.weight, a.alpha, row_tile=path.row_tile)


def step_of(allocation: str, path_name: str, device: str) -> Callable[[Fill | None], torch.Tensor]:
    """Quantise and multiply, for the judges: what they fill is the fresh memory of the scales."""
    a, path = product_on(device), broken.PATHS[path_name]

    def run(fill: Fill | None) -> torch.Tensor:
        def held(memory: torch.Tensor) -> None:
            # A tile of random bytes holds a NaN nearly always; see `nan_in_a_tile`.
            wide = torch.full(memory.shape, torch.nan, device=device)
            if fill is not None:
                fill(wide)
            # e4m3 has no infinity.
            memory.copy_(wide.clamp(-448, 448))

        if allocation == IN_KERNEL:
            swizzled = path.row_tile is not None
            shape = reference.scale_shape(LIVE, N, swizzled=swizzled)
            scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            packed = torch.empty(LIVE, N // 2, dtype=torch.uint8, device=device)
            held(scales)
            quantize_nvfp4(a.x, a.factor, swizzled=swizzled, out=(packed, scales))
        else:
            packed, scales = broken.quantize_blocks_only(a.x, a.factor, path, allocation, held)
        return multiply(a, packed, scales, path)

    return run


def paths_of(allocation: str) -> list[str]:
    """The paths an allocation is asked about; our kernel has no 8 x 4 layout."""
    return [p for p in broken.PATHS if allocation != IN_KERNEL or p != "8x4"]


def padding(allocation: str, device: str) -> Iterator[Finding]:
    """Whether live rows of an NVFP4 product depend on scales nobody wrote, on each path."""
    for path, expected in zip(paths_of(allocation), ALLOCATIONS[allocation], strict=True):
        run = step_of(allocation, path, device)
        verdict = judge_rows(run, LIVE)
        yield finding(
            INCIDENT,
            f"padding, {path}",
            allocation,
            verdict,
            expected=expected,
            changed_by=" ".join(pad_invariance(run, LIVE).changed),
        )


def nan_in_a_tile(device: str, tiles: int = 20_000) -> Finding:
    """The chance that 512 random bytes hold an e4m3 NaN: computed, and counted."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (tiles, 512), dtype=torch.uint8, generator=generator).to(device)
    counted = float(raw.view(torch.float8_e4m3fn).float().isnan().any(1).float().mean())
    computed = broken.nan_chance()
    near = abs(counted - computed) < 3 * (computed * (1 - computed) / tiles) ** 0.5
    return finding(
        INCIDENT,
        "NaN in a tile",
        "512 random bytes",
        f"{computed:.1%}" if near else "other",
        expected="98.2%",
        computed=computed,
        counted=counted,
    )


# How a product reads 128x4 scales, of how many columns of x, and how many scales of padding a live
# row thereby meets. FlashInfer #2861 reports, from 512 columns, what the second one does; that the
# layouts differ is our model of it.
READERS: dict[str, tuple[int | None, int, int]] = {"in_its_own_layout": (None, N, 3), "as_8x4": (8, 512, 28)}


def random_padding(reader: str, device: str) -> Finding:
    """What random bytes in the padding make of one live row: NaN, another number, or nothing."""
    read_as, n, met = READERS[reader]
    a = product_on(device, m=1, n=n)
    packed, scales = reference.quantize_nvfp4(a.x, a.factor)
    nobody = reference.padding_offsets(1, n).to(device)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (TRIALS, len(nobody)), dtype=torch.uint8, generator=generator).to(device)

    def answer(bytes_there: torch.Tensor) -> torch.Tensor:
        held = scales.clone()
        held.view(torch.uint8).view(-1)[nobody] = bytes_there
        return reference.block_scaled_mm(packed, held, *a.weight, a.alpha, scales_read_as=read_as)

    right = reference.block_scaled_mm(packed, scales, *a.weight, a.alpha)
    seen = torch.stack([answer(row) for row in raw])
    bad = seen.isnan().flatten(1).any(1)
    wrong = (seen != right).flatten(1).any(1) & ~bad
    verdict = "NaN or right" if not wrong.any() else "NaN or wrong"
    expected = "NaN or right" if read_as is None else "NaN or wrong"
    return finding(
        INCIDENT,
        "random padding",
        reader,
        verdict,
        expected=expected,
        trials=TRIALS,
        nan_computed=broken.nan_chance(met),
        nan=int(bad.sum()) / TRIALS,
        wrong_finite=int(wrong.sum()) / TRIALS,
    )


# tokens, experts, experts a token
ROUTED = (64, 16, 4)
ID_WIDTHS: dict[str, str] = {
    "int64_read_as_int32": WRONG,
    "int64_refused": REFUSED,
    "int32": "clean",
    "packed_int64_read_as_int32": WRONG,
    "packed_int64_refused": REFUSED,
    "packed_int32": "clean",
}


def _mixed(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(tokens,) what a token gets when expert e answers e + 1; a wrong id is a wrong number."""
    return (weights * (chosen + 1)).sum(1)


def id_width(name: str, device: str) -> Finding:
    """What a kernel that reads (tokens, top_k) int32 makes of ids as they are handed to it."""
    weights, right = ids.simulate_routing(*ROUTED, device=device)
    wide = right.long()
    words = ""
    wanted = _mixed(weights, right)
    try:
        if name.startswith("packed"):
            packed = broken.pack_in_the_width_of_the_ids(right if name == "packed_int32" else wide, weights)
            seen = packed if name == "packed_int32" else broken.read_as_int32(packed)
            if name == "packed_int64_refused":
                seen = ids.require_int32_ids(packed)
            chosen, weights = ids.unpack_topk(seen)
        elif name == "int64_refused":
            chosen = ids.require_int32_ids(wide)
        else:
            chosen = right if name == "int32" else broken.read_as_int32(wide)
        words = " ".join(map(str, chosen.flatten()[:8].tolist()))
        got = _mixed(weights, chosen)
        verdict = "clean" if torch.allclose(got, wanted) else WRONG
        verdict = "NaN" if bool(got.isnan().any()) else verdict
    except ValueError:
        verdict = REFUSED
    return finding(INCIDENT, "id width", name, verdict, expected=ID_WIDTHS[name], first_ids=words)


# experts, experts a token: DeepSeek-V3, Qwen3-30B-A3B, Qwen3-Next
SIMULATED = ((256, 8), (128, 8), (512, 10))
SIMULATED_TOKENS = 20_000
_DRAWS = {TWICE: "simulate_with_replacement", DISTINCT: "simulate_routing"}


def duplicates(experts: int, top_k: int, device: str) -> Iterator[Finding]:
    """How often the simulator gives a token an expert twice: birthdays, counted, and ours."""
    draws: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
        TWICE: broken.simulate_with_replacement,
        DISTINCT: ids.simulate_routing,
    }
    computed = ids.duplicate_chance(experts, top_k)
    for expected, draw in draws.items():
        # In parts, so that the random numbers of 512 experts stay small.
        parts = [
            ids.experts_twice(draw(SIMULATED_TOKENS // 10, experts, top_k, seed=part)[1].to(device))
            for part in range(10)
        ]
        counted = float(torch.cat(parts).float().mean())
        spread = 4 * (computed * (1 - computed) / SIMULATED_TOKENS) ** 0.5
        verdict = TWICE if abs(counted - computed) < spread else "another rate"
        yield finding(
            INCIDENT,
            f"duplicates, {experts} experts, top {top_k}",
            _DRAWS[expected],
            verdict if counted else DISTINCT,
            expected=expected,
            computed=computed if expected == TWICE else 0.0,
            counted=counted,
        )


def null_block_ranks(backend: str, device: str) -> Iterator[Finding]:
    """Two ranks, one idle: does its dummy batch reach the request that it gets next?"""
    why = null_block.why_not(backend)
    fix = f"slot_minus_one, {backend}"
    if why is not None:
        yield not_run(INCIDENT, "null block", f"slot_0, {backend}", why)
        yield not_run(INCIDENT, "off/on/off", fix, why)
        return
    try:
        steps = null_block.reproduce(backend, device=device)
    except null_block.RanksFailed as error:
        yield finding(
            INCIDENT, "null block", f"slot_0, {backend}", "failed", expected=Verdict.LEAKED, note=str(error)
        )
        return
    idle = [step for step in steps if step.rank == 1]
    busy = [step for step in steps if step.rank == 0]
    said = [str(Verdict.LEAKED if step.row_bad else Verdict.CLEAN) for step in idle]
    yield finding(
        INCIDENT,
        "null block",
        f"slot_0, {backend}",
        said[0],
        expected=Verdict.LEAKED,
        null_block_bad=idle[0].null_block_bad,
        busy_rank_bad=busy[0].row_bad,
    )
    yield off_on_off(INCIDENT, fix, off=said[0], on=said[1], off_again=said[2])


def per_token_step(name: str, device: str) -> Callable[[Fill | None], torch.Tensor]:
    """A per-token quantiser over three live rows and three of padding, for the judges."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 64, generator=generator).to(device)

    def run(fill: Fill | None) -> torch.Tensor:
        held = x.clone()
        held[3:] = torch.nan
        if fill is not None:
            fill(held[3:])
        values, scales = broken.PER_TOKEN[name](held)
        return values.float() * scales[:, None]

    return run


def _invariant(run: Callable[[Fill | None], torch.Tensor], live: int) -> tuple[str, str]:
    """``clean`` or ``wrong, finite``, and the contents of padding that changed a live row."""
    seen = pad_invariance(run, live)
    return "clean" if seen else WRONG, " ".join(seen.changed)


def cross_row(name: str, device: str) -> Iterator[Finding]:
    """The NaN check and pad-invariance, side by side, on a quantiser "per token"."""
    run = per_token_step(name, device)
    yield finding(INCIDENT, "cross row, NaN check", name, judge_rows(run, 3), expected="clean")
    verdict, changed = _invariant(run, 3)
    expected = WRONG if name == "neighbour_in_the_maximum" else "clean"
    yield finding(
        INCIDENT, "cross row, padding content", name, verdict, expected=expected, changed_by=changed
    )


def verify(device: str) -> Iterator[Finding]:
    """Off / on / off for each fix that lives in one process."""

    def padded(allocation: str, path: str) -> Callable[[], str]:
        return lambda: str(judge_rows(step_of(allocation, path, device), LIVE))

    def drawn(draw: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], str]:
        return lambda: TWICE if ids.experts_twice(draw(4096, 128, 8)[1]).any() else "clean"

    def apart(name: str) -> Callable[[], str]:
        return lambda: _invariant(per_token_step(name, device), 3)[0]

    pairs = {
        IN_KERNEL: (padded("empty", "128x4"), padded(IN_KERNEL, "128x4")),
        "zeros_swizzled_only": (padded("empty", "128x4"), padded("zeros_swizzled_only", "128x4")),
        "zeros_swizzled_only, 8x4": (padded("empty", "8x4"), padded("zeros_swizzled_only", "8x4")),
        "int32_ids": (
            lambda: id_width("int64_read_as_int32", device).verdict,
            lambda: id_width("int32", device).verdict,
        ),
        "simulate_routing": (drawn(broken.simulate_with_replacement), drawn(ids.simulate_routing)),
        "row_alone": (apart("neighbour_in_the_maximum"), apart("row_alone")),
    }
    for name, (off, on) in pairs.items():
        holds: dict[str, Any] = {"expected": NOT_FIXED} if name.endswith("8x4") else {}
        yield off_on_off(INCIDENT, name, off=off(), on=on(), off_again=off(), **holds)


def cures(cause: str, device: str) -> Iterator[Finding]:
    """Every remedy on one cause, a finding a cell: the question is the remedy."""
    for cell in matrix.row_of(cause, device):
        mine = OWN_REMEDY[cause] == cell.remedy
        yield finding(
            INCIDENT,
            f"matrix, {cell.remedy}",
            cause,
            cell.verdict,
            expected=matrix.CURED if mine else None,
            wrong_off=cell.off,
            wrong_on=cell.on,
            wrong_off_again=cell.off_again,
        )


# FlashInfer's quantiser, its layout and its way back, beside ours.
PUBLIC = ("block_scale_interleave", "e2m1_and_ufp8sf_scale_to_float", "fp4_quantize")
_BUILD = (
    "from flashinfer.quantization import fp4_quantization as f; import torch; "
    "f.get_fp4_quantization_module('%d%d' % torch.cuda.get_device_capability())"
)
BUILD_SECONDS = 90


def start_build() -> subprocess.Popen[bytes] | str:
    """FlashInfer compiling its FP4 module beside the other questions, or why it does not."""
    if devices.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def public_kernels(build: subprocess.Popen[bytes] | str) -> Iterator[Finding]:
    """FlashInfer's layout, its dequantiser and its quantiser, on our bytes."""
    why = build if isinstance(build, str) else None
    if not isinstance(build, str):
        try:
            if build.wait(timeout=BUILD_SECONDS) != 0:
                why = "FlashInfer's FP4 module did not compile here"
        except subprocess.TimeoutExpired:
            build.kill()
            why = f"FlashInfer's FP4 module did not compile in {BUILD_SECONDS} s"
    if why is not None:
        for name in PUBLIC:
            yield not_run(INCIDENT, "public", name, why)
        return
    fp4 = importlib.import_module("flashinfer.quantization.fp4_quantization")
    a = product_on("cuda", m=37)
    packed, scales = quantize_nvfp4(a.x, a.factor)
    _, linear = quantize_nvfp4(a.x, a.factor, swizzled=False)
    tiles = fp4.block_scale_interleave(linear.view(torch.uint8).contiguous())
    same = torch.equal(tiles.flatten(), scales.view(torch.uint8).flatten())
    yield finding(
        INCIDENT, "public", PUBLIC[0], "same bytes" if same else "other bytes", expected="same bytes"
    )
    # An operation of the host, upstream.
    back = fp4.e2m1_and_ufp8sf_scale_to_float(
        packed.cpu(), scales.view(torch.uint8).flatten().cpu(), 1 / a.factor.cpu(), 16, 1, True
    )
    ours = reference.dequantize_nvfp4(packed, scales, a.factor).cpu()
    near = torch.allclose(back, ours, rtol=1e-6, atol=0)
    yield finding(
        INCIDENT, "public", PUBLIC[1], "same values" if near else "other values", expected="same values"
    )
    yield _flashinfer_quantises(fp4, a, packed, scales)


def _flashinfer_quantises(fp4: Any, a: Product, packed: torch.Tensor, scales: torch.Tensor) -> Finding:
    """Its quantiser twice, over fresh memory whose last tenant was one byte, then another."""
    seen = []
    for byte in (0x55, 0xAA):
        # Blocks of the sizes it will ask for, handed back to the caching allocator.
        freed = [
            torch.full((size,), byte, dtype=torch.uint8, device="cuda")
            for size in (packed.numel(), scales.numel())
            for _ in range(4)
        ]
        del freed
        seen.append([part.view(torch.uint8).flatten() for part in fp4.fp4_quantize(a.x, a.factor)])
        torch.cuda.synchronize()
    ours = (packed.flatten(), scales.view(torch.uint8).flatten())
    if all(torch.equal(x, y) for x, y in zip(seen[0], ours, strict=True)):
        verdict = "same bytes"
    elif all(
        bool((part == byte).all()) for parts, byte in zip(seen, (0x55, 0xAA), strict=True) for part in parts
    ):
        verdict = "writes nothing"
    else:
        verdict = "other bytes"
    return finding(INCIDENT, "public", PUBLIC[2], verdict)


def run(device: str, progress: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Put every question of this incident, yielding each finding as it is obtained.

    Args:
        device: ``cpu`` or ``cuda``.
        progress: called with one line before each part.
    """
    build = start_build()
    progress("who writes the padding of the scales")
    for allocation in ALLOCATIONS:
        yield from padding(allocation, device)
    yield nan_in_a_tile(device)
    for reader in READERS:
        yield random_padding(reader, device)
    progress("the width of expert ids, and experts drawn twice")
    for name in ID_WIDTHS:
        yield id_width(name, device)
    for experts, top_k in SIMULATED:
        yield from duplicates(experts, top_k, device)
    progress("two ranks, one of them idle")
    for backend in ("gloo", "nccl"):
        yield from null_block_ranks(backend, device)
    progress("per-token quantisers, and off/on/off")
    for name in broken.PER_TOKEN:
        yield from cross_row(name, device)
    yield from verify(device)
    for cause in matrix.CAUSES:
        progress(f"every remedy on {cause}")
        yield from cures(cause, device)
    progress("the same bytes by FlashInfer")
    yield from public_kernels(build)
