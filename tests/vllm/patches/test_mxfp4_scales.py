"""The patch of incident 6 on a made-up loader: where it pads, who gets the padded one, and the probe."""

import importlib

import pytest
import torch

from staleproof.vllm.patches import mxfp4_scales as patch
from staleproof.vllm.plugin import patches

UTILS = patch.UTILS.removeprefix("vllm.")
LOADER = """
class current_platform:
    capability = 90
    is_cuda = staticmethod(lambda: True)
    @classmethod
    def is_device_capability(cls, wanted): return cls.capability == wanted

def _swizzle_mxfp4(quant_tensor, scale, num_warps=8):
    return scale, num_warps
"""
IMPORTER = f"from {patch.UTILS} import _swizzle_mxfp4\ndef load(scale): return _swizzle_mxfp4(None, scale, 4)"


@pytest.mark.parametrize(("groups", "early"), [(5, True), (6, False), (7, True)])
def test_every_importer_pads_and_a_revert_gives_vllms_back(made_up, early, groups):
    made_up({UTILS: LOADER, "oracle": IMPORTER})
    scale, fix = torch.ones(2, 3, groups, dtype=torch.uint8), patches()["mxfp4_scale_tail"]
    oracle = importlib.import_module("vllm.oracle") if early else None
    with fix.applied("0.22.1"):
        oracle = oracle or importlib.import_module("vllm.oracle")
        padded, warps = oracle.load(scale)
        by_name, _ = importlib.import_module(patch.UTILS)._swizzle_mxfp4(quant_tensor=None, scale=scale)
    assert padded.shape == by_name.shape == (2, 3, 8)
    assert warps == 4
    assert padded[..., :groups].equal(scale)
    assert not padded[..., groups:].any()
    assert oracle.load(scale)[0] is scale


@pytest.mark.parametrize(("capability", "groups"), [(100, 6), (80, 6), (90, 8), (90, 0)])
def test_other_devices_and_whole_tiles_are_left_alone(made_up, capability, groups):
    made_up({UTILS: LOADER})
    module = importlib.import_module(patch.UTILS)
    module.current_platform.capability = capability
    scale = torch.ones(2, 3, groups, dtype=torch.uint8)
    with patches()["mxfp4_scale_tail"].applied("0.22.1"):
        assert module._swizzle_mxfp4(None, scale)[0] is scale
