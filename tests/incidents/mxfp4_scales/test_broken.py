"""The layout, what the kernel reads of it, and the replica's product."""

import pytest
import torch

from staleproof.cases import children, store
from staleproof.incidents.mxfp4_scales import broken, cases, scene
from staleproof.incidents.mxfp4_scales.broken import GROUPS, LANES, Kernel, Matrix, Shape
from staleproof.kernels import mxfp4

SHAPE = Shape(2, 320, 192)


@pytest.mark.parametrize(("align", "warps"), [(2, 8), (4, 8), (2, 4)])
def test_each_scale_has_a_byte_of_its_own(align, warps):
    kernel = Kernel(align=align, warps=warps)
    used = broken.reach(SHAPE, kernel)[..., : broken.stored_groups(SHAPE, kernel)].flatten()
    assert used.sort().values.equal(torch.arange(broken.stored_bytes(SHAPE, kernel)))


def test_k_modulo_128_says_whether_the_last_row_reads_past_the_end():
    shapes = [Shape(3, 256, k) for k in range(32, 4096, 32)]
    past = [64 if 1 <= shape.k % 128 <= 64 else 0 for shape in shapes]
    assert [broken.past_the_end(shape) for shape in shapes] == past
    assert {broken.past_the_end(shape, Kernel(align=4)) for shape in shapes} == {0}


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(warps=4)])
def test_a_numbered_canary_reaches_the_columns_that_the_index_names(kernel):
    """Each byte behind is 0xff in turn; exactly the columns of ``columns_behind`` hold NaN."""
    shape = Shape(1, 160, 64)
    matrix = mxfp4.quantized(shape, torch.Generator().manual_seed(0))
    memory, named = broken.swizzled(matrix.scale, kernel), broken.columns_behind(shape, kernel)
    for byte in range(64):
        behind = torch.zeros(64, dtype=torch.uint8)
        behind[byte] = 0xFF
        y = broken.product(torch.ones(1, 64), matrix, torch.cat([memory, behind]), kernel)
        columns = y.isnan().any(0).any(0).nonzero().flatten().tolist()
        assert columns == ([named[byte]] if byte in named else [])


@pytest.mark.parametrize("kernel", [Kernel(), Kernel(align=4), Kernel(mask=GROUPS), Kernel(mask=LANES)])
def test_the_product_is_right_over_clean_memory(kernel):
    matrix = mxfp4.quantized(SHAPE, torch.Generator().manual_seed(1))
    x = torch.randn(5, SHAPE.k)
    memory = torch.cat([broken.swizzled(matrix.scale, kernel), scene.bytes_of("0x00", 64)])
    right = x @ mxfp4.dequantized(*matrix).mT
    assert torch.allclose(broken.product(x, matrix, memory, kernel), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
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
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("factor", "said"), [(1.005, scene.RIGHT), (1.01, scene.WRONG), (torch.inf, scene.NAN)]
)
def test_a_layer_that_is_off_by_more_than_bf16_rounds_is_wrong(factor, said):
    def run(a, behind):
        out, inner = scene.layer(a, scene.bytes_of("0x00"))
        return out * factor, inner

    (found,) = scene.judged(scene.layer_on("cpu"), run, ["0xff"])
    assert found.verdict == said


def test_the_index_function_is_that_of_the_source():
    """``hopper_scale.py``: which (row, group) of a block of 256 rows the first 16 bytes of storage hold."""
    zero, rows = torch.tensor(0), torch.tensor([0, 8, 0, 8, 1, 9, 1, 9, 2, 10, 2, 10, 3, 11, 3, 11])
    groups = torch.tensor([0, 0, 1, 1] * 4)
    assert broken.byte_of(zero, rows, groups, Shape(1, 256, 192)).tolist() == [*range(16)]


def test_random_bytes_do_harm_where_one_that_reaches_a_column_is_0xff():
    """Of the same bytes, one reaches column 242 of the small layer, and none a column of gpt-oss'."""
    (run,) = [run for run in store.read_all() if run.folder.name == "nvidia-h200"]
    measured = {f.variant: f.verdict for f in run.findings if f.question == "first product"}
    assert {name: cases._drawn(name, "cuda") for name in cases.DRAWN}.items() <= measured.items()
    assert [name for name in cases.DRAWN if cases._drawn(name, "cpu") == scene.NAN] == ["fp32 N(0, 1)"]


@pytest.mark.parametrize(
    ("code", "said", "verdict"),
    [
        (1, f"CUDA error: {cases.ILLEGAL}", cases.ILLEGAL),
        (1, "out of memory", None),
        (0, cases.ILLEGAL, scene.RIGHT),
    ],
)
def test_only_a_child_that_died_of_the_access_shows_an_illegal_access(monkeypatch, code, said, verdict):
    told = [] if code else [cases.reading(scene.RIGHT)]
    ended = children.Ended(told, code, "", said, 1)
    monkeypatch.setattr(children, "call", lambda *given, **options: ended)
    if verdict is None:
        with pytest.raises(children.ChildError, match="ended with 1 and said: out of memory"):
            cases.guarded("none", "cuda")
    else:
        assert cases.guarded("none", "cuda").verdict == verdict


def test_a_column_of_which_one_row_changes_is_counted():
    def product(x, matrix, memory):
        # The fourth group of each row is the layout's padding.
        out = torch.zeros(2, 16, 256)
        out[1, 3, 7] = float((memory == 0xFF).any())
        return out

    found = scene.odd_groups("none", product)
    counted = found.numbers["changed_columns"], found.numbers["columns"]
    assert (found.verdict, counted) == (scene.WRONG, (1, 256))
