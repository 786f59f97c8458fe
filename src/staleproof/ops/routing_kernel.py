"""The kernel behind the routing functions of :mod:`staleproof.ops.topk`: from logits to ids and weights.

Scores are compared as integers, because a comparison of floats is false whenever one is a NaN. Each
rounding is one float32 operation, which the reference repeats on a CPU: both give the same bits.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl


@triton.jit
def as_float32(x):
    if x.dtype == tl.bfloat16:
        # A shift of the bits, because the interpreter's cast rounds denormals differently.
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def exp_times(x, POWER: tl.constexpr):
    """exp(x) * 2**POWER for x from -104 to 0. POWER must keep the result a normal number."""
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
def exp(x):
    """exp(x) for x <= 0, and 0 for a NaN, with the same steps as ``reference.topk.exp``."""
    # Computed 2**64 too large, so that a denormal result is rounded only once, by the product.
    return exp_times(tl.where(x > -104.0, x, -104.0), 64) * 5.421010862427522e-20


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), and 0 for a NaN."""
    small = exp(tl.where(x < 0, x, -x))
    return tl.div_rn(tl.where(x >= 0, 1.0, small), 1.0 + small)


@triton.jit
def finite_or_least(x):
    """-inf in place of NaN and +inf."""
    return tl.where((x > -float("inf")) & (x < float("inf")), x, -float("inf"))


@triton.jit
def softplus_sqrt(x):
    """The square root of log(1 + exp(x)); 0 for a NaN."""
    small = exp(tl.where(x < 0, x, -x))
    # log(1 + small) is twice the inverse hyperbolic tangent of this, which is 1/3 at most.
    z = tl.div_rn(small, small + 2.0)
    square = z * z
    q = square * 0.15384615384615385 + 0.18181818181818182
    q = q * square + 0.2222222222222222
    q = q * square + 0.2857142857142857
    q = q * square + 0.4
    q = q * square + 0.6666666666666666
    logarithm = q * square * z + z + z
    return tl.sqrt_rn(tl.where(x > 0, x, 0.0) + logarithm)


@triton.jit
def exact_sum(x):
    """Sum of each row of numbers in [0, 2), which the caller has multiplied by 2**40.

    The sum is in fixed point (int64), so that the result does not depend on the order of summation.
    """
    return tl.sum(x.to(tl.int64), 1).to(tl.float32) * 9.094947017729282e-13


@triton.jit
def order_of(x):
    """An int32 that orders as the float32 does. -0 equals 0; NaNs lie beyond both infinities.

    The infinities are 0x7F800000 and -0x7F800000.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return (bits ^ (sign & 0x7FFFFFFF)) - sign


@triton.jit
def number_of(order):
    """The float32 whose ``order_of`` this is."""
    sign = order >> 31
    return ((order + sign) ^ (sign & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def wide_key(order, index):
    """An int64 that compares by order; of equal orders, the lower index (0 to 1023) is larger."""
    return (order.to(tl.int64) << 32) | (1023 - index)


@triton.jit
def narrow_key(order, index):
    """The same in an int32, for the order of a 16-bit float, whose 13 lowest bits are 0."""
    return ((order >> 3) & -1024) | (1023 - index)


@triton.jit
def close_groups(
    order, group_count,
    TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """``order`` (rows, GROUPS * GROUP_SIZE), with LEAST for experts outside the TOPK_GROUP best groups."""
    rows: tl.constexpr = order.shape[0]
    grouped = tl.reshape(order, [rows, GROUPS, GROUP_SIZE])
    best = tl.max(grouped, 2)
    is_best = grouped == best[:, :, None]
    # At least the most negative finite number, because +inf + -inf would be a NaN.
    second = tl.max(tl.where(is_best, -0x7F7FFFFF, grouped), 2)
    second = tl.where(tl.sum(is_best.to(tl.int32), 2) > 1, best, second)
    group = tl.arange(0, GROUPS)[None, :]
    key = wide_key(order_of(number_of(best) + number_of(second)), group)
    key = tl.where(group < group_count, key, -(2**63))
    # The rank of a group is the number of better groups.
    rank = tl.sum((key[:, None, :] > key[:, :, None]).to(tl.int32), 2)
    is_open = (rank < TOPK_GROUP)[:, :, None]
    return tl.reshape(tl.where(is_open, grouped, LEAST), [rows, GROUPS * GROUP_SIZE])


@triton.jit
def best_keys(key, slot, TOP_K: tl.constexpr):
    """The TOP_K largest of each row of narrow keys, in descending order."""
    best = tl.max(key, 1)
    chosen = tl.zeros([key.shape[0], slot.shape[1]], tl.int32) + best[:, None]
    for index in tl.static_range(1, TOP_K):
        # Relative to the last winner, the keys below it wrap to large uint32 values, and the nearest
        # one below is the largest. Keys that have already won become 0 or small values.
        nearest = tl.max((key - best[:, None]).to(tl.uint32, bitcast=True), 1)
        best += nearest.to(tl.int32, bitcast=True)
        chosen = tl.where(slot >= index, best[:, None], chosen)
    return chosen


@triton.jit
def best_orders(order, index, slot, TOP_K: tl.constexpr, LEAST: tl.constexpr):
    """1023 - index of the TOP_K largest of each row; among equals the lower index comes first."""
    chosen = tl.zeros([order.shape[0], slot.shape[1]], tl.int32)
    flipped = 1023 - index
    for turn in tl.static_range(TOP_K):
        best = tl.max(order, 1)
        winner = tl.max(tl.where(order == best[:, None], flipped, 0), 1)
        chosen = tl.where(slot == turn, winner[:, None], chosen)
        order = tl.where(flipped == winner[:, None], LEAST, order)
    return chosen


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
    # Places without an expert hold -inf. Their index is higher, so they lose to every expert with -inf.
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
        chosen = best_keys(key, slot, TOP_K)
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
