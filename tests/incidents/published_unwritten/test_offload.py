"""What drives vLLM's own offload worker on a GPU, beside a made-up worker and a made-up clock."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch

from staleproof.incidents.published_unwritten import offload


@dataclass
class SimpleCPUOffloadMetadata:
    load_event: int = -1
    load_gpu_blocks: list[int] = field(default_factory=list)
    load_cpu_blocks: list[int] = field(default_factory=list)
    store_event: int = -1
    store_gpu_blocks: list[int] = field(default_factory=list)
    store_cpu_blocks: list[int] = field(default_factory=list)


class SimpleCPUOffloadWorker:
    """Copies at once, loads first; an event of a copy comes with the next question whether it is done."""

    def __init__(self, vllm_config, kv_cache_config, cpu_capacity_bytes, num_cpu_blocks):
        self.given = vllm_config, kv_cache_config, cpu_capacity_bytes, num_cpu_blocks
        self._load_events, self._store_events, self.begun, self.waited = [], [], [], []

    def register_kv_caches(self, caches):
        self.gpu = caches["0"]
        self.cpu_kv_caches = {"0": torch.zeros_like(self.gpu).view(torch.int8)}

    def bind_connector_metadata(self, metadata):
        self.metadata = metadata

    def start_load_kv(self):
        m, host = self.metadata, self.cpu_kv_caches["0"].view(torch.int32)
        for block, slot in zip(m.load_gpu_blocks, m.load_cpu_blocks, strict=True):
            self.gpu[block] = host[slot]
            self.begun.append(("_load_events", m.load_event))

    def wait_for_save(self):
        m, host = self.metadata, self.cpu_kv_caches["0"].view(torch.int32)
        for block, slot in zip(m.store_gpu_blocks, m.store_cpu_blocks, strict=True):
            host[slot] = self.gpu[block]
            self.begun.append(("_store_events", m.store_event))

    def get_finished(self, finished):
        assert finished == set()
        for name, number in self.begun:
            done = SimpleNamespace(synchronize=lambda name=name: self.waited.append(name))
            getattr(self, name).append((number, done))


def test_a_worker_is_given_eight_blocks_and_copies_what_it_is_told(monkeypatch):
    modules = "vllm.utils.torch_utils", "vllm.utils.platform_utils", "vllm.envs", "vllm.platforms"
    made = {name: ModuleType(name) for name in (*modules, *offload.FILES)}
    vars(made[f"{offload.SIMPLE}.worker"]).update(SimpleCPUOffloadWorker=SimpleCPUOffloadWorker)
    vars(made[f"{offload.SIMPLE}.metadata"]).update(SimpleCPUOffloadMetadata=SimpleCPUOffloadMetadata)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *given, device, **how: full(*given, **how))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = offload._Pool()
    size = 4096 * 4
    tensor = SimpleNamespace(layers=["0"], block_stride=size, layer_stride=8 * size, offset=0)
    config = SimpleNamespace(num_blocks=8, kv_cache_tensors=[tensor])
    assert pool.worker.given == (None, config, 8 * size, 8)
    assert (pool.cache.shape, pool.cache.unique().tolist()) == ((8, 4096), [offload.OLD])
    utils, platform, envs, platforms = (made[name] for name in modules)
    assert (utils.PIN_MEMORY, platform.is_pin_memory_available()) == (True, True)
    assert envs.VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS == 0
    assert platforms.current_platform.is_rocm() is False
    assert platforms.current_platform.set_device is torch.cuda.set_device
    pool.cache[1] = 7
    pool.copy("store", 1, 3)
    assert [block.unique().tolist() for block in pool.host] == [[7] if i == 3 else [0] for i in range(8)]
    pool.worker.begun.clear()
    pool.copy("load", 2, 3)
    assert [i for i, block in enumerate(pool.cache) if (block == 7).all()] == [1, 2]
    assert pool.worker.waited == ["_store_events", "_load_events"]


@pytest.mark.parametrize("found", [[], ["other bytes"]])
def test_the_price_is_a_median_over_other_blocks_each_time(monkeypatch, found):
    calls = []

    class Prints:
        def __init__(self, kv_caches):
            assert kv_caches == [((2048, 32768), torch.bfloat16, "cuda")] * 32

        def of(self, blocks):
            calls.append(("of", blocks))

        def commit(self, blocks):
            calls.append(("commit", dict(blocks)))

        def read(self, reader, blocks):
            calls.append((reader, dict(blocks)))

        def check(self, wait):
            return found if wait else []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def elapsed_time(self, end):
            return next(times)

    # Milliseconds on the device, and seconds on the host: twenty of each, with a few that are slow.
    times = iter([0.25] * 11 + [9.0] * 9)
    ticks = iter(itertools.accumulate([5.0, *[1.0, 0.00005] * 11, *[1.0, 0.5] * 9]))
    next(ticks)
    monkeypatch.setattr(offload, "BlockFingerprints", Prints)
    monkeypatch.setattr(offload.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: (shape, dtype, device))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    assert offload.price(3) == {"alike": not found, "gpu_us": 250.0, "host_us": 50.0, "mib": 6}
    turns = [{100 * turn + i: turn for i in range(3)} for turn in range(20)]
    assert calls == [("of", [0])] + [
        call
        for blocks in turns
        for call in ("sleep", "record", ("commit", blocks), "record", "wait", ("again", blocks))
    ]
