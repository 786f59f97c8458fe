"""Patches for incident 1: they clear empty rows after MLA decode and before the merge of decode context
parallelism, and leave padding out of fp8 scales.

TurboQuant is no MLA, but its decode ends in the same Triton kernel.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from staleproof.vllm import fp8_scales
from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, PatchError, Sources, evidence, file_of, line_of

BACKENDS = "vllm.v1.attention.backends.mla"
TURBOQUANT = "vllm.v1.attention.backends.turboquant_attn"
TURBOQUANT_KERNEL = "vllm.v1.attention.ops.triton_turboquant_decode"
STAGE2 = "vllm.v1.attention.ops.triton_decode_attention", "_fwd_kernel_stage2"
# In vLLM's kernel, and with the divisor of an empty row, whose accumulator is 0, made 1.
DIVISION, GUARDED = "acc / e_sum", "acc / tl.where(e_sum == 0.0, 1.0, e_sum)"
# What a backend would say that clears these rows itself, or gives the kernel zeros for them.
CLEARED = re.compile(r"seq_lens\s*(==|<=|>|!=)\s*0|masked_fill")
# The merges of decode context parallelism: after all ranks' lse were gathered, and after an all-to-all.
GATHERED, EXCHANGED = "vllm.v1.attention.ops.common", "vllm.v1.attention.ops.dcp_alltoall"
CORRECT = "_correct_attn_cp_out_kernel"
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")


@functools.cache
def _guarded(kernel: Any) -> Any:
    """vLLM's kernel with one operation more, so that it writes 0 into empty rows: nothing runs after it.

    Raises:
        PatchError: the kernel is not as expected.
    """
    function = getattr(kernel, "fn", None)
    try:
        lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    except (TypeError, OSError) as error:
        raise PatchError(f"{STAGE2[1]} has no source: {error}") from error
    source = textwrap.dedent("".join(lines))
    # Without its decorator, which is repeated below.
    source = source[source.index("def ") :]
    if source.count(DIVISION) != 1:
        raise PatchError(f"{STAGE2[1]} does not divide by e_sum once")
    source = source.replace(DIVISION, GUARDED)
    # Triton reads the source of a kernel by the name of its file.
    name = f"{inspect.unwrap(function).__code__.co_filename}/{first}, empty rows guarded"  # type: ignore[arg-type]
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    made: dict[str, Any] = {}
    exec(compile(source, name, "exec"), function.__globals__, made)  # type: ignore[union-attr]
    guarded = type(kernel)(made[STAGE2[1]])
    guarded.staleproof_replaces = kernel
    return guarded


def _clear(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Clear the rows of empty requests in ``forward_mqa``'s result.

    That is (out, lse): (tokens, heads, rank) and (tokens, heads), or ``None`` for lse.
    """
    from staleproof.ops.clear_empty_rows import clear_empty_rows

    out, lse = result
    if not out.numel():
        return result
    decode = argument(args, kwargs, 3, "attn_metadata").decode
    # With ragged queries (FlashInfer from 0.31.0) an empty request owns no rows. Dividing the rows
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


def _clear_turboquant(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Clear the rows of empty requests in the result of TurboQuant's decode, (requests, heads, dim)."""
    from staleproof.ops.clear_empty_rows import clear_empty_rows

    # Its last kernel is vLLM's stage 2, which it imported before or after that was exchanged.
    module = sys.modules.get(TURBOQUANT_KERNEL)
    if hasattr(getattr(module, STAGE2[1], None), "staleproof_replaces"):
        return result
    seq_lens = argument(args, kwargs, 3, "attn_metadata").seq_lens
    # The lengths may be those of a larger batch. A row is a request: it has one query token.
    if 0 < len(result) <= len(seq_lens):
        clear_empty_rows(result, seq_lens[: len(result)])
    return result


def clear_dead_rows(out: Any, lse: Any) -> None:
    """Zero the rows that a merge of ranks gives the weight 0: those whose lse is -inf, inf or NaN.

    Args:
        out: one rank's output, ``(tokens, heads, dim)`` or ``(tokens, 1, heads, dim)``; changed in place.
        lse: its log-sum-exp, of as many rows.

    >>> import torch
    >>> out = torch.tensor([[[1.0, 2.0]], [[torch.nan, 3.0]]])
    >>> clear_dead_rows(out, torch.tensor([[0.5], [-torch.inf]]))
    >>> out.tolist()
    [[[1.0, 2.0]], [[0.0, 0.0]]]
    """
    out.masked_fill_(~lse.isfinite().reshape(*out.shape[:-1], 1), 0.0)


def _clear_gathered(args: Arguments, kwargs: Keywords) -> None:
    lses, rank = argument(args, kwargs, 1, "lses"), argument(args, kwargs, 2, "cp_rank")
    clear_dead_rows(argument(args, kwargs, 0, "out"), lses[rank])


def _clear_exchanged(args: Arguments, kwargs: Keywords) -> None:
    clear_dead_rows(argument(args, kwargs, 0, "cp_attn_out"), argument(args, kwargs, 1, "cp_attn_lse"))


def _gathered(sources: Sources) -> Evidence:
    path, product = file_of(GATHERED), "output = output * factor"
    if f"def {CORRECT}" not in sources.text(path):
        return Evidence(False, f"{path} has no {CORRECT}")
    found = sources.function(path, CORRECT)
    bad, good = "weighs the row of a rank without keys by 0", "drops rows of weight 0"
    return evidence(found, "factor == 0.0" not in found.text, product, bad, good)


def _exchanged(sources: Sources) -> Evidence:
    path = file_of(EXCHANGED)
    if not (sources.package / path).is_file():
        return Evidence(False, f"no {path}")
    text, weight = sources.text(path), "weight = tl.where(weight != weight"
    if weight in text and "weight == 0.0" not in text:
        return Evidence(True, f"{path}:{line_of(text, weight)} weighs the row of a rank without keys by 0")
    return Evidence(False, f"{path} drops rows of weight 0")


def _merges(sources: Sources) -> Evidence:
    found = [_gathered(sources), _exchanged(sources)]
    needed = [one.why for one in found if one.needed]
    return Evidence(bool(needed), "; ".join(needed or [one.why for one in found]))


def _stage2(sources: Sources) -> Evidence:
    stage2 = sources.function(file_of(STAGE2[0]), STAGE2[1])
    guarded = any(f"e_sum {sign} 0" in stage2.text for sign in ("==", "!=", ">"))
    if "acc / e_sum" in stage2.text and not guarded:
        return Evidence(True, f"{stage2.at('acc / e_sum')} divides by a sum that is 0 in an empty row")
    return Evidence(False, f"{stage2.place} does not divide by 0")


def _backend(module: str, name: str) -> Callable[[Sources], Evidence]:
    """Probe a backend whose kernel is not in Python: does vLLM clear the rows that it leaves?"""

    def probe(sources: Sources) -> Evidence:
        found = sources.function(file_of(module), name)
        if CLEARED.search(found.text):
            return Evidence(False, f"{found.place} clears the rows of empty requests")
        return Evidence(True, f"{found.place} does not clear the rows of empty requests")

    return probe


def _turboquant(sources: Sources) -> Evidence:
    if not (sources.package / file_of(TURBOQUANT_KERNEL)).is_file():
        return Evidence(False, "no TurboQuant")
    decode = sources.function(file_of(TURBOQUANT_KERNEL), "triton_turboquant_decode_attention")
    if "_fwd_kernel_stage2[" in decode.text:
        return Evidence(_stage2(sources).needed, f"{decode.place} ends in that kernel")
    return Evidence(False, f"{decode.place} has a kernel of its own")


def _mla(module: str, name: str, decode: str) -> Target:
    module = f"{BACKENDS}.{module}"
    probe = _backend(module, f"{name}.{decode}")
    return Target(module, f"{name}.forward_mqa", FORWARD_MQA, after=_clear, probe=probe)


TARGETS = (
    Target(*STAGE2, ("Mid_O", "o", "lse", "B_Seqlen"), swap=_guarded, probe=_stage2),
    _mla("cutlass_mla", "CutlassMLAImpl", "_sm100_cutlass_mla_decode"),
    _mla("flashinfer_mla", "FlashInferMLAImpl", "forward_mqa"),
    Target(
        TURBOQUANT,
        "TurboQuantAttentionImpl._decode_attention",
        ("self", "query", "kv_cache", "attn_metadata"),
        after=_clear_turboquant,
        versions=("0.20.0", "0.33.0"),
        probe=_turboquant,
    ),
)


def _probe(sources: Sources) -> Evidence:
    """Each backend has the defect or not; one is enough."""
    found = [target.probe(sources) for target in TARGETS if target.probe is not None]
    needed = [one.why for one in found if one.needed]
    return Evidence(bool(needed), "; ".join(needed or [one.why for one in found]))


PATCHES = (
    Patch(
        name="mla_padding",
        incident="mla_padding",
        summary="clears the rows of empty requests after Triton, CUTLASS and FlashInfer MLA, and TurboQuant",
        models="MLA models, and TurboQuant",
        versions=(("0.17.0", "0.33.0"),),
        targets=TARGETS,
        probe=_probe,
        mechanism=(
            "A decode batch is padded to the size of a captured graph with requests of seq_len 0. "
            "CUTLASS and FlashInfer leave their output rows unwritten, Triton MLA and TurboQuant write "
            "0 / 0. "
            "A later kernel that mixes rows passes the NaN on to a live token. With the patch the "
            "rows of such requests become 0, and their lse -inf: by one operation more in Triton MLA's "
            "kernel, which TurboQuant shares, and by a launch after each call of CUTLASS or FlashInfer."
        ),
        threads=("vLLM #37442", "vLLM #38359", "vLLM #57017", "FlashInfer #2883"),
        cost="no launch behind Triton MLA and TurboQuant; behind CUTLASS and FlashInfer one a layer, 1.5 us "
        "for 1,024 live rows of 128 heads on an H200",
        triton=True,
    ),
    Patch(
        name=fp8_scales.NAME,
        incident="mla_padding",
        summary="takes the fp8 scale of a batch from live rows only",
        models="MoE models with --quantization fp8 on vLLM's Triton experts",
        versions=(("0.17.0", "0.33.0"),),
        targets=fp8_scales.TARGETS,
        probe=fp8_scales.probe,
        mechanism=(
            "Experts of an fp8 model without stored activation scales quantise a batch with one scale, the "
            "largest magnitude of all its rows by 448. Padding rows are among them, so what they hold "
            "decides how live rows are rounded, before the first GEMM of the experts and before the second. "
            "With the patch staleproof's quantiser takes the scale from the step's tokens: by vLLM's mask of "
            "padding rows, or by a count in device memory that each step writes, so that a captured graph "
            "reads it at each replay. A NaN in a live row stays in its row, as in vLLM's kernel. Nothing "
            "changes with data parallelism, where rows of other ranks come in, nor in CUTLASS experts, whose "
            "second quantiser sorts the rows by expert. Linear layers have a scale a token wherever vLLM has "
            "its CUTLASS fp8 kernels; elsewhere they keep vLLM's."
        ),
        threads=("vLLM #37442", "vLLM #57017"),
        cost="one fill in a step of another number of tokens than the last; our quantiser in place of "
        "vLLM's, twice a layer of experts",
        triton=True,
    ),
    Patch(
        name="dcp_merge",
        incident="mla_padding",
        summary="clears the rows of a rank without keys before ranks are merged",
        models="models with --decode-context-parallel-size",
        versions=(("0.16.0", "0.27.1"),),
        targets=(
            Target(
                GATHERED,
                "correct_attn_out",
                ("out", "lses", "cp_rank"),
                before=_clear_gathered,
                versions=("0.16.0", "0.24.0"),
                probe=_gathered,
            ),
            Target(
                EXCHANGED,
                "dcp_a2a_lse_reduce",
                ("cp_attn_out", "cp_attn_lse"),
                before=_clear_exchanged,
                versions=("0.18.0", "0.27.1"),
                probe=_exchanged,
            ),
        ),
        probe=_merges,
        mechanism=(
            "Under decode context parallelism each rank has a part of a request's keys, and a short request "
            "has none on some rank. That rank's row is 0 / 0 or unwritten. The merge weighs it by 0, and 0 "
            "times NaN is NaN, so a live row dies on every rank. With the patch the rows whose lse is not "
            "finite are 0 before the merge. It cannot tell an lse that is itself unwritten, but finite."
        ),
        threads=("vLLM #55289", "vLLM #54889"),
        cost="three elementwise launches a layer and step, under that option only; not measured",
    ),
)
