"""Incident 1 in an installed vLLM: rows of empty requests are cleared behind its MLA kernels."""

from __future__ import annotations

from typing import Any

from staleproof.vllm.hooks import Arguments, Evidence, Keywords, Patch, Sources, Target, argument

BACKENDS = "vllm.v1.attention.backends.mla"
KERNEL = "v1/attention/ops/triton_decode_attention.py"
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")


def _clear(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Clear rows of ``forward_mqa``'s (out, lse): (tokens, heads, rank) and (tokens, heads)."""
    from staleproof.ops.clear_empty_rows import clear_empty_rows

    out, lse = result
    if not out.numel():
        return result
    decode = argument(args, kwargs, 3, "attn_metadata").decode
    # Ragged queries (FlashInfer from 0.33.0): an empty request owns no rows, so that counting
    # rows a request would clear another's. Rows behind the last start belong to none.
    starts = getattr(decode, "query_start_loc", None)
    # Every backend returns an lse, and only context parallelism reads it.
    if lse is None or not getattr(args[0], "need_to_return_lse_for_decode", True):
        clear_empty_rows(out, decode.seq_lens, query_start_loc=starts)
        return result
    # CUTLASS cuts its 128 heads to the model's; Triton's has q's dtype.
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
        summary="clears the rows of empty requests behind the Triton, CUTLASS and FlashInfer MLA",
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
            "A later kernel that mixes rows hands the NaN to a live token. Behind each "
            "forward_mqa, on the device, rows of such requests become 0 and their lse -inf."
        ),
        threads=("vLLM #37442", "vLLM #38359", "vLLM #57017", "FlashInfer #2883"),
        cost="one launch a layer; RECORDED as patch mla_padding",
    ),
)
