"""Our calls bind to the signatures of the kernels that are installed; absent ones say why."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import environment
import pytest
import torch

from staleproof import device as devices
from staleproof.device import Provenance
from staleproof.kernels import adapter as adapters
from staleproof.kernels import flashinfer, mla
from staleproof.kernels import vllm as vllm_kernels
from staleproof.kernels.vllm_sources import executed
from staleproof.ops.reference.mla_decode import mla_decode

E4M3 = torch.float8_e4m3fn


def call():
    q = torch.zeros(3, 16, 576, dtype=torch.bfloat16)
    kv_cache = torch.zeros(5, 64, 576, dtype=torch.bfloat16)
    block_table = torch.zeros(3, 2, dtype=torch.int32)
    seq_lens = torch.tensor([65, 64, 0], dtype=torch.int32)
    return q, kv_cache, block_table, seq_lens


PLANNED, TRTLLM = ["__init__", "plan", "run"], "trtllm_batch_decode_with_kv_cache_mla"


@pytest.mark.parametrize(
    ("backend", "q_len", "calls"),
    [
        *(("fa2", 1, PLANNED), ("fa3", 2, PLANNED)),
        ("trtllm", 2, [TRTLLM]),
        ("cutlass", 1, ["__init__", "run"]),
    ],
)
def test_a_call_fits_the_signatures_of_the_installed_flashinfer(monkeypatch, backend, q_len, calls):
    """What it gives them is in test_adapters.py."""
    module, decode = (pytest.importorskip(f"flashinfer.{name}") for name in ("mla", "decode"))
    real, made = module.BatchMLAPagedAttentionWrapper, []

    def bind(function, *args, **kwargs):
        made.append((function.__name__, inspect.signature(function).bind(*args, **kwargs).arguments))
        return kwargs.get("out"), kwargs.get("lse")

    class Bound:
        def __init__(self, *args, **kwargs):
            bind(real.__init__, None, *args, **kwargs)

        def __getattr__(self, name):
            return partial(bind, getattr(real, name), None)

    monkeypatch.setattr(module, "BatchMLAPagedAttentionWrapper", Bound)
    monkeypatch.setattr(decode, TRTLLM, partial(bind, getattr(decode, TRTLLM)))
    q, *rest = call()
    q = q if q_len == 1 else q[:, None].repeat(1, q_len, 1, 1)
    flashinfer.flashinfer_peers()[f"flashinfer_{backend}"].prepare(q, *rest, 0.1, None, None)()
    assert [name for name, _ in made] == calls
    assert backend == "trtllm" or made[0][1]["backend"] == backend


def test_a_wheel_without_fa3s_library_is_named(monkeypatch):
    monkeypatch.setattr(devices, "provenance", lambda: Provenance.MEASURED)
    monkeypatch.setattr(devices, "machine", lambda: SimpleNamespace(capability="sm_90"))
    monkeypatch.setattr(vllm_kernels, "vllm_file", lambda path: None)
    missing = f"no vllm with {vllm_kernels.FA3_LIBRARY} is installed"
    assert vllm_kernels.fa3_unavailable_reason() == missing
    monkeypatch.setattr(devices, "machine", lambda: SimpleNamespace(capability="sm_100"))
    assert vllm_kernels.fa3_unavailable_reason().startswith("needs an SM90 GPU")


def test_a_peer_is_told_how_many_tokens_a_table_has_room_for():
    asked = []

    def adapter(q, out, max_seq_len, num_kv_splits):
        asked.append((max_seq_len, num_kv_splits))
        return lambda: out

    q, kv_cache, block_table, seq_lens = call()
    out = q.new_empty(3 * 16 * 512)
    peer = replace(adapters.peer("any", None, adapter), num_kv_splits=3)
    found, lse = peer(q[:, None], kv_cache, block_table, seq_lens, softmax_scale=0.1, out=out)
    assert asked == [(128, 3)]
    assert (found.shape, found.data_ptr(), lse) == ((3, 16, 512), out.data_ptr(), None)


def test_an_absent_peer_says_why_and_refuses():
    for name, peer in mla.peers().items():
        if peer.unavailable_reason is None:
            continue
        assert "\n" not in peer.unavailable_reason, name
        with pytest.raises(RuntimeError, match="is not available"):
            peer(*call(), softmax_scale=0.1)


@pytest.mark.parametrize(
    ("provenance", "missing", "capability", "reasons"),
    [
        ("INTERPRETED", "", "sm_100", ["needs a CUDA device"] * 4),
        ("MEASURED", "no flashinfer", "sm_100", ["no flashinfer"] * 4),
        ("MEASURED", "", "sm_100", [None, "needs an SM90 GPU (H100, H200); this is sm_100", None, None]),
        ("MEASURED", "", "sm_90", [None] * 2 + ["needs an SM100 GPU (B200, GB200); this is sm_90"] * 2),
    ],
)
def test_flashinfers_peers_say_what_they_need(monkeypatch, provenance, missing, capability, reasons):
    machine = replace(devices.machine(), capability=capability)
    monkeypatch.setattr(devices, "machine", lambda: machine)
    monkeypatch.setattr(devices, "provenance", lambda: Provenance[provenance])
    monkeypatch.setattr(devices, "flashinfer_missing", lambda: missing)
    found = [peer.unavailable_reason for peer in flashinfer.flashinfer_peers().values()]
    assert found == reasons


@pytest.fixture(name="vllm")
def vllm_fixture(monkeypatch):
    """Makes a folder ``vllm`` the one that is installed."""

    def use(root: Path) -> None:
        monkeypatch.setattr(
            vllm_kernels, "vllm_file", lambda path: file if (file := root / path).is_file() else None
        )
        vllm_kernels.vllm_triton_mla_module.cache_clear()

    yield use
    vllm_kernels.vllm_triton_mla_module.cache_clear()


@pytest.mark.parametrize("release", ["0.17.1", "0.22.1", "0.33.0"])
def test_vllms_triton_mla_leaves_nan_in_an_empty_row(vllm, device, release):
    root = environment.sources(release) / "vllm"
    vllm(root)
    # The interpreter's dot multiplies the bit patterns of bf16 operands.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, kv_cache = (torch.randn(*shape, device=device).to(dtype) for shape in ((3, 16, 576), (3, 16, 576)))
    block_table = torch.tensor([[1, 2], [0, 0], [0, 0]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([20, 7, 0], dtype=torch.int32, device=device)
    want, _ = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=0.05)
    out, _ = mla.peers()["vllm_triton"](q, kv_cache, block_table, seq_lens, softmax_scale=0.05)
    torch.testing.assert_close(out[:2], want[:2], rtol=2e-2, atol=2e-2)
    assert out[2].isnan().all()


def test_a_vllm_whose_file_does_not_load_says_why(vllm, tmp_path):
    file = tmp_path / "v1/attention/ops/triton_decode_attention.py"
    file.parent.mkdir(parents=True)
    file.write_text("from triton import no_such_name")
    vllm(tmp_path)
    peer = mla.peers()["vllm_triton"]
    assert peer.unavailable_reason.startswith("vllm.v1.attention.ops.triton_decode_attention does not load")
    with pytest.raises(RuntimeError, match="no_such_name"):
        peer(*call(), softmax_scale=0.1)


@pytest.mark.parametrize("more", ["", ", k_scale=None, v_scale=None, is_mla=False"])
def test_vllms_triton_mla_gets_the_scales_that_its_release_takes(vllm, tmp_path, more):
    file = tmp_path / "v1/attention/ops/triton_decode_attention.py"
    file.parent.mkdir(parents=True)
    arguments = f"q, k, v, o, lse, table, lengths, parts, splits, scale, page{more}"
    file.write_text(f"seen = []\ndef decode_attention_fwd({arguments}):\n    seen.append(locals())\n")
    vllm(tmp_path)
    q, kv_cache, block_table, seq_lens = call()
    peer = mla.peers()["vllm_triton"]
    for splits in (None, 8):
        peer.prepare(q, kv_cache, block_table, seq_lens, 0.1, splits, None)()
    first, second = vllm_kernels.vllm_triton_mla_module().seen
    assert (first["splits"], second["splits"], first["scale"], first["page"]) == (4, 8, 0.1, 64)
    assert second["parts"].shape == (3, 16, 8, 513)
    assert second["parts"].dtype == torch.float32
    assert (first["k"].shape, first["v"].shape) == ((5, 64, 1, 576), (5, 64, 1, 512))
    if more:
        assert first["k_scale"] is first["v_scale"]
        assert first["is_mla"]
        assert first["k_scale"].dtype == torch.float32
        assert first["k_scale"].tolist() == [1.0]


def test_a_peer_is_named_after_its_release_and_without_one_after_its_package(monkeypatch):
    monkeypatch.setattr(devices, "version_of", {"vllm": "0.22.1", "flashinfer-python": "0.7.2"}.get)
    named = ["vLLM 0.22.1 Triton MLA", "FlashInfer 0.7.2 MLA fa2", "FlashInfer 0.7.2 MLA fa3",
             "FlashInfer 0.7.2 trtllm-gen MLA", "FlashInfer 0.7.2 CUTLASS MLA"]  # fmt: skip
    assert [peer.name for peer in mla.peers().values()][:5] == named
    assert vllm_kernels.vllm_fa3().name == "vLLM 0.22.1 FA3 MLA"
    monkeypatch.setattr(devices, "version_of", lambda package: None)
    without = [name.replace(" 0.22.1", "").replace(" 0.7.2", "") for name in named]
    assert [peer.name for peer in mla.peers().values()][:5] == without


TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla"


@pytest.mark.parametrize("version", ["0.20.0", "0.26.0"])
def test_splits_are_those_that_vllm_chooses(version):
    root = environment.sources(version) / "vllm"
    chosen = []
    with executed(root, TRITON_MLA):
        module = importlib.import_module(TRITON_MLA)
        module.decode_attention_fwd = lambda *args, **kwargs: chosen.append(args[8])
        impl = module.TritonMLAImpl.__new__(module.TritonMLAImpl)
        impl.kv_lora_rank, impl.scale, impl._sm_count = 512, 1.0, 132
        impl.need_to_return_lse_for_decode = False
        layer = SimpleNamespace(_k_scale=None, _v_scale=None)
        lengths = (1, 511, 512, 1024, 1535, 1536, 4096, 33000, 10**6)
        for length in lengths:
            decode = SimpleNamespace(block_table=None, seq_lens=None)
            metadata = SimpleNamespace(decode=decode, max_seq_len=length)
            impl.forward_mqa(torch.zeros(1, 2, 576), torch.zeros(1, 16, 576), metadata, layer)
    assert chosen == [vllm_kernels.vllm_splits(length, 132) for length in lengths]


def test_flashmla_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.delenv("STALEPROOF_FLASHMLA_SO", raising=False)
    monkeypatch.setattr(vllm_kernels, "vllm_file", lambda path: None)
    if devices.provenance() is not Provenance.MEASURED:
        assert vllm_kernels.flashmla().unavailable_reason == "needs a CUDA device"
    monkeypatch.setattr(vllm_kernels, "_needs_sm90", lambda: None)
    assert "STALEPROOF_FLASHMLA_SO does not name" in vllm_kernels.flashmla().unavailable_reason
    monkeypatch.setenv("STALEPROOF_FLASHMLA_SO", str(tmp_path / "gone.so"))
    assert vllm_kernels.flashmla().unavailable_reason is not None
    (tmp_path / "gone.so").write_text("")
    assert vllm_kernels.flashmla().unavailable_reason is None


@pytest.fixture(name="flashmla")
def flashmla_fixture(monkeypatch):
    """Decodes with a library of these functions: its result, and that of the reference."""

    def run(block_table, seq_lens, *q_len, library="_flashmla_C", e4m3=False, out=None, **functions):
        q, kv_cache = torch.randn(len(seq_lens), *q_len, 16, 576), torch.randn(5, 64, 576)
        kv_cache = kv_cache.to(E4M3) if e4m3 else kv_cache
        block_table, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in (block_table, seq_lens))
        loaded = []
        monkeypatch.setattr(torch.ops, "load_library", loaded.append)
        monkeypatch.setattr(torch.ops, library, SimpleNamespace(**functions), raising=False)
        monkeypatch.setattr(vllm_kernels, "flashmla_library", lambda: Path("wheel/_flashmla_C.abi3.so"))
        found = vllm_kernels.flashmla().prepare(q, kv_cache, block_table, seq_lens, 0.1, None, out)()
        assert loaded == [f"wheel/{library}.abi3.so"]
        q = q.to(E4M3).float() if e4m3 else q
        return found, mla_decode(q, kv_cache.float(), block_table, seq_lens, softmax_scale=0.1)

    return run


def test_flashmla_gets_the_arguments_that_vllm_gives_it(flashmla):
    calls = []

    def decode(q, kv, rank, lengths, table, scale, causal, plan, splits, out):
        calls.append((tuple(q.shape), tuple(kv.shape), rank, table.tolist(), causal, plan, splits))
        want, lse = mla_decode(q[:, 0], kv[:, :, 0], table, lengths, softmax_scale=scale)
        out[:, 0] = want
        return out, lse[:, :, None], "a plan", "splits"

    found, right = flashmla([[1, 4], [2, 99], [77, -1]], [65, 64, 0], dense_decode_fwd=decode)
    torch.testing.assert_close(found, right)
    first, second = calls
    assert first == ((3, 1, 16, 576), (5, 64, 1, 576), 512, [[1, 4], [2, 0], [0, 0]], False, None, None)
    assert second[-2:] == ("a plan", "splits")


def test_flashmla_writes_the_heads_of_several_query_tokens_as_one_axis(flashmla):
    def decode(q, kv, rank, lengths, table, scale, causal, plan, splits, out):
        assert causal
        want, lse = mla_decode(q, kv[:, :, 0], table, lengths, softmax_scale=scale)
        assert out.shape == (2, 1, 2 * 16, 512)
        out.copy_(want.reshape(out.shape))
        return out, lse, "a plan", "splits"

    (out, lse), (want, _) = flashmla([[1], [2]], [60, 7], 2, dense_decode_fwd=decode)
    torch.testing.assert_close(out, want)
    # Its lse has another order of tokens and heads.
    assert lse is None


def test_flashmla_reads_an_e4m3_cache_with_e4m3_queries(flashmla):
    def metadata(lengths, rows, kv_heads):
        assert (rows, kv_heads) == (16, 1)
        return "a plan", lengths

    def decode(q, kv, rank, lengths, table, scale, causal, plan, splits, q_scale, kv_scale):
        assert (q.dtype, kv.dtype, rank, causal) == (E4M3, E4M3, 512, False)
        assert (plan, splits is lengths) == ("a plan", True)
        assert q_scale.tolist() == kv_scale.tolist() == [1.0]
        out, lse = mla_decode(q[:, 0].float(), kv[:, :, 0].float(), table, lengths, softmax_scale=scale)
        return out[:, None], lse[..., None]

    kernels = {"fwd_kvcache_mla_fp8": decode, "get_mla_decoding_metadata_dense_fp8": metadata}
    kept = torch.empty(2, 16, 512)
    (out, lse), (want, _) = flashmla(
        [[1], [2]], [60, 7], library="_flashmla_extension_C", e4m3=True, out=kept, **kernels
    )
    torch.testing.assert_close(out, want)
    # What is compared was written before the launch that is timed.
    torch.testing.assert_close(kept, want)
    assert lse is None


@pytest.mark.gpu
def test_flashmla_is_right():
    if why := vllm_kernels.flashmla().unavailable_reason:
        pytest.skip(f"not run: {why}")
    q, kv_cache = (torch.randn(*s, device="cuda").bfloat16() for s in ((3, 128, 576), (5, 64, 576)))
    block_table = torch.tensor([[1, 4], [2, -1], [-1, -1]], dtype=torch.int32, device="cuda")
    seq_lens = torch.tensor([100, 64, 0], dtype=torch.int32, device="cuda")
    want, _ = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=0.05)
    out, _ = vllm_kernels.flashmla()(q, kv_cache, block_table, seq_lens, softmax_scale=0.05)
    torch.testing.assert_close(out[:2], want[:2], rtol=2e-2, atol=2e-2)
