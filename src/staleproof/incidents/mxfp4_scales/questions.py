"""The questions of incident 6: which bytes are read, how they change an answer, and which remedies work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from staleproof.device import Provenance
from staleproof.grades import ARITHMETIC, Evidence, Grade
from staleproof.incidents.mxfp4_scales import broken, released, scene
from staleproof.incidents.mxfp4_scales.broken import GROUPS, SHIPPED, Kernel, Shape
from staleproof.incidents.mxfp4_scales.remedies import READERS, REMEDIES
from staleproof.incidents.mxfp4_scales.scene import NAN, RIGHT, SMALL, WRONG
from staleproof.lab import FIXED, NOT_FIXED, Answer, Fix, Incident, bad, good, good_if, open_
from staleproof.vllm.plugin import patches

incident = Incident("mxfp4_scales")

# --- Which bytes, by arithmetic.

INSIDE, PAST = "inside", "past the end"
ALWAYS, SOMETIMES, NEVER = "always 0xff", "0xff now and then", "never 0xff"
# Projections of gpt-oss. K of w13 is the hidden size, 2880. K of w2 is the intermediate size of a rank, which
# vLLM rounds up to a multiple of 64.
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


@incident.question(
    "over-read",
    SHAPES,
    expect={
        "gpt-oss-20b w13": PAST,
        "gpt-oss-120b w13": PAST,
        "gpt-oss-120b w13, TP 2": PAST,
        "gpt-oss-120b w13, TP 4": PAST,
        "gpt-oss-120b w13, TP 8": PAST,
        "gpt-oss-120b w2": PAST,
        "gpt-oss-120b w2, TP 2": PAST,
        "gpt-oss-120b w2, TP 4": INSIDE,
        "gpt-oss-120b w2, TP 8": INSIDE,
        "K 2944": INSIDE,
        "K 3072": INSIDE,
    },
    evidence=ARITHMETIC,
)
def over_read(shape: Shape, device: str) -> Answer:
    """How many bytes does the kernel read past the last scale, and which columns do they change?"""
    behind, reaching, padded = broken.past_the_end(shape), broken.columns_behind(shape), Kernel(align=4)
    return good_if(
        not behind,
        PAST if behind else INSIDE,
        bytes_behind=behind,
        bytes_behind_that_reach_a_column=len(reaching),
        columns=sorted({*reaching.values()}),
        scale_bytes=broken.stored_bytes(shape, SHIPPED),
        scale_bytes_padded=broken.stored_bytes(shape, padded),
        bytes_behind_padded=broken.past_the_end(shape, padded),
    )


@incident.question(
    "byte behind",
    {"0xff": [0xFF], "the 255 others": range(0xFF)},
    expect={"0xff": NAN, "the 255 others": RIGHT},
    evidence=ARITHMETIC,
)
def byte_values(values: Sequence[int], device: str) -> Answer:
    """Which of these bytes, as a scale, turn a weight of 0 into NaN?"""
    found = (broken.e8m0(torch.tensor(values, dtype=torch.uint8)) * 0).isnan().nonzero().flatten()
    return good_if(not len(found), NAN if len(found) else RIGHT, asked=len(values), nan=len(found))


@incident.question(
    "memory behind",
    [*scene.BEHIND],
    expect={
        "0x00": NEVER,
        "0x7f": NEVER,
        "0xfe": NEVER,
        "0xff": ALWAYS,
        "int32 -1": ALWAYS,
        "bf16 -inf": ALWAYS,
        "fp32 -inf": ALWAYS,
        "bf16 NaN, 0x7fc0": NEVER,
        "fp32 NaN, 0x7fc00000": NEVER,
        "bf16 N(0, 1)": SOMETIMES,
        "fp32 N(0, 1)": SOMETIMES,
        "random bytes": SOMETIMES,
        "other scales": NEVER,
    },
    evidence=ARITHMETIC,
)
def memory_behind(name: str, device: str) -> Answer:
    """How often do the 32 bytes that reach a column of gpt-oss' first product hold a 0xff? Counted."""
    chance = float((scene.bytes_of(name, 20_000 * 32).view(-1, 32) == 0xFF).any(1).float().mean())
    answer, word = (good, NEVER) if chance == 0 else (bad, ALWAYS) if chance == 1 else (open_, SOMETIMES)
    return answer(word, counted=chance, first_bytes=scene.bytes_of(name, 8).tolist())


# --- The replica's layer.


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


@incident.question(
    "ablation",
    {
        "all": Ingredients(),
        "pairs of groups in memory": Ingredients(kernel=Kernel(align=4)),
        "a load without a mask": Ingredients(kernel=Kernel(mask=GROUPS)),
        "a byte 0xff behind": Ingredients(fill="0xfe"),
        "clamps that drop NaN": Ingredients(kernel=Kernel(drops_nan=False)),
        "K modulo 128 of 1 to 64": Ingredients(hidden=256),
        "a token of the last expert": Ingredients(routed=False),
    },
    expect={
        "all": WRONG,
        "pairs of groups in memory": RIGHT,
        "a load without a mask": RIGHT,
        "a byte 0xff behind": RIGHT,
        "clamps that drop NaN": NAN,
        "K modulo 128 of 1 to 64": RIGHT,
        "a token of the last expert": RIGHT,
    },
)
def without(a: Ingredients, device: str) -> Answer:
    """The layer with one ingredient taken away. Is it right?"""
    layer = scene.layer_of(SMALL._replace(hidden=a.hidden))
    if not a.routed:
        layer = replace(layer, topk_ids=torch.arange(SMALL.top_k).expand(layer.topk_ids.shape))
    return scene.judged(layer, partial(scene.layer, kernel=a.kernel), a.fill)


@incident.question(
    "layer, replica",
    [*REMEDIES],
    expect={
        "none": WRONG,
        "loader_pads": RIGHT,
        "layout_pads": RIGHT,
        "mask_after_load": RIGHT,
        "mask_load": RIGHT,
        "nan_to_num": WRONG,
        "zero_once": WRONG,
    },
)
def layer_with(remedy: str, device: str) -> Answer:
    """The layer over bytes of 0xff, with each remedy. Is it right?"""
    return scene.replica(remedy)


@incident.question(
    "odd groups, replica",
    READERS,
    expect={"none": NAN, "loader_pads": NAN, "layout_pads": NAN, "mask_after_load": RIGHT, "mask_load": NAN},
)
def odd_groups(remedy: str, device: str) -> Answer:
    """K of three groups: the layout adds a fourth, which holds 0xff. Does the product change?"""
    return scene.odd_groups(remedy)


def moves_rows(remedy: str, device: str) -> str | None:
    """Whether 0xff after the scales gives other rows than zeros there."""
    return _moved(layer_with(remedy, device))


def _moved(answer: Answer) -> str | None:
    changed = answer.numbers["changed"]
    return f"0xff behind the scales changes {changed} rows" if changed else None


incident.fixes(
    layer_with,
    {f"{name}, replica": Fix(off="none", on=name) for name in REMEDIES if name != "none"},
    compare=moves_rows,
    expect={
        "loader_pads, replica": FIXED,
        "layout_pads, replica": FIXED,
        "mask_after_load, replica": FIXED,
        "mask_load, replica": FIXED,
        "nan_to_num, replica": NOT_FIXED,
        "zero_once, replica": NOT_FIXED,
    },
)


@incident.question("watch, replica", ["layer"], expect="measured")
def watch(name: str, device: str) -> Answer:
    """What could a monitor of the layer's output and of its intermediate see, on quiet and loud inputs?"""
    return open_("measured", **scene.watched(scene.layer_of(tokens=256), scene.layer))


# --- The loader of a release, around our layout.


@dataclass(frozen=True)
class Loader:
    """The loader of a release of vLLM, with the patch ``mxfp4_scale_tail`` or without."""

    release: str
    patched: bool = False


def of_release(loader: Loader) -> Evidence:
    """Whose code runs."""
    return Evidence(Grade.REAL, f"vLLM {loader.release}'s loader on a CPU")


FAULTY = ("0.16.0", "0.19.1", "0.22.1")


@incident.question(
    "loader",
    {f"vLLM {release}": Loader(release) for release in (*FAULTY, "0.33.0")},
    expect={"vLLM 0.16.0": WRONG, "vLLM 0.19.1": WRONG, "vLLM 0.22.1": WRONG, "vLLM 0.33.0": RIGHT},
    evidence=of_release,
)
def loaded(loader: Loader, device: str) -> Answer:
    """The layer over bytes of 0xff, with the scales that a release's own loader converts. Is it right?"""
    patch = patches()["mxfp4_scale_tail"]
    applied = patch.applied(loader.release) if loader.patched else contextlib.nullcontext()
    with released.loader(loader.release) as module, applied:
        answer = scene.judged(scene.layer_of(), partial(released.layer, module=module), "0xff")
    # vLLM's file runs on the CPU even if there is a GPU.
    return replace(answer, provenance=None if device == "cpu" else Provenance.INTERPRETED)


def loader_moves_rows(loader: Loader, device: str) -> str | None:
    """Whether 0xff after this loader's scales gives other rows than zeros there."""
    return _moved(loaded(loader, device))


incident.fixes(
    loaded,
    {
        f"mxfp4_scale_tail, vLLM {release}": Fix(off=Loader(release), on=Loader(release, patched=True))
        for release in FAULTY
    },
    compare=loader_moves_rows,
    evidence=of_release,
)
