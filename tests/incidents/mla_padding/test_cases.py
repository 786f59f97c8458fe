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
    evidence = {case.key[1:3]: case.grade().of for case in TABLE.cases}
    assert evidence["served, torch.max", "vllm_triton"].endswith(", in our engine")


def test_a_peer_that_is_absent_is_not_asked(device):
    absent = Peer("theirs", "needs an SM100 GPU", prepare=pytest.fail)
    assert cases._unavailable(absent, device) == "needs an SM100 GPU"
    assert cases._unavailable(broken.empty_row_not_written, device) is None
    assert cases._not_served(setups.Setup(absent), "cuda") == "needs an SM100 GPU"


def test_only_the_failure_of_a_peer_is_told_in_one_line(device):
    def fails(kernel, device):
        raise OSError("no image")

    peer = Peer("theirs", None, prepare=pytest.fail)
    assert cases._asked(fails, peer, device).note == "failed: OSError: no image"
    with pytest.raises(OSError, match="no image"):
        cases._asked(fails, mla_decode, device)


@pytest.mark.parametrize(
    ("name", "heads", "says"),
    [
        ("empty_row_not_written", 0, "unwritten"),
        ("empty_row_not_written", 1, "partly written"),
        ("zero_by_zero_written", 0, "nan"),
    ],
)
def test_a_kernel_that_returns_memory_of_its_own_is_judged_by_that(device, name, heads, says):
    def own(*call, softmax_scale, out=None):
        result, lse = broken.KERNELS[name](*call, softmax_scale=softmax_scale)
        result[3:, :heads] = 0
        return result, lse

    assert cases.empty_row(own, device).verdict == says


def one_token_too_many(q, kv_cache, block_table, seq_lens, **how):
    return mla_decode(q, kv_cache, block_table, seq_lens + 1, **how)


def drops_nan_and_reads_all(q, kv_cache, *call, **how):
    return mla_decode(q, kv_cache, *call, **how)[0] + kv_cache.nan_to_num().amax(), None


@pytest.mark.parametrize("ask", [cases.past_seq_len, cases.unused_table_entry])
@pytest.mark.parametrize(
    ("kernel", "says"), [(one_token_too_many, "leaked"), (drops_nan_and_reads_all, "wrong, finite")]
)
def test_a_byte_that_belongs_to_nobody_must_not_decide(device, ask, kernel, says):
    assert ask(kernel, device) == says


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


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda a, usual: a.seq_lens > usual.context,
        lambda a, usual: torch.arange(len(a.q), device=a.q.device) >= usual.batch,
    ],
)
def test_a_fix_must_be_right_beyond_the_sizes_that_gave_the_verdict(device, spoilt):
    class Spoilt(broken.NoRemedy):
        def after(self, a, out):
            broken.zero_where(out, spoilt(a, setups.Setup().config(device)))

    assert cases.wrong(setups.Setup(mla_decode, Spoilt), device).startswith("attention, live rows")


def test_a_fix_must_clear_padding_in_every_layer_and_in_memory_of_any_content(device):
    class FirstLayer(setups.ClearEmptyRows):
        def after(self, a, out):
            if a.layer == 0:
                super().after(a, out)

    class InTheGraph(setups.Setup):
        def engine(self, *given, **sizes):
            made = super().engine(*given, **sizes)
            made.variant.attend = broken.NoRemedy(self.kernel)
            return made

    assert cases.wrong(setups.Setup(remedy=FirstLayer), device).startswith("attention, padding rows: ")
    said = cases.wrong(InTheGraph(remedy=setups.ClearEmptyRows), device)
    assert said.startswith("attention, padding rows in other memory")


def test_a_fix_whose_live_rows_depend_on_finite_padding_is_wrong(device):
    said = cases.wrong(setups.Setup(quantise=broken.quantise_amax_fmax), device)
    assert said == "live rows change with the content of padding"


def test_off_is_the_same_kernel_without_its_remedy():
    for name in ("clear_after_zero_by_zero", "clear_empty_rows_q_len_4"):
        case = cases.off_on_off(name, setups.SETUPS[name])
        off, on = case.off, case.subject
        assert (off.kernel, off.q_len, off.remedy) == (on.kernel, on.q_len, broken.NoRemedy)


@pytest.mark.parametrize("faulty", [1, 4])
def test_the_worst_number_of_splits_decides(device, monkeypatch, faulty):
    monkeypatch.setitem(cases.SPLITS, device, (1, 4))
    kernels = {faulty: broken.empty_row_not_written, 5 - faulty: mla_decode}
    found = cases.empty_row_by_splits(kernels.__getitem__, device)
    assert (found.verdict, sorted(found.numbers["states"])) == ("unwritten", ["unwritten", "zero"])
