"""The matrix: what a cell concludes from its counts, and the parts of its small server."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.scale_padding import broken, matrix, remedies
from staleproof.incidents.scale_padding.matrix import HISTORIES, Counts
from staleproof.ops.reference import nvfp4 as reference


def verdict(*counts: tuple[int, int, int]) -> str:
    return matrix.Cell("c", "r", [Counts(*count) for count in counts]).verdict


def test_cell_is_cured_only_if_nothing_is_wrong_in_any_history():
    assert verdict((3, 0, 3), (0, 0, 0)) == "cured"
    assert verdict((3, 3, 3), (0, 0, 0)) == "not cured"
    assert verdict((3, 1, 3), (3, 3, 3)) == "helped"
    assert verdict((3, 1, 3), (3, 4, 3), (3, 0, 3)) == "made worse"
    # It may not break what was right.
    assert verdict((3, 0, 3), (0, 1, 0)) == "made worse"
    assert verdict((0, 0, 0)) == verdict((3, 0, 3), (3, 0, 2)) == "not reproduced"


def test_unwritten_padding_equals_what_the_broken_quantiser_leaves(device):
    x = torch.randn(remedies.ROWS, remedies.WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    raw = HISTORIES["N(0, 1)"].fresh(0, 256, device=device).view(torch.uint8)
    factor = torch.full((1,), remedies.GLOBAL_SCALE, device=device)
    _, kernels = broken.quantize_blocks_only(
        x, factor, broken.PATHS["128x4"], "empty", lambda memory: memory.view(torch.uint8).view(-1).copy_(raw)
    )
    _, scales = reference.quantize_nvfp4(x, factor)
    nobody = reference.padding_offsets(*x.shape).to(device)
    scales.view(torch.uint8).view(-1)[nobody] = raw[nobody]
    assert torch.equal(scales.view(torch.uint8), kernels.view(torch.uint8))


@pytest.mark.parametrize(
    ("dies", "factor", "wrong"), [(3, 1.0, 2), (0, 1.0, 6), (None, 1.0005, 0), (None, 1.003, 6)]
)
def test_outputs_that_differ_or_are_missing_are_counted(monkeypatch, dies, factor, wrong):
    """Two live rows in each of the four steps that is judged, and what the process did says nothing later."""
    right = matrix._right("empty rows", "cpu")

    class Server:
        def __init__(self, *given):
            self.steps = iter(range(4))

        def step(self, number):
            assert number == next(self.steps)
            return remedies.StepResult(right[number] * factor, right[number], number != dies)

    monkeypatch.setattr(matrix, "Server", Server)
    monkeypatch.setattr(matrix, "_right", lambda cause, device: right)
    assert matrix.serve("empty rows", None, "cpu", HISTORIES["NaN"]) == wrong
