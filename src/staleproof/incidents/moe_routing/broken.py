"""The faulty expert choices, and upstream's remedies, each named after what it does.

The two CUDA choices are emulated lane by lane in PyTorch, with the same comparisons, so that they give
the same ids on every machine. The two Triton choices run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

# The warp overwrites the score of a chosen expert with this, in its registers.
CHOSEN = -10000.0
BLOCK_THREADS = 256
Choice = Callable[[torch.Tensor, int, int], torch.Tensor]


def warp_columns(experts: int, itemsize: int) -> torch.Tensor:
    """The columns that each lane of a warp holds, (lanes, columns a lane), in ascending order.

    A row is read in pieces of 16 bytes, which go to the lanes in turn (vLLM's ``topkGating``). If the number
    of experts is a multiple of 64 but not a power of two, a piece is two elements.
    """
    piece = min(16 // itemsize, experts) if experts & (experts - 1) == 0 else 2
    lanes = experts // (max(1, experts // (piece * 32)) * piece)
    return torch.arange(experts).view(-1, lanes, piece).transpose(0, 1).flatten(1)


def warp_keeps_its_first_column(choice: torch.Tensor, top_k: int, itemsize: int) -> torch.Tensor:
    """A warp's argmax, top_k times, with strict comparisons: no number compares larger than a NaN.

    Each lane starts from its first column and scans for a larger score; lanes exchange their best
    by butterfly; lane 0 writes, and the lane that holds the winner blanks it. With NaN, lanes can disagree
    about the winner. An all-NaN row gives expert 0 each time. Stands for ``topkGating`` of
    vLLM up to 0.19.1 (vLLM #39593) where the number of experts is a power of two up to 512, or on CUDA
    a multiple of 64 up to 576 (0.19.1 ``csrc/moe/topk_softmax_kernels.cu:677-697``).

    Args:
        choice: (rows, experts) float32, scores and bias.
        top_k: rounds.
        itemsize: bytes of a logit before conversion; they decide the columns of a lane.

    Returns:
        (rows, top_k) int32 ids.

    Raises:
        ValueError: another number of experts.
    """
    experts = choice.shape[1]
    fits = (0 < experts <= 512 and experts & (experts - 1) == 0) or experts in range(64, 577, 64)
    check.require(
        fits, "choice", "a power of two of experts up to 512, or a multiple of 64 up to 576", experts
    )
    columns = warp_columns(experts, itemsize).to(choice.device)
    lane = torch.arange(len(columns), device=choice.device)
    in_lanes = choice[:, columns]
    ids = torch.empty(len(choice), top_k, dtype=torch.int32, device=choice.device)
    for turn in range(top_k):
        best, expert = in_lanes[..., 0], columns[:, 0].expand(len(choice), -1)
        for index in range(1, columns.shape[1]):
            larger = in_lanes[..., index] > best
            best = torch.where(larger, in_lanes[..., index], best)
            expert = torch.where(larger, columns[:, index], expert)
        distance = len(lane) // 2
        while distance:
            other, other_expert = best[:, lane ^ distance], expert[:, lane ^ distance]
            wins = (other > best) | ((other == best) & (other_expert < expert))
            best = torch.where(wins, other, best)
            expert = torch.where(wins, other_expert, expert)
            distance //= 2
        ids[:, turn] = expert[:, 0]
        in_lanes = torch.where(columns == expert[..., None], CHOSEN, in_lanes)
    return ids


def _arg_max(
    left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """cub::ArgMax of (expert, score) pairs: the left pair, unless the right score compares larger."""
    wins = (right[1] > left[1]) | ((right[1] == left[1]) & (right[0] < left[0]))
    return torch.where(wins, right[0], left[0]), torch.where(wins, right[1], left[1])


def block_keeps_the_left(choice: torch.Tensor, top_k: int, itemsize: int) -> torch.Tensor:
    """A block's argmax, top_k times, whose operator returns its left operand if no score is larger.

    Thread t looks at the experts t, t + 256, ... and skips those chosen before. An all-NaN
    row gives expert 0 each time; with more than 256 experts it first gives 256. Stands for ``moeTopK`` of
    vLLM up to 0.19.1, the path for all other numbers of experts. Arguments and
    result are those of :func:`warp_keeps_its_first_column`.
    """
    rows, experts = choice.shape
    threads = torch.arange(BLOCK_THREADS, device=choice.device)
    ids = torch.full((rows, top_k), -1, dtype=torch.int32, device=choice.device)
    for turn in range(top_k):
        pair = (
            torch.zeros(rows, BLOCK_THREADS, dtype=torch.int64, device=choice.device),
            torch.full((rows, BLOCK_THREADS), -1.0, device=choice.device),
        )
        for first in range(0, experts, BLOCK_THREADS):
            expert = (first + threads).expand(rows, -1)
            passed_over = (expert[..., None] == ids[:, None, :turn]).any(-1) | (expert >= experts)
            score = choice.gather(1, expert.clamp(max=experts - 1))
            candidate = (torch.where(passed_over, pair[0], expert), torch.where(passed_over, pair[1], score))
            pair = _arg_max(candidate, pair)
        # Reduce neighbours within each warp first, then warp after warp.
        by_warp = [part.view(rows, -1, 32) for part in pair]
        while by_warp[0].shape[-1] > 1:
            even, odd = ([part[..., side::2] for part in by_warp] for side in (0, 1))
            by_warp = list(_arg_max((even[0], even[1]), (odd[0], odd[1])))
        result = (by_warp[0][:, 0, 0], by_warp[1][:, 0, 0])
        for warp in range(1, by_warp[0].shape[1]):
            result = _arg_max(result, (by_warp[0][:, warp, 0], by_warp[1][:, warp, 0]))
        ids[:, turn] = result[0]
    return ids


@triton.jit
def _float_order_kernel(
    choice, ids, experts,
    SORT: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    score = tl.load(choice + row * experts + expert, mask=expert < experts, other=-3e38)
    # The low 10 bits carry the index, inverted so that the lower expert wins a tie. A NaN stays a NaN.
    bits = (score.to(tl.int32, bitcast=True) & -1024) | (1023 - expert)
    packed = bits.to(tl.float32, bitcast=True)
    if SORT:
        ordered = tl.sort(packed, descending=True)
        slot = tl.arange(0, BLOCK)
    else:
        ordered = tl.topk(packed, SLOTS)
        slot = tl.arange(0, SLOTS)
    chosen = 1023 - (ordered.to(tl.int32, bitcast=True) & 1023)
    tl.store(ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)


def _float_order(choice: torch.Tensor, top_k: int, sort: bool) -> torch.Tensor:
    rows, experts = choice.shape
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=choice.device)
    _float_order_kernel[(rows,)](
        choice.contiguous(),
        ids,
        experts,
        SORT=sort,
        TOP_K=top_k,
        SLOTS=max(2, triton.next_power_of_2(top_k)),
        BLOCK=max(2, triton.next_power_of_2(experts)),
        num_warps=1,
    )
    return ids


def sort_swaps_raw_nan(choice: torch.Tensor, top_k: int, itemsize: int) -> torch.Tensor:
    """``tl.sort`` of floats that carry their index. Its swap duplicates one neighbour of a NaN.

    Compiled and interpreted Triton, 3.6 to 3.9. Arguments and result are those of
    :func:`warp_keeps_its_first_column`; ``itemsize`` is not used.
    """
    return _float_order(choice, top_k, sort=True)


def topk_swaps_raw_nan(choice: torch.Tensor, top_k: int, itemsize: int) -> torch.Tensor:
    """``tl.topk`` of floats that carry their index, with the swap of ``tl.sort``."""
    return _float_order(choice, top_k, sort=False)


CHOICES: dict[str, Choice] = {
    "warp_keeps_its_first_column": warp_keeps_its_first_column,
    "block_keeps_the_left": block_keeps_the_left,
    "sort_swaps_raw_nan": sort_swaps_raw_nan,
    "topk_swaps_raw_nan": topk_swaps_raw_nan,
}


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Remedy:
    """What upstream changed, and at which step of the routing.

    Attributes:
        on_load: applied to the logits before they are scored.
        after_scoring: applied to the scores before the bias is added.
        skips_padding: whether padding rows get the id -1 and weights 0.
    """

    on_load: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    after_scoring: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    skips_padding: bool = False


def _lowest_for_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.finfo(torch.float32).min, x)


def _zero_for_nan_and_infinity(scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores.isfinite(), scores, 0.0)


REMEDIES: dict[str, Remedy] = {
    "none": Remedy(),
    # A separate pass over the logits, as users of affected versions did (vLLM #39593).
    "nan_to_num_before": Remedy(on_load=torch.nan_to_num),
    # The form that vLLM #39593 timed: an all-NaN row becomes all -inf, and its softmax is NaN again.
    "nan_to_minus_infinity_before": Remedy(on_load=partial(torch.nan_to_num, nan=-torch.inf)),
    # vLLM #39593, closed.
    "lowest_on_load": Remedy(on_load=_lowest_for_nan),
    # vLLM #39391, from 0.20.0 on. The bias is added after the clamp.
    "clamp_after_scoring": Remedy(after_scoring=_zero_for_nan_and_infinity),
    # vLLM #46428: the id -1. Consumers that index with ids cannot handle it.
    "skip_padding": Remedy(skips_padding=True),
}


def route(
    choose: Choice,
    router_logits: torch.Tensor,
    top_k: int,
    *,
    softmax: bool = True,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
    remedy: Remedy = REMEDIES["none"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score with softmax or sigmoid, choose, and look up the weights, with one remedy applied.

    Args and results are those of :func:`staleproof.ops.topk.topk_softmax`.
    """
    x = remedy.on_load(router_logits.float())
    scores = remedy.after_scoring(x.softmax(-1) if softmax else x.sigmoid())
    choice = scores if bias is None else scores + bias.float()
    ids = choose(choice, top_k, router_logits.element_size())
    weights = scores.gather(1, ids.long())
    if remedy.skips_padding and is_padding is not None:
        ids = ids.masked_fill(is_padding[:, None], -1)
        weights = weights.masked_fill(is_padding[:, None], 0.0)
    return weights, ids


def quantise_fp8(x: torch.Tensor, *, per_token: bool, drops_nan: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic fp8 as GPU kernels do it, or as PyTorch does.

    Kernels compute the largest magnitude with ``fmaxf``, starting at 0, and clamp with ``fminf`` and
    ``fmaxf``. These return the operand that is a number, so the result has no NaN (vLLM's
    ``dynamic_scaled_fp8_quant``). ``torch.amax`` and ``torch.clamp`` keep a NaN
    (``QuantFP8.forward_native``). Both ways count an infinity as a magnitude.

    Args:
        x: (rows, columns).
        per_token: whether each row has a scale of its own.
        drops_nan: whether NaN is dropped, as kernels do, or kept, as PyTorch does.

    Returns:
        e4m3 values like x, and float32 scales (rows, 1) or (1, 1).
    """
    magnitude = x.abs().float()
    if drops_nan:
        magnitude = magnitude.fmax(torch.zeros_like(magnitude))
    scale = (magnitude.amax(1, keepdim=True) if per_token else magnitude.amax().view(1, 1)) / 448.0
    scaled = x.float() / scale
    if drops_nan:
        scaled = scaled.fmin(torch.full_like(scaled, 448.0)).fmax(torch.full_like(scaled, -448.0))
    else:
        scaled = scaled.clamp(-448.0, 448.0)
    return scaled.to(torch.float8_e4m3fn), scale
