"""Routing whose expert ids are distinct, whatever bits the logits hold. The fix of incident 3.

vLLM picks experts in k rounds of float comparisons, and a comparison with a NaN is always false, so
that one expert can win twice (vLLM #39593). vLLM's fix clamps the scores but not the bias, and a
NaN there has the same effect (vLLM #39391). Here each score and its index form one integer key: no
two keys are equal, so no expert can be picked twice. One launch, from logits to ids and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from staleproof import check, device
from staleproof.ops.launching import Key, Ready, Seen, address, empty, key_of, launched
from staleproof.ops.operators import operator

device.load_triton()

import triton

from staleproof.ops.routing_kernel import topk_kernel

INTERPRET = device.interpreting()
MAX_EXPERTS, MAX_TOP_K = 1024, 32
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IDS_DTYPES = (torch.int32, torch.int64)


def _plan(rows: int, experts: int, narrow: bool, scored: bool, grouped: bool) -> tuple[bool, int, int]:
    """Whether to sort, rows a program, warps: the best of a sweep on an H200.

    Sorting is faster if the choice is by scores, with a bias or groups (``scored``), and not by the logits.
    """
    if INTERPRET:
        # The interpreter needs as long for one row as for many, and seconds for a sort.
        return False, min(64, triton.next_power_of_2(rows)), 1
    if rows <= 256 and scored:
        return True, 1, 4
    if grouped and rows < 4096:
        return False, 1, 2
    if rows < 4096:
        return (False, 4, 4) if rows > 512 and 64 < experts <= 128 else (False, 1, 1)
    places = triton.next_power_of_2(experts)
    return False, max(1, min(4, (1024 if narrow else 512) // places)), 1


def _launch(
    score: str,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    scaling: float,
    padding_id: int,
    groups: int = 0,
    topk_group: int = 1,
    sanitize: bool = True,
) -> Ready | None:
    """Launch the kernel; ``groups`` is 0 for a choice among all experts.

    ``score`` is softmax, sigmoid or softplus_sqrt.
    """
    (rows, experts), top_k = x.shape, weights.shape[1]
    # Key and index fit into 32 bits if the choice is among 16-bit logits themselves.
    scored = bias is not None or groups > 0
    narrow = not scored and x.dtype != torch.float32
    sort, rows_each, warps = _plan(rows, experts, narrow, scored, groups > 0)
    slots = max(2, triton.next_power_of_2(top_k))
    group_size = max(triton.next_power_of_2(experts // (groups or 1)), 1 if groups else slots)
    of = score == "softmax", score == "softplus_sqrt"
    has = bias is not None, is_padding is not None, renormalize, scaling != 1.0
    how = narrow, sanitize, sort, top_k, slots, topk_group
    of_groups = groups > 0, triton.next_power_of_2(groups or 1), group_size, rows_each
    sizes = x.stride(0), rows, experts, groups or 1, padding_id, scaling, *of, *has, *how, *of_groups
    grid = (triton.cdiv(rows, rows_each),)
    # A fused multiply-add rounds once where the reference rounds twice.
    tensors = x, bias, is_padding, weights, ids
    return launched(topk_kernel, grid, tensors, sizes, enable_fp_fusion=False, num_warps=warps)


_ARGUMENTS = (
    "Tensor router_logits, Tensor? bias, Tensor? is_padding, Tensor(a!) topk_weights, "
    "Tensor(b!) topk_ids, bool renormalize, float routed_scaling_factor, int padding_id"
)


# The vLLM hooks use these too: they call them directly, without the public functions.
LAUNCHES = {
    score: operator(f"topk_{score}({_ARGUMENTS}) -> ()")(partial(_launch, score))
    for score in ("softmax", "sigmoid", "softplus_sqrt")
}
_GROUPED = f"grouped_topk({_ARGUMENTS}, int num_expert_group, int topk_group) -> ()"
LAUNCHES["grouped"] = operator(_GROUPED)(partial(_launch, "sigmoid"))
_SEEN: Seen[Ready] = Seen()


def route(
    launch: Callable[..., Ready | None],
    x: torch.Tensor,
    top_k: int,
    options: tuple[torch.Tensor | None, bool, float, torch.Tensor | None, int],
    topk_ids_dtype: torch.dtype,
    out: tuple[torch.Tensor, torch.Tensor] | None,
    groups: tuple[int, ...] = (),
    key: Key | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments, allocate the results, launch.

    Args:
        launch: one of :data:`LAUNCHES`.
        x, top_k, topk_ids_dtype, out: as in :func:`topk_softmax`, where ``x`` is named ``router_logits``.
        options: bias, renormalize, routed_scaling_factor, is_padding, padding_id.
        groups: num_expert_group and topk_group, for grouped routing.
        key: the key that the caller did not find in ``_SEEN``; the call is kept under it.

    >>> x, options = torch.tensor([[0.0, 3.0, 1.0]]), (None, False, 1.0, None, -1)
    >>> route(LAUNCHES["softmax"], x, 2, options, torch.int32, None)[1].tolist()
    [[1, 2]]
    """
    bias, renormalize, routed_scaling_factor, is_padding, padding_id = options
    if key is None:
        results = out if isinstance(out, tuple | list) else (out,)
        key = key_of(x, launch, top_k, *options, topk_ids_dtype, *groups, *results)
    if (again := _SEEN.get(key)) is not None:
        if out is None:
            rows = x.shape[0]
            weights = empty((rows, top_k), torch.float32, x)
            ids = empty((rows, top_k), topk_ids_dtype, x)
        else:
            weights, ids = out
        again(x.data_ptr(), address(bias), address(is_padding), weights.data_ptr(), ids.data_ptr())
        return weights, ids
    check.tensor("router_logits", x, ndim=2, dtype=LOGITS_DTYPES)
    (rows, experts), strides = x.shape, x.stride()
    check.require(rows > 0, "router_logits", "at least one token", tuple(x.shape))
    check.require(0 < experts <= MAX_EXPERTS, "router_logits", f"1 to {MAX_EXPERTS} experts", experts)
    check.require(strides[1] == 1, "router_logits", "contiguous rows", f"strides {strides}")
    if not (isinstance(top_k, int) and 1 <= top_k <= min(experts, MAX_TOP_K)):
        # A text with sizes is formatted on failure only: torch cannot trace it with symbolic sizes.
        check.fail("top_k", f"1 to {min(experts, MAX_TOP_K)} experts", repr(top_k))
    if groups:
        _check_groups(experts, top_k, *groups)
    like: dict[str, Any] = {"like": x, "contiguous": True}
    if bias is not None:
        check.tensor("bias", bias, shape=(experts,), dtype=LOGITS_DTYPES, **like)
    if is_padding is not None:
        check.tensor("is_padding", is_padding, shape=(rows,), dtype=torch.bool, **like)
        in_range = isinstance(padding_id, int) and -(2**31) <= padding_id < 2**31
        check.require(in_range, "padding_id", "a 32-bit integer", padding_id)
    is_number = isinstance(routed_scaling_factor, (int, float))
    if not (is_number and abs(routed_scaling_factor) <= torch.finfo(torch.float32).max):
        check.fail("routed_scaling_factor", "a finite float32", repr(routed_scaling_factor))
    known = topk_ids_dtype in IDS_DTYPES
    check.require(known, "topk_ids_dtype", "torch.int32 or torch.int64", topk_ids_dtype)
    if out is None:
        weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
        ids = torch.empty(rows, top_k, dtype=topk_ids_dtype, device=x.device)
    else:
        check.out_pair(out, "(topk_weights, topk_ids)")
        weights, ids = out
        check.tensor("out[0]", weights, shape=(rows, top_k), dtype=torch.float32, **like)
        check.tensor("out[1]", ids, shape=(rows, top_k), dtype=IDS_DTYPES, **like)
    made = launch(x, bias, is_padding, weights, ids, renormalize, routed_scaling_factor, padding_id, *groups)
    _SEEN.keep(key, made)
    return weights, ids


def _check_groups(experts: int, top_k: int, num_expert_group: int, topk_group: int) -> None:
    fits = isinstance(num_expert_group, int) and num_expert_group > 0
    size = experts // num_expert_group if fits else 0
    if size < 2 or size * num_expert_group != experts:
        wanted = f"a divisor of {experts} experts that leaves two or more a group"
        check.require(False, "num_expert_group", wanted, num_expert_group)
    fits = isinstance(topk_group, int) and 1 <= topk_group <= num_expert_group
    if not fits or topk_group * size < top_k:
        wanted = f"1 to {num_expert_group} groups of {size} that hold top_k {top_k} experts"
        check.require(False, "topk_group", wanted, topk_group)


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

    Replaces vLLM's ``ops.topk_softmax``, which before 0.20.0 gave one expert k times in a row with
    NaN (vLLM #39593). A NaN, a +inf, or a row of only -inf makes every softmax score of the row NaN.
    Such scores count as 0, so that the row gets experts 0 to k - 1 with weights 0. One launch, no
    host sync.

    Args:
        router_logits: (tokens, experts) float32, float16 or bfloat16, at least one token, at most
            1024 experts; each row contiguous.
        top_k: experts a token, at most 32.
        bias: (experts,) float32, float16 or bfloat16, added to the scores for the choice only. A
            NaN in it counts as 0.
        renormalize: divide the weights of each token by their sum, unless that is 0.
        routed_scaling_factor: finite factor on the weights, applied after ``renormalize``.
        is_padding: (tokens,) bool, True for padding: those rows get ``padding_id`` and weights 0.
        padding_id: the id in padding rows. Some consumers index with a -1 (vLLM #46428).
        topk_ids_dtype: torch.int32 or torch.int64. Ignored if ``out`` is given.
        out: ``(topk_weights, topk_ids)`` to write to, contiguous, of the results' shape.

    Returns:
        ``topk_weights`` (tokens, top_k) float32, finite, the scores without bias; ``topk_ids``
        (tokens, top_k), distinct and in range for each token, best first; among equal scores the
        lower id comes first.

    Raises:
        ValueError: an argument does not fit; nothing was written.

    >>> logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, float("nan"), 1.0, 2.0]])
    >>> weights, ids = topk_softmax(logits, 2, renormalize=True)
    >>> ids.tolist()
    [[1, 3], [0, 1]]
    >>> [[round(w, 3) for w in row] for row in weights.tolist()]
    [[0.731, 0.269], [0.0, 0.0]]
    """
    options = bias, renormalize, routed_scaling_factor, is_padding, padding_id
    return route(LAUNCHES["softmax"], router_logits, top_k, options, topk_ids_dtype, out)


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

    Replaces vLLM's ``ops.topk_sigmoid``, where a NaN in the bias still repeats experts, because it
    clamps the scores before it adds the bias (vLLM #39391). A NaN logit scores 0. Arguments, results
    and errors are those of :func:`topk_softmax`.

    >>> weights, ids = topk_sigmoid(torch.tensor([[0.0, float("nan"), 2.0]]), 3)
    >>> ids.tolist(), [round(w, 3) for w in weights[0].tolist()]
    ([[2, 0, 1]], [0.881, 0.5, 0.0])
    """
    options = bias, renormalize, routed_scaling_factor, is_padding, padding_id
    return route(LAUNCHES["sigmoid"], router_logits, top_k, options, topk_ids_dtype, out)


def topk_softplus_sqrt(
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
    """The ``top_k`` experts of largest sqrt(log(1 + exp(logit))) for each token, distinct for any input bits.

    Replaces vLLM's ``ops.topk_hash_softplus_sqrt`` without a hash table, DeepSeek-V4's routing, where a
    NaN in the logits (before 0.28.0) or in the bias repeats experts. A logit of NaN or +inf scores 0.
    Arguments, results and errors are those of :func:`topk_softmax`.

    >>> weights, ids = topk_softplus_sqrt(torch.tensor([[0.0, float("nan"), 2.0]]), 3)
    >>> ids.tolist(), [round(w, 3) for w in weights[0].tolist()]
    ([[2, 0, 1]], [1.458, 0.833, 0.0])
    """
    options = bias, renormalize, routed_scaling_factor, is_padding, padding_id
    return route(LAUNCHES["softplus_sqrt"], router_logits, top_k, options, topk_ids_dtype, out)


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

    The score of a group is the sum of its two best scores with bias. A NaN logit scores 0. Replaces
    vLLM's ``ops.grouped_topk`` with ``scoring_func`` 1.

    Args:
        num_expert_group: number of groups. Each has the same number of consecutive experts, at
            least two.
        topk_group: how many groups a token's experts come from; together they hold ``top_k``.

    The other arguments, the results and errors are those of :func:`topk_softmax`.

    >>> logits = torch.tensor([[9.0, -9.0, 1.0, 1.0]])
    >>> grouped_topk(logits, 2, num_expert_group=2, topk_group=1)[1].tolist()
    [[2, 3]]
    """
    options = bias, renormalize, routed_scaling_factor, is_padding, padding_id
    groups = num_expert_group, topk_group
    return route(LAUNCHES["grouped"], router_logits, top_k, options, topk_ids_dtype, out, groups)
