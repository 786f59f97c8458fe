"""The 128 x 4 layout and the two roundings, against loops, against torch's own, byte by byte."""

from __future__ import annotations

import sys
import types
import unittest

import pytest
import torch

from staleproof import create_fp4_scale_tensor, dequantize_nvfp4
from staleproof.ops.reference import nvfp4 as reference

ROWS, COLUMNS = (1, 2, 31, 32, 33, 127, 128, 129, 260), (1, 2, 3, 4, 5, 8, 9)


@pytest.fixture(name="torchs_own", scope="module")
def torchs_own_fixture():
    """PyTorch's block-scale helpers; they import a test package that they do not need."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    return pytest.importorskip("torch.testing._internal.common_quantized")


def test_the_layout_is_the_formula_and_torchs_and_no_byte_is_used_twice(torchs_own):
    for rows in ROWS:
        for columns in COLUMNS:
            offsets, tiles = reference.scale_offsets(rows, columns), -(-columns // 4)
            row, column = torch.arange(rows)[:, None], torch.arange(columns)
            within = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert torch.equal(offsets, (row // 128 * tiles + column // 4) * 512 + within)
            padded = reference.scale_shape(rows, columns * 16)
            assert padded == (-(-rows // 128) * 128, tiles * 4)
            padding = reference.padding_offsets(rows, columns * 16)
            everything = torch.cat((offsets.flatten(), padding)).sort().values
            assert torch.equal(everything, torch.arange(padded[0] * padded[1]))
            scales = torch.randint(1, 127, (rows, columns), dtype=torch.uint8)
            ours = reference.swizzle(scales)
            assert torch.equal(ours.flatten(), torchs_own.to_blocked(scales))
            assert torch.equal(reference.unswizzle(ours, rows, columns).view(torch.uint8), scales)


def test_8x4_tiles_are_eight_rows_of_four():
    offsets = reference.scale_offsets(10, 6, row_tile=8)
    assert offsets[0, :6].tolist() == [0, 1, 2, 3, 32, 33]
    assert offsets[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 64, 68]
    assert reference.scale_shape(10, 6 * 16, row_tile=8) == (16, 8)
    padding = reference.padding_offsets(10, 6 * 16, row_tile=8)
    assert torch.equal(torch.cat((offsets.flatten(), padding)).sort().values, torch.arange(16 * 8))
    scales = torch.arange(1, 61, dtype=torch.uint8).view(10, 6)
    tiles = reference.swizzle(scales, row_tile=8)
    assert torch.equal(tiles.flatten()[offsets], scales)
    assert torch.equal(reference.unswizzle(tiles, 10, 6, row_tile=8).view(torch.uint8), scales)


def test_e2m1_rounds_as_torch_does_every_float_near_a_tie(torchs_own):
    ties = torch.tensor(reference._HALFWAY)
    near = torch.cat([torch.nextafter(ties, ties.new_tensor(end)) for end in (0.0, 9.0)])
    x = torch.cat((ties, near, torch.tensor(reference.E2M1), torch.rand(4096) * 8))
    theirs = torchs_own._f32_to_floatx_unpacked(x.clamp(max=6), 2, 1)
    assert torch.equal(reference.encode_e2m1(x), theirs.to(torch.uint8))
    assert reference.encode_e2m1(torch.tensor([torch.nan, torch.inf])).tolist() == [7, 7]


@pytest.mark.parametrize(("m", "n"), [(3, 16), (130, 80)])
def test_every_byte_is_what_torchs_own_steps_give(torchs_own, m, n):
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(m * n))
    blocks = x.view(m, -1, 16)
    scales = (blocks.abs().amax(-1) * (64 * torch.tensor(1 / 6))).to(torch.float8_e4m3fn)
    scaled = (blocks * (1 / (scales.float() * (1 / 64)))[..., None]).clamp(-6, 6).view(m, n)
    codes = torchs_own._f32_to_floatx_unpacked(scaled, 2, 1)
    packed, tiles = reference.quantize_nvfp4(x, 64.0)
    assert torch.equal(packed, torchs_own.pack_uint4(codes))
    raw = torchs_own.to_blocked(scales.view(torch.uint8))
    assert torch.equal(tiles.view(torch.uint8).flatten(), raw)


@pytest.mark.parametrize(("amax", "scale"), [(0.0, 1.0), (0.5, 5376.0), (-2.0, 1344.0)])
def test_the_usual_global_scale(amax, scale):
    assert reference.global_scale_of(torch.tensor([[amax, 0.0]])).tolist() == [scale]


def test_a_product_reads_scales_in_tiles_of_eight_rows():
    a, b = torch.randn(10, 96, generator=torch.Generator().manual_seed(2)), torch.eye(16, 96)
    packed, scales = reference.quantize_nvfp4(a, 8.0, swizzled=False)
    right = reference.quantize_nvfp4(b, 8.0)
    eights = reference.swizzle(scales.view(torch.uint8), row_tile=8).view(scales.dtype)
    want = reference.block_scaled_mm(*reference.quantize_nvfp4(a, 8.0), *right, 1.0)
    got = reference.block_scaled_mm(packed, eights, *right, 1.0, row_tile=8)
    assert torch.equal(got, want)
    assert want.any()


def test_what_is_kept_is_within_a_rounding_of_what_was_given():
    torch.manual_seed(0)
    x = torch.randn(40, 96)
    factor = reference.global_scale_of(x)
    for swizzled in (True, False):
        kept = dequantize_nvfp4(
            *reference.quantize_nvfp4(x, factor, swizzled=swizzled), factor, swizzled=swizzled
        )
        amax = x.view(40, 6, 16).abs().amax(-1).repeat_interleave(16, 1)
        # Half of the widest step, 2 of 6, and e4m3's sixteenth for the scale.
        assert bool(((kept - x).abs() <= amax * (1 / 6 + 1 / 16)).all())
        # Values that e2m1 has come back as they are under a scale that e4m3 has.
        exact = torch.tensor([reference.E2M1 * 2])
        again = dequantize_nvfp4(*reference.quantize_nvfp4(exact, 1.0), 1.0)
        assert torch.equal(again, exact)
        half = dequantize_nvfp4(*reference.quantize_nvfp4(exact, 1.0), 1.0, dtype=torch.bfloat16)
        assert (half.dtype, torch.equal(half, exact.bfloat16())) == (torch.bfloat16, True)


@pytest.mark.parametrize(
    ("m", "n", "swizzled", "shape"),
    [(1, 16, True, (128, 4)), (129, 80, True, (256, 8)), (3, 80, False, (3, 5))],
)
def test_create_gives_the_shape_and_leaves_no_byte_of_padding_stale(m, n, swizzled, shape):
    made = create_fp4_scale_tensor(m, n, swizzled=swizzled)
    assert (tuple(made.shape), made.dtype) == (shape, torch.float8_e4m3fn)
    assert not swizzled or not made.view(torch.uint8).any()


def test_scales_are_made_on_the_device_that_is_asked_for():
    assert create_fp4_scale_tensor(3, 32, device="meta").is_meta
    assert reference.swizzle(torch.ones(3, 2, dtype=torch.uint8, device="meta")).is_meta


@pytest.mark.parametrize(
    ("m", "n", "message"),
    [
        (0, 16, "m: expected at least one row, got 0"),
        (4, 24, "n: expected a positive multiple of 16 columns, got 24"),
        ("1", 16, "m: expected at least one row, got '1'"),
        (1, 16.0, "n: expected a positive multiple of 16 columns, got 16.0"),
    ],
)
def test_create_names_what_is_wrong(m, n, message):
    with pytest.raises(ValueError, match=message):
        create_fp4_scale_tensor(m, n)


def test_dequantise_names_what_is_wrong():
    packed, scales = reference.quantize_nvfp4(torch.ones(3, 32), 1.0)
    wrong = (
        ((packed[:0], scales, 1.0), "packed: expected at least one row"),
        ((packed[:, :5], scales, 1.0), "packed: expected a positive multiple of 16"),
        ((packed.int(), scales, 1.0), "packed: expected torch.uint8"),
        ((packed, scales[:64], 1.0), r"scales: expected shape \(128, 4\), got shape \(64, 4\)"),
        ((packed, scales.float(), 1.0), "scales: expected torch.float8_e4m3fn or torch.uint8"),
        ((packed, scales.to("meta"), 1.0), "scales: expected a tensor on cpu, got one on meta"),
        ((packed, scales, 0.0), "global_scale: expected a positive finite number, got 0.0"),
        ((packed, scales, "1"), "global_scale: expected a positive finite number, got '1'"),
        ((packed, scales, torch.ones(1, device="meta")), "global_scale: expected a tensor on cpu"),
        ((packed, scales, torch.ones(2)), r"global_scale: expected shape \(\) or \(1,\), got \(2,\)"),
    )
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            dequantize_nvfp4(*arguments)
    # The value of a tensor is not read here: the host would wait for the device.
    dequantize_nvfp4(packed, scales, torch.zeros(1))
    with pytest.raises(ValueError, match=r"scales: expected shape \(3, 2\)"):
        dequantize_nvfp4(packed, scales, 1.0, swizzled=False)


def test_the_product_is_that_of_what_was_kept_and_padding_of_zeros_is_silent():
    torch.manual_seed(1)
    a, b = torch.randn(5, 80), torch.randn(16, 80)
    left, right = reference.quantize_nvfp4(a, 64.0), reference.quantize_nvfp4(b, 64.0)
    got = reference.block_scaled_mm(*left, *right, 1 / 64**2)
    want = dequantize_nvfp4(*left, 64.0) @ dequantize_nvfp4(*right, 64.0).T
    torch.testing.assert_close(got, want)
    padding = reference.padding_offsets(5, 80)
    for byte, same in ((0x70, True), (0x7F, False)):
        left[1].view(torch.uint8).view(-1)[padding] = byte
        dirty = reference.block_scaled_mm(*left, *right, 1 / 64**2)
        assert torch.equal(dirty, got) is same
    # NaN beside 0 in the padding columns, so every live row is lost.
    assert bool(dirty.isnan().all())
    with pytest.raises(ValueError, match="row_tile: expected one of"):
        reference.block_scaled_mm(*left, *right, 1.0, row_tile=64)
    with pytest.raises(ValueError, match="b: expected 80 columns, as in a, got 16"):
        reference.block_scaled_mm(*left, *reference.quantize_nvfp4(b[:, :16], 64.0), 1.0)
