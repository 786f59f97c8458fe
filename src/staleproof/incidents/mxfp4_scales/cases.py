"""The cases of incident 6: which bytes are read, how they change an answer, and which remedies work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from staleproof.cases.case import Fix, Reading, ablation, each, fix, reading
from staleproof.cases.finding import ARITHMETIC, Evidence, Grade
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.device import Provenance
from staleproof.incidents.mxfp4_scales import broken, released, scene
from staleproof.incidents.mxfp4_scales.broken import GROUPS, SHIPPED, Kernel, Shape
from staleproof.incidents.mxfp4_scales.remedies import READERS, REMEDIES
from staleproof.incidents.mxfp4_scales.scene import NAN, RIGHT, SMALL, WRONG
from staleproof.vllm.plugin import patches

WORDS = "scales"
INSIDE, PAST = "inside", "past the end"
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
    layer = scene.layer_of(SMALL._replace(hidden=a.hidden))
    if not a.routed:
        layer = replace(layer, topk_ids=torch.arange(SMALL.top_k).expand(layer.topk_ids.shape))
    return scene.judged(layer, partial(scene.layer, kernel=a.kernel), [a.fill])[0]


# --- The loader of a release, around our layout.


@dataclass(frozen=True)
class Loader:
    """The loader of a release of vLLM, with the patch ``mxfp4_scale_tail`` or without."""

    release: str
    patched: bool = False


def loaded(subject: Loader, device: str) -> Reading:
    """The layer with the scales that a release's own loader converts, and 0xff after them."""
    patch = patches()["mxfp4_scale_tail"]
    applied = patch.applied(subject.release) if subject.patched else contextlib.nullcontext()
    with released.loader(subject.release) as module, applied:
        (found,) = scene.judged(scene.layer_of(), partial(released.layer, module=module), ["0xff"])
    # vLLM's file runs on the CPU even if there is a GPU.
    return replace(found, provenance=None if device == "cpu" else Provenance.INTERPRETED)


def _watch(name: str, device: str) -> Reading:
    return scene.watched(scene.layer_of(tokens=256), scene.layer)


def _unmoved(ask: Callable[..., Reading]) -> Callable[..., str | None]:
    """The comparison for a fix: with the remedy, 0xff after the scales must give the same rows as zeros."""

    def wrong(*given: Any) -> str | None:
        changed = ask(*given).numbers["changed"]
        return f"0xff behind the scales changes {changed} rows" if changed else None

    return wrong


WITH_NAN = ("0xff", "int32 -1", "bf16 -inf", "fp32 -inf")
DRAWN = ("bf16 N(0, 1)", "fp32 N(0, 1)", "random bytes")
BYTES = dict.fromkeys(scene.BEHIND, NEVER) | dict.fromkeys(WITH_NAN, ALWAYS) | dict.fromkeys(DRAWN, SOMETIMES)
CURED = ("loader_pads", "layout_pads", "mask_after_load", "mask_load")
LAYER = {name: RIGHT if name in CURED else WRONG for name in REMEDIES}
ODD = {name: RIGHT if name == "mask_after_load" else NAN for name in REMEDIES}
OF_K = {name: PAST if 1 <= shape.k % 128 <= 64 else INSIDE for name, shape in SHAPES.items()}
VALUES = {"0xff": [0xFF], "the 255 others": range(0xFF)}
OF_BYTE = {"0xff": NAN, "the 255 others": RIGHT}
# The ingredient that is removed, and the verdict then.
WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "pairs of groups in memory": ({"kernel": Kernel(align=4)}, RIGHT),
    "a load without a mask": ({"kernel": Kernel(mask=GROUPS)}, RIGHT),
    "a byte 0xff behind": ({"fill": "0xfe"}, RIGHT),
    "clamps that drop NaN": ({"kernel": Kernel(drops_nan=False)}, NAN),
    "K modulo 128 of 1 to 64": ({"hidden": 256}, RIGHT),
    "a token of the last expert": ({"routed": False}, RIGHT),
}
# The newest release has no fault: its loader pads the scales.
RELEASES = {"0.16.0": WRONG, "0.19.1": WRONG, "0.22.1": WRONG, "0.33.0": RIGHT}


def _loader(subject: Loader) -> Evidence:
    return Evidence(Grade.REAL, f"vLLM {subject.release}'s loader on a CPU")


def _fixes() -> Iterator[Fix]:
    """Off / on / off of each remedy in our replica, and of the patch around each release's loader."""
    ours: dict[str, Any] = {"ask": scene.replica, "wrong": _unmoved(scene.replica)}
    for name in REMEDIES:
        if name != "none":
            expect = FIXED if name in CURED else NOT_FIXED
            yield fix(f"{name}, replica", WORDS, off="none", on=name, expect=expect, **ours)
    shared: dict[str, Any] = {"ask": loaded, "wrong": _unmoved(loaded), "evidence": _loader}
    for release, verdict in RELEASES.items():
        if verdict == WRONG:
            off, on = Loader(release), Loader(release, patched=True)
            yield fix(f"mxfp4_scale_tail, vLLM {release}", WORDS, off=off, on=on, **shared)


TABLE = Table(
    "mxfp4_scales",
    each("over-read", WORDS, SHAPES, over_read, expect=OF_K, evidence=ARITHMETIC),
    each("byte behind", WORDS, VALUES, byte_values, expect=OF_BYTE, evidence=ARITHMETIC),
    each("memory behind", WORDS, list(BYTES), memory_behind, expect=BYTES, evidence=ARITHMETIC),
    ablation(Ingredients(), WORDS, whole="all", without=WITHOUT, ask=silent, expect=WRONG),
    each("layer, replica", WORDS, list(REMEDIES), scene.replica, expect=LAYER),
    each("odd groups, replica", WORDS, READERS, lambda name, device: scene.odd_groups(name), expect=ODD),
    each(
        "loader",
        WORDS,
        {f"vLLM {release}": Loader(release) for release in RELEASES},
        loaded,
        expect={f"vLLM {release}": verdict for release, verdict in RELEASES.items()},
        evidence=_loader,
    ),
    each("watch, replica", "measurement", ["layer"], _watch, expect="measured"),
    _fixes(),
)
