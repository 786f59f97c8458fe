"""The tiles that mla_decode chooses on each GPU, from shapes alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.ops import mla_decode_plan as kernels

# Capability -> (processors, bytes of shared memory of a block).
GPUS = {
    (8, 0): (108, 163 * 1024),
    (8, 6): (84, 99 * 1024),
    (9, 0): (132, 227 * 1024),
    (10, 0): (148, 227 * 1024),
    (12, 0): (188, 99 * 1024),
}


@pytest.fixture
def plan(monkeypatch):
    def choose(gpu, batch, heads, size=2, capacity=4096):
        processors, shared = GPUS[gpu]
        for name, value in (("capability", gpu), ("processor_count", processors), ("shared_memory", shared)):
            monkeypatch.setattr(kernels, name, lambda index, value=value: value)
        q = SimpleNamespace(
            is_cuda=True,
            element_size=lambda: size,
            device=SimpleNamespace(index=0),
            shape=(batch, heads, 576),
        )
        return kernels.plan(q, heads, capacity)

    return choose


@pytest.mark.parametrize(
    ("batch", "heads", "size", "expected"),
    [
        (256, 128, 2, (64, 64, 1, 8)),
        (256, 32, 2, (32, 64, 1, 4)),
        (256, 16, 2, (16, 64, 1, 4)),
        (1, 128, 2, (16, 64, 16, 4)),
        (1, 16, 2, (16, 64, 64, 4)),
        (256, 128, 4, (16, 16, 1, 4)),
    ],
)
def test_hopper_keeps_the_tiles_that_were_measured(plan, batch, heads, size, expected):
    assert plan((9, 0), batch, heads, size) == expected


@pytest.mark.parametrize(("gpu", "rows"), [((8, 0), 32), ((8, 6), 16), ((10, 0), 32), ((12, 0), 16)])
def test_a_large_batch_gets_the_widest_tile_that_fits_into_shared_memory(plan, gpu, rows):
    assert plan(gpu, 256, 128)[:2] == (rows, 32)
    assert plan(gpu, 256, 16)[:2] == (16, 32)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu != (9, 0)])
def test_a_small_batch_is_split_over_the_processors(plan, gpu):
    block_m, block_n, splits, warps = plan(gpu, 1, 128, capacity=2048)
    assert (block_m, block_n, warps) == (16, 32, 8)
    assert splits == GPUS[gpu][0] // 8


# (batch, tokens, heads, whether equal parts were faster), as measured with equal lengths.
MEASURED = [
    *((128, 4096, 128, True), (16, 4096, 128, True), (32, 1024, 128, True), (32, 4096, 32, True)),
    *((128, 512, 128, False), (64, 2048, 128, False), (16, 512, 128, False), (4, 4096, 128, False)),
    *((1, 4096, 128, False), (1, 32768, 128, False)),
    *((128, 4096, 16, True), (16, 32768, 16, True), (16, 4096, 16, True), (128, 512, 16, True)),
    *((1, 4096, 16, False), (1, 32768, 16, False)),
]


@pytest.mark.parametrize(("batch", "tokens", "heads", "faster"), MEASURED)
def test_equal_parts_where_they_were_faster_on_an_h200(monkeypatch, batch, tokens, heads, faster):
    monkeypatch.setattr(kernels, "processor_count", lambda index: 132)
    monkeypatch.setattr(kernels, "fits_equal_parts", lambda *args: True)
    q = SimpleNamespace(shape=(batch, heads, 576), device=SimpleNamespace(index=0), dtype=torch.bfloat16)
    assert kernels.equal_parts_are_faster(q, q, 512, 1, 1.0, tokens) == faster
    # Not timed.
    cache = SimpleNamespace(dtype=torch.float8_e4m3fn)
    assert not kernels.equal_parts_are_faster(q, cache, 512, 1, 1.0, tokens)
    # Room for 128 times as many tokens: lengths are likely to differ then.
    if batch > 1:
        assert kernels.equal_parts_are_faster(q, q, 512, 1, 1.0, 128 * tokens)
