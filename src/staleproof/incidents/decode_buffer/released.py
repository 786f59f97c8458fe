"""The profile run and a capture of a released vLLM, on a CPU: only the capture allocates the decode buffer.

The model runner, the graph dispatcher, the MLA layer and both backends are vLLM's own files, executed
unchanged. Their other imports are stubs (:mod:`staleproof.kernels.vllm_sources`), and the attention kernel is
a function that records its arguments. The five steps of 0.18.1 follow; paths are below ``vllm/``, and without
a path the file is ``v1/worker/gpu_model_runner.py``:

1. ``profile_run`` calls ``_dummy_run(max_num_tokens, is_profile=True)``: line 5516
2. which makes it eager, ``force_eager=is_profile or ...``: line 5053
3. so that the dispatcher may choose only the graph mode NONE: line 3362
4. attention metadata is built only for ``force_attention`` or the mode FULL: line 5111
5. without metadata MLA returns zeros (``model_executor/layers/attention/mla_attention.py:558``) before
   ``forward_mqa``, whose first call allocates the buffer: ``v1/attention/backends/mla/cutlass_mla.py:233``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from staleproof.kernels.vllm_sources import executed

RUNNER, LAYER = "vllm.v1.worker.gpu_model_runner", "vllm.model_executor.layers.attention.mla_attention"
BACKENDS = {
    "CUTLASS": ("cutlass_mla", "CutlassMLAImpl"),
    "FlashInfer": ("flashinfer_mla", "FlashInferMLAImpl"),
}
FILES = ("vllm.config.compilation", "vllm.forward_context", "vllm.v1.cudagraph_dispatcher", RUNNER, LAYER)
TOKENS, ROWS, HEADS, NOPE, RANK, ROPE = 64, 8, 128, 4, 512, 64


@dataclass(frozen=True)
class Released:
    """One backend of one release.

    Attributes:
        version: of vLLM.
        backend: a key of :data:`BACKENDS`.
        change: keywords that the profile run's ``_dummy_run`` gets instead of its own.
    """

    version: str
    backend: str
    change: tuple[tuple[str, Any], ...] = ()


def _empty(*shape: Any, device: Any = None, dtype: Any = None, **options: Any) -> torch.Tensor:
    # On the CPU, whatever the device, and filled with 0x7F, so that it is visible if somebody zeroes it.
    made = _zeros_here(*shape, dtype=dtype)
    made.view(torch.uint8).fill_(0x7F)
    return made


_zeros_here = torch.zeros


def _zeros(*shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
    return _zeros_here(*shape, **options)


@contextlib.contextmanager
def _loaded(folder: Path, backend: str, calls: list[dict[str, Any]]) -> Iterator[None]:
    """The files of a release. Each call of the attention kernel adds its keyword arguments to ``calls``."""

    def cutlass(out: torch.Tensor, lse: torch.Tensor, *rest: Any) -> None:
        calls.append({"out": out, "lse": lse})

    def flashinfer(query: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options)
        return query.new_zeros(*query.shape[:3], RANK)

    known: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_LOG_BATCHSIZE_INTERVAL": -1, "__getattr__": lambda name: None},
        "vllm.ir": {"enable_torch_wrap": contextlib.nullcontext},
        "vllm.tracing": {"instrument": lambda **options: lambda function: function},
        "vllm.model_executor.custom_op": {
            "CustomOp": mock.MagicMock(register=lambda *a, **o: lambda kind: kind)
        },
        "vllm._custom_ops": {
            "sm100_cutlass_mla_decode": cutlass,
            "sm100_cutlass_mla_get_workspace_size": lambda *args, **options: 0,
        },
        "vllm.utils.platform_utils": {"num_compute_units": lambda *args: 1},
        "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b)},
        "vllm.distributed.parallel_state": {"get_pp_group": mock.MagicMock},
        "vllm.v1.worker.ubatch_utils": {"maybe_create_ubatch_slices": lambda *args: (None, None)},
    }
    stubs = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.decode")}
    vars(stubs["flashinfer.decode"])["trtllm_batch_decode_with_kv_cache_mla"] = flashinfer
    before = {name: sys.modules.get(name) for name in stubs}
    names = (*FILES, f"vllm.v1.attention.backends.mla.{BACKENDS[backend][0]}")
    with (
        executed(folder, *names),
        mock.patch.object(torch, "empty", _empty),
        mock.patch.object(torch, "zeros", _zeros),
        # The profile run ends with one, which takes longer than all else here.
        mock.patch.object(gc, "collect", return_value=0),
    ):
        # Not mock.patch.dict: it would also remove Triton if Triton is imported inside this block, and Triton
        # cannot be imported twice.
        sys.modules.update(stubs)
        for name, members in known.items():
            vars(importlib.import_module(name)).update(members)
        modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
        vars(importlib.import_module("vllm.config"))["CUDAGraphMode"] = modes
        platform = importlib.import_module("vllm.platforms").current_platform
        platform.dispatch_key, platform.set_additional_forward_context = "CPU", lambda **options: {}
        try:
            yield
        finally:
            sys.modules.update({name: module for name, module in before.items() if module})
            for name in [name for name, module in before.items() if module is None]:
                del sys.modules[name]


def _layer(subject: Released) -> Any:
    """An MLA layer on this backend; its impl has only the attributes that a decode reads."""
    file, name = BACKENDS[subject.backend]
    module = importlib.import_module(f"vllm.v1.attention.backends.mla.{file}")
    impl = mock.MagicMock(dcp_world_size=1, _decode_out=None, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
    impl.need_to_return_lse_for_decode, impl.kv_cache_dtype = True, "auto"
    impl.bmm1_scale = impl.bmm2_scale = 1.0
    impl._workspace = getattr(module, "g_sm100_workspace", None)
    for method in ("forward_mqa", "_sm100_cutlass_mla_decode"):
        if function := getattr(getattr(module, name), method, None):
            setattr(impl, method, MethodType(function, impl))
    layer = mock.MagicMock(
        impl=impl, kv_cache_dtype="auto", chunked_prefill_workspace_size=1, num_heads=HEADS, v_head_dim=NOPE
    )
    layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.q_pad_num_heads = NOPE, ROPE, None
    layer.is_aiter_triton_fp4_bmm_enabled = layer.is_aiter_triton_fp8_bmm_enabled = False
    layer.W_UK_T = torch.zeros(HEADS, NOPE, RANK, dtype=torch.bfloat16)
    own = importlib.import_module(LAYER).MLAAttention
    layer._q_scale_float = layer._k_scale_float = layer._v_scale_float = 1.0
    layer.forward_impl = MethodType(own.forward_impl, layer)
    return layer


def _runner(layer: Any) -> Any:
    """A model runner whose model is that layer. The methods it calls are vLLM's, the settings are ours."""
    modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    module, contexts = importlib.import_module(RUNNER), importlib.import_module("vllm.forward_context")
    compilation = SimpleNamespace(
        cudagraph_mode=modes.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=[ROWS],
        max_cudagraph_capture_size=ROWS,
        compile_sizes=[],
        cudagraph_specialize_lora=False,
        pass_config=SimpleNamespace(enable_sp=False),
        fast_moe_cold_start=False,
        static_forward_context={},
        ir_enable_torch_wrap=False,
        is_attention_compiled_piecewise=lambda: True,
    )
    config = mock.MagicMock(compilation_config=compilation, speculative_config=None, lora_config=None)
    config.parallel_config.data_parallel_size = config.parallel_config.num_ubatches = 1
    config.scheduler_config.max_num_seqs, config.model_config.multimodal_config = ROWS, None
    runner = mock.MagicMock(vllm_config=config, compilation_config=compilation, speculative_config=None)
    runner.scheduler_config, runner.max_num_tokens = config.scheduler_config, TOKENS
    runner.uniform_decode_query_len = 1
    runner.supports_mm_inputs = runner.enable_prompt_embeds = runner.is_pooling_model = False
    runner.use_aux_hidden_state_outputs = runner.uses_mrope = runner.model_config.is_encoder_decoder = False
    runner.uses_xdrope_dim, runner.lora_config, runner.device = 0, None, "cpu"
    runner._pad_for_sequence_parallelism = lambda tokens: tokens
    runner._get_slot_mappings.return_value = None, {}
    runner.query_start_loc.np = runner.seq_lens.np = _zeros_here(TOKENS + 1).numpy()
    runner.arange_np = runner.query_pos.np = torch.arange(TOKENS + 1).numpy()
    metadata = mock.MagicMock(num_actual_tokens=ROWS, num_decode_tokens=ROWS, num_reqs=ROWS, num_decodes=ROWS)
    metadata.decode.seq_lens = torch.zeros(ROWS, dtype=torch.int32)
    metadata.decode.block_table = torch.zeros(ROWS, 1, dtype=torch.int32)
    runner._build_attention_metadata.return_value = metadata, None
    cache = torch.zeros(1, 128, RANK + ROPE, dtype=torch.bfloat16)

    def model(**inputs: Any) -> torch.Tensor:
        context = contexts.get_forward_context()
        rows = ROWS if context.attn_metadata else TOKENS
        q = torch.zeros(rows, HEADS, NOPE + ROPE, dtype=torch.bfloat16)
        out = torch.zeros(rows, HEADS * NOPE, dtype=torch.bfloat16)
        layer.forward_impl(q, q[:, 0], q[:, 0], cache, context.attn_metadata, output=out)
        return _zeros_here(TOKENS, 1)

    runner.model = model
    dispatcher = importlib.import_module("vllm.v1.cudagraph_dispatcher").CudagraphDispatcher
    runner.cudagraph_dispatcher = dispatcher(config)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(modes.FULL_DECODE_ONLY, 1)
    own = ("profile_run", "_dummy_run", "_determine_batch_execution_and_padding", "_get_cumsum_and_arange")
    for method in own:
        setattr(runner, method, MethodType(inspect.unwrap(getattr(module.GPUModelRunner, method)), runner))
    runner._is_uniform_decode = module.GPUModelRunner._is_uniform_decode
    return runner


def profiled(subject: Released, folder: Path) -> dict[str, Any]:
    """What each step of the profile run did, and what the backend keeps after it and after a capture.

    Args:
        subject: backend and release.
        folder: of the release's package ``vllm``.

    Returns:
        The five steps of this module's docstring by name; ``kept_by_profile`` and ``kept_by_capture``, bytes
        of the decode buffer; ``out_given``, whether the kernel is given memory for its output;
        ``lse_kept``, whether two calls of CUTLASS get one LSE buffer; ``workspace_zeroed``.
    """
    calls: list[dict[str, Any]] = []
    with _loaded(folder, subject.backend, calls):
        layer = _layer(subject)
        runner = _runner(layer)
        modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
        dummy, plan, chosen = runner._dummy_run, runner._determine_batch_execution_and_padding, []
        change, given = dict(subject.change), dict[str, Any]()

        def changed(num_tokens: int, **own: Any) -> Any:
            given.update({"num_tokens": num_tokens, **own, **change})
            return dummy(**given)

        def planned(**options: Any) -> Any:
            answer = plan(**options)
            chosen.append((options["force_eager"], answer[0].name))
            return answer

        runner._dummy_run = changed
        runner._determine_batch_execution_and_padding = planned

        def kept() -> int:
            buffer = layer.impl._decode_out
            return 0 if buffer is None else int(buffer.nbytes)

        runner.profile_run()
        steps = {
            "is_profile": given["is_profile"],
            "force_eager": chosen[0][0],
            "graph_mode": chosen[0][1],
            "metadata_built": runner._build_attention_metadata.called,
            "decode_calls": len(calls),
            "kept_by_profile": kept(),
        }
        for _ in range(2):
            dummy(ROWS, cudagraph_runtime_mode=modes.FULL, force_attention=True, uniform_decode=True)
        steps |= {"kept_by_capture": kept(), "capture_calls": len(calls) - steps["decode_calls"]}
        steps["out_given"] = calls[-1].get("out") is not None
        if subject.backend == "CUTLASS":
            space = layer.impl._workspace.get_buf()
            steps["lse_kept"] = calls[-1]["lse"].data_ptr() == calls[-2]["lse"].data_ptr()
            steps["workspace_zeroed"] = not space[:1024].any()
        return steps
