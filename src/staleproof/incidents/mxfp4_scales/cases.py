"""The cases of incident 6: which bytes are read, how they change an answer, and which remedies work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.case import Fix, MissingError, Reading, Scene, ablation, each, fix, reading
from staleproof.cases.finding import ARITHMETIC, Evidence, Grade
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.incidents.mxfp4_scales import broken, real, scene, whole
from staleproof.incidents.mxfp4_scales.broken import GROUPS, SHIPPED, Kernel, Shape
from staleproof.incidents.mxfp4_scales.real import READERS
from staleproof.incidents.mxfp4_scales.remedies import REMEDIES
from staleproof.incidents.mxfp4_scales.scene import NAN, RIGHT, SMALL, TOKENS, WRONG
from staleproof.kernels import vllm_matmul_ogs

WORDS = "scales"
INSIDE, PAST, ILLEGAL = "inside", "past the end", "illegal memory access"
ALWAYS, SOMETIMES, NEVER = "always 0xff", "0xff now and then", "never 0xff"

# Projections of gpt-oss. K of the first is the hidden size, 2880. K of the second is the intermediate size of
# a rank, which vLLM rounds up to a multiple of 64.
OF_RANK = {"": 2880, ", TP 2": 1472, ", TP 4": 768, ", TP 8": 384}
SHAPES = {"gpt-oss-20b w13": Shape(32, 5760, 2880)}
SHAPES |= {f"gpt-oss-120b w13{tp}": Shape(128, 2 * size, 2880) for tp, size in OF_RANK.items()}
SHAPES |= {f"gpt-oss-120b w2{tp}": Shape(128, 2880, size) for tp, size in OF_RANK.items()}
SHAPES |= {f"K {k}": Shape(32, 5760, k) for k in (2944, 3072)}


def over_read(shape: Shape, device: str) -> Reading:
    """How many bytes the kernel reads past the last scale, and which columns of the product they change."""
    behind, reaching, padded = broken.past_the_end(shape), broken.columns_behind(shape), Kernel(align=4)
    return reading(
        PAST if behind else INSIDE,
        bytes_behind=behind,
        bytes_behind_that_reach_a_column=len(reaching),
        columns=sorted({*reaching.values()}),
        scale_bytes=broken.stored_bytes(shape, SHIPPED),
        scale_bytes_padded=broken.stored_bytes(shape, padded),
        bytes_behind_padded=broken.past_the_end(shape, padded),
    )


def memory_behind(name: str, device: str) -> Reading:
    """How often, by count, the 32 bytes that reach a column of gpt-oss' first product contain a 0xff."""
    chance = float((scene.bytes_of(name, 20_000 * 32).view(-1, 32) == 0xFF).any(1).float().mean())
    word = NEVER if chance == 0 else ALWAYS if chance == 1 else SOMETIMES
    return reading(word, counted=chance, first_bytes=scene.bytes_of(name, 8).tolist())


def byte_values(values: Sequence[int], device: str) -> Reading:
    """Which of these bytes, as a scale, turn a weight of 0 into NaN."""
    found = (broken.e8m0(torch.tensor(values, dtype=torch.uint8)) * 0).isnan().nonzero().flatten()
    return reading(NAN if len(found) else RIGHT, asked=len(values), nan=len(found))


@dataclass(frozen=True)
class Ingredients:
    """The ingredients of the silent wrong answer.

    Attributes:
        kernel: layout, mask and clamps.
        fill: the bytes after the scales.
        hidden: K of the first product.
        routed: whether a token is routed to the last expert.
    """

    kernel: Kernel = SHIPPED
    fill: str = "0xff"
    hidden: int = SMALL.hidden
    routed: bool = True


def silent(a: Ingredients, device: str) -> Reading:
    """The replica's layer with these ingredients."""
    layer = scene.layer_on("cpu", size=SMALL._replace(hidden=a.hidden))
    if not a.routed:
        layer = replace(layer, topk_ids=torch.arange(SMALL.top_k).expand(layer.topk_ids.shape))
    return scene.judged(layer, partial(scene.layer, kernel=a.kernel), [a.fill])[0]


# --- vLLM's own kernel. A probe is the key under which a child reports an answer; for a remedy it is
# (remedy, fill, tokens).

Probe = tuple[Any, ...]
Told = Mapping[Any, Any]


def _layer(remedy: str, fill: str = "0xff", tokens: int = TOKENS) -> Probe:
    return remedy, fill, tokens


def _package(probe: Any, device: str) -> str | None:
    return vllm_matmul_ogs.unavailable_reason(device)


def _on_gpu(probe: Any, device: str) -> str | None:
    return "needs a Hopper GPU" if device == "cpu" else _package(probe, device)


def _whole_on_gpu(probe: Any, device: str) -> str | None:
    return _on_gpu(probe, device) or (None if devices.version_of("vllm") else "no vLLM is installed")


def _real(probe: Any = None) -> Evidence:
    remedy = REMEDIES.get(probe[0] if isinstance(probe, tuple) else str(probe))
    what = "one line of it edited" if remedy and remedy.edit else "as shipped"
    return Evidence(Grade.REAL, f"vLLM {vllm_matmul_ogs.version()} triton_kernels, {what}")


def _whole(probe: Any) -> Evidence:
    return Evidence(Grade.REAL, f"vLLM {devices.version_of('vllm') or ''}, whole")


def _children(*calls: Probe) -> Told:
    """Answers of child processes by probe. If a child fails, :func:`answer` raises for missing answers."""
    told: dict[Any, Any] = {}
    for function, *arguments in calls:
        ended = children.call(function, *arguments, timeout_s=300)
        told |= dict(ended.told)
        if ended.code:
            told["ended"] = f"a child ended with {ended.code}: {ended.last_line}"
    return told


def _asked(device: str) -> Told:
    same = [name for name in TRIED if REMEDIES[name].edit is None]
    edited = [(real.package, device, name) for name in TRIED if REMEDIES[name].edit]
    return _children((real.package, device, "none"), *edited, (real.package, device, *same, real.AGAIN))


TRIED = [name for name in REMEDIES if name != "none"]
PACKAGE = Scene("vLLM's kernel with each remedy", _asked)
FIRST_PRODUCT = Scene("vLLM's first product", lambda device: _children((real.table, device)))
LOADER = Scene("vLLM's loader with the patch and without", lambda device: _children((real.loader, device)))
NEIGHBOUR = Scene("24 layers", lambda device: _children((real.neighbour, device)))
ENGINE = Scene("a whole vLLM", lambda device: _children((whole.ask,)))


def answer(probe: Any, device: str, told: Told) -> Reading:
    """The answer of a child to this probe."""
    if probe not in told:
        raise MissingError(told.get("ended", f"{probe} was not asked"))
    return told[probe]


def served(stage: str, device: str, told: Told) -> Reading:
    """Answers of a whole vLLM at a stage, compared with those after free bytes behind scales are zeroed."""
    said: Any = answer(stage, device, told)
    pairs = [*zip(said["answers"], said["over_zeros"], strict=True)]
    changed = sum(ours != theirs for ours, theirs in pairs)
    word = NAN if any(ours[1] != ours[1] for ours, _ in pairs) else WRONG if changed else RIGHT
    found = {name: said[name] for name in ("owners", "harmful")}
    return reading(word, **found, changed_answers=changed, answers=len(pairs))


def guarded(remedy: str, device: str) -> Reading:
    """The first product in a child process, its scales at the end of a mapping."""
    ended = children.call(real.guarded, remedy, timeout_s=120)
    if ended.code and ILLEGAL in ended.stderr:
        return reading(ILLEGAL, note=ended.last_line)
    return ended.answer()


def _child(function: Callable[[], Reading], device: str) -> Reading:
    return children.call(function, timeout_s=200).answer()


def _watch(name: str, device: str) -> Reading:
    return scene.watched(scene.layer_on("cpu", tokens=256), scene.layer)


def _unmoved(ask: Callable[..., Reading]) -> Callable[..., str | None]:
    """The comparison for a fix: with the remedy, 0xff after the scales must give the same rows as zeros."""

    def wrong(*asked: Any) -> str | None:
        changed = ask(*asked).numbers["changed"]
        return f"0xff behind the scales changes {changed} rows" if changed else None

    return wrong


def _drawn(name: str, device: str) -> str:
    """The expected verdict: whether a random byte that reaches a column of the first product is 0xff.

    The layers of the two devices have other sizes, so that other bytes reach their columns.
    """
    size, behind = scene.SIZES[device], scene.bytes_of(name)
    reaching = broken.columns_behind(Shape(size.experts, 2 * size.inter, size.hidden))
    return NAN if any(behind[byte] == 0xFF for byte in reaching) else RIGHT


PRODUCTS = {name: ("first product", name) for name in (*scene.BEHIND, "control 1", "control 2")}
WITH_NAN = ("0xff", "int32 -1", "bf16 -inf", "fp32 -inf")
DRAWN = ("bf16 N(0, 1)", "fp32 N(0, 1)", "random bytes")
BYTES = dict.fromkeys(scene.BEHIND, NEVER) | dict.fromkeys(WITH_NAN, ALWAYS) | dict.fromkeys(DRAWN, SOMETIMES)
PRODUCT: dict[str, Any] = dict.fromkeys(PRODUCTS, RIGHT) | dict.fromkeys(WITH_NAN, NAN)
PRODUCT |= dict.fromkeys(DRAWN, lambda probe: partial(_drawn, probe[1]))
ALLOCATOR = "what the allocator puts there is what is asked"
CURED = ("loader_pads", "layout_pads", "mask_after_load", "mask_load")
LAYER = {name: RIGHT if name in CURED else WRONG for name in REMEDIES}
ODD = {name: RIGHT if name == "mask_after_load" else NAN for name in REMEDIES}
# The read stays inside if more groups are stored or fewer are read. A mask after the load changes no read.
GUARD = {name: ILLEGAL if name in ("none", "mask_after_load") else RIGHT for name in READERS}
OF_K = {name: PAST if 1 <= shape.k % 128 <= 64 else INSIDE for name, shape in SHAPES.items()}
VALUES = {"0xff": [0xFF], "the 255 others": range(0xFF)}
OF_BYTE = {"0xff": NAN, "the 255 others": RIGHT}
BATCHES = {f"{r}, tokens: {n}": _layer(r, tokens=n) for r in real.BATCHED for n in real.BATCHES}
ZEROS = {r: _layer(r, "0x00") for r in REMEDIES}
# The ingredient that is removed, and the verdict then.
WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "pairs of groups in memory": ({"kernel": Kernel(align=4)}, RIGHT),
    "a load without a mask": ({"kernel": Kernel(mask=GROUPS)}, RIGHT),
    "a byte 0xff behind": ({"fill": "0xfe"}, RIGHT),
    "clamps that drop NaN": ({"kernel": Kernel(drops_nan=False)}, NAN),
    "K modulo 128 of 1 to 64": ({"hidden": 256}, RIGHT),
    "a token of the last expert": ({"routed": False}, RIGHT),
}
STAGES = ["loaded", "profiled", "KV caches", *(f"{n} requests sampled" for n in real.STEPS)]
WHOLE_STAGES = ["started", *(f"{n} requests sampled" for n in whole.STEPS)]

REAL: dict[str, Any] = {"needs": _package, "evidence": _real}
ON_GPU = REAL | {"needs": _on_gpu}
WHOLE: dict[str, Any] = {"needs": _whole_on_gpu, "evidence": _whole}
OF_PACKAGE, OF_PRODUCT = REAL | {"scene": PACKAGE}, REAL | {"scene": FIRST_PRODUCT}


def _fixes() -> Iterator[Fix]:
    """Off / on / off of each remedy, in our replica and in vLLM's package; and of the patch."""
    cures = {name: FIXED if name in CURED else NOT_FIXED for name in TRIED}
    ours: dict[str, Any] = {"ask": scene.replica, "wrong": _unmoved(scene.replica)}
    for name, expect in cures.items():
        yield fix(f"{name}, replica", WORDS, off="none", on=name, expect=expect, **ours)
    shared: dict[str, Any] = {"ask": answer, "wrong": _unmoved(answer), **REAL}
    for name, expect in cures.items():
        off, on, again = map(_layer, ("none", name, real.AGAIN))
        yield fix(name, WORDS, off=off, on=on, again=again, expect=expect, scene=PACKAGE, **shared)
    yield fix("mxfp4_scale_tail", WORDS, off=0, on=1, again=2, scene=LOADER, **shared)


TABLE = Table(
    "mxfp4_scales",
    each("over-read", WORDS, SHAPES, over_read, expect=OF_K, evidence=ARITHMETIC),
    each("byte behind", WORDS, VALUES, byte_values, expect=OF_BYTE, evidence=ARITHMETIC),
    each("memory behind", WORDS, list(BYTES), memory_behind, expect=BYTES, evidence=ARITHMETIC),
    ablation(Ingredients(), WORDS, whole="all", without=WITHOUT, ask=silent, expect=WRONG),
    each("layer, replica", WORDS, list(REMEDIES), scene.replica, expect=LAYER),
    each("odd groups, replica", WORDS, READERS, lambda name, device: scene.odd_groups(name), expect=ODD),
    each("layer", WORDS, {r: _layer(r) for r in REMEDIES}, answer, expect=LAYER, **OF_PACKAGE),
    each("layer, zeros behind", WORDS, ZEROS, answer, expect=RIGHT, **OF_PACKAGE),
    each("layer, batches", WORDS, BATCHES, answer, expect=lambda p: LAYER[p[0]], **OF_PACKAGE | ON_GPU),
    each("layer", WORDS, {"marlin": real.marlin}, _child, expect=RIGHT, **WHOLE),
    each("odd groups", WORDS, {r: (r, "odd groups") for r in READERS}, answer, expect=ODD, **OF_PACKAGE),
    each("first product", WORDS, PRODUCTS, answer, expect=PRODUCT, **OF_PRODUCT),
    each("layout", "same", ["layout"], answer, expect="same bytes", **OF_PRODUCT),
    each("end of the mapping", WORDS, READERS, guarded, expect=GUARD, **ON_GPU),
    each("neighbour", WORDS, STAGES, answer, reason=ALLOCATOR, scene=NEIGHBOUR, **ON_GPU),
    each("neighbour, whole vLLM", WORDS, WHOLE_STAGES, served, reason=ALLOCATOR, scene=ENGINE, **WHOLE),
    each("watch, replica", "measurement", ["layer"], _watch, expect="measured"),
    each("watch", "measurement", {"layer": real.watch}, _child, expect="measured", **ON_GPU),
    each("cost", "measurement", {"loader_pads": real.cost}, _child, expect="measured", **ON_GPU),
    _fixes(),
)
