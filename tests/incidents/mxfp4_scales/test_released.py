"""A released loader around our layout of the scales, and the layer that it makes."""

import sys

import pytest
import torch

from staleproof.incidents.mxfp4_scales import cases, released, scene
from staleproof.incidents.mxfp4_scales.cases import Loader
from staleproof.vllm.patches.mxfp4_scales import FUNCTION


def test_the_patched_loader_moves_no_row_and_the_released_one_every_routed_row():
    unpatched, patched = (cases.loaded(Loader("0.22.1", patched), "cpu") for patched in (False, True))
    if unpatched.verdict == "not run":
        pytest.skip(unpatched.note)
    assert (unpatched.verdict, unpatched.numbers["changed_are_those_routed"]) == (scene.WRONG, True)
    assert (patched.verdict, patched.numbers["changed"]) == (scene.RIGHT, 0)


def test_the_loader_leaves_no_module_behind():
    before = {name: module for name, module in sys.modules.items() if "triton_kernels" in name}
    with released.loader("0.22.1") as module:
        weight, scale = torch.zeros(2, 256, 96, dtype=torch.uint8), torch.ones(2, 256, 6, dtype=torch.uint8)
        _, _, turned = getattr(module, FUNCTION)(weight, scale, 8)
        assert turned.shape == (2, 6, 256)
    assert {name: module for name, module in sys.modules.items() if "triton_kernels" in name} == before
    assert not hasattr(torch.ops.vllm, "dequant_mxfp4")


def test_a_remedy_that_moves_one_row_is_not_right():
    wrong = cases._unmoved(lambda *given: cases.reading(scene.RIGHT, changed=1))
    assert wrong("a remedy", "cpu") == "0xff behind the scales changes 1 rows"
    assert cases._unmoved(lambda *given: cases.reading(scene.RIGHT, changed=0))("a remedy", "cpu") is None
