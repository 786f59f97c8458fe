"""The kernel behind the routing functions of :mod:`staleproof.ops.topk`: from logits to ids and weights."""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl

from staleproof.ops.routing_scores import (
    as_float32,
    best_keys,
    best_orders,
    close_groups,
    exact_sum,
    exp,
    exp_times,
    finite_or_least,
    narrow_key,
    number_of,
    order_of,
    sigmoid,
    softplus_sqrt,
    wide_key,
)


# Not specialised on the number of rows: it changes from step to step, and no step should compile.
@triton.jit(do_not_specialize=["rows"])
def topk_kernel(
    logits, bias, is_padding, weights, ids, row_stride, rows, experts, group_count, padding_id,
    scaling,
    SOFTMAX: tl.constexpr, SOFTPLUS: tl.constexpr, BIASED: tl.constexpr, PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr, SANITIZE: tl.constexpr,
    SORT: tl.constexpr,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    GROUPED: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program routes ROWS tokens. GROUPS, GROUP_SIZE and SLOTS are powers of two.

    SANITIZE=False exists to measure what the handling of NaN costs: a NaN then yields wrong experts.
    """
    # Below the order of every float32, -inf and the NaNs included.
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
    # Places without an expert hold -inf, and their index puts them behind every expert of -inf.
    x = as_float32(tl.load(line[:, None] + expert[None, :], mask=here, other=-float("inf")))
    if SOFTPLUS and SANITIZE:
        x = finite_or_least(x)
    order = order_of(x)
    if SOFTMAX:
        # Orders below that of -inf wrap around: now -inf is the least, and every NaN is above +inf.
        turned = order - 0x00800000
        if NARROW:
            key = narrow_key(turned, expert[None, :])
            top = (tl.max(key, 1) & -1024) << 3
        else:
            top = tl.max(turned, 1)
        peak = number_of(top + 0x00800000)
        from_peak = x - peak[:, None]
        from_peak = tl.where(from_peak > -104.0, from_peak, -104.0)
        total = exact_sum(exp_times(from_peak, 40))
        # The total is 0 exactly if the peak is a NaN or an infinity, and every score must be 0 then.
        inverse = tl.div_rn(1.0, total)
        if SANITIZE and BIASED:
            inverse = tl.where(total > 0.0, inverse, 0.0)
    elif not BIASED and not GROUPED:
        if SANITIZE:
            order = order_of(tl.where(x > -float("inf"), x, -float("inf")))
        if NARROW:
            key = narrow_key(order, expert[None, :])
    if BIASED or GROUPED:
        if SOFTMAX:
            scores = exp(from_peak) * inverse[:, None]
        else:
            scores = softplus_sqrt(x) if SOFTPLUS else sigmoid(x)
        if BIASED:
            bonus = as_float32(tl.load(bias + expert, mask=exists, other=0.0))
            if SANITIZE:
                bonus = tl.where(bonus == bonus, bonus, 0.0)
            scores += bonus[None, :]
        order = order_of(scores)

    slot = tl.arange(0, SLOTS)[None, :]
    if NARROW:
        chosen = tl.topk(key, SLOTS) if SORT else best_keys(key, slot, TOP_K)
    else:
        order = tl.where(exists[None, :], order, LEAST)
        if GROUPED:
            order = close_groups(order, group_count, TOPK_GROUP, GROUPS, GROUP_SIZE, LEAST)
        if SORT:
            chosen = tl.topk(wide_key(order, expert[None, :]), SLOTS).to(tl.int32)
        else:
            chosen = best_orders(order, expert[None, :], slot, TOP_K, LEAST)
    chosen_id = ~chosen & 1023

    # Weights are scores without bias. Computed again from the logits, which are still in the cache.
    wanted = in_rows[:, None] & (slot < TOP_K)
    x = as_float32(tl.load(line[:, None] + chosen_id, mask=wanted, other=-float("inf")))
    if SOFTMAX:
        weight = exp(x - peak[:, None]) * inverse[:, None]
        if SANITIZE and not BIASED:
            # 0 * inf is a NaN. It occurs only in rows whose total is 0, which get the first experts.
            is_number = weight == weight
            weight = tl.where(is_number, weight, 0.0)
            chosen_id = tl.where(is_number, chosen_id, slot)
    elif SOFTPLUS:
        weight = softplus_sqrt(finite_or_least(x) if SANITIZE else x)
    else:
        weight = sigmoid(x)
    if RENORMALIZE:
        # First scaled by a power of two, so that the largest weight is in [1, 2).
        largest = tl.max(weight.to(tl.int32, bitcast=True), 1) & 0x7F800000
        scaled = weight * (0x7F000000 - largest).to(tl.float32, bitcast=True)[:, None]
        total = exact_sum(scaled * 1099511627776.0)[:, None]
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
