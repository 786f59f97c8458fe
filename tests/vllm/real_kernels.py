"""vLLM's own MLA backends and FP4 scales, driven on a CPU; run inside a vLLM environment only.

The Triton MLA kernel is vLLM's, interpreted. CUTLASS and FlashInfer are stubs that leave rows of
empty requests unwritten, as theirs do. The checks show that the patches reach vLLM's calls and clean
what goes through them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Space
from typing import Any
from unittest import mock

import torch

RANK, ROPE, PAGE = 512, 64, 16
SEQ_LENS = (20, 5, 31, 0, 9, 0)
BACKENDS = "vllm.v1.attention.backends.mla"


def stub_flashinfer() -> None:
    """Put an empty FlashInfer in place of one that would look for a GPU."""
    names = {
        "flashinfer": {},
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache_mla": None},
        "flashinfer.utils": {
            "get_device_sm_count": lambda device: 1,
            "get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda *args: 16,
        },
        "flashinfer.fused_moe": {},
        "flashinfer.fused_moe.core": {
            "ActivationType": Space(Swiglu=1, Relu2=2, Geglu=3, Silu=4, Gelu=5, Relu=6, Identity=7)
        },
    }
    for name, content in names.items():
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Allocate host memory for CUDA memory, which vLLM's MLA modules allocate when they are imported."""

    def here(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return make

    platform = importlib.import_module("vllm.utils.platform_utils")
    with (
        mock.patch.object(torch, "empty", here(torch.empty)),
        mock.patch.object(torch, "zeros", here(torch.zeros)),
        mock.patch.object(platform, "num_compute_units", mock.Mock(return_value=1)),
    ):
        yield


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, or with bytes 0x7F."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan) if x.is_floating_point() else x.fill_(0x7F)

    with (
        mock.patch.object(torch, "empty", lambda *a, **k: poison(empty(*a, **k))),
        mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k))),
    ):
        yield


def mla_module(name: str) -> Any:
    """One of vLLM's MLA backend modules."""
    with cuda_is_cpu():
        return importlib.import_module(f"{BACKENDS}.{name}")


def _impl(cls: type, heads: int) -> Any:
    impl = cls.__new__(cls)
    for name, value in {
        "num_heads": heads,
        "scale": 0.1,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": 128,
        "kv_cache_dtype": "auto",
        "need_to_return_lse_for_decode": True,
        "_num_kv_splits": -1,
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "dcp_world_size": 1,
        "dcp_rank": 0,
        "_sm_count": 4,
        "_mla_counter_bytes": 16,
        "_mla_counter_max_batch": 8,
        "_workspace": Space(ensure_size=lambda *a: None, get_buf=lambda: None),
        "_workspace_buffer": None,
    }.items():
        setattr(impl, name, value)
    return impl


def _call(
    impl: Any, heads: int, q_len: int, starts: list[int] | None, dtype: Any = torch.float32
) -> tuple[Any, Any]:
    """``forward_mqa`` over six requests, two of them empty; (out, lse)."""
    seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
    rows = starts[-1] + 2 if starts else q_len * len(SEQ_LENS)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, heads, RANK + ROPE, generator=generator).to(dtype)
    cache = torch.randn(14, PAGE, RANK + ROPE, generator=generator).to(dtype)
    # A CUTLASS page table comes in multiples of 128 tokens.
    table = torch.zeros(len(SEQ_LENS), 128 // PAGE, dtype=torch.int32)
    table[:, :2] = 1 + torch.arange(12, dtype=torch.int32).view(6, 2)
    decode = Space(seq_lens=seq_lens, block_table=table, max_query_len=q_len)
    if starts is not None:
        decode.query_start_loc = torch.tensor(starts, dtype=torch.int32)
    metadata = Space(
        decode=decode, num_decodes=len(SEQ_LENS), num_decode_tokens=rows, max_seq_len=32, causal=True
    )
    layer = Space(**{f"_{name}_scale": torch.ones(1) for name in "kv"})
    vars(layer).update({f"_{name}_scale_float": 1.0 for name in "qkv"})
    with poisoned():
        return impl.forward_mqa(q, cache, metadata, layer)


def _bad_rows(out: torch.Tensor) -> list[int]:
    return [row for row, values in enumerate(out) if not values.isfinite().all()]


def triton_rows() -> dict[str, Any]:
    """Real TritonMLAImpl, real kernel: rows with NaN, sum of live rows, lse of empty ones."""
    impl = _impl(mla_module("triton_mla").TritonMLAImpl, heads=2)
    out, lse = _call(impl, 2, 1, None)
    live = [row for row, length in enumerate(SEQ_LENS) if length]
    empty = [row for row, length in enumerate(SEQ_LENS) if not length]
    return {
        "bad": _bad_rows(out),
        "live": out[live].double().sum().item(),
        "empty_sum": out[empty].nan_to_num().abs().sum().item(),
        "empty_lse": lse[empty].unique().tolist(),
    }


def _skip_empty(out: torch.Tensor, lse: Any, seq_lens: torch.Tensor, q_len: int = 1) -> None:
    """Write the rows of live requests only, as CUTLASS and FlashInfer do."""
    for request, length in enumerate(seq_lens.tolist()):
        if length:
            out.view(len(seq_lens), -1, *out.shape[-2:])[request] = 1.0
            if lse is not None and lse.numel():
                lse.view(len(seq_lens), -1)[request] = 0.0


def cutlass_rows(heads: int = 128) -> dict[str, Any]:
    """Real CutlassMLAImpl around a kernel that skips empty rows."""
    module = mla_module("cutlass_mla")
    impl = _impl(module.CutlassMLAImpl, heads)
    impl._decode_out = None

    def kernel(out: Any, lse: Any, q: Any, q_pe: Any, cache: Any, seq_lens: Any, *rest: Any) -> None:
        _skip_empty(out, lse, seq_lens)

    with mock.patch.object(module.ops, "sm100_cutlass_mla_decode", kernel):
        out, _ = _call(impl, heads, 1, None, torch.bfloat16)
    return {"bad": _bad_rows(out), "kept": impl._decode_out is not None, "shape": [*out.shape]}


def flashinfer_rows(q_len: int, starts: list[int] | None = None) -> dict[str, Any]:
    """Real FlashInferMLAImpl around a kernel that skips empty rows."""
    module = mla_module("flashinfer_mla")
    impl = _impl(module.FlashInferMLAImpl, 2)
    impl._decode_out = None
    impl.need_to_return_lse_for_decode = False

    def kernel(query: Any, seq_lens: Any, out: Any = None, **rest: Any) -> Any:
        if out is None:
            out = torch.empty(*query.shape[:-1], RANK)
        owned = rest.get("cum_seq_lens_q")
        if owned is None:
            _skip_empty(out, None, seq_lens)
        else:
            for request, length in enumerate(seq_lens.tolist()):
                if length:
                    out[owned[request] : owned[request + 1]] = 1.0
        return out if out.ndim == query.ndim else out.view(*query.shape[:-1], RANK)

    names = {"trtllm_batch_decode_with_kv_cache_mla": kernel}
    for name, value in {
        "_get_workspace_buffer": lambda *a: None,
        "_select_mla_decode_backend": lambda *a: "cute-dsl",
    }.items():
        if hasattr(module, name):
            names[name] = value
    with mock.patch.multiple(module, **names):
        out, _ = _call(impl, 2, q_len, starts)
    return {
        "bad": _bad_rows(out),
        "live": int((out == 1).all((1, 2)).sum()),
        "kept": impl._decode_out is not None,
    }


def fp4_padding(compiled: bool = False) -> dict[str, Any] | None:
    """Padding bytes of the scales that vLLM allocates for 5 rows of 64 columns, swizzled.

    ``None`` where vLLM allocates them elsewhere (0.17.1).
    """
    ops = importlib.import_module("vllm._custom_ops")
    if not hasattr(ops, "create_fp4_output_tensors"):
        return None
    make = ops.create_fp4_output_tensors
    if compiled:
        torch._dynamo.reset()
        make = torch.compile(make, backend="eager", fullgraph=True)
    with poisoned():
        _, scales = make(5, 64, torch.device("cpu"), True)
    left = int(scales.view(torch.uint8).count_nonzero())
    return {"shape": [*scales.shape], "dtype": str(scales.dtype), "stale": left}
