"""A launch of known kind: the same kernel, with the arguments of this call; other kinds are checked first."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleproof.ops import topk, topk_launch
from staleproof.ops.topk_launch import launch_again

STREAM = 99


@dataclass
class Tensor:
    """Stands for a tensor on a GPU: only its description is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    address: int = 4096
    device: int = 0
    strides: tuple[int, ...] | None = None
    is_cuda: bool = True

    def stride(self, axis: int | None = None) -> Any:
        strides = self.strides or (*self.shape[1:], 1)
        return strides if axis is None else strides[axis]

    def get_device(self) -> int:
        return self.device

    def data_ptr(self) -> int:
        return self.address


@dataclass
class Gpu:
    """What went through the checks, and what was launched without them."""

    checked: list[str] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    grids: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, x: int, y: int, z: int, stream: int, function: str, packed: str, *rest: Any) -> None:
        assert (stream, function, packed, rest[:3]) == (STREAM, "function", "packed", (None,) * 3)
        self.grids.append((x, y, z))
        self.runs.append(dict(zip(topk._topk_kernel.arg_names, rest[3:], strict=True)))


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch) -> Gpu:
    gpu = Gpu()
    kernel = SimpleNamespace(run=gpu.run, function="function", packed_metadata="packed")
    for name in ("topk_softmax", "topk_sigmoid", "grouped_topk"):
        monkeypatch.setattr(topk, name, lambda *a, name=name, **k: gpu.checked.append(name))
    monkeypatch.setattr(topk, "_launch", lambda *args: kernel)
    # Outside of the interpreter several rows go to one program.
    monkeypatch.setattr(topk, "INTERPRET", False)
    monkeypatch.setattr(topk_launch, "traced", lambda x: False)
    monkeypatch.setattr(topk_launch, "_launched", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    driver = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setattr(topk, "triton", SimpleNamespace(runtime=driver, next_power_of_2=lambda n: 256))
    return gpu


def call(rows: int = 130, name: str = "topk_sigmoid", **change: Any) -> None:
    tensors: dict[str, Any] = {
        "x": Tensor((rows, 256), torch.bfloat16, 16),
        "bias": Tensor((256,), address=32),
        "is_padding": None,
        "weights": Tensor((rows, 8), address=48),
        "ids": Tensor((rows, 8), torch.int32, 64),
    }
    options: dict[str, Any] = {"renormalize": True, "scaling": 2.5}
    for key, value in change.items():
        (tensors if key in tensors else options)[key] = value
    launch_again(name, *tensors.values(), **options)


def test_the_second_call_of_a_kind_is_launched_with_its_own_arguments(gpu):
    call(130)
    assert (gpu.checked, gpu.runs) == (["topk_sigmoid"], [])
    call(131, x=Tensor((131, 256), torch.bfloat16, 160))
    assert gpu.checked == ["topk_sigmoid"]
    given = {name: value for name, value in gpu.runs[0].items() if value is not None}
    assert given == {
        "logits": 160,
        "bias": 32,
        "weights": 48,
        "ids": 64,
        "row_stride": 256,
        "rows": 131,
        "experts": 256,
        "group_count": 1,
        "padding_id": -1,
        "scaling": 2.5,
    }
    assert gpu.grids == [(131, 1, 1)]


def test_programs_of_several_rows(gpu):
    # From 4,096 rows on each program routes two of 256 experts, and an odd one is rounded up.
    for rows in (5001, 5003):
        call(rows)
    assert gpu.grids == [(2502, 1, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 128},
        {"rows": 1},
        {"rows": 300},
        {"rows": 5001},
        {"x": Tensor((130, 256), torch.bfloat16, 24)},
        {"x": Tensor((130, 256), torch.float16, 16)},
        {"x": Tensor((130, 256), torch.bfloat16, 16, strides=(512, 1))},
        {"bias": Tensor((256,), address=36)},
        {"bias": None},
        {"is_padding": Tensor((130,), torch.bool, 80)},
        {"weights": Tensor((130, 8), address=56)},
        {"ids": Tensor((130, 8), torch.int64, 64)},
        {"renormalize": False},
        {"scaling": 1.0},
        {"name": "topk_softmax"},
        {"name": "grouped_topk", "groups": 8, "topk_group": 4},
    ],
)
def test_another_kind_is_checked_and_compiled_first(gpu, change):
    call()
    call(**change)
    assert (len(gpu.checked), gpu.runs) == (2, [])
    call(**change)
    assert (len(gpu.checked), len(gpu.runs)) == (2, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": Tensor((129, 8), address=48)},
        {"ids": Tensor((129, 8), torch.int32, 64)},
        {"bias": Tensor((128,), address=32)},
        {"x": Tensor((130, 256), torch.bfloat16, 16, device=1)},
        {"x": Tensor((130, 256), torch.bfloat16, 16, is_cuda=False)},
    ],
)
def test_what_does_not_fit_reaches_the_checks_each_time(gpu, change):
    call()
    for _ in range(2):
        call(**change)
    assert (len(gpu.checked), gpu.runs) == (3, [])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid", "grouped_topk"])
@pytest.mark.parametrize("rows", [1, 16, 100, 101, 600, 5001])
def test_a_launch_of_known_kind_gives_the_same_bits(name, rows):
    groups = {"groups": 8, "topk_group": 4} if name == "grouped_topk" else {}
    named = {"num_expert_group": 8, "topk_group": 4} if groups else {}
    for turn in range(3):
        torch.manual_seed(turn)
        x = torch.randn(rows + 32 * turn * (rows > 16), 256, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(256, device="cuda")
        bias[turn] = torch.nan
        weights = torch.full((len(x), 8), torch.nan, device="cuda")
        ids = torch.full((len(x), 8), -7, device="cuda", dtype=torch.int32)
        launch_again(name, x, bias, None, weights, ids, renormalize=True, scaling=2.5, **groups)
        wanted = getattr(topk, name)(x, 8, bias=bias, renormalize=True, routed_scaling_factor=2.5, **named)
        assert torch.equal(weights, wanted[0])
        assert torch.equal(ids, wanted[1])
