"""Incident 1 in words: a real small model behind the kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from staleproof import words
from staleproof.grades import REPLICA, Evidence, Grade
from staleproof.incidents.mla_padding import broken
from staleproof.lab import Answer, Fix, Incident


@cache
def _clean_words(requests: int, rows: int, tokens: int) -> words.Served:
    """Answers with one fp8 scale for all rows, over zeroed memory."""
    return words.serve(words.PROMPTS[:requests], rows=rows, tokens=tokens)


def _in_words(how: dict[str, Any], device: str, requests: int = 3, rows: int = 8, tokens: int = 12) -> Answer:
    """Serves requests; right are the tokens that clean memory gives with the same quantiser.

    Those of a model without fp8 are no reference: one scale for the batch changes texts without any fault.
    """
    served = words.serve(words.PROMPTS[:requests], rows=rows, tokens=tokens, **how)
    return words.judged(served, _clean_words(requests, rows, tokens))


# The attention output's memory holds NaN, or normal numbers times a factor.
POISONED: dict[str, Any] = {"memory": math.nan}
CLEARED: dict[str, Any] = {"memory": math.nan, "clear": True}
MEMORIES = {
    "NaN": POISONED,
    "x 1,000": {"memory": 1e3},
    "x 100,000": {"memory": 1e5},
    "NaN, clear_empty_rows": CLEARED,
}


def words_of_three(how: dict[str, Any], device: str) -> Answer:
    """Three requests in a step of eight rows whose padding is not written. What do their users read?"""
    return _in_words(how, device)


def words_without_fp8(how: dict[str, Any], device: str) -> Answer:
    """The same without a scale that all rows share. How many texts does that scale change by itself?"""
    prompts = words.PROMPTS[:3]
    clean = words.serve(prompts, fp8=False)
    answer = words.judged(words.serve(prompts, fp8=False, **how), clean)
    pairs = zip(clean.token_ids, _clean_words(3, 8, 12).token_ids, strict=True)
    return replace(answer, numbers={**answer.numbers, "changed_by_fp8": sum(a != b for a, b in pairs)})


def _no_vllm(how: dict[str, Any], device: str) -> str | None:
    from staleproof.words.kernels import NO_VLLM, vllm_release

    if how["kernel"] == "vllm" and vllm_release() is None:
        return NO_VLLM
    return words.unavailable_reason()


def _whose_words(how: dict[str, Any]) -> Evidence:
    from staleproof.words.kernels import vllm_release

    if how["kernel"] == "vllm" and (release := vllm_release()):
        return Evidence(Grade.REAL, f"vLLM {release[0]} Triton MLA, in our server of SmolLM2")
    return REPLICA


KERNELS = {
    "empty_row_not_written": {"kernel": broken.empty_row_not_written, **POISONED},
    "vllm_triton": {"kernel": "vllm"},
    "vllm_triton, clear_empty_rows": {"kernel": "vllm", "clear": True},
    "mla_decode": {"kernel": "mla_decode", **POISONED},
}


def words_by_kernel(how: dict[str, Any], device: str) -> Answer:
    """Four tokens of a request beside a padding row. Over zeros, vLLM's kernel divides 0 by 0 itself."""
    return _in_words(how, device, requests=1, rows=2, tokens=4)


def full_batch(how: dict[str, Any], device: str) -> Answer:
    """Eight requests in eight rows: no padding, until the first answer ends. Do the other seven live?"""
    return words.judged(words.serve(words.PROMPTS, rows=8, **how), clean=None)


def _not_the_clean_words(how: dict[str, Any], device: str) -> str | None:
    served = words.serve(words.PROMPTS, rows=8, **how)
    pairs = zip(served.token_ids, _clean_words(8, 8, 12).token_ids, strict=True)
    other = sum(a != b for a, b in pairs)
    return f"{other} of 8 texts are not those over clean memory" if other else None


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    incident.question(
        "words",
        MEMORIES,
        expect={
            "NaN": "3 of 3 dead",
            "x 1,000": words.OTHER,
            "x 100,000": words.OTHER,
            "NaN, clear_empty_rows": words.RIGHT,
        },
        needs=words.needs_model,
    )(words_of_three)
    incident.question("words without fp8", {"NaN": POISONED}, expect=words.RIGHT, needs=words.needs_model)(
        words_without_fp8
    )
    incident.question(
        "words by kernel",
        KERNELS,
        expect={
            "empty_row_not_written": "1 of 1 dead",
            "vllm_triton": "1 of 1 dead",
            "vllm_triton, clear_empty_rows": words.RIGHT,
            "mla_decode": words.RIGHT,
        },
        needs=_no_vllm,
        evidence=_whose_words,
    )(words_by_kernel)
    fix = {"words, clear_empty_rows": Fix(off=POISONED, on=CLEARED)}
    incident.fixes(full_batch, fix, compare=_not_the_clean_words, needs=words.needs_model)
