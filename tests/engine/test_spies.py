"""Spies keep which rows of a step had a NaN, and name the stage; and they fit the real vLLM 0.22.1."""

from __future__ import annotations

import types

import pytest
import torch
from tests.engine.real_vllm import fits

from staleproof.engine import probes, spies
from staleproof.engine.spies import Rows, checksum

NAN = float("nan")


class Backend:
    """The shape of an MLA backend: rows without a live request are NaN."""

    def forward_mqa(self, q, kv, metadata, layer):
        out = torch.ones(q.shape[0], 2, 4)
        out[metadata:] = NAN
        return out, None


def step(backend: Backend, rows: int, live: int, layer: int = 0) -> None:
    named = types.SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn")
    backend.forward_mqa(torch.zeros(rows, 2, 6), None, live, named)


@pytest.fixture(name="watched")
def watched_fixture(monkeypatch) -> tuple[Rows, Backend]:
    monkeypatch.setattr(Backend, "forward_mqa", Backend.forward_mqa)  # undone after the test
    watch = Rows()
    spies._attention(Backend, watch)
    return watch, Backend()


def test_flags_are_those_of_the_last_step_of_that_size(watched):
    watch, backend = watched
    step(backend, 8, 3)
    step(backend, 8, 5, layer=1)
    assert dict(watch.seen()) == {
        "layers.0.attention": [0, 0, 0, 1, 1, 1, 1, 1],
        "layers.1.attention": [0, 0, 0, 0, 0, 1, 1, 1],
    }
    watch.clear()
    assert dict(watch.seen()) == {}
    step(backend, 64, 50)
    assert [sum(flags) for _, flags in watch.seen()] == [14]


def test_of_two_sizes_the_smaller_ran_last_since_requests_only_end(watched):
    watch, backend = watched
    step(backend, 64, 50)
    step(backend, 8, 3)
    assert dict(watch.seen()) == {"layers.0.attention": [0, 0, 0, 1, 1, 1, 1, 1]}


def test_prompts_and_integers_are_not_kept(watched):
    watch, backend = watched
    step(backend, spies.LARGEST + 1, 3)
    watch.keep("layers.0.ids", torch.zeros(8, 2, dtype=torch.int64))
    assert not watch.flags


def test_a_stage_of_another_size_than_the_decode_step_is_left_out(watched):
    watch, backend = watched
    step(backend, 8, 8)
    watch.keep("layers.0.mlp", torch.full((8, 4), NAN))
    watch.keep("layers.0.warm_up", torch.full((64, 4), NAN))
    assert [stage for stage, _ in watch.seen()] == ["layers.0.attention", "layers.0.mlp"]


def test_the_largest_magnitude_of_what_experts_get_leaves_nan_out():
    watch, stage = Rows(), "layers.1.post_attention_layernorm"
    watch.keep(stage, torch.tensor([[1.0, -3.0], [NAN, 2.0], [NAN, NAN]]))
    assert watch.largest[stage, 3].tolist() == [3.0, 2.0, 0.0]
    assert watch.flags[stage, 3].tolist() == [0, 1, 1]
    assert probes._largest(watch, 1, {stage: [0, 1, 1]}) == {stage: [3.0, 2.0]}


def test_query_tokens_of_a_request_are_rows(monkeypatch):
    class Ragged(Backend):
        def forward_mqa(self, q, kv, metadata, layer):
            return torch.full((4, 2, 2, 4), NAN), None

    watch = Rows()
    spies._attention(Ragged, watch)
    step(Ragged(), 8, 8)
    assert dict(watch.seen()) == {"layers.0.attention": [1] * 8}


def test_experts_that_are_named_twice_are_counted_by_kind_of_row():
    watch = Rows()
    watch.keep_ids("router 0", torch.tensor([[0, 1], [2, 2], [3, 3], [4, 5]]))
    assert watch.duplicates(2) == (1, 1)
    # The counts are of all steps since the last clear, not of the last.
    watch.keep_ids("router 0", torch.tensor([[0, 0], [2, 3], [3, 4], [4, 5]]))
    assert watch.duplicates(2) == (2, 1)
    assert (watch.chosen(3), watch.chosen(9)) == (2, 0)
    watch.keep_ids("router 0", torch.tensor([[1, 0], [0, 2], [0, 1], [4, 5]]))
    assert watch.first_experts() == [2, 4]
    watch.clear()
    assert watch.duplicates(2) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_notices_one_bit_and_the_place_of_a_value(dtype):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = checksum(x)
    bits = x.clone().view(torch.int16)
    bits[1, 7] ^= 1
    changed = checksum(bits.view(dtype))
    swapped = x.clone()
    swapped[2, :2] = x[2, [1, 0]]
    assert (kept == changed).tolist() == [True, False, True]
    assert (kept == checksum(swapped)).tolist() == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.22.1", "0.26.0"])
def test_spies_and_fault_fit_the_real_vllm(version):
    lines, errors = fits("real_spies.py", version)
    assert lines == [
        "fits attention",
        "fits stages",
        "fits logits",
        "fits routing",
        "fits ledger",
        "fits lazy_buffers",
        "fits whole_tiles",
        "fits tenants",
        "fits first_configs",
        "fits scaled_weights: norm 1.0, gain 1.0",
        "fits switches: zeroed [[3, 2]]",
        "fits routing: behind",
        "fits first_configs: 36 and 1",
        "fits watch: 20 functions",
    ], errors
