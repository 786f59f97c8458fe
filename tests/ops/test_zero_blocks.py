"""BlockZeroer against plain PyTorch, byte for byte, with canaries everywhere else."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from staleproof import graph
from staleproof.ops import zero_blocks as kernels
from staleproof.ops import zero_kernel
from staleproof.ops.reference import zero_blocks as reference
from staleproof.ops.zero_blocks import BlockZeroer


@dataclass(frozen=True)
class Layout:
    """A strided view of a byte buffer, and what BlockZeroer is told of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    block_dim: int
    ratio: int
    bytes: int

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(self.dtype).as_strided(self.shape, self.strides, self.offset)


def random_layout(rng: random.Random, blocks: int, longest: int, grain: int) -> Layout:
    """K/V or not, blocks inside or outside of it, pages side by side or apart, any dtype.

    Addresses and lengths are multiples of ``grain`` elements.
    """
    dtype = rng.choice(kernels.DTYPES)
    size = torch.empty((), dtype=dtype).element_size()
    ratio = rng.choice([1, 1, 2, 3])
    tokens, width = rng.randint(1, 4), rng.randint(1, max(1, longest // (4 * size * grain))) * grain
    page = tokens * width
    gap = rng.choice([0, 0, grain, 16, rng.randint(0, 64 // grain) * grain])
    offset = rng.choice([0, 16, rng.randint(0, 64 // grain) * grain])
    count = blocks * ratio
    tokens_first = rng.random() < 0.5  # otherwise (..., heads, tokens), transposed
    inner = ((tokens, width), (width, 1)) if tokens_first else ((width, tokens), (1, width))
    kind = rng.choice(["blocks", "blocks", "K/V outermost", "K/V within", "blocks, K/V"])
    shape: tuple[int, ...] = (2, count)
    strides: tuple[int, ...]
    if kind == "K/V outermost":
        between = count * (page + gap) + rng.randint(0, 2) * grain
        strides, dim, span = (between, page + gap), 1, 2 * between
    elif kind == "K/V within":
        # vLLM's layout for hybrid models: the shape of the one above, a block's bytes together.
        strides, dim, span = (page, 2 * page + gap), 1, count * (2 * page + gap)
    else:
        sides = (2,) if kind == "blocks, K/V" else ()
        stride = page * (2 if sides else 1) + gap
        shape, strides, dim, span = ((count, *sides), (stride, page)[: 1 + len(sides)], 0, count * stride)
    return Layout(
        dtype,
        shape + inner[0],
        strides + inner[1],
        offset,
        dim,
        ratio,
        -(-(offset + span + 64) * size // 16) * 16,
    )


def canaries(size: int, device: str, seed: int = 0) -> torch.Tensor:
    """Bytes of which none is zero."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


class Case:
    """Buffers full of canaries, caches in them, and copies that the reference is run on."""

    def __init__(self, layouts: list[Layout], device: str) -> None:
        self.layouts = layouts
        self.raw = [canaries(a.bytes, device, seed) for seed, a in enumerate(layouts)]
        self.want = [raw.to("cpu", copy=True) for raw in self.raw]
        self.zeroer = BlockZeroer(self._views(self.raw), **self._axes)

    @property
    def _axes(self) -> dict[str, Any]:
        return {
            "block_dim": [a.block_dim for a in self.layouts],
            "block_size_ratio": [a.ratio for a in self.layouts],
        }

    def _views(self, raws: list[torch.Tensor]) -> list[torch.Tensor]:
        return [a.view(raw) for a, raw in zip(self.layouts, raws, strict=True)]

    def zero(self, ids: Any, given: Any = None) -> None:
        """Zero these blocks, given as they are or in another form, and nothing else."""
        self.expect(ids)
        self.zeroer.zero(ids if given is None else given)
        self.check()

    def expect(self, ids: list[int]) -> None:
        reference.zero_blocks(self._views(self.want), ids, **self._axes)

    def check(self) -> None:
        for layout, raw, want in zip(self.layouts, self.raw, self.want, strict=True):
            wrong = (raw.cpu() != want).nonzero()[:, 0].tolist()
            assert not wrong, f"{layout}: bytes {wrong[:9]} of {raw.numel()}"


def plain(blocks: int, page: int, *, kv: bool = False, dtype: torch.dtype = torch.uint8) -> Layout:
    shape = (2, blocks, page) if kv else (blocks, page)
    strides = (blocks * page, page, 1) if kv else (page, 1)
    size = torch.empty((), dtype=dtype).element_size()
    return Layout(dtype, shape, strides, 0, int(kv), 1, shape[0] * strides[0] * size)


def on_device(ids: list[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ids, dtype=dtype, device=device)


def test_random_geometries(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte outside the blocks is touched, and none inside left."""
    rng = random.Random(4)
    done = 0
    # Of fourteen small edits of the kernel twelve fail here, each within the first 70.
    while done < (500 if device == "cpu" else 2000):
        longest = rng.choice([40, 600])
        if device == "cpu":
            # Smaller programs than the interpreter would get, so that a page takes several.
            tile = (32 if longest == 40 else 256), 1024
            monkeypatch.setattr(zero_kernel, "_tile", lambda _, tile=tile: tile)
        else:
            longest *= rng.choice([1, 20])
        monkeypatch.setattr(zero_kernel, "ROW", rng.choice([48, 200, 2**15]))
        blocks, grain = rng.randint(2, 9), rng.choice([1, 16])
        caches = rng.choice([1, 10]) if device == "cpu" else 1
        layouts = [random_layout(rng, blocks, longest, grain) for _ in range(caches)]
        case = Case(layouts, device)
        ids = rng.sample(range(1, blocks), rng.randint(1, blocks - 1))
        case.zero(ids)
        done += len(layouts)


@pytest.mark.parametrize("count", [1, 5, 32])
def test_each_id_in_the_arguments_of_a_launch_is_read(device: str, count: int) -> None:
    case = Case([plain(64, 40, kv=True), plain(64, 7)], device)
    ids = sorted(random.Random(count).sample(range(1, 64), count))
    case.expect(ids)
    case.zeroer._plan.launch_listed(zero_kernel.pairs_of(ids))
    case.check()


@pytest.mark.parametrize("pages", [2, 4])
def test_every_row_of_every_id_has_a_program(device: str, monkeypatch, pages: int) -> None:
    if device == "cpu":
        monkeypatch.setattr(zero_kernel, "_tile", lambda _: (32, pages))
    case = Case([plain(9, 40, kv=True), plain(9, 24)], device)
    ids = [1, 3, 4, 6, 8]
    case.zero(ids)


@pytest.mark.parametrize(
    ("page", "kv"), [*((1, False), (16, False), (17, True), (10_000, True), (70_001, False))]
)
def test_any_page_size(device: str, page: int, kv: bool) -> None:
    case = Case([plain(4, page, kv=kv)], device)
    case.zero([2])
    assert case.zeroer.num_blocks == 4
    assert case.zeroer.block_bytes == page * (1 + kv)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1],
        (3, 1),
        range(1, 4, 2),
        np.array([3, 1]),
        torch.tensor([3, 1]),
        torch.tensor([1, 3], dtype=torch.int32),
    ],
    ids=["list", "tuple", "range", "numpy", "int64", "int32"],
)
def test_ids_of_any_kind(device: str, ids: Any) -> None:
    case = Case([plain(5, 24, dtype=torch.float8_e4m3fn)], device)
    case.zero([1, 3], ids)


def test_what_caches_share_is_zeroed_once(device: str) -> None:
    raw = canaries(6 * 96, device)
    pages = raw.view(6, 96)
    conv = raw.view(torch.bfloat16).as_strided((6, 8), (48, 1))
    ssm = raw.view(torch.float32).as_strided((6, 16), (24, 1), 4)
    # The state does not fill its page: its last 16 bytes are padding.
    assert BlockZeroer([conv, ssm]).block_bytes == 80
    # The first view of an address is not the longest one.
    zeroer = BlockZeroer([conv, ssm, pages.view(torch.int8), pages, pages[:, 40:60]])
    assert zeroer.block_bytes == 96
    assert zeroer._plan.rows == 1
    zeroer.zero([4])
    assert raw.view(6, 96).eq(0).sum(1).tolist() == [0, 0, 0, 0, 96, 0]


def test_nothing_to_do(device: str) -> None:
    case = Case([plain(4, 32)], device)
    empty = torch.tensor([], dtype=torch.int32)
    for nothing in ([], (), empty, empty.to(device)):
        case.zero([], nothing)


@pytest.mark.parametrize("page", [32, 33])
def test_the_kernel_passes_over_ids_that_name_no_block(
    device: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids on the device reach it unchecked."""
    case = Case([replace(plain(6, page), offset=2 * page, bytes=10 * page)], device)
    ids = [-1, 0, 4, 6, 7]
    monkeypatch.setattr(case.zeroer, "_checked", np.array)
    case.zero([4], ids if device == "cpu" else on_device(ids, device))


CACHE = torch.zeros(6, 2, 8)
OVERLAPPING = r"kv_caches\[0\]: expected elements with memory of their own"


BAD_IDS = [
    ([1, 6], "block_ids: expected 1 to 5, got 6"),
    ([1, 2**62], "block_ids: expected 1 to 5, got 4611686018427387904"),
    ([1, 2**63], "block_ids: expected a sequence of int64"),
    ([1, -1], "block_ids: expected 1 to 5, got -1"),
    ([1, 0], r"block_ids: expected 1 to 5, got 0 \(the null block\)"),
    ([2, 1, 2], "block_ids: expected each id once, got 2 again"),
    ([1.0], "block_ids: expected a sequence of int64, got .*float"),
    (["1"], "block_ids: expected a sequence of int64"),
    (b"12345678", "block_ids: expected 1 to 5, got 5"),
    (3, "block_ids: expected a sequence of int64"),
    (torch.tensor([1.0]), "block_ids: expected torch.int32 or torch.int64, got torch.float32"),
    (torch.tensor([True]), "block_ids: expected torch.int32 or torch.int64, got torch.bool"),
    (torch.tensor(1), r"block_ids: expected a tensor of rank 1, got shape \(\)"),
    (torch.arange(1, 5)[::2], "block_ids: expected a contiguous tensor"),
]


def test_bad_ids_are_named_before_any_store(device: str) -> None:
    for ids, message in BAD_IDS:
        case = Case([plain(6, 32)], device)
        with pytest.raises(ValueError, match=message):
            case.zeroer.zero(ids)
        case.check()


BAD_CACHES = [
    ([], {}, "kv_caches: expected at least one tensor"),
    ([3], {}, r"kv_caches\[0\]: expected a torch.Tensor"),
    ([CACHE.bool()], {}, r"kv_caches\[0\]: expected a dtype whose zero bytes are 0"),
    ([CACHE.to(torch.complex64)], {}, r"kv_caches\[0\]: expected a dtype whose zero bytes"),
    ([CACHE.to(torch.float8_e8m0fnu)], {}, r"kv_caches\[0\]: expected a dtype whose zero"),
    ([CACHE.to_sparse()], {}, r"kv_caches\[0\]: expected a dense tensor"),
    ([CACHE.to("meta")], {}, r"kv_caches\[0\]: expected a (cpu|cuda) tensor, got meta"),
    ([CACHE[:0]], {}, r"kv_caches\[0\]: expected elements"),
    ([CACHE, CACHE[:3]], {}, r"kv_caches\[1\]: expected 6 blocks of the manager, got 3"),
    ([CACHE[:3], CACHE], {}, r"kv_caches\[1\]: expected 3 blocks of the manager, got 6"),
    ([CACHE[:, :, :4]], {}, r"kv_caches\[0\]: expected the elements of a block side by side"),
    ([CACHE[:, :, ::2]], {}, r"kv_caches\[0\]: expected the elements of a block side by side"),
    ([CACHE[:1].expand(6, 2, 8)], {}, r"kv_caches\[0\]: expected .* and blocks apart"),
    ([CACHE.expand(3, 6, 2, 8)], {"block_dim": 1}, r"kv_caches\[0\]: expected the elements"),
    *(
        ([torch.zeros(300).as_strided(*shape)], {"block_dim": axis}, OVERLAPPING)
        for axis, shape in ((1, ((2, 6, 8), (16, 8, 1))), (2, ((2, 3, 6, 8), (96, 48, 8, 1))))
    ),
    ([CACHE], {"block_dim": 3}, r"block_dim: expected an axis of kv_caches\[0\], 0 to 2, got"),
    ([CACHE], {"block_dim": -1}, r"block_dim: expected an axis of kv_caches\[0\], 0 to 2"),
    ([CACHE, CACHE], {"block_dim": [0]}, r"block_dim: expected one int, or 2, got \[0\]"),
    ([CACHE], {"block_dim": None}, "block_dim: expected one int, or 1, got None"),
    ([CACHE], {"block_size_ratio": 4}, "block_size_ratio: expected a divisor of the 6 blocks"),
    ([CACHE], {"block_size_ratio": 0}, "block_size_ratio: expected a divisor of the 6 blocks"),
]


def test_bad_caches_are_named(device: str) -> None:
    for caches, options, message in BAD_CACHES:
        there = [
            # The copy keeps the strides, which are what is wrong.
            torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=device)
            if isinstance(c, torch.Tensor) and c.layout == torch.strided and c.device.type == "cpu"
            else c
            for c in caches
        ]
        with pytest.raises(ValueError, match=message):
            BlockZeroer(there, **options)


def test_one_cache_is_no_sequence_of_caches(device: str) -> None:
    with pytest.raises(ValueError, match="kv_caches: expected a sequence of tensors, got Tensor"):
        BlockZeroer(CACHE.to(device))  # type: ignore[arg-type]


def test_freed_memory_is_an_error_before_any_store(device: str) -> None:
    kept, freed = canaries(64, device), canaries(64, device)
    # Of the tensors that were given, none lives on; the memory of both does.
    zeroer = BlockZeroer([kept.view(4, 16), freed.view(4, 16)])
    zeroer.zero([1])
    assert int(freed.eq(0).sum()) == 16
    del freed
    with pytest.raises(ValueError, match=r"kv_caches\[1\]: expected a live tensor, got freed"):
        zeroer.zero([2])
    with pytest.raises(ValueError, match=r"kv_caches\[1\]: expected a live tensor, got freed"):
        zeroer.zero(on_device([2], device))
    assert int(kept.eq(0).sum()) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_captured_with_ids_on_the_device(dtype: torch.dtype) -> None:
    case = Case([plain(40, 4096, kv=True), plain(40, 100)], "cuda")
    ids = torch.zeros(9, dtype=dtype, device="cuda")[1:]  # not even aligned
    captured = graph.capture(lambda: case.zeroer.zero(ids), on="cuda")
    captured.replay()
    case.check()
    high = torch.iinfo(dtype).max
    for replay in ([5, 7, 0, 0, 0, 0, 0, 0], [-1, 40, 39, 1, 1, high, -high, 20], [0] * 8):
        ids.copy_(on_device(replay, "cuda", dtype))
        captured.replay()
        case.expect([i for i in replay if 0 < i < 40])
        case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 32, 33])
def test_short_lists_do_not_use_the_ring_and_keep_its_promises(count: int) -> None:
    case = Case([plain(64, 4096)], "cuda")
    ids = [*range(1, count + 1)]
    case.zero(ids)
    assert (case.zeroer._ring._used > 0) == (count > 32)
    with pytest.raises(ValueError, match=r"block_ids: expected each id once, got 3 again"):
        case.zeroer.zero([3, 3])
    with pytest.raises(ValueError, match=r"block_ids: expected a sequence of int64"):
        case.zeroer.zero([2.0])  # type: ignore[list-item]


@pytest.mark.gpu
def test_more_blocks_than_an_axis_of_a_grid() -> None:
    case = Case([plain(70_000, 16)], "cuda")
    ids = [*range(2, 70_000)]
    case.want[0][32:] = 0
    case.zeroer.zero(ids)
    case.check()


@pytest.mark.gpu
def test_tensors_of_another_device_are_named() -> None:
    with pytest.raises(ValueError, match=r"kv_caches\[0\]: expected a cuda tensor, got cpu"):
        BlockZeroer([torch.zeros(4, 16)])


@pytest.fixture(name="gpu")
def gpu_fixture(device: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A zeroer's way on a GPU, with stand-ins for its kernels; filled with their launches."""
    if device != "cpu":
        pytest.skip("launches are recorded in place of Triton's")
    asked: list[Any] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(table: torch.Tensor, *given: Any, num_warps: int) -> str:
                first = given[0].tolist() if isinstance(given[0], torch.Tensor) else given[0]
                asked.append((self.name, grid, first, num_warps))
                return self.name + (str(given[0].dtype) if isinstance(given[0], torch.Tensor) else "")

            return launch

    def ready(compiled: str, grid: Any, sizes: Any, index: int) -> SimpleNamespace:
        return SimpleNamespace(on=lambda *given: asked.append((compiled, *given)))

    monkeypatch.setattr(zero_kernel, "INTERPRET", False)
    monkeypatch.setattr(zero_kernel, "Ready", ready)
    for name in ("_zero_kernel", "_zero_listed_kernel"):
        monkeypatch.setattr(zero_kernel, name, Kernel(name))
    monkeypatch.setattr(zero_kernel.Plan, "stream", lambda plan: 77)
    return asked


def test_a_plan_for_the_caches_of_an_operator_cannot_be_made_while_a_stream_captures(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = torch.zeros(4, 3, device=device)
    layout = (zero_kernel.Layout.of(cache),), (0,), (1,), cache.device
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(kernels, "is_capturing", lambda: True)
    with pytest.raises(ValueError, match="kv_caches: expected caches of an earlier call"):
        kernels._plan(*layout)
    for interpret, capturing in ((True, True), (False, False)):
        kernels._plan.cache_clear()
        monkeypatch.setattr(kernels, "INTERPRET", interpret)
        monkeypatch.setattr(kernels, "is_capturing", lambda capturing=capturing: capturing)
        assert kernels._plan(*layout).rows == 1
    # Of an earlier call, it is not made again.
    monkeypatch.setattr(kernels, "is_capturing", lambda: True)
    assert kernels._plan(*layout).rows == 1


def test_ranges_of_several_lengths_are_cut_into_rows_of_32_kib_at_most() -> None:
    def rows(*lengths: int) -> list[tuple[int, int]]:
        ranges = [zero_kernel.Range(2**20, 2**18 * i, n) for i, n in enumerate(lengths)]
        return [(start, length) for start, _, length, _ in zero_kernel.rows_of(ranges)]

    assert rows(70_000, 70_000) == [(0, 70_000), (2**18, 70_000)]
    assert rows(70_000, 16) == [(0, 32_768), (32_768, 32_768), (65_536, 4464), (2**18, 16)]
