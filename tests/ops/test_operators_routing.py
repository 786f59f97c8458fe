"""Routing, quantising and zeroing under torch's tracers: the bits of the plain call, however it runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from staleproof.cases import graph
from staleproof.ops import operators
from staleproof.ops import zero_blocks as zeroing
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from staleproof.ops.reference import nvfp4
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax
from staleproof.ops.zero_blocks import BlockZeroer

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

import warm

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A call of a public function between other operations, its inputs, and its operator's arguments."""

    make: Callable[[int, str], Tensors]
    call: Callable[..., Tensors]
    arguments: Callable[..., tuple[Any, ...]] | None = None


def randn(rows: int, columns: int, device: str) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(device)


def logits(rows: int, device: str) -> Tensors:
    is_padding = torch.arange(rows, device=device) % 3 == 1
    return randn(rows, 16, device), randn(1, 16, device)[0], is_padding


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
    return randn(rows, 6, device), torch.arange(6 * rows, device=device).view(rows, 6) % 4


def quantised(x: torch.Tensor, scale: torch.Tensor, **options: Any) -> Tensors:
    packed, scales = quantize_nvfp4(x * 2, scale, **options)
    return packed + 1, scales.view(torch.uint8)


def quantising(x: torch.Tensor, scale: torch.Tensor) -> tuple[Any, ...]:
    packed = torch.empty(len(x), 24, dtype=torch.uint8, device=x.device)
    # As bytes: torch's check of schemas cannot compare FP8.
    return x, scale, packed, packed.new_empty(nvfp4.scale_shape(len(x), 48)), True, True


GROUPS = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CASES = {
    "topk_softmax": Case(logits, routed(topk_softmax), routing()),
    "topk_sigmoid": Case(logits, routed(topk_sigmoid, renormalize=True), routing()),
    "grouped_topk": Case(logits, routed(grouped_topk, **GROUPS), routing(4, 2)),
    "distinct_experts": Case(
        repeated,
        lambda w, i: distinct_experts(w.abs(), i),
        lambda w, i: (w, i, torch.empty_like(w), torch.empty_like(i)),
    ),
    "quantize_nvfp4": Case(
        lambda rows, device: (randn(rows, 48, device), torch.tensor(3.0, device=device)),
        quantised,
        quantising,
    ),
    "quantize_nvfp4, rows of scales, a number, bfloat16": Case(
        lambda rows, device: (randn(rows, 48, device).bfloat16(),),
        lambda x: quantised(x, 3.0, swizzled=False),  # type: ignore[arg-type]
    ),
    # Plain PyTorch, without an operator.
    "dequantize_nvfp4": Case(
        lambda rows, device: nvfp4.quantize_nvfp4(randn(rows, 48, device), 2.0),
        lambda packed, scales: (dequantize_nvfp4(packed, scales, 2.0) + 1,),
    ),
}
OPERATORS = [name for name, case in CASES.items() if case.arguments]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(name="case", params=CASES)
def case_fixture(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def _require_compiler(device: str) -> None:
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ for code on a CPU")


def assert_same(got: Tensors, want: Tensors) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, device: str) -> None:
    arguments = CASES[name].arguments
    assert arguments is not None
    operator = getattr(torch.ops.staleproof, name).default
    assert operator._schema.returns == []
    torch.library.opcheck(operator, arguments(*CASES[name].make(5, device)))


def assert_compiles(case: Case, device: str, backend: str, dynamic: bool) -> None:
    compiled = torch.compile(case.call, backend=backend, fullgraph=True, dynamic=dynamic)
    # 5 is the size of no other axis.
    for rows in (5, 7, 12) if dynamic else (5,):
        tensors = case.make(rows, device)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_same(compiled(*tensors), case.call(*tensors))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph(case: Case, device: str, backend: str, dynamic: bool) -> None:
    assert_compiles(case, device, backend, dynamic)


@pytest.mark.parametrize("name", OPERATORS)
def test_compiles_with_inductor(name: str, device: str) -> None:
    _require_compiler(device)
    assert_compiles(CASES[name], device, "inductor", dynamic=True)


def test_exports_with_any_number_of_rows(case: Case, device: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Tensors:
            return case.call(*tensors)

    tensors = case.make(4, device)
    rows = tuple({0: torch.export.Dim.AUTO} if t.ndim and len(t) == 4 else None for t in tensors)
    program = torch.export.export(Module(), tensors, dynamic_shapes=(rows,))
    assert ("staleproof." in str(program.graph)) is (case.call is not CASES["dequantize_nvfp4"].call)
    for module in (program.module(), program.run_decompositions().module()):
        for count in (4, 9):
            tensors = case.make(count, device)
            assert_same(module(*tensors), case.call(*tensors))


def test_fake_and_meta_tensors_have_the_shapes_of_real_ones(case: Case, device: str) -> None:
    tensors = case.make(4, device)
    want = case.call(*tensors)
    with FakeTensorMode() as mode:
        fake = case.call(*(mode.from_tensor(t) for t in tensors))
    assert all(isinstance(t, FakeTensor) for t in fake)
    for results in (fake, case.call(*(t.to("meta") for t in tensors))):
        assert [(t.shape, t.dtype) for t in results] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.autocast])
def test_contexts_change_no_bit(case: Case, device: str, context: Any) -> None:
    want = case.call(*case.make(4, device))
    compiled = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    with context(device, dtype=torch.bfloat16) if context is torch.autocast else context():
        tensors = case.make(4, device)
        assert_same(case.call(*tensors), want)
        assert_same(compiled(*tensors), want)


# On a CPU the stand-in for a graph is a dispatch mode, and torch.compile does nothing inside one.
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_replays_in_a_captured_graph(case: Case, device: str, compiled: bool) -> None:
    call = torch.compile(case.call, fullgraph=True) if compiled else case.call
    tensors = case.make(6, device)
    results: list[Tensors] = []
    captured = graph.capture(lambda: results.append(call(*tensors)), on=device)
    for tensor, other in zip(tensors, case.make(6, device), strict=True):
        tensor.copy_(other.flip(0) if tensor.ndim else other)
    want = case.call(*tensors)
    captured.replay()
    assert_same(results[-1], want)


class Zeroing:
    """Two caches of other axes and dtypes, and a step that reads them around the zeroing."""

    def __init__(self, device: str) -> None:
        self.caches = [torch.ones(8, 5, device=device), torch.ones(2, 8, 3, device=device).bfloat16()]
        self.zeroer = BlockZeroer(self.caches, block_dim=[0, 1])

    def __call__(self, ids: torch.Tensor) -> Tensors:
        before = self.caches[0].sum(1)
        self.zeroer.zero(ids)
        return before, self.caches[0][:, 0] + 1

    def check(self, got: Tensors, blocks: list[int]) -> None:
        zeroed = [float(block not in blocks) for block in range(8)]
        assert got[0].tolist() == [5.0] * 8
        assert (got[1] - 1).tolist() == zeroed
        assert self.caches[1][:, :, 2].tolist() == [zeroed] * 2
        for cache in self.caches:
            cache.fill_(1)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("eager", torch.int32), ("aot_eager", torch.int64), ("inductor", torch.int64)]
)
def test_zeroing_compiles_as_one_graph(
    device: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor":
        _require_compiler(device)
    step, plan = Zeroing(device), zeroing._plan
    addresses = []
    monkeypatch.setattr(zeroing, "_plan", lambda caches, *a: addresses.append(caches) or plan(caches, *a))
    compiled = torch.compile(step.__call__, backend=backend, fullgraph=True, dynamic=True)
    # As in a captured graph, ids that name no block are skipped.
    for ids in ([3, 5], [7, 0, 0, 8, -1], [1, 1, 2]):
        there = torch.tensor(ids, dtype=dtype, device=device)
        step.check(compiled(there), [i for i in ids if 0 < i < 8])
    # aot_eager passes copies of the caches and copies them back; inductor must not.
    in_place = [[c.address for c in caches] == [c.data_ptr() for c in step.caches] for caches in addresses]
    assert in_place == [backend != "aot_eager"] * 3


def test_the_operator_of_zeroing_takes_the_caches(device: str) -> None:
    def call(ids: torch.Tensor, *caches: torch.Tensor) -> Tensors:
        torch.ops.staleproof.zero_blocks(ids, list(caches), [0, 1], [1, 2])
        return tuple(cache + 1 for cache in caches)

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Tensors:
            return call(*tensors)

    ids, step = torch.tensor([1, 3], device=device), Zeroing(device)

    def make() -> Tensors:
        return torch.ones(4, 5, device=device), torch.ones(2, 8, 3, device=device)

    torch.library.opcheck(torch.ops.staleproof.zero_blocks.default, (ids, list(make()), [0, 1], [1, 2]), {})
    program = torch.export.export(Module(), (ids, *make()))
    for got in (call(ids, *make()), program.module()(ids, *make())):
        assert got[0][:, 0].tolist() == [2, 1, 2, 1]
        assert got[1][1, :, 0].tolist() == [2, 2, 1, 1, 2, 2, 1, 1]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        step.zeroer.zero(mode.from_tensor(ids))
    assert bool(step.caches[0].eq(1).all())


def test_zeroing_with_ids_on_the_host_is_refused_in_one_graph_and_breaks_it_otherwise(device: str) -> None:
    step = Zeroing(device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="block_ids on the host"):
        torch.compile(step.__call__, backend="eager", fullgraph=True)([3])
    compiled = torch.compile(step.__call__, backend="eager")
    for ids in ([3, 5], [1], torch.tensor([6])):
        step.check(compiled(ids), [*map(int, ids)])
    with pytest.raises(ValueError, match="block_ids: expected 1 to 7, got 8"):
        compiled([8])


def test_tracing_needs_the_tensors_that_were_given(device: str) -> None:
    raw = torch.ones(8, 4, device=device)
    zeroer = BlockZeroer([raw[:, :]])
    ids = torch.tensor([1], device=device)
    zeroer.zero(ids)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        pytest.raises(
            ValueError, match=r"kv_caches\[0\]: expected a live tensor while torch traces, got none"
        ),
    ):
        zeroer.zero(mode.from_tensor(ids))


@pytest.mark.gpu
def test_compiled_zeroing_in_a_cuda_graph() -> None:
    step = Zeroing("cuda")
    compiled = torch.compile(step.zeroer.zero, fullgraph=True)
    ids = torch.tensor([1, 0, 0], device="cuda")
    captured = graph.capture(lambda: compiled(ids), on="cuda")
    for blocks in ([2, 4, 0], [7, 7, 7]):
        for cache in step.caches:
            cache.fill_(1)
        ids.copy_(torch.tensor(blocks))
        captured.replay()
        step.check((torch.full((8,), 5.0), step.caches[0][:, 0] + 1), [b for b in blocks if b])


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
    for module in (operators, zeroing):
        monkeypatch.setattr(module, "on_device_of", guard)
    return seen


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_launch_is_guarded(name: str, compiled: bool, launches: list[bool]) -> None:
    call = CASES[name].call
    call = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    call(*CASES[name].make(4, "cpu"))
    assert launches == [True]


def test_every_launch_of_a_zeroer_is_guarded(launches: list[bool]) -> None:
    step = Zeroing("cpu")
    for ids in ([1, 2], torch.tensor([3])):
        step.zeroer.zero(ids)
    torch.compile(step.__call__, backend="eager", fullgraph=True)(torch.tensor([4]))
    assert launches == [True] * 3


@pytest.mark.gpu
def test_tensors_on_another_than_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for case in CASES.values():
        want, got = (case.call(*case.make(4, f"cuda:{index}")) for index in (0, 1))
        assert_same(tuple(t.to("cuda:0") for t in got), want)
    step = Zeroing("cuda:1")
    for ids in ([2, 4], torch.tensor([2, 4], device="cuda:1")):
        step.check(step(ids), [2, 4])  # type: ignore[arg-type]


def test_an_operation_loads_no_other_room() -> None:
    program = (
        "import sys\nfrom staleproof.ops import distinct_experts, nvfp4, topk, zero_blocks\n"
        "print(*(name for name in sys.modules if name.startswith('staleproof.')))"
    )
    done = warm.run("-c", program, env=os.environ, timeout=300, vllm=False)
    assert done.returncode == 0, done.stderr
    rooms = {name.split(".")[1] for name in done.stdout.split()}
    # Where kernels are interpreted, device loads what quickens that.
    assert rooms - {"interpreter"} == {"ops", "check", "device", "_kernels_loaded"}
