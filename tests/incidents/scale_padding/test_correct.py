"""A fix of incident 5 whose result is wrong is wrong, although no detector of NaN finds it."""

from functools import partial

import pytest
import torch

from staleproof.incidents.scale_padding import broken, correct, ids, null_block, scene
from staleproof.incidents.scale_padding.questions import ID_WIDTHS, incident
from staleproof.lab import OFF_ON_OFF, WRONG
from staleproof.ops.nvfp4 import quantize_nvfp4


def fix(name):
    (found,) = incident.ask(OFF_ON_OFF, name)
    return found.verdict, found.note


def _one_scale(packed, scales):
    scales.view(torch.uint8).view(-1)[0] += 1


def _hides_nan(packed, scales):
    scales.copy_(scales.float().nan_to_num())


def _rows_of_the_second_tile(packed, scales):
    scales.view(torch.uint8)[128:] = 0


def _padding_left(packed, scales):
    # Finite, and beside values of 0: no product shows it.
    scales.view(torch.uint8).view(-1)[-1] = 1


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_one_scale, "product"),
        (_hides_nan, "product"),
        (_rows_of_the_second_tile, "scales of 130 rows"),
        (_padding_left, "scales of 5 rows: 1 of"),
    ],
)
def test_quantiser_that_writes_other_bytes_is_wrong(monkeypatch, damage, why):
    def changed(x, factor, *, swizzled=True, out=None):
        out = quantize_nvfp4(x, factor, swizzled=swizzled, out=out)
        damage(*out)
        return out

    for module in (scene, correct):
        monkeypatch.setattr(module, "quantize_nvfp4", changed)
    verdict, note = fix("quantize_nvfp4")
    assert verdict == WRONG
    assert why in note


def _neighbours(tokens, experts, top_k, seed=0, **options):
    """Each expert as often as any other, and always beside the next one."""
    weights, chosen = ids.simulate_routing(tokens, experts, top_k, seed=seed, **options)
    return weights, ((chosen[:, :1] + torch.arange(top_k)) % experts).int()


def _one_seed(*args, seed=0, **options):
    return ids.simulate_routing(*args, **options)


def _unequal(*args, **options):
    weights, chosen = ids.simulate_routing(*args, **options)
    return 1.01 * weights, chosen


def _more_often(times, tokens, experts, top_k, **options):
    """So many tokens more get expert 0 than by chance, where 34 is one deviation."""
    weights, chosen = ids.simulate_routing(tokens, experts, top_k, **options)
    chosen[(chosen != 0).all(1).nonzero()[:times, 0], 0] = 0
    return weights, chosen


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (partial(_more_often, 400), "some experts are drawn too often"),
        (_neighbours, "pairs of experts"),
        (_one_seed, "another seed"),
        (_unequal, "weights"),
        (broken.simulate_with_replacement, "int64"),
    ],
)
def test_draw_that_is_not_uniform_is_wrong(draw, why):
    assert why in (correct.wrong_draw(draw, "cpu") or "")


def test_draw_within_two_deviations_is_right():
    assert correct.wrong_draw(partial(_more_often, 50), "cpu") is None


@pytest.mark.parametrize(
    ("reader", "why"),
    [
        (ID_WIDTHS["int64_read_as_int32"], "ids"),
        (lambda chosen, weights: (chosen, 1.01 * weights), "weights"),
        (lambda chosen, weights: (chosen.long(), weights), "int64"),
    ],
)
def test_reader_that_changes_ids_or_weights_is_wrong(reader, why):
    assert why in (correct.wrong_ids(reader, "cpu") or "")


def test_reader_of_packed_ids_is_right():
    assert correct.wrong_ids(ID_WIDTHS["packed_int32"], "cpu") is None


@pytest.mark.parametrize("what", ["a scale", "small numbers to zero", "a part of the range", "wide"])
def test_quantiser_per_token_with_other_numbers_is_wrong(monkeypatch, what):
    def changed(x):
        values, scales = broken.row_alone(x)
        if what == "a scale":
            scales[3] *= 1.01
        elif what == "a part of the range":
            scales *= 1.1
            values = (x * (1 / scales)[:, None]).to(values.dtype)
        elif what == "wide":
            values = values.float().where(torch.arange(x.shape[1]) < 64, 0.0).to(values.dtype)
        else:
            values = torch.where(values.float().abs() < 24, 0.0, values.float()).to(values.dtype)
        return values, scales

    monkeypatch.setitem(broken.PER_TOKEN, "row_alone", changed)
    assert fix("row_alone")[0] == WRONG


def _one_off(cache, kv, slots):
    null_block_write(cache, kv, torch.where(slots >= 0, slots + 1, slots))


def _thrice_written(cache, kv, slots):
    null_block_write(cache, 3 * kv, slots)


null_block_write = null_block.write_kv


def ranks(written=()):
    busy, idle = ([null_block.RankStep(written, False, ())] for _ in range(2))
    return busy, idle


@pytest.mark.parametrize("write", [_one_off, _thrice_written])
def test_write_to_another_slot_is_wrong(monkeypatch, write):
    assert correct.wrong_write(0, "cpu", ranks()) is None
    monkeypatch.setattr(null_block, "write_kv", write)
    assert "the cache" in (correct.wrong_write(0, "cpu", ranks()) or "")


def test_dummy_batch_that_writes_a_block_is_wrong():
    assert "the blocks [7]" in (correct.wrong_write(0, "cpu", ranks((7,))) or "")


def test_request_attends_to_its_own_tokens_only():
    cache = torch.randn(null_block.BLOCKS, null_block.BLOCK_SIZE, null_block.HEAD)
    q, table = torch.randn(null_block.HEAD), torch.tensor([3, 5, 0, 0])
    keys = torch.cat([cache[3], cache[5, :2]])
    right = (keys @ q / null_block.HEAD**0.5).softmax(0) @ keys
    torch.testing.assert_close(null_block.attend(q, cache, table, 6), right)
