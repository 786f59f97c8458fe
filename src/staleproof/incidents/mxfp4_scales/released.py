"""The loader of a released vLLM, on a CPU, around our layout of the scales.

``_swizzle_mxfp4`` is vLLM's own file, executed unchanged (:mod:`staleproof.kernels.vllm_sources`). Of the
package ``triton_kernels`` that it calls only the layout has a part in the fault, and :func:`.broken.swizzled`
stands for it: on an H200 both wrote the same bytes (recorded, question ``layout``).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from staleproof.incidents.mxfp4_scales import broken, scene
from staleproof.incidents.mxfp4_scales.broken import SHIPPED, Kernel
from staleproof.incidents.mxfp4_scales.scene import Layer
from staleproof.incidents.mxfp4_scales.weights import GROUP, Matrix
from staleproof.kernels.vllm_sources import executed, package
from staleproof.vllm.patches.mxfp4_scales import FUNCTION, UTILS

# What the loader imports from triton_kernels. Its layouts only pass through.
_KERNELS: dict[str, dict[str, Any]] = {
    "triton_kernels.matmul_ogs_details.opt_flags": {"update_opt_flags_constraints": lambda constraints: None},
    "triton_kernels.numerics": {"InFlexData": SimpleNamespace},
    "triton_kernels.tensor": {
        "FP4": "fp4",
        "wrap_torch_tensor": lambda tensor, dtype=None: tensor,
        "convert_layout": lambda tensor, layout, **options: tensor,
    },
    "triton_kernels.tensor_details.layout": {
        "StridedLayout": "strided",
        "make_default_matmul_mxfp4_w_layout": lambda **options: ("values", {}),
        "make_default_matmul_mxfp4_w_scale_layout": lambda **options: ("scales", {}),
    },
}


def _modules() -> dict[str, ModuleType]:
    """Each module of :data:`_KERNELS` and its parents, by name, with its submodules as attributes."""
    found: dict[str, ModuleType] = {}
    for name, members in _KERNELS.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            module = found.setdefault(parent, ModuleType(parent))
            if end > 1:
                setattr(found[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(found[name]).update(members)
    return found


@contextlib.contextmanager
def loader(release: str) -> Iterator[ModuleType]:
    """vLLM's ``mxfp4_utils`` of a release as on a Hopper GPU, inside a ``with``.

    Raises:
        MissingError: the release is neither installed nor unpacked.
    """
    folder, stubs = package(release), _modules()
    # The module names two operators at its end, which nothing here calls.
    operators = SimpleNamespace(dequant_mxfp4=None, quant_dequant_mxfp4=None)
    before = {name: sys.modules.get(name) for name in stubs}
    with executed(folder, UTILS), mock.patch.object(torch.ops, "vllm", operators, create=True):
        # Not mock.patch.dict: it would also remove Triton if Triton is imported inside this block, and Triton
        # cannot be imported twice.
        sys.modules.update(stubs)
        try:
            vars(importlib.import_module("vllm.utils.import_utils"))["get_triton_kernels_version"] = _version
            platform = importlib.import_module("vllm.platforms").current_platform
            platform.is_device_capability = lambda capability: capability == 90
            yield importlib.import_module(UTILS)
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


def _version() -> str:
    return "3.5"


def layer(a: Layer, behind: torch.Tensor, module: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer as :func:`.scene.layer` computes it, with scales that this loader converted.

    Args:
        a: the layer, on the CPU.
        behind: (n,) uint8, the bytes after the scales of both projections, at least 64.
        module: of :func:`loader`.

    Returns:
        (tokens, hidden), and (tokens * top_k, inter) sorted by expert; fp32.
    """

    def product(x: torch.Tensor, matrix: Matrix, expert: int) -> torch.Tensor:
        _, _, turned = getattr(module, FUNCTION)(matrix.weight, matrix.scale, 8)
        scale = turned.transpose(-2, -1)
        # The layout stores the groups that it gets, in pairs, and the kernel reads with the strides of that.
        padded = scale.shape[-1] > matrix.shape.k // GROUP
        kernel = Kernel(align=4) if padded else SHIPPED
        slab = torch.cat([broken.swizzled(scale, kernel), behind])
        return broken.product(x, matrix, slab, kernel)[expert]

    return scene.experts(a, product)
