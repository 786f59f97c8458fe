"""A released loader around our layout of the scales, and the layer that it makes."""

import sys

import pytest
import torch

from staleproof.incidents.mxfp4_scales import questions, released, scene
from staleproof.incidents.mxfp4_scales.questions import Loader
from staleproof.lab import MissingError
from staleproof.vllm.patches.mxfp4_scales import FUNCTION


def answer(patched):
    try:
        return questions.loaded(Loader("0.22.1", patched), "cpu")
    except MissingError as error:
        pytest.skip(str(error))


def test_released_loader_moves_every_routed_row_and_with_the_patch_none():
    assert answer(False).verdict == scene.WRONG
    assert answer(False).numbers["changed_are_those_routed"]
    assert (answer(True).verdict, answer(True).numbers["changed"]) == (scene.RIGHT, 0)


def test_loader_leaves_no_module_behind():
    answer(False)
    before = {name: module for name, module in sys.modules.items() if "triton_kernels" in name}
    with released.loader("0.22.1") as module:
        weight, scale = torch.zeros(2, 256, 96, dtype=torch.uint8), torch.ones(2, 256, 6, dtype=torch.uint8)
        _, _, turned = getattr(module, FUNCTION)(weight, scale, 8)
        assert turned.shape == (2, 6, 256)
    assert {name: module for name, module in sys.modules.items() if "triton_kernels" in name} == before


def test_remedy_under_which_one_row_moves_is_not_right(monkeypatch):
    """A product that adds 1 to one row over 0xff, and to none over zeros."""
    layer = scene.layer

    def one_row(a, behind, kernel):
        out, inner = layer(a, behind, kernel)
        out[3] += float((behind == 0xFF).all())
        return out, inner

    assert questions.moves_rows("loader_pads", "cpu") is None
    monkeypatch.setattr(scene, "layer", one_row)
    assert questions.moves_rows("loader_pads", "cpu") == "0xff behind the scales changes 1 rows"
