"""Calls of vLLM's own functions that the patches wrap, with the least that each needs around it.

Inside :func:`staleproof.kernels.vllm_sources.executed`, which lets ``import vllm...`` find the named
files. Each function returns a closure over vLLM's function as it is found at the time of the call,
patched or not, and the closure returns what the caller would see.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from staleproof.vllm.patch import Patch
from staleproof.vllm.releases import table

TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla"
DECODE_ATTENTION = "vllm.v1.attention.ops.triton_decode_attention"
WORKER = "vllm.v1.worker.utils"
OPS = "vllm._custom_ops"
SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGERS = "vllm.v1.core.kv_cache_manager", "vllm.v1.core.single_type_kv_cache_manager"
SCHEDULING = (SCHEDULER, "vllm.v1.core.sched.output", *MANAGERS)
EXPERTS = "vllm.model_executor.layers.fused_moe.flashinfer_cutlass_moe"

PAGE = 64


def applies_to(patch: Patch) -> str:
    """The releases of the recorded table that need a patch and get it.

    >>> from staleproof.vllm.plugin import patches
    >>> applies_to(patches()["scale_padding"])
    '0.18.0 to 0.19.1, 0.22.0 to 0.24.0, 0.30.0 to 0.33.0'
    """
    spans: list[list[str]] = []
    before = False
    for version, needs in table().items():
        here = needs[patch.name]["needed"] and patch.applies_to(version)
        if here and before:
            spans[-1][1] = version
        elif here:
            spans.append([version, version])
        before = here
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in spans)


def import_ops() -> ModuleType:
    """vLLM's ``_custom_ops``, without its kernels for fake tensors.

    A process can register those only once, and here two releases may be loaded one after another.
    """
    with mock.patch.object(torch.library, "register_fake", return_value=lambda function: function):
        return importlib.import_module(OPS)


def mla_call(
    batch: int, live: int, heads: int = 128, context: int = 512, device: str = "cuda"
) -> tuple[Callable[[], Any], torch.Tensor]:
    """vLLM's Triton ``forward_mqa`` for a padded decode batch, and its lengths."""
    cls = importlib.import_module(TRITON_MLA).TritonMLAImpl
    impl = cls.__new__(cls)
    impl.kv_lora_rank, impl.scale = 512, 576**-0.5
    impl.need_to_return_lse_for_decode = False
    processors = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 1
    impl._sm_count = processors
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(batch, heads, 576, dtype=dtype, device=device)
    pages = context // PAGE
    cache = torch.randn(batch * pages, PAGE, 576, dtype=dtype, device=device)
    seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
    seq_lens[:live] = context
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    one = torch.ones(1, device=device)
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    metadata = SimpleNamespace(
        decode=SimpleNamespace(seq_lens=seq_lens, block_table=table),
        num_decodes=batch,
        num_decode_tokens=batch,
        max_seq_len=context,
    )
    return lambda: impl.forward_mqa(q, cache, metadata, layer), seq_lens


def topk_call(
    name: str, rows: int, experts: int, top_k: int, bias: torch.Tensor | None, device: str = "cuda"
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """One of vLLM's routing ops on healthy bf16 logits; (weights, ids).

    Args:
        name: ``topk_softmax``, ``topk_sigmoid``, ``grouped_topk`` or ``topk_hash_softplus_sqrt``.
        rows, experts, top_k: sizes.
        bias: (experts,) float32.
        device: of all tensors.
    """
    ops = importlib.import_module(OPS)
    x = torch.randn(rows, experts, dtype=torch.bfloat16, device=device)
    weights = torch.empty(rows, top_k, device=device)
    ids, indices = (torch.empty(rows, top_k, dtype=torch.int32, device=device) for _ in range(2))
    if name == "grouped_topk":
        return lambda: ops.grouped_topk(x, 8, 4, top_k, True, 2.5, bias, 1)
    scaling = (2.5,) if name == "topk_hash_softplus_sqrt" else ()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        getattr(ops, name)(weights, ids, indices, x, True, *scaling, bias)
        return weights, ids

    return call


def zeroer(pin: bool = True, layers: int = 28, device: str = "cuda") -> tuple[Any, list[torch.Tensor]]:
    """vLLM's KVBlockZeroer over layers of (2, 64 blocks, 16, 8, 128) bf16, and the caches."""
    worker = importlib.import_module(WORKER)
    spec = worker.FullAttentionSpec()
    spec.block_size, spec.num_kv_heads, spec.head_size = 16, 8, 128
    caches = [torch.ones(2, 64, 16, 8, 128, dtype=torch.bfloat16, device=device) for _ in range(layers)]
    names = [str(i) for i in range(layers)]
    group = SimpleNamespace(
        kv_cache_spec=spec,
        kv_cache_group_id=0,
        layer_names=names,
        backend=SimpleNamespace(get_kv_cache_block_dim=lambda *a, **k: 1),
    )
    of_layer = {n: SimpleNamespace(kv_cache=c) for n, c in zip(names, caches, strict=True)}
    made = worker.KVBlockZeroer(torch.device(device), pin)
    made.init_meta([group], [16], "auto", set(), of_layer)
    return made, caches


class _Running:
    """A request in decode: each step has one new token for it."""

    num_output_placeholders, num_prompt_tokens, max_tokens = 0, 100, 10**6
    num_tokens_with_spec, num_tokens, num_output_tokens = 201, 201, 101
    has_encoder_inputs = use_structured_output = False
    spec_token_ids: tuple[int, ...] = ()
    lora_request = None

    def __init__(self, number: int) -> None:
        self.request_id = str(number)

    @property
    def num_computed_tokens(self) -> int:
        return 200

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        """Stays, so that each call has the same work."""


def schedule_call(requests: int) -> Callable[[], Any]:
    """vLLM's ``Scheduler.schedule`` with that many requests in decode, and nothing to zero.

    The scheduler, the manager's list of new ids and its draining are vLLM's. Allocation is left out:
    one block of one request is recorded as new in each step, as with 16 tokens a block.
    """
    module: Any = importlib.import_module(SCHEDULER)
    managers, single = (importlib.import_module(name) for name in MANAGERS)
    of_type = single.FullAttentionManager.__new__(single.FullAttentionManager)
    of_type.new_block_ids = []
    manager = managers.KVCacheManager.__new__(managers.KVCacheManager)
    manager.coordinator = SimpleNamespace(
        single_type_managers=(of_type,), new_step_starts=lambda: of_type.new_block_ids.append(7)
    )
    none = SimpleNamespace(get_block_ids=lambda allow_none=False: None)
    manager.allocate_slots = lambda *args, **kwargs: none
    manager.get_num_common_prefix_blocks = lambda request: [0]
    module.record_function_or_nullcontext = lambda name: contextlib.nullcontext()
    running = [_Running(number) for number in range(requests)]
    made = module.Scheduler.__new__(module.Scheduler)
    for name, value in {
        "max_num_scheduled_tokens": 8192,
        "max_num_encoder_input_tokens": 0,
        "max_num_running_reqs": requests,
        "max_model_len": 10**6,
        "num_lookahead_tokens": 0,
        "_pause_state": module.PauseState.UNPAUSED,
        "kv_cache_manager": manager,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=(None,)),
        "scheduler_config": SimpleNamespace(long_prefill_token_threshold=0, async_scheduling=False),
        "encoder_cache_manager": SimpleNamespace(get_freed_mm_hashes=list),
        "requests": {request.request_id: request for request in running},
        "running": running,
        "prev_step_scheduled_req_ids": {request.request_id for request in running},
        "finished_req_ids": set(),
        "policy": None,
    }.items():
        setattr(made, name, value)
    for name in ("lora_config", "connector", "ec_connector", "waiting", "skipped_waiting", "use_pp"):
        setattr(made, name, None)
    for name in ("needs_kv_cache_zeroing", "need_mamba_block_aligned_split", "use_v2_model_runner"):
        setattr(made, name, False)
    module.create_request_queue = lambda policy: ()
    return lambda: made.schedule().num_scheduled_tokens


def experts_call(
    rows: int, top_k: int, device: str = "cuda"
) -> tuple[Callable[[], None], dict[str, torch.Tensor]]:
    """vLLM's ``FlashInferExperts.apply`` for bf16 experts; FlashInfer's kernel is a copy of its input.

    The dict holds the ids and weights that the kernel was given last.
    """
    module: Any = importlib.import_module(EXPERTS)
    seen: dict[str, torch.Tensor] = {}

    def kernel(**given: Any) -> None:
        given["output"].copy_(given["input"])
        seen.update(ids=given["token_selected_experts"], weights=given["token_final_scales"])

    module.flashinfer_cutlass_fused_moe = kernel
    impl = module.FlashInferExperts.__new__(module.FlashInferExperts)
    for name in ("quant_dtype", "weight_quant_dtype", "out_dtype", "use_dp"):
        setattr(impl, name, None)
    impl.tp_size = impl.ep_size = impl.max_capture_size = 1
    impl.tp_rank = impl.ep_rank = 0
    impl.use_deepseek_fp8_block_scale = False
    x = torch.randn(rows, 64, dtype=torch.bfloat16, device=device)
    out, experts = torch.empty_like(x), torch.empty(128, 64, dtype=torch.bfloat16, device=device)
    weights = torch.rand(rows, top_k, device=device)
    ids = torch.rand(rows, len(experts), device=device).topk(top_k).indices.int()
    silu = module.MoEActivation.SILU

    def call() -> None:
        impl.apply(out, x, experts, experts, weights, ids, silu, len(experts), *[None] * 6, False)

    return call, seen
