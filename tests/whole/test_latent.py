"""A model recast over vLLM's MLA layer answers as vLLM's own model of it does."""

from __future__ import annotations

import pytest

from staleproof.incidents.mla_padding.whole import CPU_OPTIONS, WORDS, read
from staleproof.whole import place

pytestmark = pytest.mark.slow


def test_model_over_mla_answers_over_nan_as_plain_llama_over_zeros():
    if reason := place.unavailable_reason():
        pytest.skip(reason)
    env = {"VLLM_PLUGINS": ""}
    plain = place.call(read, "", CPU_OPTIONS, 0.0, env=env, timeout_s=300).answer()
    assert plain["texts"] == WORDS
    assert place.call(read, "CPU_MLA", CPU_OPTIONS, float("nan"), env=env, timeout_s=300).answer() == plain
