"""The quantiser bit for bit beside its reference, with every byte of its outputs dirty before."""

from __future__ import annotations

import pytest
import torch
from tests.bits import assert_same_bits

from staleproof import dequantize_nvfp4, graph, quantize_nvfp4
from staleproof.ops import nvfp4 as kernels
from staleproof.ops.reference import nvfp4 as reference

# Odd counts of rows, counts around a tile, and columns with and without padding.
ROWS = (1, 3, 31, 128, 129, 200)
COLUMNS = (16, 48, 64, 80, 208)


def poisoned(x: torch.Tensor, swizzled: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = x.shape
    shape = reference.scale_shape(m, n, swizzled=swizzled)
    packed = torch.full((m, n // 2), 0xA5, dtype=torch.uint8, device=x.device)
    scales = torch.full(shape, 0x7F, dtype=torch.uint8, device=x.device)
    return packed, scales.view(torch.float8_e4m3fn)


def difficult(m: int, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m * 1000 + n)
    x = torch.randn(m, n, generator=generator)
    x *= torch.randn(m, 1, generator=generator).mul(3).exp()
    x[0] = 0
    x[-1, 0], x[-1, -1] = torch.inf, -torch.inf
    x[m // 2, n // 2] = torch.nan
    return x.to(device, dtype)


@pytest.mark.parametrize("m", ROWS)
def test_every_small_shape_is_the_reference_bit_for_bit(device, m):
    for n in COLUMNS:
        dtype = reference.DTYPES[(m + n) % 3]
        x = difficult(m, n, dtype, device)
        for swizzled in (True, False):
            out = poisoned(x, swizzled)
            got = quantize_nvfp4(x, 96.0, swizzled=swizzled, out=out)
            assert_same_bits(got, reference.quantize_nvfp4(x, 96.0, swizzled=swizzled))
            assert got is out or got[0] is out[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_rounded_as_the_reference_does(device, dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    # In order of magnitude, so that blocks hold neighbours and their scales all occur.
    bits = bits[(bits.int() & 0x7FFF).sort(stable=True).indices]
    x = bits.view(dtype).view(64, 1024).to(device)
    for factor in (1.0, 2.0**-90, 3e20):
        got = quantize_nvfp4(x, factor, out=poisoned(x))
        assert_same_bits(got, reference.quantize_nvfp4(x, factor))


@pytest.mark.parametrize(("m", "n"), [(1, 16), (5, 80), (130, 64)])
def test_no_byte_of_the_scales_is_left_as_it_was(device, m, n):
    x = torch.randn(m, n, device=device)
    padding = reference.padding_offsets(m, n).to(device)
    for byte in (0x00, 0x55, 0x7F):
        out = poisoned(x)
        out[1].view(torch.uint8).fill_(byte)
        scales = quantize_nvfp4(x, 8.0, out=out)[1].view(torch.uint8).flatten()
        assert not scales[padding].any()
        # The same without its padding: the test can see the difference.
        out[1].view(torch.uint8).fill_(byte)
        kernels._launch(x, torch.full((1,), 8.0, device=device), *out, True, False)
        left = out[1].view(torch.uint8).flatten()[padding]
        assert bool((left == byte).all())


def test_a_nan_stays_in_its_block_and_stays_visible(device):
    x = torch.ones(4, 64, device=device)
    x[1, 20] = torch.nan
    kept = dequantize_nvfp4(*quantize_nvfp4(x, 1.0), 1.0)
    bad = kept.isnan().view(4, 4, 16)
    assert bad.any(-1).nonzero().tolist() == [[1, 1]]
    assert bool(bad[1, 1].all())


def test_a_number_and_a_tensor_of_it_give_the_same_bits(device):
    x = torch.randn(9, 48, device=device)
    for shape in ((), (1,)):
        tensor = torch.full(shape, 12.5, device=device)
        got = quantize_nvfp4(x, tensor, validate=True)
        assert_same_bits(quantize_nvfp4(x, 12.5), got)
        assert torch.equal(dequantize_nvfp4(*got, tensor), dequantize_nvfp4(*got, 12.5))


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_rows_may_begin_at_any_element(device, dtype):
    # Rows an odd and an even number of elements apart.
    for width in (67, 68, 69):
        wide = torch.randn(5, width, device=device).to(dtype)
        for first in (0, 1, 2, 3):
            x = wide[:, first : first + 64]
            assert_same_bits(quantize_nvfp4(x, 1.0), reference.quantize_nvfp4(x, 1.0))


def test_bad_arguments_are_named_and_nothing_is_written(device):
    x = torch.ones(3, 32, device=device)
    out = poisoned(x)
    wrong = (
        (lambda: quantize_nvfp4(x[:0], 1.0), "x: expected at least one row, got 0"),
        (lambda: quantize_nvfp4(x[:, :31], 1.0), "x: expected a positive multiple of 16 columns"),
        (lambda: quantize_nvfp4(x[:, :24], 1.0), "x: expected a positive multiple of 16 columns"),
        (lambda: quantize_nvfp4(x[0], 1.0), "x: expected a tensor of rank 2"),
        (lambda: quantize_nvfp4(x.double(), 1.0), "x: expected torch.bfloat16"),
        (lambda: quantize_nvfp4(x.repeat(1, 2)[:, ::2], 1.0), "x: expected a contiguous last axis"),
        (lambda: quantize_nvfp4(x, -1.0, out=out), "global_scale: expected a positive"),
        (lambda: quantize_nvfp4(x, torch.nan, out=out), "global_scale: expected a positive"),
        (lambda: quantize_nvfp4(x, x[0], out=out), r"global_scale: expected shape \(\) or \(1,\)"),
        (lambda: quantize_nvfp4(x, 0 * x[0, 0], out=out, validate=True), "global_scale: .* got 0.0"),
        (lambda: quantize_nvfp4(x, x[0, 0] / 0, out=out, validate=True), "global_scale: .* got inf"),
        (lambda: quantize_nvfp4(x, 1.0, out=out[0]), r"out: expected \(packed, scales\)"),
        (
            lambda: quantize_nvfp4(x, 1.0, swizzled=False, out=out),
            r"out\[1\]: expected shape \(3, 2\), got shape \(128, 4\)",
        ),
    )
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    assert bool((out[0] == 0xA5).all())
    assert bool((out[1].view(torch.uint8) == 0x7F).all())


ROWS_OF_PLANS = [1, 16, 17, 64, 65, 256, 257, 2048]


@pytest.mark.gpu
def test_each_plan_of_the_gpu_gives_the_same_bits(device):
    for m in ROWS_OF_PLANS:
        for n in (7168, 7184):
            x = difficult(m, n, torch.bfloat16, device)
            assert_same_bits(quantize_nvfp4(x, 4.0, out=poisoned(x)), reference.quantize_nvfp4(x, 4.0))


@pytest.mark.gpu
def test_one_launch_in_a_graph_whose_scales_are_dirtied_between_replays(device):
    x = torch.randn(5, 80, device=device)
    factor, out = torch.ones(1, device=device), poisoned(x)
    captured = graph.capture(lambda: quantize_nvfp4(x, factor, out=out), on=device)
    for byte in (0x7F, 0x33):
        out[1].view(torch.uint8).fill_(byte)
        captured.replay()
        assert_same_bits(out, reference.quantize_nvfp4(x, factor))
