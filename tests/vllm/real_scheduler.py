"""vLLM's own scheduler, block zeroer and dummy run, driven on a CPU; run inside a vLLM environment only."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any
from unittest import mock

import torch

BLOCKS = 512
TINY_LLAMA = Path(__file__).with_name("tiny_llama")


def fitting(call: Callable[..., Any], **keywords: Any) -> Any:
    """Call with the keywords that this release knows."""
    known = inspect.signature(call).parameters
    return call(**{name: value for name, value in keywords.items() if name in known})


@cache
def config(caching: bool, blocks: int = BLOCKS) -> Any:
    """A VllmConfig for a model of two small layers that is never loaded."""
    from vllm import config as of

    model = of.ModelConfig(
        model=str(TINY_LLAMA), skip_tokenizer_init=True, dtype="float32", max_model_len=512
    )
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512}
    scheduler = fitting(of.SchedulerConfig, enable_chunked_prefill=True, is_encoder_decoder=False, **sizes)
    cache = {"block_size": 16, "gpu_memory_utilization": 0.9, "swap_space": 0, "cache_dtype": "auto"}
    cached = fitting(of.CacheConfig, enable_prefix_caching=caching, **cache)
    cached.num_gpu_blocks = blocks
    parts = {"model_config": model, "cache_config": cached, "scheduler_config": scheduler}
    on = {"parallel_config": of.ParallelConfig(), "device_config": of.DeviceConfig(device="cpu")}
    return of.VllmConfig(**parts, **on)


def attention_spec() -> Any:
    """Full attention in blocks of 16."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return fitting(
        FullAttentionSpec, block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32, use_mla=False
    )


def mla_spec() -> Any:
    """MLA in blocks of 16."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return fitting(
        MLAAttentionSpec, block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, use_mla=True
    )


def mamba_spec(like: Any) -> Any:
    """One Mamba state a request, padded to the page size of ``like``."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=512, shapes=((8, 8),), dtypes=(torch.float32,), page_size_padded=like.page_size_bytes
    )


def scheduler(*specs: Any, blocks: int = BLOCKS) -> Any:
    """The real Scheduler over one KV group a spec."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.structured_output import StructuredOutputManager

    # A state has no prefix to find again.
    vllm_config = config(len(specs) == 1, blocks)
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    page, names = specs[0].page_size_bytes, [f"layer.{i}" for i in range(len(specs))]
    # All layers on the same bytes; the last three from 0.33.0 on.
    tensor = fitting(
        KVCacheTensor, size=page * blocks, shared_by=names, layers=names, layer_stride=0, block_stride=page
    )
    sizes = [spec.block_size for spec in specs]
    return fitting(
        Scheduler,
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        # One block size for all groups, from 0.25.1 on.
        block_size=math.lcm(*sizes),
        hash_block_size=min(sizes),
        log_stats=False,
    )


@cache
def _block_hasher() -> Any:
    """One seed of the hashes for all requests; with one each, no prefix would be found again."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(16, sha256)


def request(number: int, prompt: list[int], max_tokens: int) -> Any:
    """A request that ends after ``max_tokens`` tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=max_tokens)
    if hasattr(sampling, "update_from_generation_config"):
        sampling.update_from_generation_config({}, 2)
    given = {"request_id": str(number), "prompt_token_ids": prompt, "block_hasher": _block_hasher()}
    given |= {"sampling_params": sampling, "pooling_params": None, "eos_token_id": 2, "arrival_time": 0.0}
    return fitting(Request, **given)


def step(engine: Any) -> Any:
    """Schedule, and say that the model sampled token 5 for every request."""
    from vllm.v1.outputs import ModelRunnerOutput

    scheduled = engine.schedule()
    ids = [*scheduled.num_scheduled_tokens]
    order = {"req_ids": ids, "req_id_to_index": {r: i for i, r in enumerate(ids)}}
    nothing = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": [None for _ in ids]}
    output = fitting(ModelRunnerOutput, sampled_token_ids=[[5] for _ in ids], **order, **nothing)
    engine.update_from_output(scheduled, output)
    return scheduled


def pending(engine: Any) -> int:
    """Count the recorded block ids that nobody has taken."""
    managers = engine.kv_cache_manager.coordinator.single_type_managers
    return sum(len(manager.new_block_ids) for manager in managers)


def leak() -> list[int]:
    """Pending ids of a full-attention model after 100, 200 and 300 requests of two blocks."""
    engine = scheduler(attention_spec())
    found = []
    for number in range(300):
        engine.add_request(request(number, [number] * 24, 1))
        if number % 8 == 7 or number == 299:
            while engine.has_requests() and engine.get_num_unfinished_requests():
                step(engine)
        if number % 100 == 99:
            while engine.get_num_unfinished_requests():
                step(engine)
            found.append(pending(engine))
    return found


def hybrid(spec: Any) -> dict[str, Any]:
    """Ids that a model of Mamba and attention layers gets to zero, in 20 steps."""
    engine = scheduler(spec, mamba_spec(spec))
    for number in range(2):
        engine.add_request(request(number, [number] * 40, 40))
    asked = [step(engine).new_block_ids_to_zero for _ in range(20)]
    return {"asked": [ids for ids in asked if ids], "pending": pending(engine)}


class _Stream:
    """A stream whose work runs, in order, when it is drained."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def drain(self) -> None:
        for work in self.work:
            work()
        self.work.clear()


class _LateIds:
    """Stands for the device's id buffer: copies happen when the stream gets to them."""

    def __init__(self, stream: _Stream, size: int) -> None:
        self.stream, self.ids = stream, torch.zeros(size, dtype=torch.int64)

    def __getitem__(self, index: slice) -> _LateIds:
        view = _LateIds(self.stream, 0)
        view.ids = self.ids[index]
        return view

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self.stream.work.append(lambda: self.ids.copy_(source))


def block_zeroer(specs: list[Any], caches: list[torch.Tensor], listed: bool) -> Any:
    """The real KVBlockZeroer over one group a cache."""
    from vllm.v1.worker import utils

    groups = [
        Space(
            kv_cache_spec=spec,
            kv_cache_group_id=i,
            layer_names=[f"layer.{i}"],
            backend=Space(get_kv_cache_block_dim=lambda *args, **kwargs: 0),
            kernel_block_stride=None,
        )
        for i, spec in enumerate(specs)
    ]
    layers = {f"layer.{i}": Space(kv_cache=[cache] if listed else cache) for i, cache in enumerate(caches)}
    rest = {
        "attn_groups_iter": iter(groups),
        "kernel_block_sizes": [16] * len(specs),
        "cache_dtype": "auto",
        "runner_only_attn_layers": set(),
        "static_forward_context": layers,
    }
    made = {"device": torch.device("cpu"), "pin_memory": False, "num_blocks": len(caches[0])}
    made |= {"max_concurrency": 2}
    # From 0.32.0 on this is asked of the platform, and from 0.33.0 on once.
    torch_utils = importlib.import_module("vllm.utils.torch_utils")
    torch_utils.is_pin_memory_available = lambda: False
    if hasattr(torch_utils, "PIN_MEMORY"):
        torch_utils.PIN_MEMORY = utils.PIN_MEMORY = False
    if not hasattr(utils.KVBlockZeroer, "init_meta"):
        return fitting(utils.KVBlockZeroer, **made, **rest)
    zeroer = fitting(utils.KVBlockZeroer, **made)
    zeroer.init_meta(**rest)
    return zeroer


def race(listed: bool) -> list[list[int]] | None:
    """What the kernel zeroes when two steps ask before the stream has run: [1, 2], then [8, 9].

    ``None`` where there is no buffer to share.
    """
    from vllm.v1.worker import utils

    zeroer = block_zeroer([attention_spec()], [torch.zeros(16, 2, 16, 32)], listed)
    if not hasattr(zeroer, "_ids_pinned"):
        return None
    stream = _Stream()
    late = _LateIds(stream, zeroer._id_cap)
    # 0.26.0 has one a batch in flight.
    zeroer._ids_gpu = [late] * len(zeroer._ids_gpu) if isinstance(zeroer._ids_gpu, list) else late
    seen: list[list[int]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(segments: Any, ids: _LateIds, count: int, **constants: Any) -> None:
                stream.work.append(lambda: seen.append(ids.ids[:count].tolist()))

            return launch

    kernel, utils._zero_kv_blocks_kernel = utils._zero_kv_blocks_kernel, Kernel()
    try:
        zeroer.zero_block_ids([1, 2])
        zeroer.zero_block_ids([8, 9])
        stream.drain()
    finally:
        utils._zero_kv_blocks_kernel = kernel
    return seen


def zeroed(listed: bool) -> dict[str, list[int]]:
    """Blocks of a full-attention and an MLA cache that are zero after asking for 3 and 5."""
    caches = [torch.full((16, 2, 16, 32), torch.nan), torch.full((16, 16, 64), torch.nan)]
    zeroer = block_zeroer([attention_spec(), mla_spec()], caches, listed)
    zeroer.zero_block_ids([3, 5])
    return {
        name: [i for i, block in enumerate(cache) if not block.isnan().any()]
        for name, cache in zip(("attention", "mla"), caches, strict=True)
    }


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
    runner.kv_cache_config.kv_cache_groups = [Space(kv_cache_spec=None, layer_names=["layer.0"])]
    table = Space(slot_mapping=Space(gpu=buffer))
    runner.input_batch.block_table = [table]
    mode = module.CUDAGraphMode.NONE
    size = Space(num_tokens=8, num_reqs=8)
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
