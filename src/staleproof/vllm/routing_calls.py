"""Hooks of incident 3's patches: our routing in place of vLLM's, and inputs without NaN for vLLM's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument, replaced

TOPK = (
    "topk_weights",
    "topk_ids",
    "token_expert_indices",
    "gating_output",
    "renormalize",
    "e_score_correction_bias",
)
SOFTMAX_TOPK = (*TOPK, "is_padding")
SIGMOID_TOPK = (*TOPK, "routed_scaling_factor", "is_padding")
GROUPED = (
    "scores",
    "num_expert_group",
    "topk_group",
    "topk",
    "renormalize",
    "routed_scaling_factor",
    "bias",
    "scoring_func",
)
HASH = (
    "topk_weights",
    "topk_indices",
    "token_expert_indices",
    "gating_output",
    "renormalize",
    "routed_scaling_factor",
    "e_score_correction_bias",
    "input_tokens",
    "hash_indices_table",
    "is_padding",
    "bias_vl",
    "image_sentinel_lo",
)
# What follows the four tensors if a call leaves it out.
SOFTMAX_DEFAULTS = (False, None, None)
SIGMOID_DEFAULTS = (False, None, 1.0, None)
HASH_DEFAULTS = (False, 1.0, None, None, None, None, None, 0)
SIGMOID = 1  # vLLM's scoring_func: 1 takes logits and computes their sigmoid, 0 takes scores


def _tracing() -> bool:
    """Say whether torch.compile traces this call. Then vLLM's op stays, and only its inputs change."""
    import torch

    return torch.compiler.is_compiling()


@functools.cache
def _kernels() -> ModuleType:
    """Our routing. Kept, because an import statement takes longer than the checks of a repeated call."""
    from staleproof.ops import topk

    return topk


def _in_order(
    names: tuple[str, ...], defaults: tuple[Any, ...], args: Arguments, kwargs: Keywords
) -> Arguments:
    """All arguments of a call by position; a hook is only given calls whose names it knows."""
    if kwargs:
        given = dict(zip(names[4:], defaults, strict=True)) | dict(zip(names, args, strict=False)) | kwargs
        return tuple(given[name] for name in names)
    return args + defaults[len(args) - 4 :]


def _into(
    function: Callable[..., Any], given: Arguments, bias: Any, scaling: float, is_padding: Any = None
) -> Any:
    """Run our kernel in place of vLLM's, into the caller's tensors.

    ``token_expert_indices`` is not written, because no caller in these releases reads it.
    """
    import torch

    weights, ids, _, logits, renormalize = given[:5]
    if not logits.shape[0]:
        return NotImplemented
    if ids.dtype is torch.uint32:
        # Our op takes no uint32; as int32 an expert id has the same bits.
        ids = ids.view(torch.int32)
    function(
        logits,
        ids.shape[1],
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=scaling,
        is_padding=is_padding,
        out=(weights, ids),
    )
    return None


def softmax(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    given = _in_order(SOFTMAX_TOPK, SOFTMAX_DEFAULTS, args, kwargs)
    return _into(_kernels().topk_softmax, given, given[5], 1.0, given[6])


def sigmoid(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    given = _in_order(SIGMOID_TOPK, SIGMOID_DEFAULTS, args, kwargs)
    return _into(_kernels().topk_sigmoid, given, *given[5:])


def grouped(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    if kwargs:
        args = tuple(argument(args, kwargs, i, name, 0) for i, name in enumerate(GROUPED))
    scores, groups, chosen, top_k, renormalize, scaling, bias, *scoring = args
    if scoring != [SIGMOID] or not scores.shape[0]:
        return NotImplemented
    return _kernels().grouped_topk(
        scores,
        top_k,
        num_expert_group=groups,
        topk_group=chosen,
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=scaling,
    )


def hashed(args: Arguments, kwargs: Keywords) -> Any:
    """Run our kernel, unless a table names the experts or image tokens have a bias of their own."""
    if _tracing():
        return NotImplemented
    given = _in_order(HASH, HASH_DEFAULTS, args, kwargs)
    if given[8] is not None or given[10] is not None:
        return NotImplemented
    try:
        return _into(_kernels().topk_softplus_sqrt, given, given[6], given[5], given[9])
    except ValueError:
        return NotImplemented


def biased(replacement: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Let the replacement run where the model has a bias; without one vLLM's kernel has no defect.

    The same where ours does not take the shapes or dtypes, of which it says so before it writes. Then
    vLLM's kernel runs on a bias without NaN.
    """

    def instead(args: Arguments, kwargs: Keywords) -> Any:
        if argument(args, kwargs, position, name) is None:
            return NotImplemented
        try:
            return replacement(args, kwargs)
        except ValueError:
            return NotImplemented

    return instead


def _without_nan(x: Any, value: float = 0.0) -> Any:
    import torch

    # nan_to_num changes infinities too, unless it is told not to.
    return torch.nan_to_num(x, value, torch.inf, -torch.inf)


def clean_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    bias = argument(args, kwargs, 5, TOPK[5])
    return None if bias is None else replaced(args, kwargs, 5, TOPK[5], _without_nan(bias))


def clean_grouped_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    bias = argument(args, kwargs, 6, GROUPED[6])
    return None if bias is None else replaced(args, kwargs, 6, GROUPED[6], _without_nan(bias))


def clean_logits(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Set all logits of a row to 0 if softmax would make the row NaN."""
    import torch

    logits = argument(args, kwargs, 3, TOPK[3])
    bad = (logits.isnan() | (logits == torch.inf)).any(-1, keepdim=True)
    given = replaced(args, kwargs, 3, TOPK[3], torch.where(bad, 0.0, logits))
    return clean_bias(*given) or given


def clean_sigmoid_logits(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    logits = argument(args, kwargs, 3, TOPK[3])
    clean = _without_nan(logits, _lowest(logits))
    given = replaced(args, kwargs, 3, TOPK[3], clean)
    return clean_bias(*given) or given


def clean_scores(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    scores = argument(args, kwargs, 0, GROUPED[0])
    sigmoid = argument(args, kwargs, 7, GROUPED[7], 0) == SIGMOID
    clean = _without_nan(scores, _lowest(scores) if sigmoid else 0.0)
    given = replaced(args, kwargs, 0, GROUPED[0], clean)
    return clean_grouped_bias(*given) or given


def clean_hash_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    # The bias, and that of image tokens (0.30.0).
    for position in (6, 10):
        if (bias := argument(args, kwargs, position, HASH[position])) is not None:
            args, kwargs = replaced(args, kwargs, position, HASH[position], _without_nan(bias))
    return args, kwargs


def clean_hash(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Clean the logits and the bias of ``topk_hash_softplus_sqrt``; a NaN logit scores 0.

    With a table, which names the experts of each token, nothing is compared and nothing is cleaned.
    """
    if argument(args, kwargs, 8, HASH[8]) is not None:
        return None
    logits = argument(args, kwargs, 3, HASH[3])
    clean = _without_nan(logits, _lowest(logits))
    return clean_hash_bias(*replaced(args, kwargs, 3, HASH[3], clean))


def _lowest(x: Any) -> float:
    """Return a logit whose score is 0."""
    import torch

    return torch.finfo(x.dtype).min


def distinct(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    from staleproof.ops.distinct_experts import distinct_experts

    weights = argument(args, kwargs, 5, "topk_weights")
    ids = argument(args, kwargs, 6, "topk_ids")
    weights, ids = distinct_experts(weights.contiguous(), ids.contiguous())
    args, kwargs = replaced(args, kwargs, 5, "topk_weights", weights)
    return replaced(args, kwargs, 6, "topk_ids", ids)
