"""Expert ids for load tests, as vLLM's routing simulator draws them and as they should be.

The simulator (``routing_simulator_router.py``) has two independent faults. Its ids are int64, while
some consumers read the bytes as int32. And it draws with replacement, so that a token can get the
same expert twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from staleproof import check

Simulator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# Turns ids and weights into those that a kernel reads if it expects (tokens, top_k) int32.
Reader = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def duplicate_chance(experts: int, top_k: int) -> float:
    """Chance that ``top_k`` experts drawn with replacement are not all different (birthday problem).

    Raises:
        ValueError: fewer than one expert, or fewer than one a token.
    """
    check.require(experts > 0, "experts", "at least 1", experts)
    check.require(top_k > 0, "top_k", "at least 1", top_k)
    different = 1.0
    for taken in range(top_k):
        different *= max(0, experts - taken) / experts
    return 1 - different


def check_route(tokens: int, experts: int, top_k: int) -> None:
    """Raise ValueError unless there are tokens, and enough experts to give each ``top_k``."""
    check.require(tokens > 0, "tokens", "at least 1", tokens)
    check.require(0 < top_k <= experts, "top_k", f"1 to {experts} experts", top_k)


def simulate_routing(
    tokens: int, experts: int, top_k: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniformly random routing: distinct experts, with ids of the width a kernel reads.

    Each expert gets a random number and the ``top_k`` largest win, as in vLLM since #48740.

    Returns:
        ``topk_weights`` (tokens, top_k) float32, equal; ``topk_ids`` (tokens, top_k) int32.

    Raises:
        ValueError: no token, or more experts a token than there are.
    """
    check_route(tokens, experts, top_k)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    weights = torch.full((tokens, top_k), 1 / top_k)
    return weights.to(device), ids.to(device, torch.int32)


def require_int32_ids(topk_ids: torch.Tensor) -> torch.Tensor:
    """Return ``topk_ids`` if a kernel that reads (tokens, top_k) int32 can take it.

    FlashInfer's MnnvlMoe refuses other ids in this way (reported, vLLM #38352).

    Raises:
        ValueError: another dtype or rank, or not contiguous.
    """
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=torch.int32, contiguous=True)
    return topk_ids


def pack_topk(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Pack id and weight into one int32: the id in the upper half, the weight's bfloat16 bits in the lower.

    The format of TensorRT-LLM's routed MoE (vLLM, ``experts/trtllm_fp8_moe.py``).

    Args:
        topk_ids: (tokens, top_k) int32, below 2**15.
        topk_weights: (tokens, top_k) float.

    Raises:
        ValueError: ids of another width, or weights of another shape.
    """
    require_int32_ids(topk_ids)
    check.tensor("topk_weights", topk_weights, shape=tuple(topk_ids.shape), like=topk_ids)
    return topk_ids << 16 | weight_bits(topk_weights)


def weight_bits(topk_weights: torch.Tensor) -> torch.Tensor:
    """The bfloat16 bits of weights, as int32 from 0 to 65535."""
    return topk_weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF


def unpack_topk(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 and weights float32 out of :func:`pack_topk`."""
    return packed >> 16, (packed << 16).view(torch.float32)


def experts_twice(topk_ids: torch.Tensor) -> torch.Tensor:
    """(tokens,) bool: which tokens have an expert twice."""
    ordered = topk_ids.sort(-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(-1)
