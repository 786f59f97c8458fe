"""On a GPU: vLLM's own ``SimpleCPUOffloadWorker`` with a step that is late, and the cost of fingerprints.

The race is vLLM #45704 (to the host) and #47282 (back). The worker's files are executed unchanged, with stubs
for the rest of vLLM. A kernel that waits represents a step that is still running when the worker is told what
to copy, as happens with asynchronous scheduling.
"""

from __future__ import annotations

import importlib
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from staleproof.evidence.published_bytes import BlockFingerprints
from staleproof.incidents.published_unwritten.real import fitting
from staleproof.incidents.published_unwritten.scene import FOREIGN, UNWRITTEN, WRITTEN
from staleproof.kernels.vllm_sources import executed

SIMPLE = "vllm.v1.simple_kv_offload"
FILES = tuple(f"{SIMPLE}.{name}" for name in ("worker", "copy_backend", "cuda_mem_ops", "metadata"))
OLD, NEW, LATE = 1, 2, 3
# About a fifth of a second on an H200: far longer than the host takes to launch a copy.
CYCLES = 400_000_000


class _Pool:
    """A worker over one cache of eight blocks on the GPU, and eight on the host."""

    def __init__(self) -> None:
        import torch

        known: dict[str, dict[str, Any]] = {
            "vllm.utils.torch_utils": {"PIN_MEMORY": True},
            "vllm.utils.platform_utils": {"is_pin_memory_available": lambda: True},
            "vllm.envs": {"VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS": 0},
            "vllm.platforms": {
                "current_platform": SimpleNamespace(set_device=torch.cuda.set_device, is_rocm=lambda: False)
            },
        }
        for name, members in known.items():
            vars(importlib.import_module(name)).update(members)
        self.cache = torch.full((8, 4096), OLD, dtype=torch.int32, device="cuda:0")
        size = self.cache[0].nbytes
        tensor = SimpleNamespace(layers=["0"], block_stride=size, layer_stride=8 * size, offset=0)
        self.worker = fitting(
            importlib.import_module(f"{SIMPLE}.worker").SimpleCPUOffloadWorker,
            vllm_config=None,
            kv_cache_config=SimpleNamespace(num_blocks=8, kv_cache_tensors=[tensor]),
            cpu_capacity_bytes=8 * size,
            num_cpu_blocks=8,
        )
        self.worker.register_kv_caches({"0": self.cache})
        torch.cuda.synchronize()
        (host,) = self.worker.cpu_kv_caches.values()
        self.host = host.view(torch.int32)

    def copy(self, kind: str, block: int, slot: int) -> None:
        """Do what the connector does at the end of a step, then wait until the copy is done."""
        metadata = importlib.import_module(f"{SIMPLE}.metadata").SimpleCPUOffloadMetadata
        told: dict[str, Any] = {
            f"{kind}_event": 0,
            f"{kind}_gpu_blocks": [block],
            f"{kind}_cpu_blocks": [slot],
        }
        self.worker.bind_connector_metadata(metadata(**told))
        # Up to 0.26.0 the last of these three calls launches both copies. In 0.33.0 the first launches loads,
        # the second launches stores.
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        self.worker.get_finished(set())
        events, started = getattr(self.worker, f"_{kind}_events"), time.monotonic()
        while not events and time.monotonic() - started < 10:
            time.sleep(0.001)
        events[0][1].synchronize()


def race(package: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """Copy a block to the host (``store``) or back (``load``) while the previous step is still running.

    Args:
        package: the folder ``vllm`` of a release.
        kind: ``store``, of a block that the late step writes, or ``load``, into a block that its last owner
            still writes.

    Returns:
        ``written`` if the right bytes arrive and stay, otherwise a word for whose bytes are there. And what
        :class:`~staleproof.evidence.published_bytes.BlockFingerprints` reports for the block.
    """
    import torch

    with executed(package, *FILES):
        pool = _Pool()
        prints = BlockFingerprints([pool.cache])
        prints.of([0])  # Compiled before the step, not in it.
        # Committed for the hash: block 1, written by the late step, or block 2, written before.
        pool.host[0] = OLD if kind == "store" else NEW
        pool.cache[2] = NEW
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        pool.cache[1] = NEW if kind == "store" else LATE
        prints.commit({1 if kind == "store" else 2: "hash"})
        late = not torch.cuda.current_stream().query()
        pool.copy(kind, 1, 0)
        torch.cuda.synchronize()
        if kind == "store":
            pool.cache[1] = pool.host[0].to("cuda")
        prints.read("stranger", {1: "hash"})
        said = [str(found) for found in prints.check(wait=True)]
        (held,) = pool.cache[1].unique().tolist()
        pool.worker._backend.shutdown()
        torch.cuda.cudart().cudaHostUnregister(pool.host.data_ptr())
    return {OLD: UNWRITTEN, NEW: WRITTEN, LATE: FOREIGN}[held], {"late": late, "fingerprint": said}


def price(blocks: int) -> dict[str, Any]:
    """What :class:`~staleproof.evidence.published_bytes.BlockFingerprints` costs a step, in microseconds.

    The cache is Llama 3 8B's in bfloat16: 32 layers of 64 KiB a block, so 2 MiB a block. Medians of 20 calls,
    each with other blocks.

    Args:
        blocks: number of blocks that are committed in the step.
    """
    import torch

    caches = [torch.empty(2048, 32768, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    prints, device, host = BlockFingerprints(caches), list[float](), list[float]()
    prints.of([0])
    for turn in range(20):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        wanted = dict.fromkeys(range(turn * 100, turn * 100 + blocks), turn)
        # Keep the host ahead of the device, as in a real server.
        torch.cuda._sleep(2_000_000)
        marks[0].record()
        started = time.perf_counter()
        prints.commit(wanted)
        host.append(1e6 * (time.perf_counter() - started))
        marks[1].record()
        torch.cuda.synchronize()
        device.append(1e3 * marks[0].elapsed_time(marks[1]))
        prints.read("again", wanted)
    return {
        # Nothing was written in between, so there must be no alarm.
        "alike": not prints.check(wait=True),
        "gpu_us": round(statistics.median(device), 1),
        "host_us": round(statistics.median(host), 1),
        "mib": 2 * blocks,
    }
