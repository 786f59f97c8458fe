"""The layout, what the kernel reads of it, and the replica's product."""

import pytest
import torch

from staleproof.incidents.mxfp4_scales import broken, scene, weights
from staleproof.incidents.mxfp4_scales.broken import GROUPS, Kernel, Matrix, Shape

SHAPE = Shape(2, 320, 192)


@pytest.mark.parametrize(("align", "warps"), [(4, 8), (2, 4)])
def test_each_scale_has_its_own_byte(align, warps):
    kernel = Kernel(align=align, warps=warps)
    used = broken.reach(SHAPE, kernel)[..., : broken.stored_groups(SHAPE, kernel)].flatten()
    assert used.sort().values.equal(torch.arange(broken.stored_bytes(SHAPE, kernel)))


def test_last_row_reads_past_the_end_if_k_modulo_128_is_1_to_64():
    shapes = [Shape(3, 256, k) for k in range(32, 4096, 32)]
    past = [64 if 1 <= shape.k % 128 <= 64 else 0 for shape in shapes]
    assert [broken.past_the_end(shape) for shape in shapes] == past
    assert {broken.past_the_end(shape, Kernel(align=4)) for shape in shapes} == {0}


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(warps=4)])
def test_each_byte_behind_reaches_the_columns_of_the_index(kernel):
    """Each byte behind is 0xff in turn; exactly the columns of ``columns_behind`` hold NaN."""
    shape = Shape(1, 160, 64)
    matrix = weights.quantized(shape, torch.Generator().manual_seed(0))
    memory, named = broken.swizzled(matrix.scale, kernel), broken.columns_behind(shape, kernel)
    for byte in range(64):
        behind = torch.zeros(64, dtype=torch.uint8)
        behind[byte] = 0xFF
        y = broken.product(torch.ones(1, 64), matrix, torch.cat([memory, behind]), kernel)
        columns = y.isnan().any(0).any(0).nonzero().flatten().tolist()
        assert columns == ([named[byte]] if byte in named else [])


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(align=4), Kernel(mask=GROUPS)])
def test_product_over_clean_memory_is_right(kernel):
    matrix = weights.quantized(SHAPE, torch.Generator().manual_seed(1))
    x = torch.randn(5, SHAPE.k)
    memory = torch.cat([broken.swizzled(matrix.scale, kernel), scene.bytes_of("0x00", 64)])
    right = x @ weights.dequantized(*matrix).mT
    assert torch.allclose(broken.product(x, matrix, memory, kernel), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: broken.stored_groups(Shape(2, 256, 100), Kernel()), "k: expected a multiple of 32, got 100"),
        (lambda: broken.reach(Shape(0, 256, 96)), "n, experts: expected at least 1"),
        (
            lambda: broken.product(
                torch.ones(1, 64),
                Matrix(torch.zeros(1, 256, 32, dtype=torch.uint8), torch.zeros(1, 256, 2, dtype=torch.uint8)),
                torch.zeros(512, dtype=torch.uint8),
            ),
            "slab: expected at least 576 bytes, got 512",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.005, scene.RIGHT), (1.01, scene.WRONG), (torch.inf, scene.NAN)]
)
def test_layer_off_by_more_than_bf16_rounds_is_wrong(factor, verdict):
    def run(a, behind):
        out, inner = scene.layer(a, scene.bytes_of("0x00"))
        return out * factor, inner

    assert scene.judged(scene.layer_of(), run).verdict == verdict


def test_index_function_follows_the_source():
    """``hopper_scale.py``: which (row, group) of a block of 256 rows the first 16 bytes of storage hold."""
    zero, rows = torch.tensor(0), torch.tensor([0, 8, 0, 8, 1, 9, 1, 9, 2, 10, 2, 10, 3, 11, 3, 11])
    groups = torch.tensor([0, 0, 1, 1] * 4)
    assert broken.byte_of(zero, rows, groups, Shape(1, 256, 192)).tolist() == [*range(16)]


@pytest.mark.parametrize(("sizes", "named"), [((2, 256, 48), "k"), ((2, 0, 32), "n, experts")])
def test_weights_without_a_whole_group_are_refused(sizes, named):
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        weights.quantized(weights.Shape(*sizes), torch.Generator())
    weights.Shape(1, 1, 32).check()
