"""The cases of incident 6: which bytes are read, what they make of an answer, and what cures it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from staleproof.cases import children
from staleproof.cases.case import MissingError, Reading, Scene, ablation, each, fix, reading
from staleproof.cases.finding import ARITHMETIC, Evidence, Grade
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.incidents.mxfp4_scales import broken, real, scene
from staleproof.incidents.mxfp4_scales.broken import GROUPS, SHIPPED, Kernel, Shape
from staleproof.incidents.mxfp4_scales.remedies import REMEDIES
from staleproof.incidents.mxfp4_scales.scene import NAN, RIGHT, SMALL, TOKENS, WRONG
from staleproof.kernels import vllm_matmul_ogs

INSIDE, PAST = "inside", "past the end"
ALWAYS, SOMETIMES, NEVER = "always 0xff", "0xff now and then", "never 0xff"

# Projections of gpt-oss: K of the first is the hidden size, 2880. vLLM rounds the intermediate size that
# a rank has up to a multiple of 64, and K of the second is that.
SHAPES = {
    "gpt-oss-20b w13": Shape(32, 5760, 2880),
    "gpt-oss-120b w13": Shape(128, 5760, 2880),
    "gpt-oss-120b w13, TP 2": Shape(128, 2944, 2880),
    "gpt-oss-120b w13, TP 4": Shape(128, 1536, 2880),
    "gpt-oss-120b w13, TP 8": Shape(128, 768, 2880),
    "gpt-oss-120b w2": Shape(128, 2880, 2880),
    "gpt-oss-120b w2, TP 2": Shape(128, 2880, 1472),
    "gpt-oss-120b w2, TP 4": Shape(128, 2880, 768),
    "gpt-oss-120b w2, TP 8": Shape(128, 2880, 384),
    "K 2944": Shape(32, 5760, 2944),
    "K 3072": Shape(32, 5760, 3072),
}


def over_read(shape: Shape, device: str) -> Reading:
    """How many bytes behind the last scale the kernel reads, and which columns of the product they decide."""
    behind, padded = broken.past_the_end(shape), Kernel(align=4)
    columns = sorted({*broken.columns_behind(shape).values()})
    return reading(
        PAST if behind else INSIDE,
        bytes_behind=behind,
        bytes_behind_that_reach_a_column=len(broken.columns_behind(shape)),
        columns=columns,
        scale_bytes=broken.stored_bytes(shape, SHIPPED),
        scale_bytes_padded=broken.stored_bytes(shape, padded),
        bytes_behind_padded=broken.past_the_end(shape, padded),
    )


def memory_behind(name: str, device: str) -> Reading:
    """How often memory of this kind holds a byte 0xff where it reaches a column."""
    chance = scene.chance_of_0xff(name)
    word = NEVER if chance == 0 else ALWAYS if chance == 1 else SOMETIMES
    return reading(word, counted=chance, first_bytes=scene.bytes_of(name, 8).tolist())


def byte_values(shape: Shape, device: str) -> Reading:
    """Which of the 256 values of a byte behind the scales make a NaN: each times a weight of 0."""
    scales = broken.e8m0(torch.arange(256).to(torch.uint8))
    return reading(NAN, values=(scales * 0).isnan().nonzero().flatten().tolist())


@dataclass(frozen=True)
class Ingredients:
    """All that the silent answer needs.

    Attributes:
        kernel: layout, mask and clamps.
        fill: what lies behind the scales.
        hidden: K of the first product.
        routed: whether a token is routed to the last expert.
    """

    kernel: Kernel = SHIPPED
    fill: str = "0xff"
    hidden: int = SMALL.hidden
    routed: bool = True


def silent(a: Ingredients, device: str) -> Reading:
    """The replica's layer with these ingredients."""
    layer = scene.layer_on("cpu", SMALL._replace(hidden=a.hidden))
    if not a.routed:
        layer = replace(layer, topk_ids=torch.arange(SMALL.top_k).expand(layer.topk_ids.shape))
    return scene.judged(layer, lambda behind: scene.layer(layer, behind, a.kernel), [a.fill])[0]


def _package(remedy: Any, device: str) -> str | None:
    return vllm_matmul_ogs.unavailable_reason(device)


def _on_gpu(remedy: Any, device: str) -> str | None:
    return "needs a Hopper GPU" if device == "cpu" else _package(remedy, device)


def _real(remedy: Any = None) -> Evidence:
    edited = REMEDIES[remedy].edit if isinstance(remedy, str) and remedy in REMEDIES else None
    what = "one line of it edited" if edited else "as shipped"
    return Evidence(Grade.REAL, f"vLLM {vllm_matmul_ogs.version()} triton_kernels, {what}")


Told = Mapping[Any, Any]


def _children(*calls: tuple[Any, ...]) -> dict[Any, Any]:
    """What child processes told, by probe; an error of one is raised where its answers are asked for."""
    told: dict[Any, Any] = {}
    for function, *arguments in calls:
        ended = children.call(function, *arguments, timeout_s=300)
        told |= dict(ended.told)
        if ended.code:
            told["ended"] = f"a child ended with {ended.code}: {ended.last_line}"
    return told


def _asked(device: str) -> Told:
    same = [name for name, remedy in REMEDIES.items() if remedy.edit is None]
    edited = [(real.package, device, name) for name, remedy in REMEDIES.items() if remedy.edit]
    return _children((real.package, device, *same), *edited)


PACKAGE = Scene("vLLM's kernel with each remedy", _asked)
FIRST_PRODUCT = Scene("vLLM's first product", lambda device: _children((real.table, device)))
NEIGHBOUR = Scene("24 layers", lambda device: _children((real.neighbour, device)))


def answer(probe: Any, device: str, told: Told) -> Reading:
    """What a child told about this probe."""
    if probe not in told:
        raise MissingError(told.get("ended", f"{probe} was not asked"))
    return told[probe]


def _of_layer(remedy: str, device: str, told: Told, fill: str = "0xff") -> Reading:
    return answer((remedy, f"{fill}, {TOKENS} tokens"), device, told)


def _moved(remedy: str, device: str, told: Told) -> str | None:
    """What a remedy changes besides: rows over other bytes behind."""
    changed = _of_layer(remedy, device, told).numbers["changed"]
    return f"0xff behind the scales changes {changed} rows" if changed else None


def _moved_replica(remedy: str, device: str) -> str | None:
    changed = scene.replica(remedy, "0xff").numbers["changed"]
    return f"0xff behind the scales changes {changed} rows" if changed else None


def guarded(remedy: str, device: str) -> Reading:
    """The first product in a child process, its scales at the end of a mapping."""
    ended = children.call(real.guarded, remedy, timeout_s=120)
    if ended.code and "illegal memory access" in ended.stderr:
        return reading("illegal memory access", note=ended.last_line)
    return ended.answer()


def _cost(remedy: Any, device: str) -> Reading:
    return children.call(real.cost, device, timeout_s=200).answer()


def _loaded(device: str) -> Any:
    """The three answers of vLLM's loader: without the patch, with it, and without it."""
    given = vllm_matmul_ogs.version(), str(vllm_matmul_ogs.root())
    return children.call(real.loader, device, *given, timeout_s=300).answer()


def _turn(turn: int, device: str, told: list[Reading]) -> Reading:
    return told[turn]


def _turn_moved(turn: int, device: str, told: list[Reading]) -> str | None:
    changed = told[turn].numbers["changed"]
    return f"0xff behind the scales changes {changed} rows" if changed else None


def _product(name: str, device: str, told: Told) -> Reading:
    return answer((real.size_on(device).hidden, name), device, told)


def _control(index: int, device: str, told: Told) -> Reading:
    return answer((real.CONTROLS[device][index], "0xff"), device, told)


def _layout(name: str, device: str, told: Told) -> Reading:
    return answer((real.size_on(device).hidden, "layout"), device, told)


def _batch(tokens: int, device: str, told: Told) -> Reading:
    return answer(("none", f"0xff, {tokens} tokens"), device, told)


ILLEGAL = "illegal memory access"
CURED = ("loader_pads", "layout_pads", "mask_after_load", "mask_load")
LAYER = {name: RIGHT if name in CURED else WRONG for name in REMEDIES}
ODD = {name: RIGHT if name == "mask_after_load" else NAN for name in REMEDIES}
BYTES = dict.fromkeys(scene.BEHIND, NEVER) | {
    **dict.fromkeys(("0xff", "int32 -1", "bf16 -inf", "fp32 -inf"), ALWAYS),
    **dict.fromkeys(("bf16 N(0, 1)", "fp32 N(0, 1)", "random bytes"), SOMETIMES),
}
PRODUCT = {name: NAN for name, chance in BYTES.items() if chance == ALWAYS} | {
    name: RIGHT for name, chance in BYTES.items() if chance == NEVER
}
# The read is inside with more groups in memory, or fewer read. A mask after the load changes no read.
GUARD = {"none": ILLEGAL, "mask_after_load": ILLEGAL} | dict.fromkeys(
    ("loader_pads", "layout_pads", "mask_load"), RIGHT
)
DRAWN = "whether these 32 random bytes hold 0xff is a matter of chance"
STAGES = ("loaded", "profiled", "KV caches", *(f"{n} requests sampled" for n in real.STEPS))

TABLE = Table(
    "mxfp4_scales",
    each(
        "over-read",
        "scales",
        SHAPES,
        over_read,
        expect=lambda shape: PAST if 1 <= shape.k % 128 <= 64 else INSIDE,
        evidence=ARITHMETIC,
    ),
    each("byte behind", "scales", {"all 256": None}, byte_values, expect=NAN, evidence=ARITHMETIC),
    each("memory behind", "scales", list(scene.BEHIND), memory_behind, expect=BYTES, evidence=ARITHMETIC),
    ablation(
        Ingredients(),
        "scales",
        whole="all",
        without={
            "pairs of groups in memory": {"kernel": Kernel(align=4)},
            "a load without a mask": {"kernel": Kernel(mask=GROUPS)},
            "a byte 0xff behind": {"fill": "0xfe"},
            "clamps that drop NaN": {"kernel": Kernel(drops_nan=False)},
            "K modulo 128 of 1 to 64": {"hidden": 256},
            "a token of the last expert": {"routed": False},
        },
        ask=silent,
        expect={
            "all": WRONG,
            "pairs of groups in memory": RIGHT,
            "a load without a mask": RIGHT,
            "a byte 0xff behind": RIGHT,
            "clamps that drop NaN": NAN,
            "K modulo 128 of 1 to 64": RIGHT,
            "a token of the last expert": RIGHT,
        },
    ),
    each(
        "layer, replica",
        "scales",
        list(REMEDIES),
        lambda name, device: scene.replica(name, "0xff"),
        expect=LAYER,
    ),
    each(
        "odd groups, replica", "scales", list(REMEDIES), lambda name, device: scene.odd_groups(name), expect=ODD
    ),
    each(
        "layer",
        "scales",
        list(REMEDIES),
        _of_layer,
        expect=LAYER,
        needs=_package,
        evidence=_real,
        scene=PACKAGE,
    ),
    each(
        "layer, clean memory behind",
        "scales",
        list(REMEDIES),
        partial(_of_layer, fill="0x00"),
        expect=RIGHT,
        needs=_package,
        evidence=_real,
        scene=PACKAGE,
    ),
    each(
        "layer, batches",
        "scales",
        {f"{tokens} tokens": tokens for tokens in real.BATCHES["cuda"]},
        _batch,
        expect=WRONG,
        needs=_on_gpu,
        evidence=_real,
        scene=PACKAGE,
    ),
    each(
        "odd groups",
        "scales",
        list(REMEDIES),
        lambda name, device, told: answer((name, "odd groups"), device, told),
        expect=ODD,
        needs=_package,
        evidence=_real,
        scene=PACKAGE,
    ),
    each(
        "first product",
        "scales",
        list(scene.BEHIND),
        _product,
        expect=PRODUCT,
        reason=DRAWN,
        needs=_package,
        evidence=_real,
        scene=FIRST_PRODUCT,
    ),
    each(
        "first product, whole tiles",
        "scales",
        {"control 1": 0, "control 2": 1},
        _control,
        expect=RIGHT,
        needs=_package,
        evidence=_real,
        scene=FIRST_PRODUCT,
    ),
    each(
        "layout",
        "same",
        ["our index function"],
        _layout,
        expect="same bytes",
        needs=_package,
        evidence=_real,
        scene=FIRST_PRODUCT,
    ),
    each("end of the mapping", "scales", list(GUARD), guarded, expect=GUARD, needs=_on_gpu, evidence=_real),
    each(
        "neighbour",
        "scales",
        list(STAGES),
        answer,
        reason="what the allocator puts there is what is asked",
        needs=_on_gpu,
        evidence=_real,
        scene=NEIGHBOUR,
    ),
    each("cost", "measurement", ["loader_pads"], _cost, expect="measured", needs=_on_gpu, evidence=_real),
    *(
        fix(
            f"{name}, replica",
            "scales",
            off="none",
            on=name,
            ask=lambda remedy, device: scene.replica(remedy, "0xff"),
            wrong=_moved_replica,
            expect=FIXED if name in CURED else NOT_FIXED,
        )
        for name in itertools.islice(REMEDIES, 1, None)
    ),
    *(
        fix(
            name,
            "scales",
            off="none",
            on=name,
            ask=_of_layer,
            wrong=_moved,
            expect=FIXED if name in CURED else NOT_FIXED,
            needs=_package,
            evidence=_real,
            scene=PACKAGE,
        )
        for name in itertools.islice(REMEDIES, 1, None)
    ),
    fix(
        "mxfp4_scale_tail",
        "scales",
        off=0,
        on=1,
        again=2,
        ask=_turn,
        wrong=_turn_moved,
        needs=_package,
        evidence=_real,
        scene=Scene("vLLM's loader with the patch", _loaded),
    ),
)
