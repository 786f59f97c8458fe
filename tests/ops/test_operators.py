"""Every operation under torch's tracers, and on whose device it launches.

A case makes the tensors of some number of rows, and a function that calls the operation between
other operations. However torch runs that function, the result has the bits of the plain call.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import warm
from tests.bits import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from staleproof import graph
from staleproof.ops import operators, zero_kernel
from staleproof.ops import zero_blocks as zeroing
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from staleproof.ops.reference import nvfp4
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax
from staleproof.ops.zero_blocks import BlockZeroer

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A call of a public function between other operations.

    ``arguments`` are those of its operator, from the tensors; without them the case is another call of an
    operator that is asked already.
    """

    operator: str
    make: Callable[[int, str], Tensors]
    call: Callable[..., Tensors]
    arguments: Callable[..., tuple[Any, ...]] | None = None


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


def fp8_case(live: Callable[..., dict[str, Any]], given: Callable[..., tuple[Any, ...]]) -> Case:
    """Of the keywords of the function, and the two masks of the operator."""

    def call(x: torch.Tensor, *masks: torch.Tensor) -> Tensors:
        x_fp8, scale = quantize_fp8_per_tensor(x * 2, **live(x, *masks))
        return x_fp8.view(torch.uint8), scale * 2

    def arguments(x: torch.Tensor, *masks: torch.Tensor) -> tuple[Any, ...]:
        # The operator writes bytes; torch's check of schemas cannot compare FP8.
        return x, *given(*masks), 2, torch.empty_like(x, dtype=torch.uint8), x.new_empty(1)

    return Case("quantize_fp8_per_tensor", make_quantize, call, arguments)


def logits(rows: int, device: str) -> Tensors:
    is_padding = torch.arange(rows, device=device) % 3 == 1
    return randn(rows, 16, device=device), randn(16, device=device), is_padding


def routed(function: Callable[..., Tensors], **options: Any) -> Callable[..., Tensors]:
    def call(x: torch.Tensor, bias: torch.Tensor, is_padding: torch.Tensor) -> Tensors:
        weights, ids = function(x * 2, 3, bias=bias, is_padding=is_padding, **options)
        return weights + 1, ids

    return call


def routing(*more: Any) -> Callable[..., tuple[Any, ...]]:
    def arguments(x: torch.Tensor, *others: torch.Tensor) -> tuple[Any, ...]:
        ids = torch.empty(len(x), 3, dtype=torch.int32, device=x.device)
        return x, *others, x.new_empty(len(x), 3), ids, True, 1.5, -1, *more

    return arguments


def repeated(rows: int, device: str) -> Tensors:
    return randn(rows, 6, device=device), torch.arange(6 * rows, device=device).view(rows, 6) % 4


def quantised(x: torch.Tensor, scale: torch.Tensor, **options: Any) -> Tensors:
    packed, scales = quantize_nvfp4(x * 2, scale, **options)
    return packed + 1, scales.view(torch.uint8)


def quantising(x: torch.Tensor, scale: torch.Tensor) -> tuple[Any, ...]:
    packed = torch.empty(len(x), 24, dtype=torch.uint8, device=x.device)
    # As bytes: torch's check of schemas cannot compare FP8.
    return x, scale, packed, packed.new_empty(nvfp4.scale_shape(len(x), 48)), True, True


GROUPS = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
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
    "quantize_fp8_per_tensor, int": fp8_case(
        lambda x, padding, count: {"live_rows": x.shape[0] - 1}, lambda padding, count: (None, None)
    ),
    "quantize_fp8_per_tensor, count": fp8_case(
        lambda x, padding, count: {"live_rows": count}, lambda padding, count: (count, None)
    ),
    "quantize_fp8_per_tensor, mask": fp8_case(
        lambda x, padding, count: {"is_padding": padding}, lambda padding, count: (None, padding)
    ),
    "topk_softmax": Case("topk_softmax", logits, routed(topk_softmax), routing()),
    "topk_sigmoid": Case("topk_sigmoid", logits, routed(topk_sigmoid, renormalize=True), routing()),
    "grouped_topk": Case("grouped_topk", logits, routed(grouped_topk, **GROUPS), routing(4, 2)),
    "distinct_experts": Case(
        "distinct_experts",
        repeated,
        lambda w, i: distinct_experts(w.abs(), i),
        lambda w, i: (w, i, torch.empty_like(w), torch.empty_like(i)),
    ),
    "quantize_nvfp4": Case(
        "quantize_nvfp4",
        lambda rows, device: (randn(rows, 48, device=device), torch.tensor(3.0, device=device)),
        quantised,
        quantising,
    ),
    "quantize_nvfp4, rows of scales, a number, bfloat16": Case(
        "quantize_nvfp4",
        lambda rows, device: (randn(rows, 48, device=device).bfloat16(),),
        lambda x: quantised(x, 3.0, swizzled=False),  # type: ignore[arg-type]
    ),
    # Plain PyTorch, without an operator.
    "dequantize_nvfp4": Case(
        "",
        lambda rows, device: nvfp4.quantize_nvfp4(randn(rows, 48, device=device), 2.0),
        lambda packed, scales: (dequantize_nvfp4(packed, scales, 2.0) + 1,),
    ),
}
ASKED = [name for name, case in CASES.items() if case.arguments]
# The last case of each operator, where every case would take long.
EACH = list({case.operator: name for name, case in CASES.items() if case.arguments}.values())


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_an_operator_declares_its_writes_and_no_result(device: str) -> None:
    for name in ASKED:
        operator = getattr(torch.ops.staleproof, CASES[name].operator).default
        assert operator._schema.returns == []
        assert any(a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments)
        assert torch.Tag.pt2_compliant_tag in operator.tags
        torch.library.opcheck(operator, CASES[name].arguments(*CASES[name].make(4, device)))


COMPILED = [
    *((name, "aot_eager", True) for name in (*EACH, "dequantize_nvfp4")),
    ("mla_decode", "eager", False),
    *((name, "inductor", True) for name in ("clear_empty_rows", "mla_decode, splits", "topk_softmax")),
]


@pytest.mark.parametrize(("name", "backend", "dynamic"), COMPILED)
def test_compiles_once_for_all_sizes(name: str, device: str, backend: str, dynamic: bool) -> None:
    if backend == "inductor" and device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ for code on a CPU")
    case = CASES[name]
    compiled = torch.compile(case.call, backend=backend, fullgraph=True, dynamic=dynamic)
    # 5 is the size of no other axis.
    for rows in (5, 7, 12) if dynamic else (5, 5):
        tensors = case.make(rows, device)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same_bits(compiled(*tensors), case.call(*tensors))


@pytest.mark.parametrize("name", [*EACH, "dequantize_nvfp4"])
def test_exports_with_any_number_of_rows(name: str, device: str) -> None:
    case = CASES[name]

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Tensors:
            return case.call(*tensors)

    tensors = case.make(4, device)
    # 4 rows, and 5 row starts; the axes of a fixed size have another one.
    rows = tuple({0: torch.export.Dim.AUTO} if t.ndim and len(t) in (4, 5) else None for t in tensors)
    program = torch.export.export(Module(), tensors, dynamic_shapes=(rows,))
    assert (f"staleproof.{case.operator}" in str(program.graph)) is bool(case.operator)
    # What is plain PyTorch torch itself decomposes.
    for of in (program, program.run_decompositions()) if case.operator else (program,):
        module = of.module()
        for count in (4, 9):
            tensors = case.make(count, device)
            assert_same_bits(module(*tensors), case.call(*tensors))


X = [name for name in EACH if name != "quantize_nvfp4"]


def test_make_fx_records_the_operator(device: str) -> None:
    for name in X:
        case = CASES[name]
        tensors = case.make(4, device)
        traced = make_fx(case.call)(*tensors)
        assert f"staleproof.{case.operator}" in traced.code
        assert_same_bits(traced(*tensors), case.call(*tensors))


def test_fake_and_meta_tensors_have_the_shapes_of_real_ones(device: str) -> None:
    for name, case in CASES.items():
        tensors = case.make(4, device)
        want = case.call(*tensors)
        with FakeTensorMode() as mode:
            fake = case.call(*(mode.from_tensor(t) for t in tensors))
        assert all(isinstance(t, FakeTensor) for t in fake), name
        for results in (fake, case.call(*(t.to("meta") for t in tensors))):
            assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in want], name


CONTEXTS = {
    "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "no_grad": lambda device: torch.no_grad(),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_change_no_bit(device: str, context: str) -> None:
    for case in CASES.values():
        want = case.call(*case.make(4, device))
        with CONTEXTS[context](device):
            assert_same_bits(case.call(*case.make(4, device)), want)


@pytest.mark.parametrize(
    ("name", "context"), [("mla_decode", "autocast"), ("topk_softmax", "inference_mode")]
)
def test_contexts_change_no_bit_of_compiled_code(name: str, device: str, context: str) -> None:
    case = CASES[name]
    want = case.call(*case.make(4, device))
    with CONTEXTS[context](device):
        compiled = torch.compile(case.call, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(*case.make(4, device)), want)


# On a CPU the stand-in for a graph is a dispatch mode, and torch.compile stands back from those.
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in (*EACH, "dequantize_nvfp4")),
        *(pytest.param(name, True, marks=pytest.mark.gpu) for name in ("mla_decode", "topk_softmax")),
    ],
)
def test_replays_in_a_captured_graph(name: str, device: str, compiled: bool) -> None:
    case = CASES[name]
    call = torch.compile(case.call, fullgraph=True) if compiled else case.call
    tensors = case.make(6, device)
    results: list[Tensors] = []
    captured = graph.capture(lambda: results.append(call(*tensors)), on=device)
    first = tensors[0].clone()
    tensors[0].copy_(first.flip(0) if first.ndim else first * 3)
    want = case.call(*tensors)
    captured.replay()
    assert_same_bits(results[-1], want)


def test_values_are_checked_only_where_they_can_be_read(device: str) -> None:
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


def test_a_mode_that_only_watches_sees_plain_launches(device: str) -> None:
    """As a profiler does."""
    case = CASES["mla_decode"]
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.namespace)
            return function(*args, **kwargs or {})

    tensors = case.make(4, device)
    want = case.call(*tensors)
    with Watch():
        got = case.call(*tensors)
    assert_same_bits(got, want)
    assert "aten" in seen
    assert "staleproof" not in seen


@pytest.fixture(name="launches")
def launches_fixture(device: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch so far was made under the guard of the device of its tensors."""
    if device != "cpu":
        pytest.skip("counts the launches of Triton's interpreter")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    seen: list[bool] = []
    inside = False

    @contextlib.contextmanager
    def guard(x: torch.Tensor) -> Iterator[None]:
        nonlocal inside
        inside = isinstance(x, torch.Tensor)
        yield
        inside = False

    run = interpreter.InterpretedFunction.run

    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(inside)
        return run(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", recorded)
    for module in (operators, zeroing, zero_kernel):
        monkeypatch.setattr(module, "on_device_of", guard)
    return seen


def test_every_launch_is_guarded(launches: list[bool]) -> None:
    for name in ASKED:
        launches.clear()
        call = CASES[name].call
        call(*CASES[name].make(4, "cpu"))
        assert launches, name
        if name in EACH:
            torch.compile(call, backend="eager", fullgraph=True)(*CASES[name].make(4, "cpu"))
        assert all(launches), name


def test_every_launch_of_a_zeroer_is_guarded(launches: list[bool]) -> None:
    caches = [torch.ones(8, 5)]
    zeroer = BlockZeroer(caches)
    for ids in ([1, 2], torch.tensor([3])):
        zeroer.zero(ids)
    torch.compile(zeroer.zero, backend="eager", fullgraph=True)(torch.tensor([4]))
    assert launches == [True] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", EACH)
def test_tensors_on_another_than_the_current_device(name: str) -> None:
    case = CASES[name]
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    want = case.call(*case.make(4, "cuda:0"))
    with torch.cuda.device(0):
        got = case.call(*case.make(4, "cuda:1"))
        compiled = torch.compile(case.call, backend="eager", fullgraph=True)(*case.make(4, "cuda:1"))
    assert_same_bits(tuple(t.to("cuda:0") for t in got), want)
    assert_same_bits(compiled, got)


def test_importing_a_name_registers_its_operator_alone_and_loads_no_other_room() -> None:
    program = """
import sys
from staleproof import clear_empty_rows
import torch
print(*dir(torch.ops.staleproof))
from staleproof.ops import *
from staleproof.ops.mla import *
print(*dir(torch.ops.staleproof))
from staleproof.ops import distinct_experts, nvfp4, topk, zero_blocks
print(*(name for name in sys.modules if name.startswith("staleproof.")))
"""
    done = warm.run("-c", program, env=os.environ, timeout=300, vllm=False)
    assert done.returncode == 0, done.stderr
    one, every, modules = (line.split() for line in done.stdout.splitlines())
    assert "clear_empty_rows" in one
    assert "mla_decode" not in one
    assert {*every} >= {case.operator for case in CASES.values() if case.operator}
    rooms = {name.split(".")[1] for name in modules}
    # Where kernels are interpreted, device loads what quickens that.
    assert rooms - {"interpreter"} == {"ops", "check", "device", "_kernels_loaded"}
