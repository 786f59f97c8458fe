"""The mixture-of-experts routers and experts of transformers, on any device."""

from __future__ import annotations

import torch

from staleproof.kernels import subject


def _routers(*names):
    def mark(function):
        for name, module, grouped in reversed(names):
            given = {"name": name, "module": f"transformers.models.{module}.modeling_{module}"}
            subject.routing(name=name, package="transformers", given=given, grouped=grouped)(function)
        return function

    return mark


@_routers(
    ("MixtralTopKRouter", "mixtral", False),
    ("GptOssTopKRouter", "gpt_oss", False),
    ("Qwen3MoeTopKRouter", "qwen3_moe", False),
    ("OlmoeTopKRouter", "olmoe", False),
)
def router(router_logits, top_k, name, module):
    import importlib
    import types

    experts = router_logits.shape[1]
    config = types.SimpleNamespace(
        num_experts_per_tok=top_k, hidden_size=experts, num_experts=experts, num_local_experts=experts,
        norm_topk_prob="Olmoe" not in name,
    )  # fmt: skip
    router = getattr(importlib.import_module(module), name)(config).to(router_logits)
    # The weight is the identity, so that the logits equal the hidden states.
    router.weight.data = torch.eye(experts).to(router_logits)
    if hasattr(router, "bias"):
        router.bias.data = torch.zeros_like(router_logits[0])
    return router(router_logits)[1:]


@subject.routing(name="DeepseekV3TopkRouter", package="transformers", grouped=True)
def deepseek_v3(router_logits, top_k, bias=None):
    import types

    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    experts = router_logits.shape[1]
    config = types.SimpleNamespace(
        num_experts_per_tok=top_k, hidden_size=experts, num_local_experts=experts,
        routed_scaling_factor=1.0, n_group=4, topk_group=2, norm_topk_prob=True,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config).to(router_logits)
    router.weight.data = torch.eye(experts).to(router_logits)
    if bias is not None:
        router.e_score_correction_bias.data = bias
    return router(router_logits)[1:]


@subject.routing(name="MiniMaxM2TopKRouter", package="transformers")
def minimax_m2(router_logits, top_k, bias=None):
    import types

    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

    experts = router_logits.shape[1]
    config = types.SimpleNamespace(num_experts_per_tok=top_k, num_local_experts=experts, hidden_size=experts)
    router = MiniMaxM2TopKRouter(config).to(router_logits)
    router.weight.data = torch.eye(experts).to(router_logits)
    return router(router_logits, torch.zeros_like(router_logits[0]) if bias is None else bias)[1:]


@subject.experts(name="MixtralExperts", package="transformers")
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
