"""The questions of incident 5: the fault that the revert blamed, and the other faults that were there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from staleproof.evidence.rows import Verdict, judge_rows, pad_invariance
from staleproof.grades import ARITHMETIC
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
from staleproof.lab import FIXED, NOT_FIXED, Answer, Fix, Incident, Scene, bad, good, good_if
from staleproof.ops.reference import nvfp4 as reference

incident = Incident("scale_padding")

WRONG, REFUSED, TWICE, DISTINCT = "wrong, finite", "refused", "an expert twice", "distinct"
CLEAN, LEAKED = str(Verdict.CLEAN), str(Verdict.LEAKED)

# --- Scales of padding that nobody writes.


class Padding(NamedTuple):
    """Who writes the scales of an NVFP4 tensor, and in which layout.

    Attributes:
        path: a key of :data:`.broken.PATHS`.
        allocation: a key of :data:`.broken.ALLOCATIONS`, or ``quantize_nvfp4``, which writes the padding.
    """

    path: str
    allocation: str


def on_path(path: str, *allocations: str) -> dict[str, Padding]:
    """These allocations on one path, by name."""
    return {allocation: Padding(path, allocation) for allocation in allocations}


# Our quantiser has no 8 x 4 layout.
@incident.question("padding, 8x4", on_path("8x4", *broken.ALLOCATIONS), expect=LEAKED)
@incident.question("padding, linear", on_path("linear", *broken.ALLOCATIONS, IN_KERNEL), expect=CLEAN)
@incident.question(
    "padding, 128x4",
    on_path("128x4", *broken.ALLOCATIONS, IN_KERNEL),
    expect={"empty": LEAKED, "zeros_both_layouts": CLEAN, "zeros_swizzled_only": CLEAN, IN_KERNEL: CLEAN},
)
def padding(scales: Padding, device: str) -> Answer:
    """Fresh memory holds NaN. Does it reach a live row of an NVFP4 product, and which contents do?"""
    step = step_of(scales.path, scales.allocation, product_on(device))
    verdict = judge_rows(step, LIVE)
    return good_if(verdict == CLEAN, verdict, changed_by=" ".join(pad_invariance(step, LIVE).changed))


def leaks(scales: Padding, device: str) -> Answer:
    """:func:`padding` without the contents."""
    verdict = judge_rows(step_of(scales.path, scales.allocation, product_on(device)), LIVE)
    return good_if(verdict == CLEAN, verdict)


def wrong_padding(scales: Padding, device: str) -> str | None:
    """What is wrong with the product, or with what our quantiser writes."""
    return wrong_product(scales.path, scales.allocation, device)


incident.fixes(
    leaks,
    {
        IN_KERNEL: Fix(off=Padding("128x4", "empty"), on=Padding("128x4", IN_KERNEL)),
        "zeros_swizzled_only": Fix(off=Padding("128x4", "empty"), on=Padding("128x4", "zeros_swizzled_only")),
        "zeros_swizzled_only, 8x4": Fix(
            off=Padding("8x4", "empty"), on=Padding("8x4", "zeros_swizzled_only")
        ),
    },
    compare=wrong_padding,
    expect={IN_KERNEL: FIXED, "zeros_swizzled_only": FIXED, "zeros_swizzled_only, 8x4": NOT_FIXED},
)


# Reported: the chance that random bytes in a tile's padding hold a NaN.
@incident.question("NaN in a tile", {"512 random bytes": 0.982}, expect="agrees", evidence=ARITHMETIC)
def nan_in_a_tile(stated: float, device: str, tiles: int = 20_000) -> Answer:
    """A stated chance that 512 random bytes hold an e4m3 NaN. Do computation and count agree with it?

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
    agrees = near and round(computed, 3) == stated
    return good_if(agrees, "agrees" if agrees else "off", stated=stated, computed=computed, counted=counted)


TRIALS = 200


class Reader(NamedTuple):
    """How a product reads 128x4 scales.

    Attributes:
        row_tile: rows of a tile as it reads them; ``None`` for the layout's own.
        columns: of the tensor.
        padding_scales: how many scales of padding a live row then meets.
    """

    row_tile: int | None
    columns: int
    padding_scales: int


@incident.question(
    "random padding",
    {
        "in_its_own_layout": Reader(None, N, 3),
        # Our model of FlashInfer #2861, which reports such wrong rows from 512 columns on, but not that the
        # layouts differ.
        "as_8x4": Reader(8, 512, 28),
    },
    expect={"in_its_own_layout": "NaN or right", "as_8x4": "NaN or wrong"},
)
def random_padding(reader: Reader, device: str) -> Answer:
    """Random bytes in the padding. Is one live row right, NaN, or another number?"""
    a = product_on(device, m=1, n=reader.columns)
    packed, scales = reference.quantize_nvfp4(a.x, a.factor)
    unowned = reference.padding_offsets(1, reader.columns).to(device)
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (TRIALS, len(unowned)), dtype=torch.uint8, generator=generator).to(device)

    def product(padding_bytes: torch.Tensor) -> torch.Tensor:
        dirty = scales.clone()
        dirty.view(torch.uint8).view(-1)[unowned] = padding_bytes
        return reference.block_scaled_mm(packed, dirty, *a.weight, a.alpha, scales_read_as=reader.row_tile)

    right = reference.block_scaled_mm(packed, scales, *a.weight, a.alpha)
    got = torch.stack([product(row) for row in raw])
    nan = got.isnan().flatten(1).any(1)
    wrong = (got != right).flatten(1).any(1) & ~nan
    return bad(
        "NaN or wrong" if wrong.any() else "NaN or right",
        trials=TRIALS,
        nan_computed=broken.nan_chance(reader.padding_scales),
        nan=int(nan.sum()) / TRIALS,
        wrong_finite=int(wrong.sum()) / TRIALS,
    )


# --- Expert ids of the wrong width, or drawn twice.

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


@incident.question(
    "id width",
    ID_WIDTHS,
    expect={
        "int64_read_as_int32": WRONG,
        "int64_refused": REFUSED,
        "int32": CLEAN,
        "packed_int64_read_as_int32": WRONG,
        "packed_int64_refused": REFUSED,
        "packed_int32": CLEAN,
    },
)
def id_width(reader: ids.Reader, device: str) -> Answer:
    """A kernel gets the right ids through ``reader``. Does it mix the experts that were chosen?"""
    weights, right = ids.simulate_routing(*ROUTED, device=device)
    try:
        chosen, read_weights = reader(right, weights)
    except ValueError:
        return good(REFUSED, first_ids="")
    got = _mixed(read_weights, chosen)
    first = " ".join(map(str, chosen.flatten()[:8].tolist()))
    if torch.allclose(got, _mixed(weights, right)):
        return good(CLEAN, first_ids=first)
    return bad("NaN" if bool(got.isnan().any()) else WRONG, first_ids=first)


incident.fixes(
    id_width,
    {"int32_ids": Fix(off=ID_WIDTHS["int64_read_as_int32"], on=ID_WIDTHS["int32"])},
    compare=wrong_ids,
)

SIMULATED_TOKENS = 20_000


class Draw(NamedTuple):
    """A simulator, and how many experts each token gets of how many."""

    simulator: ids.Simulator
    experts: int
    top_k: int

    @property
    def chance(self) -> float:
        """The computed chance that a token gets an expert twice."""
        twice = self.simulator is broken.simulate_with_replacement
        return ids.duplicate_chance(self.experts, self.top_k) if twice else 0.0


def draws(experts: int, top_k: int) -> dict[str, Draw]:
    """Both simulators with these sizes, by name."""
    simulators = (broken.simulate_with_replacement, ids.simulate_routing)
    return {draw.__name__: Draw(draw, experts, top_k) for draw in simulators}


BY_SIMULATOR = {"simulate_with_replacement": TWICE, "simulate_routing": DISTINCT}


@incident.question("duplicates, 512 experts, top 10", draws(512, 10), expect=BY_SIMULATOR)
@incident.question("duplicates, 128 experts, top 8", draws(128, 8), expect=BY_SIMULATOR)
@incident.question("duplicates, 256 experts, top 8", draws(256, 8), expect=BY_SIMULATOR)
def duplicates(draw: Draw, device: str) -> Answer:
    """How often does a simulator give a token an expert twice? Counted beside the computed chance."""
    computed = draw.chance
    # In parts, so that the random numbers of 512 experts stay small.
    tokens = SIMULATED_TOKENS // 10
    drawn = (draw.simulator(tokens, draw.experts, draw.top_k, seed=part)[1] for part in range(10))
    counted = float(torch.cat([ids.experts_twice(chosen.to(device)) for chosen in drawn]).float().mean())
    numbers = {"computed": computed, "counted": counted}
    if not counted:
        return good(DISTINCT, **numbers)
    near = abs(counted - computed) < 4 * (computed * (1 - computed) / SIMULATED_TOKENS) ** 0.5
    return bad(TWICE if near else "another rate", **numbers)


def draws_twice(simulator: ids.Simulator, device: str) -> Answer:
    """Does a simulator give any token an expert twice?"""
    twice = bool(ids.experts_twice(simulator(4096, 128, 8)[1]).any())
    return good_if(not twice, TWICE if twice else DISTINCT)


incident.fixes(
    draws_twice,
    {"simulate_routing": Fix(off=broken.simulate_with_replacement, on=ids.simulate_routing)},
    compare=wrong_draw,
)

# --- The null block, on two ranks.

GLOO = Scene("two ranks, gloo", null_block.reproduce)


@incident.question(
    "null block", ["slot_0, gloo"], expect=LEAKED, needs=null_block.unavailable_reason, scene=GLOO
)
def null_block_leaks(name: str, device: str, ranks: null_block.Ranks) -> Answer:
    """The dummy batch of an idle rank writes slot 0. Does it change the next request of that rank?"""
    busy, idle = ranks
    return good_if(
        not idle[0].row_wrong,
        LEAKED if idle[0].row_wrong else CLEAN,
        changed_by=" ".join(idle[0].row_wrong),
        contents=" ".join(null_block.CONTENTS),
        null_block_bad=idle[0].null_block_bad,
        busy_rank_bad=bool(busy[0].row_wrong),
    )


def repetition_leaks(number: int, device: str, ranks: null_block.Ranks) -> Answer:
    """The same for one repetition. The same processes run slot 0, -1 and 0, which is off / on / off."""
    wrong = ranks[1][number].row_wrong
    return good_if(not wrong, LEAKED if wrong else CLEAN)


incident.fixes(
    repetition_leaks,
    {"slot_minus_one, gloo": Fix(off=0, on=1, again=2)},
    compare=wrong_write,
    needs=null_block.unavailable_reason,
    scene=GLOO,
)

# --- A quantiser per token whose maximum includes the neighbour's row.


@incident.question("cross row, NaN check", [*broken.PER_TOKEN], expect=CLEAN)
def nan_reaches(name: str, device: str) -> Answer:
    """Three padding rows hold NaN. Does a check for NaN find it in a live row?"""
    verdict = judge_rows(per_token_step(name, device), 3)
    return good_if(verdict == CLEAN, verdict)


@incident.question(
    "cross row, padding content",
    [*broken.PER_TOKEN],
    expect={"neighbour_in_the_maximum": WRONG, "row_alone": CLEAN},
)
def content_decides(name: str, device: str) -> Answer:
    """On the same step: which contents of padding change a live row?"""
    found = pad_invariance(per_token_step(name, device), 3)
    return good_if(bool(found), CLEAN if found else WRONG, changed_by=" ".join(found.changed))


incident.fixes(
    content_decides,
    {"row_alone": Fix(off="neighbour_in_the_maximum", on="row_alone")},
    compare=wrong_row_scale,
)

# --- The matrix: each cause with its own remedy, and three with zero-initialised buffers.


class Cure(NamedTuple):
    """One remedy on one cause."""

    cause: str
    remedy: str


# Remedy -> cause -> the verdict. All 121 pairs were recorded on a GPU; these carry the argument.
MATRIX: dict[str, dict[str, str]] = {
    "post_kernel_clear": {"empty rows": CURED, "amax, torch.max": CURED},
    "amax_of_live_rows": {"amax, torch.max": CURED, "amax, fmax": CURED},
    "fused_sanitising": {"NaN logits": CURED},
    "distinct_ids": {"duplicate ids": CURED},
    "int32_ids": {"int64 ids": CURED},
    "in_kernel_padding": {"scale padding": CURED},
    "zero_blocks_on_allocation": {"tail over-read": CURED, "block reuse": CURED},
    "slot_minus_one": {"null block": CURED},
    "rows_kept_apart": {"cross-row reduction": CURED},
    "zero_init_per_layer": {"empty rows": WORSE, "amax, torch.max": WORSE, "amax, fmax": WORSE},
}
# The remedies of one cause share the two runs without a remedy, before and after.
ROWS = {
    cause: Scene(
        f"matrix, {cause}",
        partial(matrix.row_of, cause, remedies=[name for name, causes in MATRIX.items() if cause in causes]),
    )
    for cause in remedies.CAUSES
}


def cures(pair: Cure, device: str, row: Mapping[str, matrix.Cell]) -> Answer:
    """A small server with one fault and one remedy, over nine histories of memory. Is it cured?"""
    return row[pair.remedy].answer


def row_of_cause(pair: Cure) -> Scene:
    """What the remedies of one cause share."""
    return ROWS[pair.cause]


for _remedy, _causes in MATRIX.items():
    incident.question(
        f"matrix, {_remedy}",
        {cause: Cure(cause, _remedy) for cause in _causes},
        expect=_causes,
        scene=row_of_cause,
    )(cures)
