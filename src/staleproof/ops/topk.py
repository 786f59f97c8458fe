"""The fix of incident 3: routing whose expert ids are distinct whatever the logits hold.

Upstream picks by k rounds of comparisons, which a NaN wins or loses at will (vLLM #39593); its fix
clamps the scores and leaves a NaN bias to do the same (vLLM #39391). Here a number and its index
make one integer key: no two keys are equal and integers know no NaN, so no bits can bring the same
expert twice. One launch, from logits to ids and weights.
"""

from __future__ import annotations

from typing import Any

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()
MAX_EXPERTS, MAX_TOP_K = 1024, 32
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IDS_DTYPES = (torch.int32, torch.int64)


@triton.jit
def _float32(x):
    if x.dtype == tl.bfloat16:
        # By its bits: the interpreter's own conversion of denormals is another.
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _exp_times(x, POWER: tl.constexpr):
    """exp(x) * 2**POWER for x from -104 to 0 and a POWER that keeps it a normal number."""
    # Adding 1.5 * 2**23 leaves the nearest integer in the low bits.
    shift = 12582912.0 + POWER
    shifted = x * 1.4426950408889634 + shift
    rounded = shifted - shift
    r = x - rounded * 0.693359375 - rounded * -0.00021219444005469058
    q = r * 0.00138146126 + 0.00836871006
    q = q * r + 0.0416683902
    q = q * r + 0.166665211
    q = q * r + 0.49999994
    value = q * (r * r) + r + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (value.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    """``reference.exp`` step by step: e to the power of x <= 0, and 0 for a NaN."""
    # The product rounds what becomes denormal, once.
    return _exp_times(tl.where(x > -104.0, x, -104.0), 64) * 5.421010862427522e-20


@triton.jit
def _sigmoid(x):
    """0 for a NaN."""
    small = _exp(tl.where(x < 0, x, -x))
    return tl.div_rn(tl.where(x >= 0, 1.0, small), 1.0 + small)


@triton.jit
def _exact_sum(x):
    """Sums of the rows of numbers in [0, 2) times 2**40, cut to integers: any order, same bits."""
    return tl.sum(x.to(tl.int64), 1).to(tl.float32) * 9.094947017729282e-13


@triton.jit
def _order(x):
    """An int32 that orders as the float32 does, with -0 equal to 0 and NaN beyond both infinities.

    The infinities are 0x7F800000 and -0x7F800000.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return (bits ^ (sign & 0x7FFFFFFF)) - sign


@triton.jit
def _number(order):
    """The float32 of an ``_order``."""
    sign = order >> 31
    return ((order + sign) ^ (sign & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(order, index):
    """One integer of an order and an index, the lower index above the higher among equals."""
    return (order.to(tl.int64) << 32) | (1023 - index)


@triton.jit
def _narrow_key(order, index):
    """The same in 29 bits for an order of 16 bits, which is 0 in its 13 lowest."""
    return ((order >> 3) & -1024) | (1023 - index)


@triton.jit
def _close_groups(
    order, group_count,
    TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Orders (rows, GROUPS * GROUP_SIZE) with LEAST for all outside the TOPK_GROUP best groups."""
    rows: tl.constexpr = order.shape[0]
    grouped = tl.reshape(order, [rows, GROUPS, GROUP_SIZE])
    best = tl.max(grouped, 2)
    is_best = grouped == best[:, :, None]
    # No less than the most negative number: a sum with +inf is no NaN.
    second = tl.max(tl.where(is_best, -0x7F7FFFFF, grouped), 2)
    second = tl.where(tl.sum(is_best.to(tl.int32), 2) > 1, best, second)
    group = tl.arange(0, GROUPS)[None, :]
    key = _key(_order(_number(best) + _number(second)), group)
    key = tl.where(group < group_count, key, -(2**63))
    # A group's rank is the number of better ones.
    rank = tl.sum((key[:, None, :] > key[:, :, None]).to(tl.int32), 2)
    is_open = (rank < TOPK_GROUP)[:, :, None]
    return tl.reshape(tl.where(is_open, grouped, LEAST), [rows, GROUPS * GROUP_SIZE])


@triton.jit
def _best_keys(key, slot, TOP_K: tl.constexpr):
    """The TOP_K largest of each row of narrow keys, in the slots 0 to TOP_K - 1."""
    best = tl.max(key, 1)
    chosen = tl.zeros([key.shape[0], slot.shape[1]], tl.int32) + best[:, None]
    for index in tl.static_range(1, TOP_K):
        # What lies above wraps around to a small number, and the nearest below is the largest.
        beyond = tl.max((key - best[:, None]).to(tl.uint32, bitcast=True), 1)
        best += beyond.to(tl.int32, bitcast=True)
        chosen = tl.where(slot >= index, best[:, None], chosen)
    return chosen


@triton.jit
def _best_orders(order, index, slot, TOP_K: tl.constexpr, LEAST: tl.constexpr):
    """1023 less the index of the TOP_K largest of each row, the lower index first among equals."""
    chosen = tl.zeros([order.shape[0], slot.shape[1]], tl.int32)
    flipped = 1023 - index
    for turn in tl.static_range(TOP_K):
        best = tl.max(order, 1)
        winner = tl.max(tl.where(order == best[:, None], flipped, 0), 1)
        chosen = tl.where(slot == turn, winner[:, None], chosen)
        order = tl.where(flipped == winner[:, None], LEAST, order)
    return chosen


@triton.jit
def _topk_kernel(
    logits, bias, is_padding, weights, ids, row_stride, rows, experts, group_count, padding_id,
    scaling,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr, RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr, NARROW: tl.constexpr, SANITIZE: tl.constexpr, SORT: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    GROUPED: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows. GROUPS, GROUP_SIZE and SLOTS are rounded up to powers of two.

    SANITIZE is for measuring what it costs: without it, a NaN yields wrong experts and weights.
    """
    # Below the order of every float32, those of -inf and NaN among them.
    LEAST: tl.constexpr = -(2**31)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    place = tl.arange(0, GROUPS * GROUP_SIZE)
    if GROUPED:
        size = experts // group_count
        expert = place // GROUP_SIZE * size + place % GROUP_SIZE
        exists = (place % GROUP_SIZE < size) & (place // GROUP_SIZE < group_count)
    else:
        expert = place
        exists = place < experts
    line = logits + row * row_stride
    here = in_rows[:, None] & exists[None, :]
    # Experts that do not exist come last among those of -inf.
    x = _float32(tl.load(line[:, None] + expert[None, :], mask=here, other=-float("inf")))
    order = _order(x)
    if SOFTMAX:
        # Turned until what lay below -inf wraps around: -inf is the least, every NaN above +inf.
        turned = order - 0x00800000
        if NARROW:
            key = _narrow_key(turned, expert[None, :])
            top = (tl.max(key, 1) & -1024) << 3
        else:
            top = tl.max(turned, 1)
        peak = _number(top + 0x00800000)
        from_peak = x - peak[:, None]
        from_peak = tl.where(from_peak > -104.0, from_peak, -104.0)
        total = _exact_sum(_exp_times(from_peak, 40))
        # 0 if, and only if, the peak is a NaN or an infinity: then every score is to be 0.
        inverse = tl.div_rn(1.0, total)
        if SANITIZE and BIASED:
            inverse = tl.where(total > 0.0, inverse, 0.0)
    elif not BIASED and not GROUPED:
        if SANITIZE:
            order = _order(tl.where(x > -float("inf"), x, -float("inf")))
        if NARROW:
            key = _narrow_key(order, expert[None, :])
    if BIASED or GROUPED:
        scores = _exp(from_peak) * inverse[:, None] if SOFTMAX else _sigmoid(x)
        if BIASED:
            bonus = _float32(tl.load(bias + expert, mask=exists, other=0.0))
            if SANITIZE:
                bonus = tl.where(bonus == bonus, bonus, 0.0)
            scores += bonus[None, :]
        order = _order(scores)

    slot = tl.arange(0, SLOTS)[None, :]
    if NARROW:
        chosen = tl.topk(key, SLOTS) if SORT else _best_keys(key, slot, TOP_K)
    else:
        order = tl.where(exists[None, :], order, LEAST)
        if GROUPED:
            order = _close_groups(order, group_count, TOPK_GROUP, GROUPS, GROUP_SIZE, LEAST)
        if SORT:
            chosen = tl.topk(_key(order, expert[None, :]), SLOTS).to(tl.int32)
        else:
            chosen = _best_orders(order, expert[None, :], slot, TOP_K, LEAST)
    chosen_id = ~chosen & 1023

    # The weights are the scores without bias: from the logits again, which are near.
    wanted = in_rows[:, None] & (slot < TOP_K)
    x = _float32(tl.load(line[:, None] + chosen_id, mask=wanted, other=-float("inf")))
    if SOFTMAX:
        weight = _exp(x - peak[:, None]) * inverse[:, None]
        if SANITIZE and not BIASED:
            # Infinitely much of nothing is a NaN here, in the rows whose total is 0 alone.
            is_number = weight == weight
            weight = tl.where(is_number, weight, 0.0)
            chosen_id = tl.where(is_number, chosen_id, slot)
    else:
        weight = _sigmoid(x)
    if RENORMALIZE:
        # By the power of two that brings the largest to 1 or a little above it.
        largest = tl.max(weight.to(tl.int32, bitcast=True), 1) & 0x7F800000
        scaled = weight * (0x7F000000 - largest).to(tl.float32, bitcast=True)[:, None]
        total = _exact_sum(scaled * 1099511627776.0)[:, None]
        weight = tl.where(total > 0, tl.div_rn(scaled, tl.where(total > 0, total, 1.0)), weight)
    if SCALED:
        weight = weight * scaling
    if PADDED:
        padding = tl.load(is_padding + row, mask=in_rows, other=0) != 0
        weight = tl.where(padding[:, None], 0.0, weight)
        chosen_id = tl.where(padding[:, None], padding_id, chosen_id)
    target = row[:, None] * TOP_K + slot
    tl.store(weights + target, weight, mask=wanted)
    tl.store(ids + target, chosen_id.to(ids.dtype.element_ty), mask=wanted)


def _plan(rows: int, experts: int, narrow: bool) -> tuple[bool, int, int]:
    """Whether to sort, rows a program, warps: the best of a sweep on an H200."""
    if INTERPRET:
        # There an operation costs the same for one row as for many, and a sort takes seconds.
        return False, min(64, triton.next_power_of_2(rows)), 1
    if rows <= 256 and not narrow:
        return True, 1, 4
    if rows < 4096:
        return (False, 4, 4) if rows > 512 and 64 < experts <= 128 else (False, 1, 1)
    places = triton.next_power_of_2(experts)
    return False, max(1, min(4, (1024 if narrow else 512) // places)), 1


def _route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    softmax: bool,
    bias: torch.Tensor | None,
    renormalize: bool,
    is_padding: torch.Tensor | None,
    padding_id: int,
    routed_scaling_factor: float,
    topk_ids_dtype: torch.dtype,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    groups: int | None = None,
    topk_group: int = 1,
    sanitize: bool = True,
    plan: tuple[bool, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check and launch. ``sanitize`` and ``plan`` are for measuring what they cost."""
    x = router_logits
    check.tensor("router_logits", x, ndim=2, dtype=LOGITS_DTYPES)
    (rows, experts), strides = x.shape, x.stride()
    check.require(rows > 0, "router_logits", "at least one token", tuple(x.shape))
    most = MAX_EXPERTS
    check.require(0 < experts <= most, "router_logits", f"1 to {most} experts", experts)
    check.require(strides[1] == 1, "router_logits", "contiguous rows", f"strides {strides}")
    most = min(experts, MAX_TOP_K)
    in_range = isinstance(top_k, int) and 1 <= top_k <= most
    check.require(in_range, "top_k", f"1 to {most} experts", top_k)
    like: dict[str, Any] = {"like": x, "contiguous": True}
    if bias is not None:
        check.tensor("bias", bias, shape=(experts,), dtype=LOGITS_DTYPES, **like)
    if is_padding is not None:
        check.tensor("is_padding", is_padding, shape=(rows,), dtype=torch.bool, **like)
        in_range = isinstance(padding_id, int) and -(2**31) <= padding_id < 2**31
        check.require(in_range, "padding_id", "a 32-bit integer", padding_id)
    finite = abs(routed_scaling_factor) <= torch.finfo(torch.float32).max
    check.require(finite, "routed_scaling_factor", "a finite float32", routed_scaling_factor)
    known = topk_ids_dtype in IDS_DTYPES
    check.require(known, "topk_ids_dtype", "torch.int32 or torch.int64", topk_ids_dtype)
    if out is None:
        weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
        ids = torch.empty(rows, top_k, dtype=topk_ids_dtype, device=x.device)
    else:
        is_pair = isinstance(out, tuple | list) and len(out) == 2
        check.require(is_pair, "out", "a pair (topk_weights, topk_ids)", type(out).__name__)
        weights, ids = out
        check.tensor("out[0]", weights, shape=(rows, top_k), dtype=torch.float32, **like)
        check.tensor("out[1]", ids, shape=(rows, top_k), dtype=IDS_DTYPES, **like)

    # With a choice among 16-bit logits themselves, key and index fit into 32 bits.
    narrow = bias is None and groups is None and x.dtype != torch.float32
    sort, rows_each, warps = plan or _plan(rows, experts, narrow)
    slots = max(2, triton.next_power_of_2(top_k))
    group_size = max(triton.next_power_of_2(experts // (groups or 1)), 1 if groups else slots)
    _topk_kernel[(triton.cdiv(rows, rows_each),)](
        x,
        bias,
        is_padding,
        weights,
        ids,
        strides[0],
        rows,
        experts,
        groups or 1,
        padding_id,
        routed_scaling_factor,
        SOFTMAX=softmax,
        BIASED=bias is not None,
        PADDED=is_padding is not None,
        RENORMALIZE=renormalize,
        SCALED=routed_scaling_factor != 1.0,
        NARROW=narrow,
        SANITIZE=sanitize,
        SORT=sort,
        TOP_K=top_k,
        SLOTS=slots,
        TOPK_GROUP=topk_group,
        GROUPED=groups is not None,
        GROUPS=triton.next_power_of_2(groups or 1),
        GROUP_SIZE=group_size,
        ROWS=rows_each,
        # A fused product and sum round once, and only compiled code would fuse them.
        enable_fp_fusion=False,
        num_warps=warps,
    )
    return weights, ids


def topk_softmax(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
    padding_id: int = -1,
    topk_ids_dtype: torch.dtype = torch.int32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of largest softmax score for each token, distinct for any input bits.

    Takes the place of vLLM's ``ops.topk_softmax``, whose NaN rows gave one expert k times before
    0.20.0 (vLLM #39593). A NaN, +inf, or nothing but -inf in a row makes all its scores NaN: they
    count as 0, so the row gets the experts 0 to k - 1 with weights 0. One launch, no host sync.

    Args:
        router_logits: (tokens, experts) float32, float16 or bfloat16, at least one token, at most
            1024 experts; each row contiguous.
        top_k: experts a token, at most 32.
        bias: (experts,) float32, float16 or bfloat16, added to the scores for the choice only; a
            NaN in it is no bonus.
        renormalize: whether to divide a token's weights by their sum, where that is not 0.
        routed_scaling_factor: finite factor on the weights, after ``renormalize``.
        is_padding: (tokens,) bool; rows where it is true get ``padding_id`` and weights 0.
        padding_id: what padding rows hold; beware of consumers that index with -1 (vLLM #46428).
        topk_ids_dtype: torch.int32 or torch.int64; ``out`` brings its own.
        out: ``(topk_weights, topk_ids)`` to write to, contiguous, of the results' shape.

    Returns:
        ``topk_weights`` (tokens, top_k) float32, finite, the scores without bias; ``topk_ids``
        (tokens, top_k), distinct and in range for each token, best first, the lower id first among
        equals.

    Raises:
        ValueError: an argument does not fit.
    """
    return _route(
        router_logits,
        top_k,
        softmax=True,
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        is_padding=is_padding,
        padding_id=padding_id,
        topk_ids_dtype=topk_ids_dtype,
        out=out,
    )


def topk_sigmoid(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
    padding_id: int = -1,
    topk_ids_dtype: torch.dtype = torch.int32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of largest sigmoid score for each token, distinct for any input bits.

    Takes the place of vLLM's ``ops.topk_sigmoid``, in which a NaN bias still doubles experts
    (vLLM #39391 clamps before it). A NaN logit scores 0. The rest is as in :func:`topk_softmax`.
    """
    return _route(
        router_logits,
        top_k,
        softmax=False,
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        is_padding=is_padding,
        padding_id=padding_id,
        topk_ids_dtype=topk_ids_dtype,
        out=out,
    )


def grouped_topk(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    num_expert_group: int,
    topk_group: int,
    bias: torch.Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
    padding_id: int = -1,
    topk_ids_dtype: torch.dtype = torch.int32,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek's routing: sigmoid scores, and experts from the ``topk_group`` best groups only.

    A group's score is the sum of its two best scores with bias. A NaN logit counts as a score of 0.
    Takes the place of vLLM's ``ops.grouped_topk`` with ``scoring_func`` 1.

    Args:
        num_expert_group: groups of equally many experts, two or more; they stand side by side.
        topk_group: how many groups a token's experts come from; together they hold ``top_k``.

    The other arguments, the results and errors are those of :func:`topk_softmax`.
    """
    check.tensor("router_logits", router_logits, ndim=2)
    experts = router_logits.shape[1]
    fits = isinstance(num_expert_group, int) and num_expert_group > 0
    size = experts // num_expert_group if fits else 0
    check.require(
        size >= 2 and size * num_expert_group == experts,
        "num_expert_group",
        f"a divisor of {experts} experts that leaves two or more a group",
        num_expert_group,
    )
    fits = isinstance(topk_group, int) and 1 <= topk_group <= num_expert_group
    check.require(
        fits and topk_group * size >= top_k,
        "topk_group",
        f"1 to {num_expert_group} groups of {size} that hold top_k {top_k} experts",
        topk_group,
    )
    return _route(
        router_logits,
        top_k,
        softmax=False,
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        is_padding=is_padding,
        padding_id=padding_id,
        topk_ids_dtype=topk_ids_dtype,
        out=out,
        groups=num_expert_group,
        topk_group=topk_group,
    )
