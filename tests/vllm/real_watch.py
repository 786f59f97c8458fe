"""The watch on vLLM's own files, driven on a CPU; run inside a vLLM environment only. Prints one object."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import real_kernels
import real_scheduler
import torch

from staleproof.vllm import fp8_scales, plugin, watch_blocks, watch_hooks
from staleproof.vllm.standing import registry


def states() -> dict[str, str]:
    """What became of each hook once its module is imported."""
    for target in watch_hooks.installed[0].targets():
        # A backend whose package is not installed cannot be used either.
        with contextlib.suppress(ImportError, AssertionError, RuntimeError), real_kernels.cuda_is_cpu():
            importlib.import_module(target.module)
    return registry.targets(watch_hooks.OWNER)


def triton(live: int, padding: list[bool] | None = None) -> list[int]:
    """Padding and live rows that vLLM's Triton MLA kernel leaves NaN, as the watch counts them."""
    on = watch_hooks.installed[0]
    on.loaded(None, (Space(device="cpu"),), {})
    assert on.watch is not None
    output = Space(total_num_scheduled_tokens=live, num_scheduled_tokens={})
    on.blocks = None
    on.step((None, output), {})
    with context(padding):
        real_kernels.triton_rows()
    on.watch.copy()
    ((_, counts),) = on.watch.reading().bad.items()
    return list(counts)


@contextlib.contextmanager
def context(padding: list[bool] | None) -> Any:
    """vLLM's own forward context, with a mask of padding rows if this release has one."""
    from vllm import forward_context

    if padding is None:
        yield
        return
    empty = {name: {} for name in ("no_compile_layers", "attn_metadata", "slot_mapping")}
    given = {"virtual_engine": 0, "is_padding": torch.tensor(padding)}
    made = real_scheduler.fitting(forward_context.ForwardContext, **empty, **given)
    with forward_context.override_forward_context(made):
        yield


def blocks(zeroing: bool) -> dict[str, int]:
    """Stale blocks of vLLM's scheduler over attention and a state, with few blocks."""
    attention = real_scheduler.attention_spec()
    engine = real_scheduler.scheduler(attention, real_scheduler.mamba_spec(attention), blocks=24)
    counter = watch_blocks.of(engine.kv_cache_config)
    for number in range(40):
        engine.add_request(real_scheduler.request(number, [3 + number] * (5 + 7 * number % 60), 4))
    steps = 0
    while engine.has_requests():
        scheduled = real_scheduler.step(engine)
        if not zeroing:
            scheduled.new_block_ids_to_zero = None
        counter.scheduled(scheduled)
        steps += 1
    return {"steps": steps, **{", ".join(kinds): count for kinds, count in counter.stale.items()}}


if __name__ == "__main__":
    os.environ |= {"STALEPROOF_WATCH": "1", "STALEPROOF_PATCHES": "none"}
    plugin.register()
    said: dict[str, Any] = {"states": states(), "counted": triton(3)}
    for name, writes in (("unwritten mask", "0"), ("masked", "1")):
        # Whether steps write vLLM's mask; before 0.27.0 they do not by default.
        os.environ["VLLM_MOE_SKIP_PADDING"] = writes
        fp8_scales._writes_masks.cache_clear()
        try:
            said[name] = triton(3, [False] * 5 + [True])
        except TypeError:
            said[name] = None
    said["blocks"] = {str(zeroing): blocks(zeroing) for zeroing in (True, False)}
    print(json.dumps(said))
