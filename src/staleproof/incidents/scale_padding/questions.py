"""The questions of incident 5: what the revert blamed, and what was there besides.

The table is at the end; above it are the functions that answer one row each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from staleproof.cases import children
from staleproof.cases.answers import Answer, answer, failed, no_answer
from staleproof.cases.case import Fix, Question, Questions
from staleproof.cases.finding import ARITHMETIC, CLEAN, NOT_FIXED, OFF_ON_OFF, off_on_off, real
from staleproof.evidence.rows import Verdict, judge_rows, pad_invariance
from staleproof.incidents.scale_padding import broken, flashinfer_fp4, ids, matrix, null_block, remedies
from staleproof.incidents.scale_padding.correct import (
    wrong_draw,
    wrong_ids,
    wrong_product,
    wrong_row_scale,
    wrong_write,
)
from staleproof.incidents.scale_padding.flashinfer_fp4 import Build, PublicKernel
from staleproof.incidents.scale_padding.scene import IN_KERNEL, LIVE, N, per_token_step, product_on, step_of
from staleproof.ops.reference import nvfp4 as reference

INCIDENT = "scale_padding"
WRONG, REFUSED, TWICE, DISTINCT = "wrong, finite", "refused", "an expert twice", "distinct"
LEAKED = str(Verdict.LEAKED)

TRIALS = 200

# What each allocation gives on each path, if fresh memory holds NaN. Ours has no 8 x 4 layout.
PADDING: dict[str, dict[str, str]] = {
    "128x4": {"empty": LEAKED, "zeros_both_layouts": CLEAN, "zeros_swizzled_only": CLEAN, IN_KERNEL: CLEAN},
    "linear": {"empty": CLEAN, "zeros_both_layouts": CLEAN, "zeros_swizzled_only": CLEAN, IN_KERNEL: CLEAN},
    "8x4": {"empty": LEAKED, "zeros_both_layouts": LEAKED, "zeros_swizzled_only": LEAKED},
}


def leaks(path: str, allocation: str, device: str) -> str:
    """Whether NaN in scales that nobody wrote reaches a live row of an NVFP4 product."""
    return judge_rows(step_of(path, allocation, device), LIVE)


def padding(path: str, allocation: str, device: str) -> Answer:
    """:func:`leaks`, and which contents of the padding change a live row."""
    changed = pad_invariance(step_of(path, allocation, device), LIVE).changed
    return answer(leaks(path, allocation, device), changed_by=" ".join(changed))


def nan_in_a_tile(name: str, device: str, tiles: int = 20_000) -> Answer:
    """The chance that 512 random bytes hold an e4m3 NaN: computed, and counted."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (tiles, 512), dtype=torch.uint8, generator=generator).to(device)
    counted = float(raw.view(torch.float8_e4m3fn).float().isnan().any(1).float().mean())
    computed = broken.nan_chance()
    near = abs(counted - computed) < 3 * (computed * (1 - computed) / tiles) ** 0.5
    return answer(f"{computed:.1%}" if near else "other", computed=computed, counted=counted)


# How a product reads 128x4 scales, how many columns x has, and how many scales of padding a live
# row meets that way. The second is our model of FlashInfer #2861, which reports such wrong rows from
# 512 columns on, but not that the layouts differ.
READERS: dict[str, tuple[int | None, int, int]] = {"in_its_own_layout": (None, N, 3), "as_8x4": (8, 512, 28)}


def random_padding(reader: tuple[int | None, int, int], device: str) -> Answer:
    """What random bytes in the padding make of one live row: NaN, another number, or nothing."""
    read_as, n, met = reader
    a = product_on(device, m=1, n=n)
    packed, scales = reference.quantize_nvfp4(a.x, a.factor)
    unowned = reference.padding_offsets(1, n).to(device)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (TRIALS, len(unowned)), dtype=torch.uint8, generator=generator).to(device)

    def product(padding_bytes: torch.Tensor) -> torch.Tensor:
        dirty = scales.clone()
        dirty.view(torch.uint8).view(-1)[unowned] = padding_bytes
        return reference.block_scaled_mm(packed, dirty, *a.weight, a.alpha, scales_read_as=read_as)

    right = reference.block_scaled_mm(packed, scales, *a.weight, a.alpha)
    got = torch.stack([product(row) for row in raw])
    bad = got.isnan().flatten(1).any(1)
    wrong = (got != right).flatten(1).any(1) & ~bad
    return answer(
        "NaN or wrong" if wrong.any() else "NaN or right",
        trials=TRIALS,
        nan_computed=broken.nan_chance(met),
        nan=int(bad.sum()) / TRIALS,
        wrong_finite=int(wrong.sum()) / TRIALS,
    )


# Ids and weights on their way to a kernel that reads (tokens, top_k) int32: what it sees of them.
Pair = tuple[torch.Tensor, torch.Tensor]
Reader = Callable[[torch.Tensor, torch.Tensor], Pair]
ID_WIDTHS: dict[str, Reader] = {
    "int64_read_as_int32": lambda chosen, weights: (broken.read_as_int32(chosen.long()), weights),
    "int64_refused": lambda chosen, weights: (ids.require_int32_ids(chosen.long()), weights),
    "int32": lambda chosen, weights: (ids.require_int32_ids(chosen), weights),
    "packed_int64_read_as_int32": lambda chosen, weights: ids.unpack_topk(
        broken.read_as_int32(broken.pack_in_the_width_of_the_ids(chosen.long(), weights))
    ),
    "packed_int64_refused": lambda chosen, weights: ids.unpack_topk(ids.pack_topk(chosen.long(), weights)),
    "packed_int32": lambda chosen, weights: ids.unpack_topk(ids.pack_topk(chosen, weights)),
}
# tokens, experts, experts a token
ROUTED = (64, 16, 4)


def _sent(device: str) -> Pair:
    return ids.simulate_routing(*ROUTED, device=device)


def _mixed(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(tokens,) what a token gets if expert e answers e + 1; a wrong id is a wrong number."""
    return (weights * (chosen + 1)).sum(1)


def id_width(reader: Reader, device: str) -> Answer:
    """What a kernel computes from the ids that ``reader`` makes of the right ones."""
    weights, right = _sent(device)
    try:
        chosen, read_weights = reader(right, weights)
    except ValueError:
        return answer(REFUSED, first_ids="")
    got = _mixed(read_weights, chosen)
    verdict = CLEAN if torch.allclose(got, _mixed(weights, right)) else WRONG
    words = " ".join(map(str, chosen.flatten()[:8].tolist()))
    return answer("NaN" if bool(got.isnan().any()) else verdict, first_ids=words)


# experts, experts a token: DeepSeek-V3, Qwen3-30B-A3B, Qwen3-Next
SIMULATED = ((256, 8), (128, 8), (512, 10))
SIMULATED_TOKENS = 20_000


def duplicates(experts: int, top_k: int, how: tuple[ids.Simulator, float], device: str) -> Answer:
    """How often a simulator gives a token an expert twice, beside the chance computed for it."""
    draw, computed = how
    # In parts, so that the random numbers of 512 experts stay small.
    parts = [
        ids.experts_twice(draw(SIMULATED_TOKENS // 10, experts, top_k, seed=part)[1].to(device))
        for part in range(10)
    ]
    counted = float(torch.cat(parts).float().mean())
    spread = 4 * (computed * (1 - computed) / SIMULATED_TOKENS) ** 0.5
    verdict = TWICE if abs(counted - computed) < spread else "another rate"
    return answer(verdict if counted else DISTINCT, computed=computed, counted=counted)


def draws(simulator: ids.Simulator, device: str) -> str:
    """Whether a simulator gives any token an expert twice."""
    return TWICE if ids.experts_twice(simulator(4096, 128, 8)[1]).any() else CLEAN


def null_block_ranks(backend: str, device: str) -> Iterator[Answer]:
    """Two ranks, one idle: does its dummy batch reach the request that it gets next?

    The ranks run with slot 0, -1 and 0 in one life, which is off / on / off as well; each time with
    every one of :data:`null_block.CONTENTS` in the dummy batch.
    """
    fix = f"slot_minus_one, {backend}"
    if why := null_block.unavailable_reason(backend):
        yield no_answer(why)
        yield no_answer(why, question=OFF_ON_OFF, variant=fix)
        return
    try:
        busy, idle = null_block.reproduce(backend, device=device)
    except children.ChildError as error:
        yield answer("failed", note=str(error))
        return
    off, on, again = (LEAKED if step.row_wrong else CLEAN for step in idle)
    yield answer(
        off,
        changed_by=" ".join(idle[0].row_wrong),
        contents=" ".join(null_block.CONTENTS),
        null_block_bad=idle[0].null_block_bad,
        busy_rank_bad=bool(busy[0].row_wrong),
    )
    claim = off_on_off(INCIDENT, fix, off=off, on=on, off_again=again, wrong=wrong_write(device))
    yield Answer(claim.verdict, claim.numbers, claim.note, OFF_ON_OFF, fix, claim.expected)


def nan_reaches(name: str, device: str) -> str:
    """The NaN check, on a quantiser "per token"."""
    return judge_rows(per_token_step(name, device), 3)


def content_decides(name: str, device: str) -> Answer:
    """Pad-invariance, on the same step: which contents of padding change a live row."""
    seen = pad_invariance(per_token_step(name, device), 3)
    return answer(CLEAN if seen else WRONG, changed_by=" ".join(seen.changed))


def cures(cause: str, device: str) -> Iterator[Answer]:
    """Every remedy on one cause, an answer a cell: the question is the remedy."""
    for cell in matrix.row_of(cause, device):
        yield Answer(
            cell.verdict,
            cell.numbers,
            question=f"matrix, {cell.remedy}",
            expected=matrix.CURED if remedies.CAUSES[cause] == cell.remedy else None,
        )


def public_kernel(kernel: PublicKernel, device: str, build: Build) -> Answer:
    """One kernel of FlashInfer on our bytes."""
    if why := build():
        return no_answer(why)
    try:
        return answer(kernel.compare(product_on("cuda", m=37)))
    except Exception as error:
        return failed(error)


QUESTIONS = Questions(
    INCIDENT,
    *(
        Question(f"padding, {path}", list(found), partial(padding, path), found)
        for path, found in PADDING.items()
    ),
    Question("NaN in a tile", ["512 random bytes"], nan_in_a_tile, "98.2%", evidence=ARITHMETIC),
    Question(
        "random padding",
        READERS,
        random_padding,
        {"in_its_own_layout": "NaN or right", "as_8x4": "NaN or wrong"},
        one_thread=True,
    ),
    Question(
        "id width",
        ID_WIDTHS,
        id_width,
        {name: REFUSED if "refused" in name else WRONG if "read_as" in name else CLEAN for name in ID_WIDTHS},
    ),
    *(
        Question(
            f"duplicates, {experts} experts, top {top_k}",
            {
                "simulate_with_replacement": (
                    broken.simulate_with_replacement,
                    ids.duplicate_chance(experts, top_k),
                ),
                "simulate_routing": (ids.simulate_routing, 0.0),
            },
            partial(duplicates, experts, top_k),
            lambda how: TWICE if how[1] else DISTINCT,
        )
        for experts, top_k in SIMULATED
    ),
    Question("null block", {f"slot_0, {b}": b for b in ("gloo", "nccl")}, null_block_ranks, LEAKED),
    Question("cross row, NaN check", list(broken.PER_TOKEN), nan_reaches, CLEAN),
    Question(
        "cross row, padding content",
        list(broken.PER_TOKEN),
        content_decides,
        {"neighbour_in_the_maximum": WRONG, "row_alone": CLEAN},
    ),
    *(
        Fix(name, "empty", name, partial(leaks, "128x4"), partial(wrong_product, "128x4"))
        for name in (IN_KERNEL, "zeros_swizzled_only")
    ),
    Fix(
        "zeros_swizzled_only, 8x4",
        off="empty",
        on="zeros_swizzled_only",
        ask=partial(leaks, "8x4"),
        expected=NOT_FIXED,
    ),
    Fix(
        "int32_ids",
        off=ID_WIDTHS["int64_read_as_int32"],
        on=ID_WIDTHS["int32"],
        ask=id_width,
        wrong=lambda reader, device: wrong_ids(reader, _sent(device)),
    ),
    Fix(
        "simulate_routing",
        off=broken.simulate_with_replacement,
        on=ids.simulate_routing,
        ask=draws,
        wrong=wrong_draw,
    ),
    Fix(
        "row_alone",
        off="neighbour_in_the_maximum",
        on="row_alone",
        ask=content_decides,
        wrong=wrong_row_scale,
    ),
    Question("matrix", list(remedies.CAUSES), cures, one_thread=True),
    Question(
        "public",
        flashinfer_fp4.KERNELS,
        public_kernel,
        lambda kernel: kernel.expected,
        unavailable=flashinfer_fp4.unavailable_reason,
        begin=flashinfer_fp4.start_build,
        evidence=real("flashinfer-python"),
    ),
)
