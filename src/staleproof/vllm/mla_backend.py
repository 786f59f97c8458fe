"""An attention backend of vLLM whose decode is :func:`staleproof.mla_decode`; prefill stays vLLM's own.

``--attention-backend CUSTOM`` selects it, where the plugin has registered it. Only then does vLLM import
this module, which imports vLLM, as no other module of the plugin does. Its decode writes empty rows: 0,
with an lse of -inf. So a padded batch holds no NaN, and under context parallelism a rank without keys has
weight 0 in the merge (vLLM #55289).

vLLM asks a backend's class methods before it loads a model: another head size, cache dtype or GPU is refused
at the start, with the reason. Nothing is decided in the middle of a run.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention import mla_attention as common
from vllm.v1.attention.backend import AttentionCGSupport

from staleproof.ops.mla.decode import mla_decode

# DeepSeek's row of the cache: 512 latent elements and 64 rotary ones.
HEAD_SIZE, RANK = 576, 512
# Hopper's kernels read pages of 64 tokens.
PAGE_SIZE = 64
FP8 = ("fp8", "fp8_e4m3")


class MLADecodeMetadataBuilder(common.MLACommonMetadataBuilder):
    """vLLM's metadata for batches in which every request has the same number of query tokens (MTP)."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = common.QueryLenSupport.UNIFORM


class MLADecodeBackend(common.MLACommonBackend):
    """What vLLM asks before it selects this backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", *FP8]

    @staticmethod
    def get_name() -> str:
        """vLLM's own name for a backend that it does not ship."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MLADecodeImpl]:
        """The class that a layer of the model holds."""
        return MLADecodeImpl

    @staticmethod
    def get_builder_cls() -> type[MLADecodeMetadataBuilder]:
        """The class that makes the metadata of a step."""
        return MLADecodeMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Elements of a cached token: 576."""
        return [HEAD_SIZE]

    @staticmethod
    def get_supported_kernel_block_sizes(*spec: Any) -> list[int]:
        """Tokens of a page: 64. Later releases pass the cache's spec."""
        return [PAGE_SIZE]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper alone; :meth:`supports_combination` gives the reason for other GPUs."""
        return bool(capability.major == 9)

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Why vLLM must not select this backend, and which to name instead; ``None`` if it may.

        Releases pass other arguments here; the ones read are named in all of them.
        """
        named = dict(zip(("head_size", "dtype", "kv_cache_dtype"), args, strict=False)) | kwargs
        if kwargs.get("use_sparse"):
            return "staleproof's MLA decode has no sparse attention; use FLASHMLA_SPARSE"
        capability = kwargs.get("device_capability") or (args[-1] if args else None)
        if getattr(capability, "major", 9) != 9:
            return "staleproof's MLA decode is fast on Hopper (SM90) only; use TRITON_MLA or FLASHINFER_MLA"
        if named.get("head_size") not in (None, HEAD_SIZE):
            return f"staleproof's MLA decode expects head_size {HEAD_SIZE}; use TRITON_MLA"
        return None


class MLADecodeImpl(common.MLACommonImpl):
    """One layer. vLLM calls :meth:`forward_mqa` for the decode tokens of a step."""

    can_return_lse_for_decode: bool = True
    supports_dcp: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The kernels read an E4M3 cache beside queries of 16 bits.
        if self.kv_cache_dtype in FP8:
            self.supports_quant_query_input = False
        for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
            if getattr(self, name, None):
                raise NotImplementedError(
                    f"{name}: expected none, which staleproof's MLA decode has no code for"
                )

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode: every query token against its request's pages.

        Args:
            q: (tokens, heads, 576), or its latent and rotary parts.
            kv_c_and_k_pe_cache: (pages, 64, 576), the dtype of ``q`` or E4M3.
            attn_metadata: vLLM's, with the block table and the lengths of the decode requests.
            layer: vLLM's attention layer, which has the scale of an E4M3 cache.

        Returns:
            (tokens, heads, 512) and (tokens, heads) float32; an empty row is 0, with an lse of -inf.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        decode = attn_metadata.decode
        requests, (tokens, heads, width) = decode.seq_lens.shape[0], q.shape
        if tokens != requests:
            # Drafts: each request has the same number of query tokens (QueryLenSupport.UNIFORM).
            q = q.view(requests, tokens // requests, heads, width)
        out, lse = mla_decode(
            q,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            softmax_scale=self.scale,
            k_scale=layer._k_scale_float if self.kv_cache_dtype in FP8 else 1.0,
        )
        return out.view(tokens, heads, RANK), lse.view(tokens, heads)
