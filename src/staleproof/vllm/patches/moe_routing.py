"""Patches for incident 3: expert ids are distinct even if logits or bias contain NaN."""

from __future__ import annotations

import re
from typing import Any

from staleproof.vllm import routing_calls as calls
from staleproof.vllm import simulated_routing as simulated
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of, numbers

OPS = "vllm._custom_ops"
KERNELS = "topk_softmax_kernels.cu"
HASH_KERNELS = "topk_softplus_sqrt_kernels.cu"
EXPERTS = "vllm.model_executor.layers.fused_moe"
# The first FlashInfer that bounds the row index of a repeated expert.
GUARDED_FLASHINFER = "0.6.10"


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
    arguments = calls.GROUPED if name == "grouped_topk" else calls.TOPK
    return Target(OPS, name, arguments, instead=hook, before=clean)


def _biased_routing(name: str, arguments: tuple[str, ...], versions: tuple[str, str]) -> Target:
    """The same for calls with a bias, in releases with these arguments."""
    instead = calls.biased(calls.softmax if name == "topk_softmax" else calls.sigmoid, 5, calls.TOPK[5])
    return Target(OPS, name, arguments, instead=instead, before=calls.clean_bias, versions=versions)


def _hash_routing(count: int, versions: tuple[str, str], clamped: bool = False) -> Target:
    """Target DeepSeek-V4's selection with so many arguments; if clamped, only a bias can repeat experts."""
    instead = calls.biased(calls.hashed, 6, calls.HASH[6]) if clamped else calls.hashed
    before = calls.clean_hash_bias if clamped else calls.clean_hash
    names = calls.HASH[:count]
    return Target(OPS, "topk_hash_softplus_sqrt", names, instead=instead, before=before, versions=versions)


PATCHES = (
    Patch(
        name="topk_nan",
        incident="moe_routing",
        summary="routes by kernels whose expert ids are distinct even if logits are NaN",
        models="MoE models",
        versions=(("0.17.0", "0.19.1"),),
        targets=(
            _routing("topk_softmax", calls.softmax, calls.clean_logits),
            _routing("topk_sigmoid", calls.sigmoid, calls.clean_sigmoid_logits),
            _routing("grouped_topk", calls.grouped, calls.clean_scores),
        ),
        probe=_unclamped,
        mechanism=_MECHANISM
        + "With the patch staleproof's top-k replaces vLLM's: a NaN score counts as 0, and so does a "
        "NaN bias.",
        threads=_THREADS,
        cost="our kernel in place of vLLM's: 2.0 us, not 5.0 us, for 128 rows of 128 experts on an H200",
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
            _biased_routing("topk_softmax", calls.TOPK, ("0.20.0", "0.26.0")),
            _biased_routing("topk_softmax", calls.SOFTMAX_TOPK, ("0.27.0", "0.33.0")),
            _biased_routing("topk_sigmoid", calls.TOPK, ("0.20.0", "0.25.1")),
            _biased_routing("topk_sigmoid", calls.SIGMOID_TOPK[:7], ("0.26.0", "0.26.0")),
            _biased_routing("topk_sigmoid", calls.SIGMOID_TOPK, ("0.27.0", "0.33.0")),
            Target(
                OPS,
                "grouped_topk",
                calls.GROUPED,
                instead=calls.biased(calls.grouped, 6, calls.GROUPED[6]),
                before=calls.clean_grouped_bias,
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
        summary="routes DeepSeek-V4 by a kernel to which a NaN in logits or bias scores 0",
        models="DeepSeek-V4",
        versions=(("0.20.0", "0.33.0"),),
        targets=(
            _hash_routing(9, ("0.20.0", "0.26.0")),
            _hash_routing(10, ("0.27.0", "0.27.1")),
            _hash_routing(10, ("0.28.0", "0.29.0"), clamped=True),
            _hash_routing(12, ("0.30.0", "0.33.0"), clamped=True),
        ),
        probe=_hash_nan,
        mechanism=_MECHANISM
        + "topk_hash_softplus_sqrt clamps nothing before 0.28.0, and from then on the score but not "
        "the bias. With the patch staleproof's kernel replaces it (from 0.28.0 on where there is a bias): a "
        "NaN logit scores 0, and a NaN in the bias counts as 0. Where a table names the experts, vLLM's "
        "kernel runs as it is; where image tokens have a bias of their own, and while torch.compile traces, "
        "it gets inputs without NaN.",
        threads=_THREADS,
        cost="our kernel in place of vLLM's",
        triton=True,
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
                calls.APPLY,
                before=calls.distinct,
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
        "id -1, which its kernels skip, and its weight goes to the first slot of that expert. A batch "
        "that FlashInfer sorts in one block is left as it is: there every slot gets a row of its own.",
        threads=(*_THREADS, "FlashInfer #2762", "vLLM #42906"),
        cost="no launch for up to 256 tokens (128 at 127 experts, 64 at 255) and top 1, 2, 4, 6 or 8; "
        "otherwise a small one a layer, 1.2 us for 512 rows on an H200",
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
