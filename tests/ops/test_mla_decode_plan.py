"""The tiles that mla_decode chooses on each GPU, from shapes alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.ops.mla import plan as kernels

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
    def choose(gpu, batch, heads, size=2, capacity=4096, sm90=False):
        processors, shared = GPUS[gpu]
        for name, value in (("capability", gpu), ("processor_count", processors), ("shared_memory", shared)):
            monkeypatch.setattr(kernels, name, lambda index, value=value: value)
        q = SimpleNamespace(
            is_cuda=True,
            element_size=lambda: size,
            device=SimpleNamespace(index=0),
            shape=(batch, heads, 576),
        )
        return kernels.plan(q, heads, capacity, sm90)

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


# (batch, tokens, heads, splits of the Hopper kernel of one request a program; 0 where Triton's was faster).
ALONE = [
    *((8, 256, 128, 0), (8, 512, 128, 0), (16, 256, 128, 0), (1, 2048, 128, 0), (1, 2048, 64, 0)),
    *((32, 64, 128, 1), (32, 512, 128, 1), (64, 128, 128, 1), (128, 64, 128, 1), (64, 512, 64, 1)),
    *((1, 4096, 128, 32), (2, 2048, 128, 16), (4, 1024, 128, 8), (4, 4096, 128, 16), (2, 4096, 64, 32)),
    *((1, 32768, 128, 66), (128, 512, 16, 0)),
]


@pytest.mark.parametrize(("batch", "tokens", "heads", "splits"), ALONE)
def test_one_request_a_program_where_it_was_faster_on_an_h200(plan, batch, tokens, heads, splits):
    chosen = plan((9, 0), batch, heads, capacity=tokens, sm90=True)
    assert (chosen == (64, 64, splits, 8)) == (splits > 0)


def test_what_the_hopper_kernel_does_not_support_keeps_the_tiles_of_the_triton_kernel(plan):
    assert plan((9, 0), 32, 128, capacity=64) == (16, 64, 1, 4)
    assert plan((9, 0), 1, 128, capacity=4096) == (16, 64, 16, 4)


# (batch, tokens, heads, whether equal parts were faster), as measured with equal lengths.
MEASURED = [
    *((128, 4096, 128, True), (16, 4096, 128, True), (32, 1024, 128, True), (32, 4096, 32, True)),
    *((16, 512, 128, True), (16, 1024, 128, True), (8, 1024, 128, True), (8, 2048, 64, True)),
    *((128, 512, 128, False), (64, 2048, 128, False), (8, 512, 128, False), (4, 4096, 128, False)),
    *((128, 1024, 128, False), (64, 256, 128, False), (32, 512, 128, False), (64, 512, 64, False)),
    *((1, 4096, 128, False), (1, 32768, 128, False)),
    *((128, 4096, 16, True), (16, 32768, 16, True), (16, 4096, 16, True), (128, 512, 16, True)),
    *((16, 1024, 16, True), (32, 512, 16, True), (128, 128, 16, False), (8, 1024, 16, False)),
    *((1, 4096, 16, False), (1, 32768, 16, False)),
]


def _faster(batch: int, tokens: int, heads: int, cache: torch.dtype = torch.bfloat16) -> bool:
    q = SimpleNamespace(shape=(batch, heads, 576), device=SimpleNamespace(index=0), dtype=torch.bfloat16)
    return kernels.equal_parts_are_faster(q, SimpleNamespace(dtype=cache), 512, 1, 1.0, tokens)


@pytest.fixture(name="h200")
def h200_fixture(monkeypatch):
    monkeypatch.setattr(kernels, "processor_count", lambda index: 132)
    monkeypatch.setattr(kernels, "fits_equal_parts", lambda *args: True)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("batch", "tokens", "heads", "faster"), MEASURED)
def test_equal_parts_where_they_were_faster_on_an_h200(batch, tokens, heads, faster):
    assert _faster(batch, tokens, heads) == faster
    # Room for 128 times as many tokens: lengths are likely to differ then.
    if batch > 1:
        assert _faster(batch, 128 * tokens, heads)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "faster"),
    [
        *((128, 4096, 128, True), (1, 2048, 128, True), (16, 128, 128, True), (4, 128, 128, False)),
        *((8, 128, 128, False), (16, 64, 128, False), (128, 4096, 16, True), (4, 64, 16, True)),
    ],
)
def test_equal_parts_of_an_e4m3_cache_where_they_were_faster_on_an_h200(batch, tokens, heads, faster):
    assert _faster(batch, tokens, heads, torch.float8_e4m3fn) == faster
