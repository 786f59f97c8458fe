"""The variants in the engine: what is served, and what switching a fix off means."""

from types import SimpleNamespace

import pytest
import torch

from staleproof.evidence import Verdict, row_states
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.remedies import HIDDEN, SETUPS, StepVerdicts


def test_the_sick_requests_own_step_must_show_that_it_is_sick():
    steps = (Verdict.CLEAN, Verdict.PAD_ONLY, Verdict.CLEAN, Verdict.LIVE_BORN, Verdict.CLEAN)
    assert StepVerdicts(steps, invariant=True).verdict == Verdict.PAD_ONLY
    assert StepVerdicts((*steps[:4], Verdict.LEAKED), invariant=True).verdict == Verdict.LEAKED
    clean = (Verdict.CLEAN,) * 5
    assert (
        StepVerdicts((*clean[:3], Verdict.LIVE_BORN, Verdict.CLEAN), invariant=True).verdict == Verdict.CLEAN
    )
    for sick in {*Verdict} - {Verdict.LIVE_BORN}:
        steps = (*clean[:3], sick, Verdict.CLEAN)
        assert StepVerdicts(steps, invariant=True).verdict == HIDDEN
    steps = (*clean[:2], Verdict.PAD_ONLY, Verdict.CLEAN, Verdict.CLEAN)
    assert StepVerdicts(steps, invariant=True).verdict == Verdict.PAD_ONLY


def test_a_new_engine_holds_canaries_where_nobody_wrote(device):
    engine = SETUPS["empty_row_not_written"].engine("torch.max", device, batch=4)
    assert set(row_states(engine.taps[0]["attention"])) == {"unwritten"}
    assert set(row_states(engine.kv_cache[0][:1])) == {"unwritten"}
    # The zeros of this variant are its own memory, and stay.
    kept = SETUPS["zeros_once_per_layer"].engine("torch.max", device, batch=4)
    assert "unwritten" not in row_states(kept.taps[0]["attention"])


def test_the_scale_of_the_fmax_quantiser_ignores_nan_and_keeps_infinity():
    values, scale = broken.quantise_amax_fmax(torch.tensor([[torch.nan, -2.0, 1.0]]))
    assert (values.float().tolist(), scale.item()) == ([[448, -448, 224]], torch.tensor(2 / 448).item())
    assert broken.quantise_amax_fmax(torch.tensor([[torch.inf, 1.0]]))[1].item() == torch.inf


@pytest.mark.parametrize("remedy", [broken.ZerosOncePerLayer, broken.OneSharedBuffer])
def test_a_smaller_batch_gets_the_first_rows_of_the_buffer(remedy):
    kept = remedy(broken.empty_row_not_written)
    many, few = (kept.output(SimpleNamespace(layer=0, q=torch.ones(n, 1, 2, 576))) for n in (4, 3))
    assert (few.shape, few.data_ptr()) == ((3, 1, 2, 512), many.data_ptr())
