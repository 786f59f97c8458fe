"""The models that a real engine loads: small configurations of our own, with dummy weights.

Each has the shape of a published model (its attention, its router, its cache groups) and few layers, so
that an engine starts in seconds and needs no download.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleproof.check import require

# What all of them say; the tokens are numbers, so that no tokenizer is needed.
_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "initializer_range": 0.02,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

_GROUPLESS: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 8000,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}

MODELS: dict[str, dict[str, Any]] = {
    # MLA attention, softmax router without groups.
    "deepseek_v2": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
    },
    # The router of DeepSeek-V3: sigmoid scores, groups, and a bias that takes part in the choice only.
    "deepseek_v3": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 512,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
    },
    # Full attention only: vLLM records the blocks it hands out, and nothing reads the record.
    "qwen3": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "rope_theta": 10000.0,
        "attention_bias": False,
    },
    # The shape of Qwen3-30B-A3B: a softmax router without groups, 8 of 128 experts.
    "qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 8000,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 1000000.0,
        "attention_bias": False,
    },
    # Three layers of linear attention, one of full attention: blocks change hands between the two.
    "qwen3_next": {
        **_COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 8000,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts_per_tok": 2,
        "num_experts": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 1, 2],
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    # Three layers of linear attention (KDA), one of MLA, which has no positions; DeepSeek's router.
    "kimi_linear": {
        **_COMMON,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 8000,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "moe_intermediate_size": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "linear_attn_config": {
            # Numbers of layers from 1 on.
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
    },
    # A router with sigmoid scores and a bias, without groups.
    "minimax_m2": {
        **_GROUPLESS,
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "intermediate_size": 512,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "rotary_dim": 64,
        "use_qk_norm": True,
        "rope_theta": 10000.0,
    },
    # A router with softmax scores and a bias, without groups.
    "ernie4_5_moe": {
        **_GROUPLESS,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 1,
        "use_bias": False,
        "rope_theta": 10000.0,
    },
}


def write_config(folder: Path, model: str, changes: Mapping[str, Any]) -> None:
    """Write ``config.json`` of a model, as ``vllm.LLM(model=folder)`` reads it.

    Args:
        folder: where; it exists.
        model: a key of :data:`MODELS`.
        changes: fields that differ from the table's.

    Raises:
        ValueError: an unknown model; nothing was written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_config(Path(folder), "qwen3", {"num_hidden_layers": 2})
    ...     json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"]
    2
    """
    require(model in MODELS, "model", f"one of {sorted(MODELS)}", model)
    (folder / "config.json").write_text(json.dumps({**MODELS[model], **changes}, indent=1))
