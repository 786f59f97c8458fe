"""The cases of incident 5: the fault that the revert blamed, and the other faults that were there.

The table is at the end. Each function above it computes the result of one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from staleproof.cases.case import Case, Reading, Scene, each, fix, reading
from staleproof.cases.finding import ARITHMETIC, Key
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.evidence.rows import Verdict, judge_rows, pad_invariance
from staleproof.incidents.scale_padding import broken, ids, matrix, null_block, remedies
from staleproof.incidents.scale_padding.correct import (
    wrong_draw,
    wrong_ids,
    wrong_product,
    wrong_row_scale,
    wrong_write,
)
from staleproof.incidents.scale_padding.matrix import CURED, WORSE
from staleproof.incidents.scale_padding.scene import IN_KERNEL, LIVE, N, per_token_step, product_on, step_of
from staleproof.ops.reference import nvfp4 as reference

WRONG, REFUSED, TWICE, DISTINCT = "wrong, finite", "refused", "an expert twice", "distinct"
CLEAN, LEAKED = str(Verdict.CLEAN), str(Verdict.LEAKED)

TRIALS = 200

# The verdict of each allocation on each path if fresh memory has NaN. Our quantiser has no 8 x 4 layout.
PADDING: dict[str, dict[str, str]] = {
    "128x4": {"empty": LEAKED, "zeros_both_layouts": CLEAN, "zeros_swizzled_only": CLEAN, IN_KERNEL: CLEAN},
    "linear": {"empty": CLEAN, "zeros_both_layouts": CLEAN, "zeros_swizzled_only": CLEAN, IN_KERNEL: CLEAN},
    "8x4": {"empty": LEAKED, "zeros_both_layouts": LEAKED, "zeros_swizzled_only": LEAKED},
}


def leaks(path: str, allocation: str, device: str) -> str:
    """Whether NaN in scales that nobody wrote reaches a live row of an NVFP4 product."""
    return judge_rows(step_of(path, allocation, product_on(device)), LIVE)


def padding(path: str, allocation: str, device: str) -> Reading:
    """:func:`leaks`, and which contents of the padding change a live row."""
    changed = pad_invariance(step_of(path, allocation, product_on(device)), LIVE).changed
    return reading(leaks(path, allocation, device), changed_by=" ".join(changed))


def nan_in_a_tile(stated: float, device: str, tiles: int = 20_000) -> Reading:
    """Whether a stated chance that 512 random bytes contain an e4m3 NaN agrees with computation and count.

    Args:
        stated: rounded to a tenth of a per cent.
        device: ``"cpu"`` or ``"cuda"``.
        tiles: number of tiles to count; the count may be off by three standard deviations.
    """
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (tiles, 512), dtype=torch.uint8, generator=generator).to(device)
    counted = float(raw.view(torch.float8_e4m3fn).float().isnan().any(1).float().mean())
    computed = broken.nan_chance()
    near = abs(counted - computed) < 3 * (computed * (1 - computed) / tiles) ** 0.5
    verdict = "agrees" if near and round(computed, 3) == stated else "off"
    return reading(verdict, stated=stated, computed=computed, counted=counted)


# How a product reads 128x4 scales, the number of columns of x, and how many padding scales a live row then
# uses. The second entry is our model of FlashInfer #2861, which reports such wrong rows from 512 columns on,
# but does not report that the layouts differ.
READERS: dict[str, tuple[int | None, int, int]] = {"in_its_own_layout": (None, N, 3), "as_8x4": (8, 512, 28)}


def random_padding(reader: tuple[int | None, int, int], device: str) -> Reading:
    """The effect of random bytes in the padding on one live row: NaN, another number, or none."""
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
    return reading(
        "NaN or wrong" if wrong.any() else "NaN or right",
        trials=TRIALS,
        nan_computed=broken.nan_chance(met),
        nan=int(bad.sum()) / TRIALS,
        wrong_finite=int(wrong.sum()) / TRIALS,
    )


ID_WIDTHS: dict[str, ids.Reader] = {
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


def _mixed(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(tokens,) result of each token if expert e answers e + 1, so that a wrong id changes the number."""
    return (weights * (chosen + 1)).sum(1)


def id_width(reader: ids.Reader, device: str) -> Reading:
    """The outcome of a kernel that gets the right ids through ``reader``."""
    weights, right = ids.simulate_routing(*ROUTED, device=device)
    try:
        chosen, read_weights = reader(right, weights)
    except ValueError:
        return reading(REFUSED, first_ids="")
    got = _mixed(read_weights, chosen)
    verdict = CLEAN if torch.allclose(got, _mixed(weights, right)) else WRONG
    words = " ".join(map(str, chosen.flatten()[:8].tolist()))
    return reading("NaN" if bool(got.isnan().any()) else verdict, first_ids=words)


# experts, experts a token: DeepSeek-V3, Qwen3-30B-A3B, Qwen3-Next
SIMULATED = ((256, 8), (128, 8), (512, 10))
SIMULATED_TOKENS = 20_000


def duplicates(experts: int, top_k: int, how: tuple[ids.Simulator, float], device: str) -> Reading:
    """How often a simulator gives a token an expert twice, compared with the computed chance."""
    draw, computed = how
    # In parts, so that the random numbers of 512 experts stay small.
    parts = [
        ids.experts_twice(draw(SIMULATED_TOKENS // 10, experts, top_k, seed=part)[1].to(device))
        for part in range(10)
    ]
    counted = float(torch.cat(parts).float().mean())
    spread = 4 * (computed * (1 - computed) / SIMULATED_TOKENS) ** 0.5
    verdict = TWICE if abs(counted - computed) < spread else "another rate"
    return reading(verdict if counted else DISTINCT, computed=computed, counted=counted)


def draws(simulator: ids.Simulator, device: str) -> str:
    """Whether a simulator gives any token an expert twice."""
    return TWICE if ids.experts_twice(simulator(4096, 128, 8)[1]).any() else DISTINCT


def null_block_leaks(name: str, device: str, ranks: null_block.Ranks) -> Reading:
    """Whether the dummy batch of an idle rank changes the next request of that rank."""
    busy, idle = ranks
    return reading(
        LEAKED if idle[0].row_wrong else CLEAN,
        changed_by=" ".join(idle[0].row_wrong),
        contents=" ".join(null_block.CONTENTS),
        null_block_bad=idle[0].null_block_bad,
        busy_rank_bad=bool(busy[0].row_wrong),
    )


def repetition_leaks(number: int, device: str, ranks: null_block.Ranks) -> str:
    """The same for one repetition. The same processes run slot 0, -1 and 0, which is off / on / off."""
    return LEAKED if ranks[1][number].row_wrong else CLEAN


def nan_reaches(name: str, device: str) -> str:
    """The result of the NaN check for a quantiser "per token"."""
    return judge_rows(per_token_step(name, device), 3)


def content_decides(name: str, device: str) -> Reading:
    """Pad-invariance, on the same step: which contents of padding change a live row."""
    seen = pad_invariance(per_token_step(name, device), 3)
    return reading(CLEAN if seen else WRONG, changed_by=" ".join(seen.changed))


# What each remedy does to a cause: its own cures it, and zero-initialised buffers make three of them worse.
FACTS: dict[str, dict[str, str]] = {cause: {own: CURED} for cause, own in remedies.CAUSES.items()}
for _cause in remedies.UNWRITTEN:
    FACTS[_cause]["zero_init_per_layer"] = WORSE
FACTS["amax, torch.max"]["post_kernel_clear"] = CURED

Row = Mapping[str, matrix.Cell]


def cures(remedy: str, device: str, row: Row) -> Reading:
    """What one remedy does to one cause."""
    return Reading(row[remedy].verdict, row[remedy].numbers)


def _of_cause(cause: str) -> list[Case]:
    """Some remedies on one cause. All share the two runs without a remedy, before and after."""
    scene = Scene(f"matrix, {cause}", partial(matrix.row_of, cause, remedies=[*FACTS[cause]]))
    return [
        Case(Key("", f"matrix, {remedy}", cause), "cure", cures, remedy, expect=verdict, scene=scene)
        for remedy, verdict in FACTS[cause].items()
    ]


GLOO = Scene("two ranks, gloo", null_block.reproduce)
# The matrix, a row a cause.
MATRIX = {cause: Table("scale_padding", _of_cause(cause)) for cause in remedies.CAUSES}

TABLE = Table(
    "scale_padding",
    *(
        each(f"padding, {path}", "rows", list(found), partial(padding, path), expect=found)
        for path, found in PADDING.items()
    ),
    each(
        "NaN in a tile",
        "arithmetic",
        # Reported: the chance that random bytes in a tile's padding hold a NaN.
        {"512 random bytes": 0.982},
        nan_in_a_tile,
        expect="agrees",
        evidence=ARITHMETIC,
    ),
    each(
        "random padding",
        "random padding",
        READERS,
        random_padding,
        expect={"in_its_own_layout": "NaN or right", "as_8x4": "NaN or wrong"},
    ),
    each(
        "id width",
        "id width",
        ID_WIDTHS,
        id_width,
        expect={
            name: REFUSED if "refused" in name else WRONG if "read_as" in name else CLEAN
            for name in ID_WIDTHS
        },
    ),
    *(
        each(
            f"duplicates, {experts} experts, top {top_k}",
            "draws",
            {
                "simulate_with_replacement": (
                    broken.simulate_with_replacement,
                    ids.duplicate_chance(experts, top_k),
                ),
                "simulate_routing": (ids.simulate_routing, 0.0),
            },
            partial(duplicates, experts, top_k),
            expect=lambda how: TWICE if how[1] else DISTINCT,
        )
        for experts, top_k in SIMULATED
    ),
    each(
        "null block",
        "rows",
        ["slot_0, gloo"],
        null_block_leaks,
        expect=LEAKED,
        needs=null_block.unavailable_reason,
        scene=GLOO,
    ),
    fix(
        "slot_minus_one, gloo",
        "rows",
        off=0,
        on=1,
        again=2,
        ask=repetition_leaks,
        wrong=wrong_write,
        needs=null_block.unavailable_reason,
        scene=GLOO,
    ),
    each("cross row, NaN check", "rows", list(broken.PER_TOKEN), nan_reaches, expect=CLEAN),
    each(
        "cross row, padding content",
        "rows",
        list(broken.PER_TOKEN),
        content_decides,
        expect={"neighbour_in_the_maximum": WRONG, "row_alone": CLEAN},
    ),
    *(
        fix(
            name,
            "rows",
            off="empty",
            on=allocation,
            ask=partial(leaks, path),
            wrong=partial(wrong_product, path),
            expect=expect,
        )
        for name, path, allocation, expect in (
            (IN_KERNEL, "128x4", IN_KERNEL, FIXED),
            ("zeros_swizzled_only", "128x4", "zeros_swizzled_only", FIXED),
            ("zeros_swizzled_only, 8x4", "8x4", "zeros_swizzled_only", NOT_FIXED),
        )
    ),
    fix(
        "int32_ids",
        "id width",
        off=ID_WIDTHS["int64_read_as_int32"],
        on=ID_WIDTHS["int32"],
        ask=id_width,
        wrong=wrong_ids,
    ),
    fix(
        "simulate_routing",
        "draws",
        off=broken.simulate_with_replacement,
        on=ids.simulate_routing,
        ask=draws,
        wrong=wrong_draw,
    ),
    fix(
        "row_alone",
        "rows",
        off="neighbour_in_the_maximum",
        on="row_alone",
        ask=content_decides,
        wrong=wrong_row_scale,
    ),
    *(row.cases for row in MATRIX.values()),
)
