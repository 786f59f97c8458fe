"""Calls that were checked and compiled before."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits
from torch._C._dynamo.guards import _empty_strided_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

from staleproof.device import select
from staleproof.ops import cuda_runtime, launching, private
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.launching import Seen, key_of
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.nvfp4_layout import scale_shape
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax, topk_softplus_sqrt

Call = Callable[[int], tuple[torch.Tensor, ...]]
HERE = select()


def test_no_key_while_torch_traces():
    assert key_of(torch.ones(2)) is not None
    with FakeTensorMode():
        assert key_of(torch.ones(2), 3) is None


@pytest.mark.parametrize("shape", [(5,), (4, 0), (0, 4), (2, 3), (8, 16, 512), torch.Size((2, 3, 4, 5))])
def test_memory_of_a_found_call_is_that_of_torch_empty(monkeypatch, shape):
    asked = []

    def on_host(*given):
        asked.append(given)
        return _empty_strided_cpu(*given)

    monkeypatch.setattr(private, "empty_strided_cuda", on_host)
    monkeypatch.setattr(private, "current_device", lambda: 0)
    found = launching.empty(shape, torch.bfloat16, SimpleNamespace(is_cuda=True, get_device=lambda: 0))
    wanted = torch.empty(shape, dtype=torch.bfloat16)
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert len(asked) == 1


X, Y = torch.ones(4, 6), torch.zeros(3, dtype=torch.int32)
WIDE = torch.ones(4, 12)
# (arguments of another call, whether the call kept for (X, Y, 8, None) serves them)
OTHERS: dict[str, tuple[tuple[object, ...], bool]] = {
    "values of tensors": ((X * 3, Y + 1, 8, None), True),
    "a parameter": ((torch.nn.Parameter(X), Y, 8, None), False),
    "shape": ((X[:3], Y, 8, None), False),
    "shape of the second": ((X, Y[:2], 8, None), False),
    "strides": ((WIDE[:, :6], Y, 8, None), False),
    "dtype": ((X.double(), Y, 8, None), False),
    "device": ((X.to("meta"), Y, 8, None), False),
    "alignment": ((torch.ones(25)[1:].view(4, 6), Y, 8, None), False),
    "number": ((X, Y, 9, None), False),
    "a float": ((X, Y, 8.0, None), False),
    "a list": ((X, Y, [8], None), False),
    "a tensor more": ((X, Y, 8, Y), False),
    "a tensor less": ((X, None, 8, None), False),
    "the same tensor twice": ((X, X, 8, None), False),
}


@pytest.mark.parametrize("in_python", [False, True], ids=["torch's guards", "without them"])
@pytest.mark.parametrize("case", OTHERS)
def test_a_kept_call_serves_the_same_layouts_and_numbers(case, in_python, monkeypatch):
    if in_python:
        monkeypatch.setattr(private, "_TensorGuards", None)
    seen: Seen[str] = Seen()
    seen.keep((X, Y, 8, None), "a call")
    arguments, serves = OTHERS[case]
    assert seen.get(arguments) == ("a call" if serves else None)
    assert seen.get((X, Y, 8, None)) == "a call"
    seen.keep(None, "another")
    assert seen.get(None) is None


def test_a_call_kept_for_an_odd_address_serves_every_address():
    seen: Seen[str] = Seen()
    seen.keep((torch.ones(25)[1:],), "no alignment")
    assert seen.get((torch.ones(24),)) == seen.get((torch.ones(25)[1:],)) == "no alignment"


def test_a_tensor_of_another_class_is_checked_each_time_and_not_kept_alive():
    class Other(torch.Tensor):
        pass

    seen, given = Seen[str](), torch.ones(24).as_subclass(Other)
    gone = weakref.ref(given)
    seen.keep((X, given), "a call")
    assert seen.get((X, given)) is None
    del given
    assert gone() is None


def test_an_argument_that_no_dict_holds_is_left_to_the_checks():
    seen: Seen[str] = Seen()
    seen.keep((X, (1, 2)), "a call")
    assert seen.get((X, ([1], 2))) is None
    with pytest.raises(ValueError, match="top_k"):
        topk_softmax(torch.ones(1, 4), [2])  # type: ignore[arg-type]


def test_calls_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(launching, "MOST_CALLS", 3)
    seen: Seen[int] = Seen()
    for number in range(10):
        seen.keep((X, number), number)
    # Full after three, and again after six and nine.
    assert [seen.get((X, number)) for number in range(5, 10)] == [None, None, None, None, 9]
    seen.keep((X, 10), 10)
    assert [seen.get((X, number)) for number in (9, 10)] == [9, 10]


def _rows(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(HERE, dtype)


def _lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=HERE)


def _clear(seed: int, *, starts: bool = False) -> tuple[torch.Tensor, ...]:
    out, lse = _rows(seed, 4, 8, 512), _rows(seed, 4, 8, dtype=torch.float32)
    given = {"query_start_loc": _lengths(0, 1, 1, seed - 2, 4)} if starts else {"lse": lse}
    clear_empty_rows(out, _lengths(seed, 0, 3, 0), **given)
    return out, lse


def _decode(
    batch: int, heads: int, q_len: int | None = None, *, rank: int = 512, out: bool = False, **more: Any
) -> Call:
    def call(seed: int) -> tuple[torch.Tensor, ...]:
        rows = (batch, heads) if q_len is None else (batch, q_len, heads)
        table = torch.randperm(4 * batch).view(batch, 4).to(HERE, torch.int32)
        lengths = torch.randint(0, 256, (batch,)).to(HERE, torch.int32)
        results = {"out": _rows(0, *rows, rank), "lse": _rows(0, *rows, dtype=torch.float32)} if out else {}
        q, cache = _rows(seed, *rows, rank + 64), _rows(seed + 1, 4 * batch, 64, rank + 64)
        given = {"softmax_scale": 0.04, "kv_lora_rank": rank} | more | results
        return mla_decode(q, cache, table, lengths, **given)

    return call


def _padding(seed: int) -> torch.Tensor:
    return torch.arange(16, device=HERE) >= seed


def _fp8(seed: int, hidden: int = 96, **more: Any) -> tuple[torch.Tensor, ...]:
    return quantize_fp8_per_tensor(_rows(seed, 16, hidden), **more)


def _fp8_out(seed: int) -> tuple[torch.Tensor, ...]:
    out = torch.zeros(16, 96, dtype=torch.float8_e4m3fn, device=HERE), torch.zeros(1, device=HERE)
    return _fp8(seed, live_rows=_lengths(seed), out=out)


def _fp4(seed: int, first: int = 0, *, swizzled: bool = True, out: bool = False) -> tuple[torch.Tensor, ...]:
    x, scale = _rows(seed, 5, 102)[:, first : first + 96], torch.full((), 2.0 + seed, device=HERE)
    shape = scale_shape(5, 96, swizzled=swizzled)
    made = [torch.full(size, 7, dtype=torch.uint8, device=HERE) for size in ((5, 48), shape)]
    results = (made[0], made[1].view(torch.float8_e4m3fn)) if out else None
    return quantize_nvfp4(x, scale, swizzled=swizzled, out=results)


def _route_out(seed: int) -> tuple[torch.Tensor, ...]:
    out = torch.zeros(16, 4, device=HERE), torch.zeros(16, 4, dtype=torch.int64, device=HERE)
    return topk_softmax(_rows(seed, 16, 64), 4, is_padding=_padding(seed), out=out)


BETWEEN_WORDS = "nvfp4, values between words"
CALLS: dict[str, Call] = {
    "clear_empty_rows": _clear,
    "clear_empty_rows, ragged": lambda seed: _clear(seed, starts=True),
    "mla_decode, 3 splits": _decode(2, 4, rank=64, num_kv_splits=3),
    "mla_decode, 3 splits, given results": _decode(2, 4, rank=64, num_kv_splits=3, out=True),
    "mla_decode, 1 split": _decode(3, 4, 2, rank=64, num_kv_splits=1),
    "mla_decode, 2 query tokens, given results": _decode(3, 4, 2, rank=64, num_kv_splits=1, out=True),
    "topk_softmax": lambda seed: topk_softmax(_rows(seed, 16, 128), 8, is_padding=_padding(seed)),
    "topk_softmax, given results": _route_out,
    "topk_sigmoid": lambda seed: topk_sigmoid(_rows(seed, 16, 64), 4, bias=_rows(seed, 64), renormalize=True),
    "topk_softplus_sqrt": lambda seed: topk_softplus_sqrt(
        _rows(seed, 16, 64), 6, bias=_rows(seed, 64), topk_ids_dtype=torch.int64
    ),
    "grouped_topk": lambda seed: grouped_topk(
        _rows(seed, 16, 256), 8, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5
    ),
    "fp8, padding": lambda seed: _fp8(seed, is_padding=_padding(seed)),
    "fp8, all": _fp8,
    "fp8, a count and given results": _fp8_out,
    "fp8, two launches": lambda seed: _fp8(seed, 600, is_padding=_padding(seed)),
    "distinct_experts": lambda seed: distinct_experts(
        _rows(seed, 16, 8, dtype=torch.float32), torch.randint(0, 9, (16, 8)).to(HERE, torch.int32)
    ),
    "nvfp4": _fp4,
    "nvfp4, rows of scales": lambda seed: _fp4(seed, swizzled=False),
    "nvfp4, given results": lambda seed: _fp4(seed, out=True),
    BETWEEN_WORDS: lambda seed: _fp4(seed, first=1),
}
ON_A_GPU: dict[str, Call] = {
    "mla_decode, splits": _decode(2, 128),
    "mla_decode, Hopper": _decode(256, 128),
    "mla_decode, 2 query tokens": _decode(3, 16, 2),
}


def _replay(kernel: Any, grid: Any, tensors: Any, sizes: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a GPU would keep of a launch: all but the addresses. Under the interpreter nothing is compiled."""
    layouts = [x if x is None else (x.dtype, x.shape, x.stride()) for x in tensors]

    def at(layout: Any, address: int | None) -> torch.Tensor | None:
        assert (layout is None) == (address is None)
        if layout is None:
            return None
        dtype, shape, strides = layout
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)

    def again(*addresses: int | None) -> None:
        kernel[grid](*(at(*pair) for pair in zip(layouts, addresses, strict=True)), *sizes, **options)

    return again


@pytest.fixture
def triton_launches(device: str, monkeypatch) -> list[object]:
    """Filled with each launch by Triton's own way."""
    found = []
    launched = launching.launched

    def counted(kernel, grid, tensors, sizes, **options):
        found.append(kernel)
        sizes = tuple(sizes)
        made = launched(kernel, grid, tensors, sizes, **options)
        return _replay(kernel, grid, tensors, sizes, options) if device == "cpu" else made

    for name in ("clear_empty_rows", "mla.decode", "topk", "fp8", "nvfp4", "distinct_experts"):
        monkeypatch.setattr(f"staleproof.ops.{name}.launched", counted)
        monkeypatch.setattr(f"staleproof.ops.{name}._SEEN", Seen())
    return found


@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_A_GPU)])
def test_a_repeated_call_takes_the_short_way_to_the_same_bits(name, triton_launches, monkeypatch):
    call = (CALLS | ON_A_GPU)[name]

    def seeded(seed: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        return call(seed)

    seeded(3)
    first = len(triton_launches)
    short = seeded(5)
    # Values between words are copied, and the copy's address is no argument of the next call.
    assert (len(triton_launches) == first > 0) == (name != BETWEEN_WORDS)
    before = len(triton_launches)
    monkeypatch.setattr(Seen, "get", lambda *_: None)
    assert_same_bits(short, seeded(5))
    assert len(triton_launches) > before


@pytest.mark.gpu
def test_another_alignment_stream_or_bad_argument_is_not_mistaken_for_the_last_call(triton_launches):
    memory = torch.full((4 * 8 * 512 + 1,), torch.nan, dtype=torch.bfloat16, device="cuda")
    for start in (0, 1, 0, 1):
        out = memory[start : start + 4 * 8 * 512].view(4, 8, 512)
        clear_empty_rows(out, _lengths(0, 0, 0, 0))
        assert not out.isnan().any()
        memory.fill_(torch.nan)
    assert len(triton_launches) == 2
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = torch.full((4, 8, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        lengths = _lengths(0, 0, 0, 0)
        torch.cuda._sleep(20_000_000)
        clear_empty_rows(out, lengths)
        bad = out.isnan().any()
    stream.synchronize()
    assert not bad
    with pytest.raises(ValueError, match=r"seq_lens: expected torch\.int32"):
        clear_empty_rows(out, lengths.long())
    with pytest.raises(ValueError, match="seq_lens: expected a tensor on cuda:0"):
        clear_empty_rows(out, lengths.cpu())


@pytest.mark.gpu
def test_a_short_call_is_captured(triton_launches):
    out, lengths = _rows(1, 4, 8, 512), _lengths(3, 3, 3, 3)
    clear_empty_rows(out, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clear_empty_rows(out, lengths)
    assert len(triton_launches) == 1
    lengths.copy_(_lengths(3, 0, 3, 0))
    out.fill_(torch.nan)
    graph.replay()
    assert out.isnan().flatten(1).any(1).tolist() == [True, False, True, False]


@pytest.fixture
def gpus(monkeypatch) -> list[Any]:
    """Stand-ins for two GPUs, of which the first is current; filled with what they are asked."""
    asked: list[Any] = []
    current = [0]

    @contextlib.contextmanager
    def entered(index):
        current.append(index)
        yield
        current.pop()

    driver = SimpleNamespace(get_current_stream=lambda index: 70 + index)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(private, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", entered)

    def launcher(compiled):
        return lambda *given: asked.append((compiled, current[-1], *given)), ("before",), None

    monkeypatch.setattr(private, "launcher", launcher)
    return asked


@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)])
@pytest.mark.parametrize("index", [0, 1])
def test_what_was_launched_is_launched_again_on_its_device_and_its_stream(gpus, grid, index):
    first = SimpleNamespace(is_cuda=True, get_device=lambda: index)
    taken: list[Any] = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: taken.append((grid, given, options)) or "compiled"

    ready = launching.launched(Kernel(), grid, (first, None), iter((8, 9)), num_warps=2)
    assert taken == [(grid, (first, None, 8, 9), {"num_warps": 2})]
    ready(1000, 2000)
    ready.on(33, (2, 3, 4), 1000, 55)
    expected = ("compiled", index, *(*grid, 1, 1)[:3], 70 + index, "before", 1000, 2000, 8, 9)
    assert gpus == [expected, ("compiled", 0, 2, 3, 4, 33, "before", 1000, 55)]


@pytest.mark.parametrize("first", [None, torch.ones(1), SimpleNamespace(is_cuda=True)])
def test_nothing_compiled_is_nothing_to_repeat(gpus, first):
    compiled = None if isinstance(first, SimpleNamespace) else "compiled"
    kernel = {(1,): lambda *given: compiled}
    assert launching.launched(kernel, (1,), (first,), ()) is None


def test_memory_beside_a_tensor_of_another_device_comes_from_torch(monkeypatch):
    monkeypatch.setattr(private, "empty_strided_cuda", lambda *given: pytest.fail("for the current device"))
    monkeypatch.setattr(private, "current_device", lambda: 0)
    for like in (torch.ones(1), SimpleNamespace(is_cuda=True, get_device=lambda: 1, device="meta")):
        made = launching.empty((2, 3), torch.int32, like)
        assert (made.shape, made.dtype, made.device) == ((2, 3), torch.int32, torch.device(like.device))


def test_what_a_launcher_asks_of_a_device(monkeypatch):
    found = [f.__wrapped__ for f in (cuda_runtime.processor_count, cuda_runtime.capability)]
    facts = {0: SimpleNamespace(multi_processor_count=132), 1: SimpleNamespace(multi_processor_count=84)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {0: (9, 0), 1: (8, 6)}.get)
    assert [[fact(index) for fact in found] for index in (0, 1)] == [[132, (9, 0)], [84, (8, 6)]]
    utils = SimpleNamespace(get_device_properties={1: {"max_shared_mem": 99.0}}.get)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    assert cuda_runtime.shared_memory.__wrapped__(1) == 99
    # The soname of the library that torch has loaded.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    assert cuda_runtime.cudart.__wrapped__() == "libcudart.so.13"
