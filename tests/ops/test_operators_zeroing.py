"""BlockZeroer under torch's tracers: its caches are changed in place, however the step runs."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from staleproof import graph
from staleproof.ops import zero_blocks as zeroing
from staleproof.ops.zero_blocks import BlockZeroer

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


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
    if backend == "inductor" and device == "cpu" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++ for code on a CPU")
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


@pytest.mark.gpu
def test_caches_on_another_than_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    step = Zeroing("cuda:1")
    for ids in ([2, 4], torch.tensor([2, 4], device="cuda:1")):
        step.check(step(ids), [2, 4])  # type: ignore[arg-type]
