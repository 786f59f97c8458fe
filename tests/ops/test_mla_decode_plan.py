"""The kernel, the tiles and the cut that mla_decode chooses on each GPU, from shapes alone."""

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
        return kernels.tiles_of(q, heads, capacity)

    return choose


def test_float32_has_few_warps_everywhere_and_a_cpu_one_processor(plan):
    assert plan((8, 0), 256, 128, size=4) == (16, 16, 1, 4)
    assert kernels.tiles_of(torch.ones(1, 16, 576).half(), 16, 4096) == (16, 64, 1, 4)


@pytest.mark.parametrize(("gpu", "rows"), [((8, 0), 32), ((8, 6), 16), ((10, 0), 32), ((12, 0), 16)])
def test_tiles_of_a_large_batch_fit_and_a_small_batch_is_split(plan, gpu, rows):
    """The widest tile that fits into shared memory; programs for all processors."""
    assert plan(gpu, 256, 128)[:2] == (rows, 32)
    assert plan(gpu, 256, 16)[:2] == (16, 32)
    block_m, block_n, splits, warps = plan(gpu, 1, 128, capacity=2048)
    assert (block_m, block_n, warps) == (16, 32, 8)
    assert splits == GPUS[gpu][0] // 8


# Equal lengths: (batch, tokens, heads, E4M3 cache, kernel), where no other was within 5 % of it on an H200.
MEASURED = [
    *((1, 512, 128, False, "portable"), (1, 4096, 128, False, "cut"), (16, 512, 128, False, "cut")),
    *((4, 4096, 128, False, "cut"), (16, 1548, 128, False, "cut"), (5, 25256, 32, False, "cut")),
    *((16, 32768, 16, False, "cut"), (16, 4096, 16, True, "cut"), (1, 4096, 16, True, "cut")),
    *((4, 4096, 32, True, "cut"), (3, 200, 16, True, "cut"), (128, 512, 16, True, "whole")),
    *((16, 4096, 128, True, "cut"), (4, 4096, 128, True, "cut"), (8, 32768, 16, True, "cut")),
]


def _work(batch: int, tokens: int, heads: int, converts: bool = False) -> kernels.Work:
    tiles = -(-tokens // 64)
    return kernels.Work(batch, heads, 1, tiles, float(batch * tiles), 132, converts)


def _name(cut: kernels.Cut) -> str:
    if cut.kernel == "portable":
        return cut.kernel
    return "cut" if cut.parts or cut.splits > 1 else "whole"


def test_the_prediction_ranks_kernels_as_they_were_measured():
    works = {row: _work(*row[:4]) for row in MEASURED}
    found = {row: _name(min(work.cuts(), key=work.microseconds)) for row, work in works.items()}
    assert found == {row: row[4] for row in MEASURED}


def test_two_query_tokens_of_32_heads_are_cut_into_equal_parts():
    """One program a request took ten times as long as FlashMLA on an H200 where one of 32 was long."""
    work = kernels.Work(25, 32, 2, 512, 512.0 + 24 * 308, 132)
    # Both in a program: the cache is read once.
    assert min(work.cuts(), key=work.microseconds) == kernels.Cut("packed", 132)
    # Of few tiles: the ends of requests take longer packed, and took more than one reading saves.
    short = kernels.Work(4, 16, 2, 64, 4 * 64.0, 132)
    assert min(short.cuts(), key=short.microseconds) == kernels.Cut("few", 0, 16)


@pytest.fixture
def fastest(monkeypatch):
    monkeypatch.setattr(kernels, "processor_count", lambda index: 132)

    def choose(batch, heads, q_len, capacity, converts=False):
        q = SimpleNamespace(shape=(batch, heads, 576), device=SimpleNamespace(index=0), dtype=torch.bfloat16)
        cache = SimpleNamespace(dtype=torch.float8_e4m3fn if converts else torch.bfloat16)
        return kernels.fastest(q, cache, q_len, capacity)

    return choose


@pytest.mark.parametrize("heads", [16, 128])
def test_requests_that_may_be_long_are_cut_into_equal_parts(fastest, heads):
    """A table with room for 128 times as many tokens: one long request must not keep one program busy."""
    assert fastest(64, heads, 1, 131_072).parts > 0
    assert fastest(64, heads, 1, 128).parts == 0


@pytest.mark.parametrize(
    ("call", "cut"),
    [
        *(((16, 128, 1, 4096), (66, 1)), ((4, 128, 1, 4096), (0, 16)), ((6, 128, 2, 448, True), (0, 4))),
        # One request has no shorter ones beside it.
        ((1, 128, 2, 2048, True), (0, 32)),
    ],
)
def test_uneven_lengths_count_as_much_as_equal_ones(fastest, call, cut):
    """Equal lengths alone would decide for splits of each request, uneven ones alone for equal parts."""
    assert fastest(*call) == kernels.Cut("pairs", *cut)


def _arguments(**change):
    """A call that the Hopper kernels support, with one thing changed."""
    sizes = {"heads": 128, "q_len": 1, "batch": 4, "width": 576, "page": 64, "pages": 100, "token": 576}
    given = sizes | {"page_stride": None, "q_at": 0, "cache_at": 0, "q_stride": None, "size": 2} | change
    q_strides = (given["q_stride"] or given["heads"] * given["width"], given["width"], 1)
    q = SimpleNamespace(
        is_cuda=True,
        device=SimpleNamespace(index=0),
        shape=(given["batch"], given["heads"], given["width"]),
        element_size=lambda: given["size"],
        data_ptr=lambda: given["q_at"],
        stride=lambda: q_strides,
    )
    strides = (given["page_stride"] or given["page"] * given["token"], given["token"], 1)
    cache = SimpleNamespace(
        shape=(given["pages"], given["page"], given["width"]),
        data_ptr=lambda: given["cache_at"],
        stride=lambda axis=None: strides if axis is None else strides[axis],
    )
    return q, cache, given.get("rank", 512), given["q_len"], given.get("scale", 0.1)


REFUSED = {
    "another rank": {"rank": 256},
    "32 bits": {"size": 4},
    "pages of 32": {"page": 32},
    "queries between 16 bytes": {"q_at": 8},
    "a cache between 16 bytes": {"cache_at": 8},
    "rows of queries between 16 bytes": {"q_stride": 128 * 576 + 8},
    "rows of the cache between 16 bytes": {"token": 584},
    "96 heads with two query tokens": {"heads": 96, "q_len": 2},
    "more than 1,024 requests": {"batch": 1025},
    "more than 1,024 rows": {"q_len": 9},
    "a scale of 0": {"scale": 0.0},
    "a negative scale": {"scale": -0.1},
    "pages that are no whole number of rows apart": {"page_stride": 64 * 576 + 16},
    "2 ** 31 rows": {"pages": 2**31 // 64},
    "rows of 2 ** 24 numbers": {"token": 2**24},
}


def test_what_the_hopper_kernels_cannot_address_goes_to_the_portable_one(monkeypatch):
    monkeypatch.setattr(kernels, "capability", lambda index: (9, 0))
    assert kernels.fits_hopper(*_arguments())
    assert not [case for case in REFUSED if kernels.fits_hopper(*_arguments(**REFUSED[case]))]


LARGEST = [
    *({"pages": 2**31 // 64 - 1}, {"heads": 40}, {"heads": 8, "q_len": 3}, {"heads": 40, "q_len": 2}),
    *({"page_stride": 128 * 576}, {"batch": 1024}, {"heads": 128, "q_len": 8}),
]


@pytest.mark.parametrize("gpu", [(9, 0), (10, 0)])
def test_what_the_hopper_kernels_can_address_is_theirs_on_hopper_alone(monkeypatch, gpu):
    monkeypatch.setattr(kernels, "capability", lambda index: gpu)
    assert {kernels.fits_hopper(*_arguments(**change)) for change in LARGEST} == {gpu == (9, 0)}


@pytest.mark.parametrize(
    ("gpu", "converts"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), (None, True)]
)
def test_a_cache_may_be_e4m3_where_a_gpu_converts_it(monkeypatch, gpu, converts):
    monkeypatch.setattr(kernels, "capability", lambda index: gpu)
    q = SimpleNamespace(is_cuda=gpu is not None, device=SimpleNamespace(index=0), dtype=torch.bfloat16)
    assert kernels.cache_dtypes(q) == (torch.bfloat16, torch.float8_e4m3fn)[: 1 + converts]
