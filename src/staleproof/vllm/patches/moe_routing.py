"""Patches for incident 3: expert ids are distinct even if logits or bias contain NaN."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from staleproof.vllm import simulated_routing as simulated
from staleproof.vllm.arguments import Arguments, Keywords, argument, replaced
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of, numbers

OPS = "vllm._custom_ops"
TOPK = (
    "topk_weights",
    "topk_ids",
    "token_expert_indices",
    "gating_output",
    "renormalize",
    "e_score_correction_bias",
)
SOFTMAX_TOPK = (*TOPK, "is_padding")
SIGMOID_TOPK = (*TOPK, "routed_scaling_factor", "is_padding")
GROUPED = (
    "scores",
    "num_expert_group",
    "topk_group",
    "topk",
    "renormalize",
    "routed_scaling_factor",
    "bias",
    "scoring_func",
)
HASH = (
    "topk_weights",
    "topk_indices",
    "token_expert_indices",
    "gating_output",
    "renormalize",
    "routed_scaling_factor",
    "e_score_correction_bias",
)
# The bias of image tokens (0.33.0).
IMAGE_BIAS = 10, "bias_vl"
SIGMOID = 1  # vLLM's scoring_func: 1 takes logits and computes their sigmoid, 0 takes scores
KERNELS = "topk_softmax_kernels.cu"
HASH_KERNELS = "topk_softplus_sqrt_kernels.cu"
EXPERTS = "vllm.model_executor.layers.fused_moe"
# The first FlashInfer that bounds the row index of a repeated expert.
GUARDED_FLASHINFER = "0.6.10"


def _tracing() -> bool:
    """Say whether torch.compile traces this call. Then vLLM's op stays, and only its inputs change."""
    import torch

    return torch.compiler.is_compiling()


def _select(name: str, args: Arguments, kwargs: Keywords) -> Any:
    """Run our ``topk_softmax`` or ``topk_sigmoid`` in place of vLLM's, into the caller's tensors.

    ``token_expert_indices`` is not written, because no caller in these releases reads it.
    """
    if _tracing():
        return NotImplemented
    import torch

    from staleproof.ops import topk as kernels

    # Releases differ in what follows the bias; a hook is only given calls whose names it knows.
    names = SIGMOID_TOPK if name == "topk_sigmoid" else SOFTMAX_TOPK
    given = dict(zip(names, args, strict=False)) | kwargs
    logits, ids = given["gating_output"], given["topk_ids"]
    if not logits.shape[0]:
        return NotImplemented
    getattr(kernels, name)(
        logits,
        ids.shape[1],
        bias=given.get("e_score_correction_bias"),
        renormalize=bool(given.get("renormalize", False)),
        routed_scaling_factor=given.get("routed_scaling_factor", 1.0),
        is_padding=given.get("is_padding"),
        # Our op takes no uint32; as int32 an expert id has the same bits.
        out=(given["topk_weights"], ids.view(torch.int32) if ids.dtype == torch.uint32 else ids),
    )
    return None


def _softmax(args: Arguments, kwargs: Keywords) -> Any:
    return _select("topk_softmax", args, kwargs)


def _sigmoid(args: Arguments, kwargs: Keywords) -> Any:
    return _select("topk_sigmoid", args, kwargs)


def _grouped(args: Arguments, kwargs: Keywords) -> Any:
    if _tracing():
        return NotImplemented
    from staleproof.ops.topk import grouped_topk

    scores, groups, chosen, top_k, renormalize, scaling, bias = (
        argument(args, kwargs, i, GROUPED[i]) for i in range(7)
    )
    if argument(args, kwargs, 7, GROUPED[7], 0) != SIGMOID or not scores.shape[0]:
        return NotImplemented
    return grouped_topk(
        scores,
        top_k,
        num_expert_group=groups,
        topk_group=chosen,
        bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=scaling,
    )


def _biased(replacement: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Let the replacement run where the model has a bias; without one vLLM's kernel has no defect.

    The same where ours does not take the shapes or dtypes, of which it says so before it writes. Then
    vLLM's kernel runs on a bias without NaN.
    """

    def instead(args: Arguments, kwargs: Keywords) -> Any:
        if argument(args, kwargs, position, name) is None:
            return NotImplemented
        try:
            return replacement(args, kwargs)
        except ValueError:
            return NotImplemented

    return instead


def _without_nan(x: Any, value: float = 0.0) -> Any:
    import torch

    # nan_to_num changes infinities too, unless it is told not to.
    return torch.nan_to_num(x, value, torch.inf, -torch.inf)


def _clean_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    bias = argument(args, kwargs, 5, TOPK[5])
    return None if bias is None else replaced(args, kwargs, 5, TOPK[5], _without_nan(bias))


def _clean_grouped_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    bias = argument(args, kwargs, 6, GROUPED[6])
    return None if bias is None else replaced(args, kwargs, 6, GROUPED[6], _without_nan(bias))


def _clean_logits(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Set all logits of a row to 0 if softmax would make the row NaN."""
    import torch

    logits = argument(args, kwargs, 3, TOPK[3])
    bad = (logits.isnan() | (logits == torch.inf)).any(-1, keepdim=True)
    given = replaced(args, kwargs, 3, TOPK[3], torch.where(bad, 0.0, logits))
    return _clean_bias(*given) or given


def _clean_sigmoid_logits(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    logits = argument(args, kwargs, 3, TOPK[3])
    clean = _without_nan(logits, _lowest(logits))
    given = replaced(args, kwargs, 3, TOPK[3], clean)
    return _clean_bias(*given) or given


def _clean_scores(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    scores = argument(args, kwargs, 0, GROUPED[0])
    sigmoid = argument(args, kwargs, 7, GROUPED[7], 0) == SIGMOID
    clean = _without_nan(scores, _lowest(scores) if sigmoid else 0.0)
    given = replaced(args, kwargs, 0, GROUPED[0], clean)
    return _clean_grouped_bias(*given) or given


def _clean_hash_bias(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    for position, name in ((6, HASH[6]), IMAGE_BIAS):
        if (bias := argument(args, kwargs, position, name)) is not None:
            args, kwargs = replaced(args, kwargs, position, name, _without_nan(bias))
    return args, kwargs


def _clean_hash(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Clean the logits and the bias of ``topk_hash_softplus_sqrt``; a NaN logit scores 0."""
    logits = argument(args, kwargs, 3, HASH[3])
    clean = _without_nan(logits, _lowest(logits))
    return _clean_hash_bias(*replaced(args, kwargs, 3, HASH[3], clean))


def _lowest(x: Any) -> float:
    """Return a logit whose score is 0."""
    import torch

    return torch.finfo(x.dtype).min


def _distinct(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    from staleproof.ops.distinct_experts import distinct_experts

    weights = argument(args, kwargs, 5, "topk_weights")
    ids = argument(args, kwargs, 6, "topk_ids")
    weights, ids = distinct_experts(weights.contiguous(), ids.contiguous())
    args, kwargs = replaced(args, kwargs, 5, "topk_weights", weights)
    return replaced(args, kwargs, 6, "topk_ids", ids)


def _clamps(sources: Sources, kernels: str) -> tuple[bool, bool, str]:
    """Read whether the kernels clamp NaN scores, and a NaN bias; and where they add the bias."""
    text = sources.csrc_text(kernels)
    guarded = re.search(r"(isnan|isfinite)\((correction_|row_)?bias", text) is not None
    line = next((n for n, line in enumerate(text.splitlines(), start=1) if ADDED.search(line)), 1)
    return "isnan(" in text, guarded, f"csrc {kernels}:{line}"


def _unclamped(sources: Sources) -> Evidence:
    clamped, _, place = _clamps(sources, KERNELS)
    return Evidence(not clamped, f"{place} has {'made' if clamped else 'not made'} NaN scores 0 before")


def _nan_bias(sources: Sources) -> Evidence:
    clamped, guarded, place = _clamps(sources, KERNELS)
    if not clamped:
        return Evidence(False, f"{place} has no clamp at all (topk_nan)")
    says = "makes a NaN bias 0" if guarded else "adds the bias behind the clamp"
    return Evidence(not guarded, f"{place} {says}")


def _hash_nan(sources: Sources) -> Evidence:
    if "def topk_hash_softplus_sqrt(" not in sources.text(file_of(OPS)):
        return Evidence(False, f"{file_of(OPS)} has no topk_hash_softplus_sqrt")
    clamped, guarded, place = _clamps(sources, HASH_KERNELS)
    if clamped and guarded:
        return Evidence(False, f"{place} makes NaN scores and a NaN bias 0")
    says = "adds the bias behind the clamp" if clamped else "compares NaN scores as they are"
    return Evidence(True, f"{place} {says}")


def _unguarded_flashinfer(sources: Sources) -> Evidence:
    version = sources.flashinfer
    if version is None:
        return Evidence(False, "no FlashInfer is installed")
    needed = numbers(version) < numbers(GUARDED_FLASHINFER)
    says = "reads" if needed else "bounds"
    return Evidence(needed, f"flashinfer-python {version} {says} the row index of a repeated expert")


_SIMULATED = "DistributionBasedRouting"
# Where the kernels add the bias to the score.
ADDED = re.compile(r"= .* \+ (correction_|row_)?bias\[")
_MECHANISM = (
    "One NaN logit makes a row's softmax NaN, every comparison with it is false, and the selection "
    "takes one expert k times. FlashInfer's map builder leaves the repeated slots unwritten and "
    "its finalise step follows them. "
)
_THREADS = ("vLLM #39593", "vLLM #39391", "vLLM #39288", "vLLM #37758")


def _routing(name: str, hook: Any, clean: Any) -> Target:
    """Target a top-k op: our op replaces it; while torch.compile traces, its inputs are cleaned."""
    arguments = GROUPED if name == "grouped_topk" else TOPK
    return Target(OPS, name, arguments, instead=hook, before=clean)


def _biased_routing(name: str, arguments: tuple[str, ...], versions: tuple[str, str]) -> Target:
    """The same for calls with a bias, in releases with these arguments."""
    instead = _biased(_softmax if name == "topk_softmax" else _sigmoid, 5, TOPK[5])
    return Target(OPS, name, arguments, instead=instead, before=_clean_bias, versions=versions)


PATCHES = (
    Patch(
        name="topk_nan",
        incident="moe_routing",
        summary="routes by kernels whose expert ids are distinct even if logits are NaN",
        models="MoE models",
        versions=(("0.17.0", "0.19.1"),),
        targets=(
            _routing("topk_softmax", _softmax, _clean_logits),
            _routing("topk_sigmoid", _sigmoid, _clean_sigmoid_logits),
            _routing("grouped_topk", _grouped, _clean_scores),
        ),
        probe=_unclamped,
        mechanism=_MECHANISM
        + "With the patch staleproof's top-k replaces vLLM's: a NaN score counts as 0, and so does a "
        "NaN bias.",
        threads=_THREADS,
        cost="our kernel in place of vLLM's: 1.9 us in place of 3.7 for 128 rows of 128 experts on an H200",
        triton=True,
        traced=True,
    ),
    Patch(
        name="topk_nan_bias",
        incident="moe_routing",
        summary="routes by kernels to which a NaN in the score correction bias counts as 0",
        models="MoE models whose router has a bias",
        versions=(("0.20.0", "0.33.0"),),
        targets=(
            _biased_routing("topk_softmax", TOPK, ("0.20.0", "0.26.0")),
            _biased_routing("topk_softmax", SOFTMAX_TOPK, ("0.27.0", "0.33.0")),
            _biased_routing("topk_sigmoid", TOPK, ("0.20.0", "0.25.1")),
            _biased_routing("topk_sigmoid", SIGMOID_TOPK[:7], ("0.26.0", "0.26.0")),
            _biased_routing("topk_sigmoid", SIGMOID_TOPK, ("0.27.0", "0.33.0")),
            Target(
                OPS,
                "grouped_topk",
                GROUPED,
                instead=_biased(_grouped, 6, GROUPED[6]),
                before=_clean_grouped_bias,
            ),
        ),
        probe=_nan_bias,
        mechanism=_MECHANISM
        + "vLLM #39391 makes NaN scores 0 and adds the bias after that, so a bias of NaN still "
        "repeats experts. With the patch staleproof's top-k replaces vLLM's where a model has a bias, and "
        "a NaN in it counts as 0. What ours does not take, and a call that torch.compile traces, goes to "
        "vLLM's kernel with a bias without NaN.",
        threads=_THREADS,
        cost="our kernel in place of vLLM's where a model has a bias; no launch otherwise",
        triton=True,
        traced=True,
    ),
    Patch(
        name="hash_topk_nan",
        incident="moe_routing",
        summary="clears NaN from the logits and the bias of DeepSeek-V4's selection",
        models="DeepSeek-V4",
        versions=(("0.20.0", "0.33.0"),),
        targets=(
            Target(OPS, "topk_hash_softplus_sqrt", HASH, before=_clean_hash, versions=("0.20.0", "0.27.1")),
            Target(
                OPS, "topk_hash_softplus_sqrt", HASH, before=_clean_hash_bias, versions=("0.28.0", "0.33.0")
            ),
        ),
        probe=_hash_nan,
        mechanism=_MECHANISM
        + "topk_hash_softplus_sqrt clamps nothing before 0.28.0, and from then on the score but not "
        "the bias. With the patch a NaN logit scores 0, and a NaN in the bias counts as 0.",
        threads=_THREADS,
        cost="one launch for the logits (before 0.28.0) and one for each bias; not measured",
        traced=True,
    ),
    Patch(
        name="duplicate_experts",
        incident="moe_routing",
        summary="gives FlashInfer's fused MoE distinct expert ids",
        models="MoE models on FlashInfer's CUTLASS experts",
        versions=(("0.17.0", "0.21.0"),),
        targets=tuple(
            Target(
                f"{EXPERTS}.{module}",
                "FlashInferExperts.apply",
                ("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids"),
                before=_distinct,
                versions=versions,
            )
            for module, versions in (
                ("flashinfer_cutlass_moe", ("0.17.0", "0.20.2")),
                ("experts.flashinfer_cutlass_moe", ("0.21.0", "0.21.0")),
            )
        ),
        probe=_unguarded_flashinfer,
        mechanism=_MECHANISM
        + "FlashInfer bounds that index from 0.6.10 on. With the patch a repeated slot gets the "
        "id -1, which its kernels skip, and its weight goes to the first slot of that expert.",
        threads=(*_THREADS, "FlashInfer #2762", "vLLM #42906"),
        cost="one small launch a layer: 1.3 us for 128 rows on an H200",
        triton=True,
    ),
    Patch(
        name="routing_simulator",
        incident="moe_routing",
        summary="simulated routing draws without replacement, and int32 ids by default",
        models="runs with VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        versions=(("0.17.0", "0.33.0"),),
        targets=(
            Target(
                simulated.SIMULATOR, f"{_SIMULATED}.route_tokens", simulated.ROUTE, before=simulated.int32_ids
            ),
            Target(
                simulated.SIMULATOR,
                f"{_SIMULATED}._sample_expert_ids",
                simulated.SAMPLE,
                instead=simulated.sample,
            ),
        ),
        probe=simulated.probe,
        mechanism=(
            "VLLM_MOE_ROUTING_SIMULATION_STRATEGY draws experts with replacement: with 8 of 128 "
            "experts a fifth of the tokens names one twice. Its ids are int64 by default, and "
            "consumers of raw int32 ids read (id, 0) pairs or refuse."
        ),
        threads=("vLLM #38352", "vLLM #38359", "vLLM #48740"),
        cost="only if the simulator is switched on",
    ),
)
