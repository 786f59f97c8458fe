"""SmolLM2 over vLLM's own MLA layer and backend: what an MLA decode kernel does can be read as text.

vLLM's DeepSeek model cannot hold it: its rotary part is one head for all, and SmolLM2 rotates three key
heads of 64 elements each. So this model is vLLM's Llama with another attention: a token's latent of 512
elements holds its three values and its three rotated keys, the rotary part is zero, and ``kv_b_proj`` picks
each head's own columns. That is exact, and layer, cache, backend and kernels are vLLM's.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

# DeepSeek's latent, rotary part, and heads of keys and of values: vLLM's prefill on a GPU takes no others. Of
# a head only SmolLM2's first 64 columns are not zero.
RANK, ROTARY, HEAD = 512, 64, 128
NAME = "LatentLlamaForCausalLM"
# Of vllm.LLM. As an MLA model vLLM knows DeepSeek's type; the sizes are those of its latent.
OPTIONS: dict[str, Any] = {
    "hf_overrides": {
        "architectures": [NAME], "model_type": "deepseek_v2", "kv_lora_rank": RANK, "q_lora_rank": None,
        "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": HEAD, "v_head_dim": HEAD,
    },
    "enable_prefix_caching": False,
}  # fmt: skip


def register() -> None:
    """Tell vLLM of the model; then ``Engine(folder of SmolLM2, **OPTIONS)`` serves it."""
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.models import llama

    from vllm import ModelRegistry

    class Nothing(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    class LatentAttention(llama.LlamaAttention):
        def __init__(self, *args: Any, cache_config: Any, prefix: str, **kwargs: Any) -> None:
            # The layer that is replaced must not be made: it would choose a backend, and get a cache.
            with mock.patch.object(llama, "Attention", Nothing):
                super().__init__(*args, cache_config=cache_config, prefix=prefix, **kwargs)
            del self.attn
            heads = self.num_heads
            self.up = ColumnParallelLinear(RANK, 2 * heads * HEAD, bias=False, prefix=f"{prefix}.up")
            self.latent = MLAAttention(
                num_heads=heads, scale=self.scaling, qk_nope_head_dim=HEAD, qk_rope_head_dim=ROTARY,
                v_head_dim=HEAD, q_lora_rank=None, kv_lora_rank=RANK, kv_b_proj=self.up,
                cache_config=cache_config, prefix=f"{prefix}.attn",
            )  # fmt: skip

        def pick_columns(self) -> None:
            """Key and value of each head: the columns of its group."""
            dim = self.head_dim
            weight = self.up.weight.data.zero_().view(self.num_heads, 2 * HEAD, RANK)
            for head, rows in enumerate(weight):
                value = head // (self.num_heads // self.num_kv_heads) * dim
                rows[:dim, self.kv_size + value :].fill_diagonal_(1)
                rows[HEAD : HEAD + dim, value:].fill_diagonal_(1)

        def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
            qkv, _ = self.qkv_proj(hidden_states)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], -1)
            q, k = self.rotary_emb(positions, q, k)
            pad = torch.nn.functional.pad
            latent = pad(torch.cat([v, k], -1), (0, RANK - 2 * self.kv_size))
            heads, dim = self.num_heads, self.head_dim
            query = pad(q.view(len(q), heads, dim), (0, HEAD - dim + ROTARY))
            rotary = k.new_zeros(len(k), 1, ROTARY)
            out = self.latent(query, latent, rotary, output_shape=(len(q), heads * HEAD))
            return self.o_proj(out.view(len(q), heads, HEAD)[..., :dim].flatten(1))[0]

    class Layer(llama.LlamaDecoderLayer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, attn_layer_type=LatentAttention, **kwargs)

    class LatentLlama(llama.LlamaForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=Layer)

        def load_weights(self, weights: Any) -> set[str]:
            loaded: set[str] = super().load_weights(weights)
            for name, module in self.named_modules():
                if isinstance(module, LatentAttention):
                    module.pick_columns()
                    loaded.add(f"{name}.up.weight")
            return loaded

    ModelRegistry.register_model(NAME, LatentLlama)
