"""The mixture-of-experts routers and experts of transformers, on any device."""

from __future__ import annotations

from staleproof import audit


@audit.routing(name="MixtralTopKRouter", package="transformers")
def mixtral(router_logits, top_k):
    import types

    import torch
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    # An identity for a weight, so that the hidden states are the logits.
    experts = router_logits.shape[1]
    config = types.SimpleNamespace(num_experts_per_tok=top_k, num_local_experts=experts, hidden_size=experts)
    router = MixtralTopKRouter(config).to(router_logits)
    router.weight.data = torch.eye(experts).to(router_logits)
    return router(router_logits)[1:]


@audit.routing(name="GptOssTopKRouter", package="transformers")
def gpt_oss(router_logits, top_k):
    import types

    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    experts = router_logits.shape[1]
    config = types.SimpleNamespace(num_experts_per_tok=top_k, num_local_experts=experts, hidden_size=experts)
    router = GptOssTopKRouter(config).to(router_logits)
    router.weight.data, router.bias.data = (
        torch.eye(experts).to(router_logits),
        torch.zeros_like(router_logits[0]),
    )
    return router(router_logits)[1:]


@audit.experts(name="MixtralExperts", package="transformers")
def mixtral_experts(x, w1, w2, topk_weights, topk_ids):
    import types

    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = types.SimpleNamespace(
        num_local_experts=len(w1), hidden_size=x.shape[1], intermediate_size=w2.shape[2], hidden_act="silu",
        _experts_implementation="eager",
    )  # fmt: skip
    experts = MixtralExperts(config).to(x)
    experts.gate_up_proj.data, experts.down_proj.data = w1, w2
    return experts(x, topk_ids, topk_weights.to(x.dtype)).detach()
