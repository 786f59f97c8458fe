"""Hooks of incident 3's patches: our routing in place of vLLM's, and inputs without NaN for vLLM's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
APPLY = ("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")
# What stands for the arguments that a call leaves out. It never leaves out the first four.
SOFTMAX_DEFAULTS = (None, None, None, None, False, None, None)
SIGMOID_DEFAULTS = (None, None, None, None, False, None, 1.0, None)
HASH_DEFAULTS = (None, None, None, None, False, 1.0, None, None, None, None, None, 0)
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
) -> Sequence[Any]:
    """All arguments of a call by position; a hook is only given calls whose names it knows."""
    given = args + defaults[len(args) :]
    if not kwargs:
        return given
    changed = [*given]
    for name, value in kwargs.items():
        changed[names.index(name)] = value
    return changed


def _into(name: str, given: Sequence[Any], bias: Any, scaling: float, is_padding: Any) -> Any:
    """Run our kernel in place of vLLM's, into the caller's tensors.

    ``token_expert_indices`` is not written, because no caller in these releases reads it.
    """
    weights, ids, _, logits, renormalize = given[:5]
    kernels = _kernels()
    # A repeated call goes from vLLM's arguments to the launch, without our own function between.
    key = kernels.key_of(logits, bias, is_padding, weights, ids, renormalize, scaling, name)
    at, weights_at, ids_at = logits.data_ptr(), weights.data_ptr(), ids.data_ptr()
    bias_at = None if bias is None else bias.data_ptr()
    padding_at = None if is_padding is None else is_padding.data_ptr()
    addresses = at | weights_at | ids_at | (bias_at or 0) | (padding_at or 0)
    if (again := kernels._SEEN.get(key, addresses)) is not None:
        again(at, bias_at, padding_at, weights_at, ids_at)
        return None
    if not logits.shape[0]:
        return NotImplemented
    import torch

    # Our op takes no uint32; as int32 an expert id has the same bits.
    out = weights, ids.view(torch.int32) if ids.dtype is torch.uint32 else ids
    options = bias, renormalize, scaling, is_padding, -1
    kernels.route(kernels.LAUNCHES[name], logits, ids.shape[1], options, torch.int32, out, key=key)
    return None


def softmax(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    given = _in_order(SOFTMAX_TOPK, SOFTMAX_DEFAULTS, args, kwargs)
    return _into("softmax", given, given[5], 1.0, given[6])


def sigmoid(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    given = _in_order(SIGMOID_TOPK, SIGMOID_DEFAULTS, args, kwargs)
    return _into("sigmoid", given, *given[5:])


def grouped(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    if kwargs:
        args = tuple(argument(args, kwargs, i, name, 0) for i, name in enumerate(GROUPED))
    import torch

    kernels = _kernels()
    scores, bias, top_k = args[0], args[6], args[3]
    key = kernels.key_of(*args)
    at, bias_at = scores.data_ptr(), None if bias is None else bias.data_ptr()
    if (again := kernels._SEEN.get(key, at | (bias_at or 0))) is not None:
        shape = scores.shape[0], top_k
        weights = kernels.empty(shape, torch.float32, scores)
        ids = kernels.empty(shape, torch.int32, scores)
        again(at, bias_at, None, weights.data_ptr(), ids.data_ptr())
        return weights, ids
    _, groups, chosen, _, renormalize, scaling, _, *scoring = args
    if scoring != [SIGMOID] or not scores.shape[0]:
        return NotImplemented
    options = bias, renormalize, scaling, None, -1
    launch = kernels.LAUNCHES["grouped"]
    return kernels.route(launch, scores, top_k, options, torch.int32, None, (groups, chosen), key)


def hashed(args: Arguments, kwargs: Keywords) -> Any:
    """Run our kernel, unless a table names the experts or image tokens have a bias of their own."""
    if _tracing():
        return NotImplemented
    given = _in_order(HASH, HASH_DEFAULTS, args, kwargs)
    if given[8] is not None or given[10] is not None:
        return NotImplemented
    try:
        return _into("softplus_sqrt", given, given[6], given[5], given[9])
    except ValueError:
        return NotImplemented


def biased(replacement: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Let the replacement run where the model has a bias; without one vLLM's kernel has no defect.

    The same where ours does not take the shapes or dtypes, of which it says so before it writes. Then
    vLLM's kernel runs on a bias without NaN.
    """

    def instead(args: Arguments, kwargs: Keywords) -> Any:
        # What ``argument`` does, with a call less.
        if (args[position] if position < len(args) else kwargs.get(name)) is None:
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


def _scored_0(x: Any) -> Any:
    """Logits with the lowest one, whose score is 0, in place of NaN."""
    import torch

    return _without_nan(x, torch.finfo(x.dtype).min)


def _softmax_rows(logits: Any) -> Any:
    """Logits with 0 in all of a row that softmax would make NaN."""
    import torch

    bad = (logits.isnan() | (logits == torch.inf)).any(-1, keepdim=True)
    return torch.where(bad, 0.0, logits)


def _cleaned(
    args: Arguments,
    kwargs: Keywords,
    names: tuple[str, ...],
    positions: Sequence[int],
    clean: Callable[[Any], Any] = _without_nan,
) -> tuple[Arguments, Keywords]:
    """The arguments of a call with those at some positions cleaned; one that is missing stays missing."""
    for position in positions:
        if (x := argument(args, kwargs, position, names[position])) is not None:
            args, kwargs = replaced(args, kwargs, position, names[position], clean(x))
    return args, kwargs


def clean_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    return _cleaned(args, kwargs, TOPK, [5])


def clean_grouped_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    return _cleaned(args, kwargs, GROUPED, [6])


def clean_hash_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    # The bias, and that of image tokens (0.30.0).
    return _cleaned(args, kwargs, HASH, [6, 10])


def clean_logits(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    return clean_bias(*_cleaned(args, kwargs, TOPK, [3], _softmax_rows))


def clean_sigmoid_logits(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    return clean_bias(*_cleaned(args, kwargs, TOPK, [3], _scored_0))


def clean_scores(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    logits = argument(args, kwargs, 7, GROUPED[7], 0) == SIGMOID
    return clean_grouped_bias(*_cleaned(args, kwargs, GROUPED, [0], _scored_0 if logits else _without_nan))


def clean_hash(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Clean the logits and the bias of ``topk_hash_softplus_sqrt``; a NaN logit scores 0.

    With a table, which names the experts of each token, nothing is compared and nothing is cleaned.
    """
    if argument(args, kwargs, 8, HASH[8]) is not None:
        return None
    return clean_hash_bias(*_cleaned(args, kwargs, HASH, [3], _scored_0))


# FlashInfer sorts the slots of a batch by expert in one thread block if the batch has at most this many
# tokens, an expert's number at most this many bits, and a token one of these numbers of slots. Every slot
# then gets a row of its own, so a repeated expert does no harm. Otherwise three kernels sort them: they write
# only the first of equal slots, and the last kernel reads what none of them wrote
# (``fusedBuildExpertMapsSortFirstToken`` in cutlass_fused_moe_kernels.cuh, the same from 0.3.0 to 0.6.9).
BLOCK_TOKENS, BLOCK_BITS, BLOCK_TOP_K = 256, 9, (1, 2, 4, 6, 8)
# The block also needs 2 bytes of shared memory per thread for each value of an expert's number. Up to this
# many bits that is 65 KiB, which every GPU has. Where it does not fit, the three kernels run.
ROOMY_BITS = 7


def sorts_in_one_block(tokens: int, top_k: int, experts: int, roomy_bits: int = ROOMY_BITS) -> bool:
    """Whether FlashInfer before 0.6.10 takes repeated experts of such a batch, weights of 4 bits left aside.

    Args:
        tokens, top_k, experts: the shape of the batch; the experts of this rank.
        roomy_bits: with so many bits of an expert's number the block's shared memory is enough for all its
            tokens. As it is: on every GPU.

    >>> sorts_in_one_block(128, 8, 128), sorts_in_one_block(129, 8, 128), sorts_in_one_block(1, 10, 128)
    (True, False, False)
    """
    # Two numbers more than experts: no expert of this rank, and no token.
    bits = (experts + 1).bit_length()
    most = BLOCK_TOKENS >> max(0, bits - roomy_bits)
    return tokens <= most and bits <= BLOCK_BITS and top_k in BLOCK_TOP_K


def distinct(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Make the ids distinct, unless FlashInfer takes repeated ones: then nothing is launched."""
    if len(args) > 6:
        _, _, hidden, w1, _, weights, ids = args[:7]
    else:
        hidden, w1, weights, ids = (argument(args, kwargs, i, APPLY[i]) for i in (2, 3, 5, 6))
    # Of weights that are stored otherwise than the activations, e.g. in 4 bits, three kernels sort the
    # slots. A trace keeps for all numbers of tokens what is true of one.
    if not _tracing() and hidden.dtype is w1.dtype:
        tokens, top_k = ids.shape
        if sorts_in_one_block(tokens, top_k, w1.shape[0]):
            return None
    from staleproof.ops.distinct_experts import distinct_experts

    weights, ids = distinct_experts(weights.contiguous(), ids.contiguous())
    if len(args) > 6:
        return (*args[:5], weights, ids, *args[7:]), kwargs
    args, kwargs = replaced(args, kwargs, 5, APPLY[5], weights)
    return replaced(args, kwargs, 6, APPLY[6], ids)
