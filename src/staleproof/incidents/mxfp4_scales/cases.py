"""The cases of incident 6: which bytes are read, what they make of an answer, and what cures it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from staleproof.cases import children
from staleproof.cases.case import Fix, MissingError, Reading, Scene, ablation, each, fix, reading
from staleproof.cases.finding import ARITHMETIC, Evidence, Grade
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.incidents.mxfp4_scales import broken, real, scene
from staleproof.incidents.mxfp4_scales.broken import GROUPS, SHIPPED, Kernel, Shape
from staleproof.incidents.mxfp4_scales.real import READERS
from staleproof.incidents.mxfp4_scales.remedies import REMEDIES
from staleproof.incidents.mxfp4_scales.scene import NAN, RIGHT, SMALL, TOKENS, WRONG
from staleproof.kernels import vllm_matmul_ogs

WORDS = "scales"
INSIDE, PAST, ILLEGAL = "inside", "past the end", "illegal memory access"
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


def byte_values(values: Sequence[int], device: str) -> Reading:
    """Which of these bytes, as a scale, make a NaN of a weight of 0."""
    found = (broken.e8m0(torch.tensor(values, dtype=torch.uint8)) * 0).isnan().nonzero().flatten()
    return reading(NAN if len(found) else RIGHT, asked=len(values), nan=len(found))


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
    same = [name for name, remedy in REMEDIES.items() if remedy.edit is None and name != "none"]
    edited = [(real.package, device, name) for name, remedy in REMEDIES.items() if remedy.edit]
    return _children((real.package, device, "none"), *edited, (real.package, device, *same, real.AGAIN))


def _loaded(device: str) -> Told:
    given = str(vllm_matmul_ogs.version()), str(vllm_matmul_ogs.root())
    return _children((real.loader, device, *given))


PACKAGE = Scene("vLLM's kernel with each remedy", _asked)
FIRST_PRODUCT = Scene("vLLM's first product", lambda device: _children((real.table, device)))
NEIGHBOUR = Scene("24 layers", lambda device: _children((real.neighbour, device)))
LOADER = Scene("vLLM's loader with the patch and without", _loaded)


def answer(probe: Any, device: str, told: Told) -> Reading:
    """What a child told about this probe."""
    if probe not in told:
        raise MissingError(told.get("ended", f"{probe} was not asked"))
    return told[probe]


def of_layer(label: str, device: str, told: Told, fill: str = "0xff", tokens: int = TOKENS) -> Reading:
    """What vLLM's kernel made of the layer with a remedy."""
    return answer((label, fill, tokens), device, told)


def of_product(name: str, device: str, told: Told) -> Reading:
    """vLLM's first product with these bytes behind, or ``"layout"``; ``"control 1"``: of whole tiles."""
    control = name.startswith("control")
    k = real.CONTROLS[device][int(name[-1]) - 1] if control else real.size_on(device).hidden
    return answer((k, "0xff" if control else name), device, told)


def _moved(said: Reading) -> str | None:
    changed = said.numbers["changed"]
    return f"0xff behind the scales changes {changed} rows" if changed else None


def guarded(remedy: str, device: str) -> Reading:
    """The first product in a child process, its scales at the end of a mapping."""
    ended = children.call(real.guarded, remedy, timeout_s=120)
    if ended.code and ILLEGAL in ended.stderr:
        return reading(ILLEGAL, note=ended.last_line)
    return ended.answer()


def _cost(remedy: Any, device: str) -> Reading:
    return children.call(real.cost, device, timeout_s=200).answer()


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
VALUES = {"0xff": [0xFF], "the 255 others": range(0xFF)}
OF_BYTE = {"0xff": NAN, "the 255 others": RIGHT}
DRAWN = "whether these 32 random bytes hold 0xff is a matter of chance"
ALLOCATOR = "what the allocator puts there is what is asked"
BATCHES = {
    f"{label}, tokens: {n}": (label, n) for label in ("none", "loader_pads") for n in real.BATCHES["cuda"]
}
# What is left out, and the verdict then.
WITHOUT: dict[str, dict[str, Any]] = {
    "pairs of groups in memory": {"kernel": Kernel(align=4)},
    "a load without a mask": {"kernel": Kernel(mask=GROUPS)},
    "a byte 0xff behind": {"fill": "0xfe"},
    "clamps that drop NaN": {"kernel": Kernel(drops_nan=False)},
    "K modulo 128 of 1 to 64": {"hidden": 256},
    "a token of the last expert": {"routed": False},
}
ABLATED = dict.fromkeys(WITHOUT, RIGHT) | {"all": WRONG, "clamps that drop NaN": NAN}
STAGES = ["loaded", "profiled", "KV caches", *(f"{n} requests sampled" for n in real.STEPS)]

REAL: dict[str, Any] = {"needs": _package, "evidence": _real}
ON_GPU = REAL | {"needs": _on_gpu}
TRIED = [name for name in REMEDIES if name != "none"]


def _ours(remedy: str, device: str) -> Reading:
    return scene.replica(remedy, "0xff")


def _fixes(replica: bool) -> Iterator[Fix]:
    """Off / on / off of each remedy, in our replica or in vLLM's package."""
    for name in TRIED:
        shared: dict[str, Any] = {"off": "none", "on": name, "expect": FIXED if name in CURED else NOT_FIXED}
        if replica:
            yield fix(f"{name}, replica", WORDS, ask=_ours, wrong=lambda *on: _moved(_ours(*on)), **shared)
        else:
            wrong = lambda *on: _moved(of_layer(*on))  # noqa: E731
            shared |= REAL | {"again": real.AGAIN, "scene": PACKAGE}
            yield fix(name, WORDS, ask=of_layer, wrong=wrong, **shared)


def of_batch(subject: tuple[str, int], device: str, told: Told) -> Reading:
    """What vLLM's kernel made of a batch of this many tokens."""
    return of_layer(subject[0], device, told, tokens=subject[1])


def _odd(name: str, device: str, told: Told) -> Reading:
    return answer((name, "odd groups"), device, told)


def _of_shape(shape: Shape) -> str:
    return PAST if 1 <= shape.k % 128 <= 64 else INSIDE


def _of_batch(subject: tuple[str, int]) -> str:
    return LAYER[subject[0]]


_ZEROS = partial(of_layer, fill="0x00")
LAYERS, FILLS, CONTROLS = list(REMEDIES), list(scene.BEHIND), ["control 1", "control 2"]
OF_PACKAGE, OF_PRODUCT = REAL | {"scene": PACKAGE}, REAL | {"scene": FIRST_PRODUCT}
COMPARED: dict[str, Any] = {"wrong": lambda *on: _moved(answer(*on)), "scene": LOADER}

TABLE = Table(
    "mxfp4_scales",
    each("over-read", WORDS, SHAPES, over_read, expect=_of_shape, evidence=ARITHMETIC),
    each("byte behind", WORDS, VALUES, byte_values, expect=OF_BYTE, evidence=ARITHMETIC),
    each("memory behind", WORDS, FILLS, memory_behind, expect=BYTES, evidence=ARITHMETIC),
    ablation(Ingredients(), WORDS, whole="all", without=WITHOUT, ask=silent, expect=ABLATED),
    each("layer, replica", WORDS, LAYERS, _ours, expect=LAYER),
    each("odd groups, replica", WORDS, READERS, lambda name, device: scene.odd_groups(name), expect=ODD),
    each("layer", WORDS, LAYERS, of_layer, expect=LAYER, **OF_PACKAGE),
    each("layer, zeros behind", WORDS, LAYERS, _ZEROS, expect=RIGHT, **OF_PACKAGE),
    each("layer, batches", WORDS, BATCHES, of_batch, expect=_of_batch, **OF_PACKAGE | ON_GPU),
    each("odd groups", WORDS, READERS, _odd, expect=ODD, **OF_PACKAGE),
    each("first product", WORDS, FILLS, of_product, expect=PRODUCT, reason=DRAWN, **OF_PRODUCT),
    each("first product", WORDS, CONTROLS, of_product, expect=RIGHT, **OF_PRODUCT),
    each("layout", "same", ["layout"], of_product, expect="same bytes", **OF_PRODUCT),
    each("end of the mapping", WORDS, READERS, guarded, expect=GUARD, **ON_GPU),
    each("neighbour", WORDS, STAGES, answer, reason=ALLOCATOR, scene=NEIGHBOUR, **ON_GPU),
    each("cost", "measurement", ["loader_pads"], _cost, expect="measured", **ON_GPU),
    _fixes(replica=True),
    _fixes(replica=False),
    fix("mxfp4_scale_tail", WORDS, off=0, on=1, again=2, ask=answer, **COMPARED, **REAL),
)
