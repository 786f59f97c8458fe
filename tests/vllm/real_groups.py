"""What patches do together in one vLLM, on a CPU; run inside a vLLM environment only. Prints one object.

Each scene is a process of its own. A model of MLA layers alone serves 500 requests while somebody
else schedules, or a hook fails; the rows of TurboQuant's decode.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any
from unittest import mock

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import real_checks
import real_kernels as kernels
import real_scheduler as real

SCHEDULER = importlib.import_module("vllm.v1.core.sched.scheduler")
REQUESTS = 500


def _load() -> list[str]:
    """Load the plugins; what ours warns of from now on."""
    lines = real_checks.logged(logging.WARNING)
    importlib.import_module("vllm.plugins").load_general_plugins()
    return lines


def _served() -> int:
    """Pending ids after all requests, of two blocks each, in a model of MLA layers alone."""
    engine = real.scheduler(real.mla_spec())
    for number in range(REQUESTS):
        engine.add_request(real.request(number, [number] * 24, 1))
        if number % 8 == 7:
            while engine.get_num_unfinished_requests():
                real.step(engine)
    return real.pending(engine)


def patched() -> dict[str, Any]:
    """All patches in place."""
    lines = _load()
    return {"pending": _served(), "lines": lines, "hybrid": real.hybrid(real.mla_spec())["pending"]}


def another_plugin() -> dict[str, Any]:
    """Another plugin has wrapped ``Scheduler.schedule`` before."""
    SCHEDULER.Scheduler.schedule = real_checks.of_another_package(SCHEDULER.Scheduler.schedule)
    lines = _load()
    return {"pending": _served(), "lines": lines}


def scheduler_class() -> dict[str, Any]:
    """``--scheduler-cls`` names a class with a ``schedule`` of its own, which is vLLM's as it was."""
    own = SCHEDULER.Scheduler.schedule
    lines = _load()
    cls = type("Own", (SCHEDULER.Scheduler,), {"schedule": real_checks.of_another_package(own)})
    with mock.patch.object(SCHEDULER, "Scheduler", cls):
        return {"pending": _served(), "lines": lines}


def failing_drain() -> dict[str, Any]:
    """The drain of the list raises at each call."""
    lines = _load()
    manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    with mock.patch.object(manager, "take_new_block_ids", side_effect=RuntimeError("planted")):
        return {"pending": _served(), "lines": lines}


def turboquant() -> dict[str, Any]:
    """NaN rows of the real TurboQuant decode, its kernels interpreted, without the patches and with."""
    module = importlib.import_module("vllm.v1.attention.backends.turboquant_attn")
    config = importlib.import_module("vllm.model_executor.layers.quantization.turboquant.config")
    impl = module.TurboQuantAttentionImpl.__new__(module.TurboQuantAttentionImpl)
    impl.head_size, impl.num_heads, impl.scale, impl.max_num_kv_splits = 64, 2, 0.1, 4
    impl._use_flydsl = False
    impl.tq_config = config.TurboQuantConfig(head_dim=64, key_quant_bits=4, value_quant_bits=4)
    seq_lens = torch.tensor(kernels.SEQ_LENS, dtype=torch.int32)
    table = torch.zeros(len(seq_lens), 2, dtype=torch.int32)
    metadata = Space(seq_lens=seq_lens, block_table=table)
    cache = torch.zeros(2, 16, 1, impl.tq_config.slot_size_aligned, dtype=torch.uint8)
    query = torch.ones(len(seq_lens), 2, 64)
    arguments = query, cache, metadata, torch.eye(64), torch.linspace(-1, 1, 16)

    def rows() -> list[int]:
        with kernels.poisoned():
            return kernels._bad_rows(impl._decode_attention(*arguments))

    off = rows()
    lines = _load()
    return {"off": off, "on": rows(), "lines": lines}


SCENES = [patched, scheduler_class]
# Where vLLM itself drains the list, no patch of ours stands on its schedule.
if "undrained_ids" in sys.argv[1:]:
    SCENES += another_plugin, failing_drain
if importlib.util.find_spec("vllm.v1.attention.backends.turboquant_attn"):
    SCENES.append(turboquant)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    results = {}
    for scene in SCENES:
        with context.Pool(1) as pool:
            results[scene.__name__] = pool.apply(scene)
    print(json.dumps(results))
