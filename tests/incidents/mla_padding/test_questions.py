"""What the table of incident 1 rests on, beside the verdict of each case."""

from functools import partial

import pytest
import torch

from staleproof.evidence import Verdict
from staleproof.incidents.mla_padding import broken, questions, remedies, scene
from staleproof.incidents.mla_padding.correct import wrong
from staleproof.incidents.mla_padding.questions import LIVE_ROWS_WRONG, incident
from staleproof.kernels.adapter import Peer
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode


def test_the_evidence_of_a_peer_names_its_package(device):
    (found,) = incident.ask("empty row", "torch_sdpa", device=device)
    assert found.of.startswith("torch")
    evidence = {case.key[1:3]: case.grade().of for case in incident.cases}
    assert evidence["served, torch.max", "vllm_triton"].endswith(", in our engine")


def test_a_peer_that_is_absent_is_not_asked(device):
    absent = Peer("theirs", "needs an SM100 GPU", prepare=pytest.fail)
    assert questions.unavailable(absent, device) == "needs an SM100 GPU"
    assert questions.unavailable(broken.empty_row_not_written, device) is None
    assert questions._not_served(remedies.Setup(absent), "cuda") == "needs an SM100 GPU"


def test_only_the_failure_of_a_peer_is_told_in_one_line(device):
    def fails(kernel, device):
        raise OSError("no image")

    peer = Peer("theirs", None, prepare=pytest.fail)
    assert questions.others_may_fail(fails)(peer, device).note == "failed: OSError: no image"
    with pytest.raises(OSError, match="no image"):
        questions.others_may_fail(fails)(mla_decode, device)


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

    assert questions.empty_row(own, device).verdict == says


def one_token_too_many(q, kv_cache, block_table, seq_lens, **how):
    return mla_decode(q, kv_cache, block_table, seq_lens + 1, **how)


def drops_nan_and_reads_all(q, kv_cache, *call, **how):
    return mla_decode(q, kv_cache, *call, **how)[0] + kv_cache.nan_to_num().amax(), None


@pytest.mark.parametrize(
    ("ask", "kernel", "says"),
    [
        (questions.past_seq_len, one_token_too_many, "leaked"),
        (questions.unused_table_entry, drops_nan_and_reads_all, "wrong, finite"),
    ],
)
def test_a_byte_that_belongs_to_nobody_must_not_decide(device, ask, kernel, says):
    assert ask(kernel, device).verdict == says


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

    assert questions.empty_row(kernel, device).verdict == ours
    assert questions.empty_row(Peer("theirs", None, prepare), device).verdict == theirs


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.0, False), (1.05, True)])
def test_a_quantiser_whose_scale_is_off_by_more_than_fp8_rounds_is_wrong(device, factor, is_wrong):
    def quantise(x, live_rows):
        values, scale = remedies.quantise_live_rows(x, live_rows)
        return values, scale * factor

    error = wrong(remedies.Setup(mla_decode, quantise=quantise), device)
    assert (error or "").startswith("projection after fp8") is is_wrong


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
            broken.zero_where(out, spoilt(a, remedies.Setup().config(device)))

    assert wrong(remedies.Setup(mla_decode, Spoilt), device).startswith("attention, live rows")


def test_a_fix_must_clear_padding_in_every_layer_and_in_memory_of_any_content(device):
    class FirstLayer(remedies.ClearEmptyRows):
        def after(self, a, out):
            if a.layer == 0:
                super().after(a, out)

    class InTheGraph(remedies.Setup):
        def engine(self, *given, **sizes):
            made = super().engine(*given, **sizes)
            made.variant.attend = broken.NoRemedy(self.kernel)
            return made

    assert wrong(remedies.Setup(remedy=FirstLayer), device).startswith("attention, padding rows: ")
    said = wrong(InTheGraph(remedy=remedies.ClearEmptyRows), device)
    assert said.startswith("attention, padding rows in other memory")


def test_a_fix_whose_live_rows_depend_on_finite_padding_is_wrong(device):
    said = wrong(remedies.Setup(quantise=broken.quantise_amax_fmax), device)
    assert said == "live rows change with the content of padding"


def test_off_is_the_same_kernel_without_its_remedy():
    for name in ("clear_after_zero_by_zero", "clear_empty_rows_q_len_4"):
        pair = questions.off_on(remedies.SETUPS[name])
        off, on = pair.off, pair.on
        assert (off.kernel, off.q_len, off.remedy) == (on.kernel, on.q_len, broken.NoRemedy)


@pytest.mark.parametrize("faulty", [1, 4])
def test_the_worst_number_of_splits_decides(device, monkeypatch, faulty):
    monkeypatch.setitem(questions.SPLITS, device, (1, 4))
    kernels = {faulty: broken.empty_row_not_written, 5 - faulty: mla_decode}
    found = questions.empty_row_by_splits(kernels.__getitem__, device)
    assert (found.verdict, sorted(found.numbers["states"])) == ("unwritten", ["unwritten", "zero"])


def test_a_remedy_that_clears_is_clean_over_nan(device, monkeypatch):
    monkeypatch.setattr(broken, "PadWithSeqLenOne", remedies.ClearEmptyRows)
    assert questions.null_block(("masked tail", "NaN"), device).verdict == Verdict.CLEAN


def test_rows_past_a_buffer_are_counted_and_a_refusal_after_the_write_is_told_apart(device):
    found = questions.three_d_buffer((broken.empty_row_not_written, 4), device)
    assert found.numbers["rows_past_the_end"] == 3 * found.numbers["rows"]

    assert questions.three_d_buffer((mla_decode, 4), device).note.startswith("out: expected ")

    def too_late(q, *args, softmax_scale, out, behind=False):
        (out._base[-1:] if behind else out).zero_()
        raise ValueError("out: expected another shape")

    for kernel in (too_late, partial(too_late, behind=True)):
        assert questions.three_d_buffer((kernel, 4), device).verdict == "refused too late"
