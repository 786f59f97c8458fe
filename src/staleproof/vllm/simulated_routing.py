"""Draws of vLLM's simulated routing (``VLLM_MOE_ROUTING_SIMULATION_STRATEGY``): distinct int32 ids."""

from __future__ import annotations

from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument, replaced
from staleproof.vllm.sources import Evidence, Sources, file_of

SIMULATOR = "vllm.model_executor.layers.fused_moe.router.routing_simulator_router"
ROUTE = ("self", "hidden_states", "router_logits", "top_k", "indices_type")
SAMPLE = ("self", "num_tokens", "num_experts", "top_k", "device", "indices_type")


def int32_ids(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Ask ``route_tokens`` for int32 ids unless the caller names another dtype."""
    import torch

    if argument(args, kwargs, 4, "indices_type") is not None:
        return None
    return replaced(args, kwargs, 4, "indices_type", torch.int32)


def sample(args: Arguments, kwargs: Keywords) -> Any:
    """Draw each token's experts from the strategy's distribution, without replacement.

    The top_k largest of log p + Gumbel noise are such a draw. For the normal strategy, vLLM maps a
    sample to expert floor(sigmoid(sample) * experts); p is the probability of that interval.
    """
    import torch

    router, tokens, experts, top_k, device, dtype = (argument(args, kwargs, i, SAMPLE[i]) for i in range(6))
    if top_k > experts or router.distribution not in ("uniform", "normal"):
        return NotImplemented
    log_p = torch.zeros(experts, dtype=torch.float64, device=device)
    if router.distribution == "normal":
        given = router.distribution_params
        edges = torch.arange(experts + 1, dtype=torch.float64, device=device) / experts
        below = torch.special.ndtr((edges.logit() - given["mean"]) / given["std"])
        log_p = below.diff().log()
    uniform = torch.rand(tokens, experts, dtype=torch.float64, device=device)
    keys = log_p - uniform.log().neg().log()
    return keys.topk(top_k, dim=-1).indices.to(dtype)


def probe(sources: Sources) -> Evidence:
    """Read whether it draws with replacement, or gives int64 ids by default."""
    path = file_of(SIMULATOR)
    sample = sources.function(path, "DistributionBasedRouting._sample_expert_ids")
    route = sources.function(path, "DistributionBasedRouting.route_tokens")
    defects = []
    if "torch.long" in route.text:
        defects.append(f"{route.at('torch.long')} gives int64 ids by default")
    if "torch.randint" in sample.text:
        defects.append(f"{sample.at('torch.randint')} draws with replacement")
    elif "_sample_continuous_distribution" in sample.text:
        defects.append(
            f"{sample.at('_sample_continuous_distribution')} draws normal samples with replacement"
        )
    return Evidence(bool(defects), "; ".join(defects) or f"{route.place} gives distinct int32 ids")
