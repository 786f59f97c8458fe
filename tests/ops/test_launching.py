"""Calls that were checked and compiled before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch._C._dynamo.guards import _empty_strided_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

from staleproof.ops import launching, private
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.launching import Seen, key_of
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax, topk_softplus_sqrt

Call = Callable[[int], tuple[torch.Tensor, ...]]


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
    assert sum(len(kind.calls) for kind in seen._kinds.values()) <= 3
    assert seen.get((X, 9)) == 9


def _rows(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def _lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _clear(seed: int) -> tuple[torch.Tensor, ...]:
    out, lse = _rows(seed, 4, 8, 512), _rows(seed, 4, 8, dtype=torch.float32)
    clear_empty_rows(out, _lengths(seed, 0, 3, 0), lse=lse)
    return out, lse


def _decode(batch: int, heads: int, q_len: int | None = None) -> Call:
    def call(seed: int) -> tuple[torch.Tensor, ...]:
        q = _rows(seed, batch, heads, 576) if q_len is None else _rows(seed, batch, q_len, heads, 576)
        table = torch.randperm(4 * batch).view(batch, 4).to("cuda", torch.int32)
        lengths = torch.randint(0, 256, (batch,)).to("cuda", torch.int32)
        return mla_decode(q, _rows(seed + 1, 4 * batch, 64, 576), table, lengths, softmax_scale=0.04)

    return call


def _padding(seed: int) -> torch.Tensor:
    return torch.arange(16, device="cuda") >= seed


CALLS: dict[str, Call] = {
    "clear_empty_rows": _clear,
    "mla_decode, splits": _decode(2, 128),
    "mla_decode, Hopper": _decode(256, 128),
    "mla_decode, 2 query tokens": _decode(3, 16, 2),
    "topk_softmax": lambda seed: topk_softmax(_rows(seed, 16, 128), 8, is_padding=_padding(seed)),
    "topk_sigmoid": lambda seed: topk_sigmoid(_rows(seed, 16, 64), 4, bias=_rows(seed, 64), renormalize=True),
    "topk_softplus_sqrt": lambda seed: topk_softplus_sqrt(_rows(seed, 16, 64), 6, bias=_rows(seed, 64)),
    "grouped_topk": lambda seed: grouped_topk(
        _rows(seed, 16, 256), 8, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5
    ),
    "fp8, padding": lambda seed: quantize_fp8_per_tensor(_rows(seed, 16, 96), is_padding=_padding(seed)),
    "fp8, all": lambda seed: quantize_fp8_per_tensor(_rows(seed, 16, 96)),
    "distinct_experts": lambda seed: distinct_experts(
        _rows(seed, 16, 8, dtype=torch.float32), torch.randint(0, 9, (16, 8)).to("cuda", torch.int32)
    ),
    "nvfp4": lambda seed: quantize_nvfp4(_rows(seed, 5, 96), torch.full((), 2.0 + seed, device="cuda")),
}


@pytest.fixture
def triton_launches(monkeypatch) -> list[object]:
    """Filled with each launch by Triton's own way."""
    found = []
    launched = launching.launched

    def counted(kernel, *args, **options):
        found.append(kernel)
        return launched(kernel, *args, **options)

    for name in ("clear_empty_rows", "mla.decode", "topk", "fp8", "nvfp4", "distinct_experts"):
        monkeypatch.setattr(f"staleproof.ops.{name}.launched", counted)
        monkeypatch.setattr(f"staleproof.ops.{name}._SEEN", Seen())
    return found


def _bits(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [x.contiguous().view(torch.uint8) for x in results]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_takes_the_short_way_to_the_same_bits(name, triton_launches, monkeypatch):
    call = CALLS[name]

    def seeded(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return _bits(call(seed))

    seeded(3)
    first = len(triton_launches)
    short = seeded(5)
    assert len(triton_launches) == first > 0
    monkeypatch.setattr(Seen, "get", lambda *_: None)
    long = seeded(5)
    assert len(triton_launches) > first
    assert all(map(torch.equal, short, long))


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
