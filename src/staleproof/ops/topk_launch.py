"""Routing launched again: without the checks of ``ops.topk`` and without Triton's dispatcher.

For a patch behind which vLLM calls routing once a layer, with the same kinds of tensors each time. On
an H200's host the public functions take several times as long as a launch. What was checked and
compiled once is launched here by the compiled kernel's own launcher, as ``ops.zero_blocks`` does it.
"""

from __future__ import annotations

from typing import Any

import torch

from staleproof.ops import topk
from staleproof.ops.operators import traced

# What was launched before: the kernel, and the values of its arguments behind the sizes.
_launched: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# The arguments of the kernel that are not compile-time constants.
ARGUMENTS = 11


def _kind(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Everything about a tensor that checks or Triton's specialisation depend on, but its rows."""
    if x is None:
        return None
    return (x.dtype, x.shape[1:], x.stride(), x.get_device(), x.data_ptr() % 16 == 0)


def launch_again(
    name: str,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    renormalize: bool,
    scaling: float,
    groups: int = 0,
    topk_group: int = 1,
) -> None:
    """Route into ``weights`` and ``ids``; the first call of its kind goes through ``ops.topk``.

    Args:
        name: ``topk_softmax``, ``topk_sigmoid`` or ``grouped_topk``.
        x: the logits, (tokens, experts).
        bias, is_padding: as there, or ``None``.
        weights, ids: ``out`` there.
        renormalize, scaling: as there.
        groups, topk_group: number of groups, and of those that are open; for ``grouped_topk``.

    Raises:
        ValueError: an argument does not fit; nothing was written.

    >>> weights, ids = torch.empty(1, 2), torch.empty(1, 2, dtype=torch.int32)
    >>> x, bias = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.0, 0.0, torch.nan])
    >>> launch_again("topk_sigmoid", x, bias, None, weights, ids, renormalize=False, scaling=1.0)
    >>> ids.tolist()
    [[1, 2]]
    """
    rows = x.shape[0]
    tensors = x, bias, is_padding, weights, ids
    if topk.INTERPRET or traced(x) or not x.is_cuda or x.get_device() != torch._C._cuda_getDevice():
        return _checked(name, tensors, renormalize, scaling, groups, topk_group)
    # A program's rows depend on their number, and Triton compiles for 1, for multiples of 16 and for
    # the rest. All tensors must have as many rows as ``x``, which makes these the last checks.
    same = weights.shape[0] == ids.shape[0] == rows and (is_padding is None or is_padding.shape[0] == rows)
    same = same and (bias is None or bias.shape[0] == x.shape[1])
    narrow = bias is None and not groups and x.dtype != torch.float32
    plan = topk._plan(rows, x.shape[1], narrow)
    kinds = tuple(_kind(each) for each in tensors)
    options = name, renormalize, scaling, groups, topk_group
    key = (kinds, options, plan, rows == 1, rows % 16 == 0)
    found = _launched.get(key) if same and rows else None
    if found is None:
        _checked(name, tensors, renormalize, scaling, groups, topk_group)
        # Once more, because the public function keeps no compiled kernel; it writes the same results.
        kernel = topk._launch(name == "topk_softmax", *tensors, renormalize, scaling, -1, groups, topk_group)
        constants = len(topk._topk_kernel.arg_names) - ARGUMENTS
        rest = (x.shape[1], groups or 1, -1, scaling, *[None] * constants)
        _launched[key] = kernel, rest
        return None
    kernel, rest = found
    stream = topk.triton.runtime.driver.active.get_current_stream(x.get_device())
    kernel.run(
        -(-rows // plan[1]),
        1,
        1,
        stream,
        kernel.function,
        kernel.packed_metadata,
        None,
        None,
        None,
        *(None if each is None else each.data_ptr() for each in tensors),
        x.stride(0),
        rows,
        *rest,
    )
    return None


def _checked(
    name: str, tensors: tuple[Any, ...], renormalize: bool, scaling: float, groups: int, topk_group: int
) -> None:
    x, bias, is_padding, weights, ids = tensors
    grouped = {"num_expert_group": groups, "topk_group": topk_group} if name == "grouped_topk" else {}
    getattr(topk, name)(
        x,
        ids.shape[1],
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=scaling,
        is_padding=is_padding,
        out=(weights, ids),
        **grouped,
    )
