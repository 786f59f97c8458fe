"""A fix of incident 5 whose result is wrong is called wrong, although no detector of NaN sees it."""

from __future__ import annotations

import pytest
import torch

from staleproof.cases.finding import OFF_ON_OFF
from staleproof.cases.words import FIXED, WRONG
from staleproof.incidents.scale_padding import broken, correct, ids, null_block, scene
from staleproof.incidents.scale_padding.cases import ID_WIDTHS, TABLE
from staleproof.ops.nvfp4 import quantize_nvfp4


def fix(name):
    (found,) = TABLE.ask(OFF_ON_OFF, name)
    return found.verdict, found.note


def _zeros(packed, scales):
    packed.zero_()


def _thrice(packed, scales):
    scales.copy_(scales.float() * 3)


def _one_scale(packed, scales):
    scales.view(torch.uint8).view(-1)[0] += 1


def _padding_left(packed, scales):
    # Finite, and beside values of 0: no product shows it.
    scales.view(torch.uint8).view(-1)[-1] = 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(_zeros, "product"), (_thrice, "product"), (_one_scale, "product"), (_padding_left, "scales: 1 of")],
)
def test_a_quantiser_that_writes_other_bytes_is_wrong(monkeypatch, spoil, why):
    def spoilt(x, factor, *, swizzled=True, out=None):
        out = quantize_nvfp4(x, factor, swizzled=swizzled, out=out)
        spoil(*out)
        return out

    assert fix("quantize_nvfp4") == (FIXED, "")
    for module in (scene, correct):
        monkeypatch.setattr(module, "quantize_nvfp4", spoilt)
    verdict, note = fix("quantize_nvfp4")
    assert verdict == WRONG
    assert why in note


def _favours(tokens, experts, top_k, **options):
    weights, chosen = ids.simulate_routing(tokens, experts, top_k, **options)
    return weights, torch.arange(top_k, dtype=torch.int32).expand_as(chosen)


def _one_takes_all(tokens, experts, top_k, **options):
    weights, chosen = ids.simulate_routing(tokens, experts, top_k, **options)
    weights.zero_()[:, 0] = 1
    return weights, chosen


def _thrice_as_heavy(*args, **options):
    weights, chosen = ids.simulate_routing(*args, **options)
    return 3 * weights, chosen


def _wide(*args, **options):
    weights, chosen = ids.simulate_routing(*args, **options)
    return weights, chosen.long()


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (_favours, "too often"),
        (_one_takes_all, "weights"),
        (_thrice_as_heavy, "weights"),
        (_wide, "int64"),
        (broken.simulate_with_replacement, "int64"),
    ],
)
def test_a_draw_that_favours_somebody_is_wrong(draw, why):
    assert correct.wrong_draw(ids.simulate_routing, "cpu") is None
    assert why in (correct.wrong_draw(draw, "cpu") or "")


def test_ids_that_arrive_as_others_are_wrong():
    sent = ids.simulate_routing(64, 16, 4)
    for name in ("int32", "packed_int32"):
        assert correct.wrong_ids(ID_WIDTHS[name], sent) is None
    assert "ids" in (correct.wrong_ids(ID_WIDTHS["int64_read_as_int32"], sent) or "")
    assert "weights" in (correct.wrong_ids(lambda chosen, weights: (chosen, 3 * weights), sent) or "")
    assert "ids" in (correct.wrong_ids(lambda chosen, weights: (chosen * 0, weights), sent) or "")


@pytest.mark.parametrize("what", ["thrice", "zeros", "quiet rows to zero", "a scale"])
def test_a_quantiser_per_token_that_loses_rows_is_wrong(monkeypatch, what):
    def spoilt(x):
        values, scales = broken.row_alone(x)
        if what == "thrice":
            scales = scales * 3
        elif what == "zeros":
            values = torch.zeros_like(values)
        elif what == "a scale":
            scales[3] *= 1.01
        else:
            values = torch.where((x.abs() < 0.1).all(1, keepdim=True), 0.0, values.float()).to(values.dtype)
        return values, scales

    assert correct.wrong_row_scale("row_alone", "cpu") is None
    assert correct.wrong_row_scale("neighbour_in_the_maximum", "cpu") is not None
    monkeypatch.setitem(broken.PER_TOKEN, "row_alone", spoilt)
    assert fix("row_alone")[0] == WRONG


def _drops_all(cache, kv, slots):
    pass


def _one_off(cache, kv, slots):
    null_block_write(cache, kv, torch.where(slots >= 0, slots + 1, slots))


def _thrice_written(cache, kv, slots):
    null_block_write(cache, 3 * kv, slots)


null_block_write = null_block.write_kv


@pytest.mark.parametrize("write", [_drops_all, _one_off, _thrice_written])
def test_a_write_that_drops_or_misplaces_is_wrong(monkeypatch, write):
    assert correct.wrong_write("cpu") is None
    monkeypatch.setattr(null_block, "write_kv", write)
    assert "the cache" in (correct.wrong_write("cpu") or "")
