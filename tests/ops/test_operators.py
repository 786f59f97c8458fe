"""Every operation under torch's tracers, and on whose device it launches.

A case makes the tensors of some number of rows, and a function that calls the operation between
other operations. However torch runs that function, the result has the bits of the plain call.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from staleproof.cases import graph
from staleproof.ops import operators
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla.decode import mla_decode

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    operator: str
    make: Callable[[int, str], Tensors]
    call: Callable[..., Tensors]
    # The operator's own arguments, from the tensors.
    arguments: Callable[..., tuple[Any, ...]]


def randn(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def every_third(rows: int, device: str) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.int32, device=device) % 3 == 1


def make_clear(rows: int, device: str) -> Tensors:
    lens = (~every_third(rows, device)).int() * 9
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return randn(rows, 2, 16, device=device), randn(rows, 2, device=device), lens, starts


def clear(x: torch.Tensor, lse: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor | None) -> Tensors:
    out, lse = x + 1, lse * 2
    clear_empty_rows(out, lens, lse=lse, query_start_loc=starts)
    return out - 1, lse


def make_decode(rows: int, device: str) -> Tensors:
    table = torch.arange(2 * rows, dtype=torch.int32, device=device).view(rows, 2) % 3
    lens = (~every_third(rows, device)).int() * 25
    return randn(rows, 2, 32, device=device), randn(3, 16, 32, device=device), table, lens


def decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, **more: Any
) -> Tensors:
    out, lse = mla_decode(q * 2, cache, table, lens, softmax_scale=0.2, kv_lora_rank=16, **more)
    return out + 1, lse


def decode_arguments(splits: int | None) -> Callable[..., tuple[Any, ...]]:
    def arguments(q: torch.Tensor, *others: torch.Tensor) -> tuple[Any, ...]:
        return q, *others, 0.2, 1.0, splits, q.new_empty(*q.shape[:2], 16), q.new_empty(q.shape[:2])

    return arguments


def make_quantize(rows: int, device: str) -> Tensors:
    count = torch.tensor([3], dtype=torch.int32, device=device)
    return randn(rows, 40, device=device), every_third(rows, device), count


def quantize(x: torch.Tensor, **keywords: Any) -> Tensors:
    x_fp8, scale = quantize_fp8_per_tensor(x * 2, **keywords)
    return x_fp8.view(torch.uint8), scale * 2


def quantize_arguments(x: torch.Tensor, live: Any, padding: Any, count: int) -> tuple[Any, ...]:
    # The operator writes bytes; torch's check of schemas cannot compare FP8.
    return x, live, padding, count, torch.empty_like(x, dtype=torch.uint8), x.new_empty(1)


CASES = {
    "clear_empty_rows": Case(
        "clear_empty_rows",
        make_clear,
        lambda x, lse, lens, starts: clear(x, lse, lens, None),
        lambda x, lse, lens, starts: (x, lens, None, lse),
    ),
    "clear_empty_rows, ragged": Case(
        "clear_empty_rows", make_clear, clear, lambda x, lse, lens, starts: (x, lens, starts, None)
    ),
    "mla_decode": Case("mla_decode", make_decode, lambda *t: decode(*t), decode_arguments(None)),
    "mla_decode, splits": Case(
        "mla_decode", make_decode, lambda *t: decode(*t, num_kv_splits=2), decode_arguments(2)
    ),
    "quantize_fp8_per_tensor, int": Case(
        "quantize_fp8_per_tensor",
        make_quantize,
        lambda x, padding, count: quantize(x, live_rows=x.shape[0] - 1),
        lambda x, padding, count: quantize_arguments(x, None, None, 2),
    ),
    "quantize_fp8_per_tensor, count": Case(
        "quantize_fp8_per_tensor",
        make_quantize,
        lambda x, padding, count: quantize(x, live_rows=count),
        lambda x, padding, count: quantize_arguments(x, count, None, 2),
    ),
    "quantize_fp8_per_tensor, mask": Case(
        "quantize_fp8_per_tensor",
        make_quantize,
        lambda x, padding, count: quantize(x, is_padding=padding),
        lambda x, padding, count: quantize_arguments(x, None, padding, 2),
    ),
}
ONE_EACH = ["clear_empty_rows", "mla_decode, splits", "quantize_fp8_per_tensor, count"]


@pytest.fixture(name="case", params=CASES)
def case_fixture(request: pytest.FixtureRequest) -> Case:
    torch._dynamo.reset()
    return CASES[request.param]


def assert_same_bits(got: Tensors, want: Tensors) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        assert torch.equal(g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8))


def test_opcheck(case: Case, device: str) -> None:
    operator = getattr(torch.ops.staleproof, case.operator).default
    torch.library.opcheck(operator, case.arguments(*case.make(4, device)))


def test_schema_declares_its_writes_and_no_result(case: Case) -> None:
    schema = getattr(torch.ops.staleproof, case.operator).default._schema
    assert schema.returns == []
    assert any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", True)])
def test_compiles_once_for_all_sizes(case: Case, device: str, backend: str, dynamic: bool) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(case.call, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for rows in (4, 7, 12) if dynamic else (4, 4):
        tensors = case.make(rows, device)
        assert_same_bits(compiled(*tensors), case.call(*tensors))
        counts.append(counter.frame_count)
    # The first call may compile twice; no later one compiles again.
    assert counts[0] >= 1
    assert counts[0] == counts[-1]


@pytest.mark.parametrize("name", ONE_EACH)
def test_compiles_with_inductor(name: str, device: str) -> None:
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ for code on a CPU")
    torch._dynamo.reset()
    case = CASES[name]
    compiled = torch.compile(case.call, fullgraph=True, dynamic=True)
    for rows in (4, 7):
        tensors = case.make(rows, device)
        assert_same_bits(compiled(*tensors), case.call(*tensors))


def test_exports_with_a_dynamic_axis(case: Case, device: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Tensors:
            return case.call(*tensors)

    tensors = case.make(4, device)
    # 4 rows, and 5 row starts; the axes of a fixed size have another one.
    axes = tuple({0: torch.export.Dim.AUTO} if t.shape[0] in (4, 5) else None for t in tensors)
    program = torch.export.export(Module(), tensors, dynamic_shapes=(axes,))
    assert f"staleproof.{case.operator}" in str(program.graph)
    for module in (program.module(), program.run_decompositions().module()):
        for rows in (4, 9):
            tensors = case.make(rows, device)
            assert_same_bits(module(*tensors), case.call(*tensors))


def test_make_fx_records_the_operator(case: Case, device: str) -> None:
    tensors = case.make(4, device)
    traced = make_fx(case.call)(*tensors)
    assert f"staleproof.{case.operator}" in traced.code
    assert_same_bits(traced(*tensors), case.call(*tensors))


def test_fake_and_meta_tensors_have_the_shapes_of_real_ones(case: Case, device: str) -> None:
    want = case.call(*case.make(4, device))
    with FakeTensorMode() as mode:
        fake = case.call(*(mode.from_tensor(t) for t in case.make(4, "meta")))
        assert all(isinstance(t, FakeTensor) for t in fake)
    for results in (fake, case.call(*(t.to("meta") for t in case.make(4, device)))):
        assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.autocast])
def test_contexts_change_no_bit(case: Case, device: str, context: Any) -> None:
    want = case.call(*case.make(4, device))
    compiled = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    with context(device, dtype=torch.bfloat16) if context is torch.autocast else context():
        tensors = case.make(4, device)
        assert_same_bits(case.call(*tensors), want)
        assert_same_bits(compiled(*tensors), want)


# On a CPU the stand-in for a graph is a dispatch mode, and torch.compile stands back from those.
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_replays_in_a_captured_graph(case: Case, device: str, compiled: bool) -> None:
    call = torch.compile(case.call, backend="aot_eager", fullgraph=True) if compiled else case.call
    tensors = case.make(6, device)
    results: list[Tensors] = []
    captured = graph.capture(lambda: results.append(call(*tensors)), on=device)
    tensors[0].mul_(3.0)
    want = case.call(*tensors)
    captured.replay()
    assert_same_bits(results[-1], want)


def test_values_are_checked_only_where_they_can_be_read(device: str) -> None:
    torch._dynamo.reset()
    count = torch.tensor([2], dtype=torch.int32, device=device)

    def call(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return quantize_fp8_per_tensor(x * 2, live_rows=count, validate=True)[1]

    x = torch.ones(3, 4, device=device)
    with pytest.raises(ValueError, match="validate: expected False while torch traces the call, got True"):
        make_fx(call)(x, count)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="validate=True reads values on the host"):
        torch.compile(call, backend="eager", fullgraph=True)(x, count)
    compiled = torch.compile(call, backend="eager")
    assert_same_bits((compiled(x, count),), (call(x, count),))
    with pytest.raises(ValueError, match="live_rows: expected 0 to 3 rows, got 4"):
        compiled(x, count + 2)


def test_the_guard_is_taken_for_another_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda d: taken.append(d) or contextlib.nullcontext())
    for index in (0, 1):
        device = torch.device("cuda", index)
        on = SimpleNamespace(is_cuda=True, device=device, get_device=lambda i=index: i)
        with operators.on_device_of(on):  # type: ignore[arg-type]
            pass
    with operators.on_device_of(torch.ones(1)):
        pass
    assert taken == [torch.device("cuda", 1)]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_launch_is_guarded(
    device: str, case: Case, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if device != "cpu":
        pytest.skip("launches are watched through Triton's interpreter")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    guarded: list[bool] = []
    inside = False

    @contextlib.contextmanager
    def guard(x: torch.Tensor):
        nonlocal inside
        inside = True
        yield
        inside = False

    run = interpreter.InterpretedFunction.run

    def recorded(*args: Any, **kwargs: Any) -> Any:
        guarded.append(inside)
        return run(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", recorded)
    monkeypatch.setattr(operators, "on_device_of", guard)
    call = torch.compile(case.call, backend="eager", fullgraph=True) if compiled else case.call
    call(*case.make(4, "cpu"))
    assert guarded
    assert all(guarded)


@pytest.mark.gpu
def test_tensors_on_another_than_the_current_device(case: Case) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    want = case.call(*case.make(4, "cuda:0"))
    with torch.cuda.device(0):
        got = case.call(*case.make(4, "cuda:1"))
        compiled = torch.compile(case.call, backend="eager", fullgraph=True)(*case.make(4, "cuda:1"))
    assert all(t.device == torch.device("cuda", 1) for t in got)
    assert_same_bits(tuple(t.to("cuda:0") for t in got), want)
    assert_same_bits(compiled, got)


def test_importing_a_name_registers_its_operator_and_importing_star_all() -> None:
    program = """
import sys
import staleproof
assert "torch" not in sys.modules
from staleproof import clear_empty_rows
import torch
print(*dir(torch.ops.staleproof))
from staleproof.ops import *
from staleproof.ops.mla import *
print(*dir(torch.ops.staleproof))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    one, every = (set(line.split()) for line in done.stdout.splitlines())
    assert "clear_empty_rows" in one
    assert "mla_decode" not in one
    assert every >= {case.operator for case in CASES.values()}
