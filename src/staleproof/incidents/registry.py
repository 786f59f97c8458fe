"""The incidents by folder name, and the function that runs their questions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from staleproof import device
from staleproof.check import require

if TYPE_CHECKING:
    from staleproof import lab
    from staleproof.lab import Finding


class Incident(NamedTuple):
    """What ``staleproof list`` and ``staleproof run`` print about one incident, apart from its symptom.

    The symptom comes from the triage table: :func:`staleproof.triage.symptom`.

    Attributes:
        number: its chapter.
        title: the heading of its notebook.
        notebook: file name in ``notebooks/``; empty until there is one.
        summary: the cause in one sentence.
        served: questions that serve requests with a remedy.
        tried: variants of these questions that upstream or users tried as remedies.
    """

    number: int
    title: str
    notebook: str
    summary: str
    served: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()


INCIDENTS = {
    "mla_padding": Incident(
        number=1,
        title="NaN from the empty rows of MLA decode",
        notebook="01_mla_padding.ipynb",
        summary="a padding slot's output row is unwritten or 0/0, and a scale over all rows reads it",
        served=("served, torch.max",),
        tried=(
            "zeros_once_per_layer",
            "zeros_before_zero_by_zero",
            "one_shared_buffer",
            "clears_nothing_q_len_4",
            "pad_with_seq_len_1",
        ),
    ),
    "decode_buffer": Incident(
        number=2,
        title="The out-of-memory that the first fix caused",
        notebook="02_decode_buffer_oom.ipynb",
        summary="a buffer a layer in a branch that the memory profile never takes",
        served=("server", "overlap", "other_model", "growth"),
        tried=("zeros_per_layer", "zeros_before_profile", "module_singleton"),
    ),
    "moe_routing": Incident(
        number=3,
        title="NaN logits, the same expert k times, an illegal access",
        notebook="03_moe_routing.ipynb",
        summary="a choice by comparison repeats an expert, and a map entry stays unwritten",
    ),
    "kv_reuse": Incident(
        number=4,
        title="KV blocks that were Mamba state",
        notebook="04_kv_reuse.ipynb",
        summary="a block changes hands unzeroed, and a mask multiplies what it held by 0",
        served=("served with prefix caching", "served without prefix caching"),
        tried=("zero_on_free", "zero_hits_too", "zero_mamba_only"),
    ),
    "scale_padding": Incident(
        number=5,
        title="The revert: what it blamed, and what it was",
        notebook="05_the_revert.ipynb",
        summary="blamed: int64 ids; found: scale padding, the null block, a scale over other rows",
    ),
    "mxfp4_scales": Incident(
        number=6,
        title="The scale behind the last one",
        notebook="07_the_scale_behind_the_last.ipynb",
        summary="a kernel reads 64 bytes behind its scales, and SwiGLU makes a finite number of the NaN",
        served=("layer, replica",),
        tried=("nan_to_num", "zero_once", "mask_load"),
    ),
    "published_unwritten": Incident(
        number=7,
        title="Published before written",
        notebook="08_published_before_written.ipynb",
        summary="a step that was planned and withdrawn leaves hashes of blocks that nobody writes",
        served=("burst",),
        tried=("same_step_guard", "zero_at_allocation", "withdraw_all", "reset_cache"),
    ),
    "uniform_decode": Incident(
        number=8,
        title="A prompt as long as a draft",
        notebook="09_a_prompt_as_long_as_a_draft.ipynb",
        summary="a prompt of k+1 tokens replays the graph of decode, over a stranger's state",
    ),
}


def questions_of(name: str) -> lab.Incident:
    """The questions of one incident: ``incident`` in ``questions.py`` of its folder, which this imports.

    Raises:
        ValueError: they are another incident's, under whose name its findings would be kept.
    """
    found: lab.Incident = importlib.import_module(f"staleproof.incidents.{name}.questions").incident
    require(found.name == name, f"incident of {name}", repr(name), repr(found.name))
    return found


def ask_all(name: str, device_name: str, progress: Callable[[str], None]) -> Generator[Finding]:
    """Ask every question of one incident, and yield each finding as soon as it is ready.

    Args:
        name: its folder.
        device_name: ``"cpu"`` or ``"cuda"``.
        progress: takes one line about the step that begins.
    """
    from staleproof.lab import Key, finding, not_run

    if device.has_triton():
        yield from questions_of(name).run(device_name, progress)
    else:
        yield finding(Key(name, "all questions", "all variants"), not_run(device.TRITON_MISSING))
