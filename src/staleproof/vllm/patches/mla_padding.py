"""Patch for incident 1: clears the rows of empty requests after vLLM's MLA decode kernels."""

from __future__ import annotations

from typing import Any

from staleproof.vllm.hooks import Arguments, Keywords, Target, argument
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources

BACKENDS = "vllm.v1.attention.backends.mla"
KERNEL = "v1/attention/ops/triton_decode_attention.py"
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")


def _clear(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Clear the rows of empty requests in ``forward_mqa``'s result.

    That is (out, lse): (tokens, heads, rank) and (tokens, heads), or ``None`` for lse.
    """
    from staleproof.ops.clear_empty_rows import clear_empty_rows

    out, lse = result
    if not out.numel():
        return result
    decode = argument(args, kwargs, 3, "attn_metadata").decode
    # With ragged queries (FlashInfer from 0.33.0) an empty request owns no rows. Dividing the rows
    # evenly among the requests would clear rows of others. Rows after the last start are padding.
    starts = getattr(decode, "query_start_loc", None)
    # Only context parallelism reads the lse; otherwise it need not be cleared.
    if lse is None or not getattr(args[0], "need_to_return_lse_for_decode", True):
        clear_empty_rows(out, decode.seq_lens, query_start_loc=starts)
        return result
    # The op takes a contiguous fp32 lse. CUTLASS returns a slice of 128 heads, Triton one of q's dtype.
    plain = lse.float().contiguous()
    clear_empty_rows(out, decode.seq_lens, lse=plain, query_start_loc=starts)
    if plain is not lse:
        lse.copy_(plain)
    return result


def _probe(sources: Sources) -> Evidence:
    stage2 = sources.function(KERNEL, "_fwd_kernel_stage2")
    guarded = any(f"e_sum {sign} 0" in stage2.text for sign in ("==", "!=", ">"))
    if "acc / e_sum" in stage2.text and not guarded:
        return Evidence(True, f"{stage2.place} divides by a sum that is 0 in an empty row")
    return Evidence(False, f"{stage2.place} does not divide by 0")


PATCHES = (
    Patch(
        name="mla_padding",
        incident="mla_padding",
        summary="clears the rows of empty requests after the Triton, CUTLASS and FlashInfer MLA",
        versions=(("0.17.1", "0.33.0"),),
        targets=tuple(
            Target(f"{BACKENDS}.{module}", f"{name}.forward_mqa", FORWARD_MQA, after=_clear)
            for module, name in (
                ("triton_mla", "TritonMLAImpl"),
                ("cutlass_mla", "CutlassMLAImpl"),
                ("flashinfer_mla", "FlashInferMLAImpl"),
            )
        ),
        probe=_probe,
        mechanism=(
            "A decode batch is padded to the size of a captured graph with requests of seq_len 0. "
            "CUTLASS and FlashInfer leave their output rows unwritten, Triton MLA writes 0 / 0. "
            "A later kernel that mixes rows passes the NaN on to a live token. With the patch the "
            "rows of such requests become 0, and their lse -inf, after each forward_mqa."
        ),
        threads=("vLLM #37442", "vLLM #38359", "vLLM #57017", "FlashInfer #2883"),
        cost="one launch a layer; RECORDED as patch mla_padding",
    ),
)
