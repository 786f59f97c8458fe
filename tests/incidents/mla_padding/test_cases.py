"""What the table of incident 1 rests on, beside the verdict of each case."""

import pytest
import torch

from staleproof.incidents.mla_padding import broken, cases, scene, setups
from staleproof.incidents.mla_padding.cases import LIVE_ROWS_WRONG, TABLE
from staleproof.kernels.adapter import Peer
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode


def test_the_evidence_of_a_peer_names_its_package(device):
    (found,) = TABLE.ask("empty row", "torch_sdpa", device=device)
    assert found.of.startswith("torch")


def test_a_peer_that_is_absent_is_not_asked(device):
    absent = Peer("theirs", "needs an SM100 GPU", prepare=pytest.fail)
    assert cases._unavailable(absent, device) == "needs an SM100 GPU"
    assert cases._unavailable(broken.empty_row_not_written, device) is None


@pytest.mark.parametrize(
    ("name", "says"), [("empty_row_not_written", "unwritten"), ("zero_by_zero_written", "nan")]
)
def test_a_kernel_that_returns_memory_of_its_own_is_judged_by_that(device, name, says):
    def own(*call, softmax_scale, out=None):
        return broken.KERNELS[name](*call, softmax_scale=softmax_scale)

    assert cases.empty_row(own, device).verdict == says


@pytest.mark.parametrize(
    ("factor", "ours", "theirs"),
    [(1.0, "zero", "zero"), (1.003, LIVE_ROWS_WRONG, "zero"), (1.006, LIVE_ROWS_WRONG, LIVE_ROWS_WRONG)],
)
def test_a_kernel_in_bf16_may_round_twice_and_a_peers_four_times(device, monkeypatch, factor, ours, theirs):
    """A factor common to a whole row is found beyond a quarter of its budget: 2**-9 and 2**-8."""
    monkeypatch.setattr(scene, "compared_dtype", lambda device: torch.bfloat16)

    def kernel(q, *call, softmax_scale, out):
        right, _ = reference_decode(q.double(), *call, softmax_scale=softmax_scale)
        return out.copy_(right * factor), None

    def prepare(*call):
        *given, scale, _, out = call
        return lambda: kernel(*given, softmax_scale=scale, out=out)

    assert cases.empty_row(kernel, device).verdict == ours
    assert cases.empty_row(Peer("theirs", None, prepare), device).verdict == theirs


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, False), (1.05, True)])
def test_a_quantiser_whose_scale_is_off_by_more_than_fp8_rounds_is_wrong(device, factor, wrong):
    def quantise(x, live_rows):
        values, scale = setups.quantise_live_rows(x, live_rows)
        return values, scale * factor

    said = cases.wrong(setups.Setup(mla_decode, quantise=quantise), device)
    assert (said or "").startswith("projection after fp8") is wrong


@pytest.mark.parametrize("faulty", [1, 4])
def test_the_worst_number_of_splits_decides(device, monkeypatch, faulty):
    monkeypatch.setitem(cases.SPLITS, device, (1, 4))
    kernels = {faulty: broken.empty_row_not_written, 5 - faulty: mla_decode}
    found = cases.empty_row_by_splits(kernels.__getitem__, device)
    assert (found.verdict, sorted(found.numbers["states"])) == ("unwritten", ["unwritten", "zero"])
