"""The hooks and the probe of incident 5's patch; the fused kernel's padding in a made-up result."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from staleproof.ops.reference.nvfp4 import padding_offsets, scale_shape
from staleproof.vllm.patches import scale_padding as patch

DIRTY = 0x7F


@dataclass
class QuantizedActivation:
    """What the patch reads of vLLM's."""

    data: torch.Tensor
    scale: torch.Tensor
    orig_shape: tuple[int, ...]


def _activation(rows: int, width: int) -> QuantizedActivation:
    """What vLLM's fused SiLU and quantisation returns; every scale is 0x7F, padding included."""
    scale = torch.full(scale_shape(rows, width), DIRTY, dtype=torch.uint8).view(torch.float8_e4m3fn)
    data = torch.zeros(rows, width // 2, dtype=torch.uint8)
    return QuantizedActivation(data, scale, (rows, width))


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 16), (32, 80), (33, 64), (127, 192), (128, 80), (130, 16), (256, 192)]
)
def test_padding_is_cleared_and_nothing_else(rows, width, monkeypatch):
    given = _activation(rows, width)
    with monkeypatch.context() as patched:
        # Each tensor made on the way is a launch.
        patched.setattr(torch, "arange", None)
        assert patch._clear_padding(given, (), {}) is given
    expected = torch.full_like(given.scale.view(torch.uint8).flatten(), DIRTY)
    expected[padding_offsets(rows, width)] = 0
    assert given.scale.view(torch.uint8).flatten().equal(expected)


def test_leading_dimensions_count_as_rows():
    given = _activation(6, 64)
    given.orig_shape = (2, 3, 64)
    patch._clear_padding(given, (), {})
    assert int(given.scale.view(torch.uint8).count_nonzero()) == 6 * 4


def test_it_can_be_traced():
    def call(data, scale):
        given = QuantizedActivation(data, scale, (data.shape[0], data.shape[1] * 2))
        return patch._clear_padding(given, (), {}).scale

    traced = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for rows in (5, 130, 64, 128, 160):
        given, other = _activation(rows, 80), _activation(rows, 80)
        scales = traced(given.data, given.scale)
        expected = call(other.data, other.scale)
        assert scales.view(torch.uint8).equal(expected.view(torch.uint8))


def _made(rows: int, width: int, swizzled: bool = True) -> torch.Tensor | None:
    """What the patch allocates in a traced call; None: vLLM's own memory."""

    def call(x):
        made = patch._zeroed((x.shape[0], width, x.device, swizzled), {})
        return torch.empty(0) if made is NotImplemented else made

    made = torch.compile(call, fullgraph=True, backend="eager")(torch.ones(rows, 1))
    return made if made.numel() else None


def test_a_traced_call_gets_zeros_where_scales_are_padded():
    torch._dynamo.reset()
    for rows, width, shape in ((128, 80, (128, 2)), (100, 7168, (128, 112)), (128, 7168, (128, 112))):
        made = _made(rows, width)
        assert made.shape == shape
        assert made.dtype == torch.int32
        assert not made.count_nonzero()
    assert _made(100, 7168, swizzled=False) is None


def test_outside_of_a_graph_memory_stays_vllms():
    device = torch.device("cpu")
    for rows, width, swizzled in ((128, 7168, True), (128, 80, True), (100, 7168, True), (100, 7168, False)):
        assert patch._zeroed((rows, width, device, swizzled), {}) is NotImplemented
    with FakeTensorMode():
        assert patch._zeroed((100, 7168, device, True), {}).shape == (128, 112)


def test_a_trace_of_whole_tiles_serves_other_sizes():
    def call(x):
        made = patch._zeroed((x.shape[0], 64, x.device, True), {})
        return torch.ones(1) if made is NotImplemented else made

    traced = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for rows in (128, 130):
        assert traced(torch.ones(rows, 2)).shape == (-(-rows // 128) * 128, 1)


def test_other_results_pass():
    plain = torch.ones(3, 4)
    assert patch._clear_padding(plain, (), {}) is plain
    fp8 = QuantizedActivation(torch.ones(3, 4, dtype=torch.float8_e4m3fn), torch.ones(3), (3, 4))
    assert patch._clear_padding(fp8, (), {}) is fp8
    # A plain activation of bytes has a ``data`` as well.
    plain = torch.ones(3, 4, dtype=torch.uint8)
    assert patch._clear_padding(plain, (), {}) is plain
