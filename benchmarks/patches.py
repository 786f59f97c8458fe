"""What each patch of an installed vLLM costs a decode step, beside vLLM's own code without it.

vLLM's files run as they are, in the places they have there (`staleproof.harness.vllm_files`): its
Triton MLA, its callers of the routing ops and its block zeroer. ``STALEPROOF_VLLM_MOE_SO`` names
the compiled ``_moe_C`` library of a vLLM wheel (0.20.2 was meant); without it the routing rows are
left out. Rows named "host" are time of the calling thread, not of the device.

Run: ``python benchmarks/patches.py`` on a machine with a CUDA device and an importable vllm folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.harness import measure
from staleproof.harness.vllm_files import UnavailableError, executed, load
from staleproof.vllm import standing
from staleproof.vllm.patches import kv_reuse, mla_padding, moe_routing
from staleproof.vllm.sources import file_of, vllm_file

# Imported by name, so that the source digest of a recorded row covers them.
PATCHES = {patch.name: patch for part in (kv_reuse, mla_padding, moe_routing) for patch in part.PATCHES}
VERSION = "0.20.2"
TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla"
WORKER = "vllm.v1.worker.utils"
OPS = "vllm._custom_ops"
# vllm.envs, because a patch that torch.compile traces adds itself to the compile-cache key there.
FILES = (TRITON_MLA, "vllm.v1.attention.ops.triton_decode_attention", WORKER, OPS, "vllm.envs")
BATCH, HEADS, PAGE, CONTEXT = 128, 128, 64, 512
HOST_CALLS = 200


def mla_call(batch: int, live: int, heads: int = HEADS, context: int = CONTEXT) -> Any:
    """A closure over vLLM's Triton ``forward_mqa`` for a padded decode batch, and its lengths."""
    cls = importlib.import_module(TRITON_MLA).TritonMLAImpl
    impl = cls.__new__(cls)
    impl.kv_lora_rank, impl.scale = 512, 576**-0.5
    impl.need_to_return_lse_for_decode = False
    impl._sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    q = torch.randn(batch, heads, 576, dtype=torch.bfloat16, device="cuda")
    pages = context // PAGE
    cache = torch.randn(batch * pages, PAGE, 576, dtype=torch.bfloat16, device="cuda")
    seq_lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
    seq_lens[:live] = context
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
    one = torch.ones(1, device="cuda")
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    metadata = SimpleNamespace(
        decode=SimpleNamespace(seq_lens=seq_lens, block_table=table),
        num_decodes=batch,
        num_decode_tokens=batch,
        max_seq_len=context,
    )
    return lambda: impl.forward_mqa(q, cache, metadata, layer), seq_lens


def zeroer(pin: bool = True) -> Any:
    """vLLM's KVBlockZeroer over 28 layers of (2, blocks, 16, 8, 128) bf16."""
    worker = importlib.import_module(WORKER)
    spec = worker.FullAttentionSpec()
    spec.block_size, spec.num_kv_heads, spec.head_size = 16, 8, 128
    caches = [torch.ones(2, 64, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(28)]
    names = [str(i) for i in range(28)]
    group = SimpleNamespace(
        kv_cache_spec=spec,
        kv_cache_group_id=0,
        layer_names=names,
        backend=SimpleNamespace(get_kv_cache_block_dim=lambda *a, **k: 1),
    )
    layers = {n: SimpleNamespace(kv_cache=c) for n, c in zip(names, caches, strict=True)}
    made = worker.KVBlockZeroer(torch.device("cuda"), pin)
    made.init_meta([group], [16], "auto", set(), layers)
    return made, caches


def _topk_call(name: str, experts: int, top_k: int, bias: torch.Tensor | None) -> Callable[[], Any]:
    ops = importlib.import_module(OPS)
    x = torch.randn(BATCH, experts, dtype=torch.bfloat16, device="cuda")
    weights = torch.empty(BATCH, top_k, device="cuda")
    ids, indices = (torch.empty(BATCH, top_k, dtype=torch.int32, device="cuda") for _ in range(2))
    if name == "grouped_topk":
        return lambda: ops.grouped_topk(x, 8, 4, top_k, True, 2.5, bias, 1)
    return lambda: getattr(ops, name)(weights, ids, indices, x, False, bias)


def _host_times(call: Callable[[], object]) -> measure.Times:
    """Microseconds of the calling thread."""
    each = []
    for turn in range(HOST_CALLS + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if turn >= 20:
            each.append((time.perf_counter() - start) * 1e6)
    p20, p50, p80 = (torch.tensor(each).quantile(q).item() for q in (0.2, 0.5, 0.8))
    return measure.Times(p50=p50, p20=p20, p80=p80)


def vllm_root() -> Path:
    """Find the folder ``vllm`` of an importable vLLM whose files run here.

    Raises:
        UnavailableError: there is none, or its files do not load.
    """
    init = vllm_file("__init__.py")
    if init is None or not all(vllm_file(file_of(name)) for name in FILES):
        raise UnavailableError("no importable vllm folder with its MLA, zeroer and ops")
    # Not the ops: loading them registers operators, which a process can do once.
    load(init.parent, *(name for name in FILES if name != OPS))
    return init.parent


def _pair(
    patch: str, mode: str, call: Callable[[], object], moved: int, host: bool = False
) -> Iterator[dict[str, Any]]:
    """One row without the patch and one with it."""
    subject = PATCHES[patch]
    time_of = _host_times if host else lambda c: measure.graph_times([c])
    for provider in ("without", "patched"):
        if provider == "patched":
            subject.apply(subject.versions[-1][0] if not subject.applies_to(VERSION) else VERSION)
        try:
            times = time_of(call)
            if provider == "patched" and "in place" not in standing.targets(patch).values():
                why = standing.stepped_back.get(patch, "its functions were not imported")
                raise measure.WrongResult(f"{patch} is not in place, this would time vLLM alone: {why}")
        finally:
            subject.revert()
        yield measure.row(subject.incident, f"patch {patch}", provider, mode, "rows", BATCH, times, moved)


def rows() -> list[dict[str, Any]]:
    """Measure every patch that runs in a decode step.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    try:
        root = vllm_root()
    except UnavailableError as error:
        print(f"patches: not run, {error}")
        return []
    from staleproof.ops.distinct_experts import distinct_experts

    found: list[dict[str, Any]] = []
    with executed(root, *FILES):
        call, _ = mla_call(BATCH, 100)
        mode = f"Triton MLA, 100 live, {CONTEXT} tokens"
        found += _pair("mla_padding", mode, call, BATCH * HEADS * 512 * 2)
        library = os.environ.get("STALEPROOF_VLLM_MOE_SO")
        if library is None:
            print("STALEPROOF_VLLM_MOE_SO is not set: vLLM's routing is not run")
        else:
            torch.ops.load_library(library)
            moved = BATCH * 256 * 2
            found += _pair(
                "topk_nan",
                "softmax, 128 experts, top 8",
                _topk_call("topk_softmax", 128, 8, None),
                BATCH * 128 * 2,
            )
            bias = torch.randn(256, device="cuda")
            for name in ("topk_sigmoid", "grouped_topk"):
                found += _pair(
                    "topk_nan_bias", f"{name}, 256 experts, top 8", _topk_call(name, 256, 8, bias), moved
                )
        weights = torch.rand(BATCH, 8, device="cuda")
        ids = torch.randint(0, 128, (BATCH, 8), dtype=torch.int32, device="cuda")
        times = measure.graph_times([lambda: distinct_experts(weights, ids)])
        mode = "ids and weights, top 8"
        found.append(
            measure.row(
                "moe_routing",
                "patch duplicate_experts",
                "patched",
                mode,
                "rows",
                BATCH,
                times,
                BATCH * 8 * 16,
            )
        )
        ops = importlib.import_module(OPS)
        if hasattr(ops, "create_fp4_scale_tensor"):
            times = measure.graph_times(
                [lambda: ops.create_fp4_scale_tensor(BATCH, 7168, torch.device("cuda"), True)]
            )
            found.append(
                measure.row(
                    "scale_padding",
                    "patch scale_padding",
                    "patched",
                    "zeros, 7168 columns",
                    "rows",
                    BATCH,
                    times,
                    BATCH * 7168 // 16,
                )
            )
        made, _ = zeroer()
        found += _pair(
            "staging_race",
            "host: zero 30 blocks of 28 layers",
            lambda: made.zero_block_ids([*range(1, 31)]),
            30 * 28 * 2 * 32768,
            host=True,
        )
        scheduler = SimpleNamespace(
            needs_kv_cache_zeroing=False, kv_cache_manager=SimpleNamespace(take_new_block_ids=list)
        )
        drain = kv_reuse._drain
        for provider, hook in (("without", lambda: None), ("patched", lambda: drain(0, (scheduler,), {}))):
            found.append(
                measure.row(
                    "kv_reuse",
                    "patch undrained_ids",
                    provider,
                    "host: one schedule()",
                    "rows",
                    BATCH,
                    _host_times(hook),
                    0,
                )
            )
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="without")
