"""vLLM's own classes around its kernels, driven on a CPU; run inside a vLLM environment only.

The Triton MLA kernel is vLLM's, interpreted. The compiled kernels are not to be had here: stand-ins
take their place that model their faults, which tests that the patches reach vLLM's calls and clean
what comes through them, not the kernels; test_gpu.py has the compiled routing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
            "ActivationType": SimpleNamespace(Swiglu=1, Relu2=2, Geglu=3, Silu=4, Gelu=5, Relu=6, Identity=7)
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
    """CUDA memory is host memory: vLLM's MLA modules ask for some when they are imported."""

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
    """Memory that nobody wrote holds NaN, or bytes 0x7F."""
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
        "_workspace": SimpleNamespace(ensure_size=lambda *a: None, get_buf=lambda: None),
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
    decode = SimpleNamespace(seq_lens=seq_lens, block_table=table, max_query_len=q_len)
    if starts is not None:
        decode.query_start_loc = torch.tensor(starts, dtype=torch.int32)
    metadata = SimpleNamespace(
        decode=decode, num_decodes=len(SEQ_LENS), num_decode_tokens=rows, max_seq_len=32, causal=True
    )
    layer = SimpleNamespace(
        _k_scale=torch.ones(1),
        _v_scale=torch.ones(1),
        _q_scale_float=1.0,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
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
    """What CUTLASS and FlashInfer do to rows of empty requests: nothing."""
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


def _first_wins(scores: torch.Tensor, choice: torch.Tensor, k: int) -> tuple[Any, Any]:
    """vLLM's selection: k rounds of ``>``, which no NaN wins, so that the first column stays."""
    ids = torch.zeros(scores.shape[0], k, dtype=torch.int64)
    for row, values in enumerate(choice.clone().tolist()):
        for slot in range(k):
            best = 0
            for expert, value in enumerate(values):
                if value > values[best]:
                    best = expert
            ids[row, slot] = best
            values[best] = -10000.0
    return scores.gather(1, ids), ids


class CompiledOps:
    """Stand-ins for the routing ops of ``_moe_C``, registered for the CPU."""

    def __init__(self, clamped: bool) -> None:
        ops = importlib.import_module("vllm._custom_ops")
        arguments = importlib.import_module("inspect").signature(ops.topk_softmax).parameters
        padding = ", Tensor? is_padding" if "is_padding" in arguments else ""
        scaling = ", float scaling" if padding else ""
        self.clamped = clamped
        self.bias_seen: list[bool] = []
        self.library = torch.library.Library("_moe_C", "FRAGMENT")
        common = "Tensor(a!) w, Tensor(b!) ids, Tensor(c!) i, Tensor x, bool renorm, Tensor? bias"
        self.library.define(f"topk_softmax({common}{padding}) -> ()")
        self.library.define(f"topk_sigmoid({common}{scaling}{padding}) -> ()")
        self.library.define(
            "grouped_topk(Tensor x, int groups, int chosen, int k, bool renorm, float scaling, "
            "Tensor bias, int scoring) -> (Tensor, Tensor)"
        )
        self.library.impl("topk_softmax", self._topk(lambda x: x.softmax(-1)), "CPU")
        self.library.impl("topk_sigmoid", self._topk(lambda x: x.sigmoid()), "CPU")
        self.library.impl("grouped_topk", self._grouped, "CPU")
        for name in ("topk_softmax", "topk_sigmoid"):
            torch.library.register_fake(f"_moe_C::{name}", lambda *args: None, lib=self.library)

    def _topk(self, score: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
        def run(w: Any, ids: Any, i: Any, x: Any, renorm: bool, bias: Any, *rest: Any) -> None:
            scores = score(x.float())
            if self.clamped:
                scores = torch.where(scores.isfinite(), scores, 0.0)
            chosen = scores if bias is None else scores + bias
            values, found = _first_wins(scores, chosen, ids.shape[1])
            w.copy_(values / values.sum(-1, keepdim=True) if renorm else values)
            ids.copy_(found)

        return run

    def _grouped(
        self, x: Any, groups: int, chosen: int, k: int, renorm: bool, scaling: float, bias: Any, scoring: int
    ) -> Any:
        scores = x.float().sigmoid() if scoring else x.float()
        if self.clamped:
            scores = torch.where(scores.isfinite(), scores, 0.0)
        values, found = _first_wins(scores, scores + bias, k)
        return values, found.int()


def _duplicates(ids: torch.Tensor) -> int:
    return sum(len(set(row)) < len(row) for row in ids.tolist())


def _logits(experts: int = 32, rows: int = 6) -> torch.Tensor:
    x = torch.randn(rows, experts, generator=torch.Generator().manual_seed(1))
    x[3] = torch.nan
    x[4, 0] = torch.nan
    return x


ROUTERS = "vllm.model_executor.layers.fused_moe.router"


def routing() -> dict[str, Any]:
    """Rows of 6 with a repeated expert, through vLLM's own callers; NaN in two rows or the bias."""
    plain = importlib.import_module(f"{ROUTERS}.fused_topk_router")
    biased = importlib.import_module(f"{ROUTERS}.fused_topk_bias_router")
    grouped = importlib.import_module(f"{ROUTERS}.grouped_topk_router")
    ops = importlib.import_module("vllm._custom_ops")
    x, hidden = _logits(), torch.zeros(6, 8)
    clean = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    bias = torch.zeros(32)
    bias[:30] = torch.nan
    found = {}
    platform = mock.Mock(is_cuda=lambda: True, is_xpu=lambda: False)
    with (
        mock.patch.object(ops, "current_platform", platform),
        mock.patch.object(biased.rocm_aiter_ops, "is_fused_moe_enabled", return_value=False),
    ):
        for scoring in ("softmax", "sigmoid"):
            weights, ids, _ = plain.fused_topk(hidden, x, 4, False, scoring_func=scoring)
            found[scoring] = _duplicates(ids)
            found[f"{scoring} weights"] = int((~weights.isfinite()).sum())
        for scoring in ("softmax", "sigmoid"):
            weights, ids = (
                biased.vllm_topk_softmax(
                    torch.empty(6, 4),
                    torch.empty(6, 4, dtype=torch.int32),
                    torch.empty(6, 4, dtype=torch.int32),
                    clean,
                    False,
                    bias,
                )
                if scoring == "softmax"
                else biased.vllm_topk_sigmoid(
                    torch.empty(6, 4),
                    torch.empty(6, 4, dtype=torch.int32),
                    torch.empty(6, 4, dtype=torch.int32),
                    clean,
                    False,
                    bias,
                )
            )
            found[f"{scoring} NaN bias"] = _duplicates(ids)
        _, ids = grouped.fused_grouped_topk(hidden, x, 4, False, torch.zeros(32), 4, 2, "sigmoid", 1.0)
        found["grouped"] = _duplicates(ids)
        _, ids = grouped.fused_grouped_topk(hidden, clean, 4, False, bias, 4, 2, "sigmoid", 1.0)
        found["grouped NaN bias"] = _duplicates(ids)
    return found


def traced_routing() -> int:
    """Rows with a repeated expert where torch.compile has traced vLLM's caller, in one graph."""
    plain = importlib.import_module(f"{ROUTERS}.fused_topk_router")
    torch._dynamo.reset()
    run = torch.compile(plain.vllm_topk_softmax, backend="eager", fullgraph=True)
    ids = torch.empty(6, 4, dtype=torch.int32)
    run(torch.empty(6, 4), ids, torch.empty(6, 4, dtype=torch.int32), _logits(), False)
    return _duplicates(ids)


def simulator() -> dict[str, Any]:
    """Default id dtype, and the part of 2,000 tokens that name an expert twice (8 of 128)."""
    module = importlib.import_module(f"{ROUTERS}.routing_simulator_router")
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for distribution in ("uniform", "normal"):
        router = module.DistributionBasedRouting(distribution)
        _, ids = router.route_tokens(torch.zeros(2000, 8), torch.zeros(2000, 128), 8)
        found[distribution] = round(_duplicates(ids) / len(ids), 2)
        found["dtype"] = str(ids.dtype)
        found[f"{distribution} range"] = bool(((ids >= 0) & (ids < 128)).all())
    return found


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
        _, scales = make(5, 64, torch.device("cpu"), True)
    else:
        with poisoned():
            _, scales = make(5, 64, torch.device("cpu"), True)
    left = 0 if compiled else int(scales.view(torch.uint8).count_nonzero())
    return {"shape": [*scales.shape], "dtype": str(scales.dtype), "stale": left}


def fused_moe_ids() -> dict[str, Any]:
    """Ids and weights that reach FlashInfer's fused MoE from a row that names expert 3 twice."""
    name = "vllm.model_executor.layers.fused_moe"
    try:
        module = importlib.import_module(f"{name}.flashinfer_cutlass_moe")
    except ImportError:
        module = importlib.import_module(f"{name}.experts.flashinfer_cutlass_moe")
    impl = module.FlashInferExperts.__new__(module.FlashInferExperts)
    seen: dict[str, Any] = {}

    def kernel(**given: Any) -> None:
        seen["ids"] = given["token_selected_experts"].tolist()
        seen["weights"] = given["token_final_scales"].tolist()

    handed = mock.MagicMock(name="attributes")
    activation = module.MoEActivation.SILU
    with (
        mock.patch.object(module, "flashinfer_cutlass_fused_moe", kernel),
        mock.patch.object(
            module.FlashInferExperts, "__getattr__", lambda self, name: _moe_attribute(name), create=True
        ),
    ):
        for name in ("quant_dtype", "w1_scale", "w2_scale"):
            with contextlib.suppress(AttributeError):
                setattr(impl, name, None)
        impl.apply(
            torch.zeros(2, 8),
            torch.zeros(2, 8, dtype=torch.bfloat16),
            handed,
            handed,
            torch.tensor([[0.4, 0.3, 0.2], [0.5, 0.3, 0.2]]),
            torch.tensor([[3, 1, 3], [0, 1, 2]], dtype=torch.int32),
            activation,
            8,
            None,
            None,
            None,
            None,
            None,
            None,
            False,
        )
    return seen


def _moe_attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    flags = name.startswith(("use_", "is_"))
    return False if flags else 1 if "size" in name or "rank" in name else None


class _Stop(Exception):
    pass


def dummy_slots() -> dict[str, Any]:
    """The slots that a real ``_dummy_run`` of 8 tokens hands out, and a real step after it."""
    module = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    cls = module.GPUModelRunner
    buffer = torch.full((16,), 7, dtype=torch.int64)
    runner = mock.MagicMock()
    runner.max_num_tokens = 16
    runner.scheduler_config.max_num_seqs = 8
    runner.uniform_decode_query_len = 1
    runner.is_pooling_model = False
    runner.dcp_world_size = runner.pcp_world_size = 1
    runner.kv_cache_config.kv_cache_groups = [SimpleNamespace(kv_cache_spec=None, layer_names=["layer.0"])]
    table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=buffer))
    runner.input_batch.block_table = [table]
    mode = module.CUDAGraphMode.NONE
    size = SimpleNamespace(num_tokens=8, num_reqs=8)
    runner._determine_batch_execution_and_padding.return_value = (mode, size, False, None, None)
    runner.vllm_config.model_config.multimodal_config = None
    runner._get_slot_mappings = lambda *a, **k: cls._get_slot_mappings(runner, *a, **k)
    runner._staleproof_dummy = False
    runner.synchronize_input_prep.side_effect = _Stop
    with contextlib.suppress(_Stop):
        cls._dummy_run(runner, 8, cudagraph_runtime_mode=mode)
    handed = buffer.tolist()
    buffer.fill_(7)
    runner._get_slot_mappings(num_tokens_padded=8, num_reqs_padded=8, num_tokens_unpadded=6)
    return {"dummy": handed, "real": buffer.tolist()}
