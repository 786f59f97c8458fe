"""Whether an fp8 quantiser between attention and router passes NaN on: our replicas, vLLM's compiled ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from staleproof.evidence.compare import rounding, too_far
from staleproof.evidence.rows import Verdict, bad_rows
from staleproof.grades import REPLICA, Evidence
from staleproof.incidents.moe_routing import broken, scene
from staleproof.incidents.moe_routing.batch import rows_with_duplicates
from staleproof.lab import Answer, good_if

# (rows, columns) -> fp8 values, and the scales that give the numbers back
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def through(bad: float, quantise: Quantise, device: str) -> Answer:
    """Padding of the attention output holds NaN, or Inf. Does an fp8 quantiser pass it on to the router?"""
    attended = scene.make_logits(device, 256, 8)
    attended[scene.LIVE :, ::64] = bad
    values, scale = quantise(attended)
    quantised = values.float() * scale
    logits = quantised @ scene.make_logits(device, 128, 256)
    rows, live = bad_rows(logits), slice(scene.LIVE)
    # vLLM's ops get bf16 input, so allow one rounding to bf16 more.
    budget = rounding(torch.float8_e4m3fn) + rounding(torch.bfloat16)
    if bool(rows[live].any()):
        verdict = str(Verdict.LEAKED)
    elif too_far("live rows", quantised[live], attended[live], budget):
        verdict = "wrong, finite"
    else:
        verdict = Verdict.PAD_ONLY if bool(rows.any()) else Verdict.CLEAN
    _, ids = broken.route(broken.warp_keeps_its_first_column, logits, 8)
    return good_if(
        verdict == Verdict.CLEAN, verdict, rows_with_duplicates=int(rows_with_duplicates(ids).sum())
    )


def vllms_op(x: torch.Tensor, *, per_token: bool) -> scene.Routed:
    """vLLM's compiled dynamic fp8 quantisers, from the library that STALEPROOF_VLLM_C_SO names.

    Called as by ``scaled_fp8_quant`` (vLLM 0.20.2 ``_custom_ops.py:2056``). Arguments and results are
    those of :func:`broken.quantise_fp8`.
    """
    ops, x = scene.vllm_ops(scene.VLLM_FP8_VARIABLE), x.bfloat16()
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(len(x) if per_token else 1, 1, device=x.device)
    if per_token:
        ops.dynamic_per_token_scaled_fp8_quant(values, x, scale, None)
    else:
        ops.dynamic_scaled_fp8_quant(values, x, scale.view(1))
    return values, scale


_fp8 = partial(partial, broken.quantise_fp8)
FIREWALLS: dict[str, Quantise] = {
    "a scale a token, fmax": _fp8(per_token=True, drops_nan=True),
    "a scale a token, torch.amax": _fp8(per_token=True, drops_nan=False),
    "one scale, fmax": _fp8(per_token=False, drops_nan=True),
    "one scale, torch.amax": _fp8(per_token=False, drops_nan=False),
    "a scale a token, vLLM's op": partial(vllms_op, per_token=True),
    "one scale, vLLM's op": partial(vllms_op, per_token=False),
}
_THEIRS = [wall for name, wall in FIREWALLS.items() if "vLLM" in name]


def unavailable_reason(firewall: Quantise, device: str) -> str | None:
    """Why this quantiser cannot run, if it is vLLM's."""
    if firewall in _THEIRS:
        return scene.vllm_unavailable_reason(device, scene.VLLM_FP8_VARIABLE)
    return None


def evidence(firewall: Quantise) -> Evidence:
    """The evidence grade of this quantiser's code."""
    return scene.vllm_evidence(scene.VLLM_FP8_VARIABLE) if firewall in _THEIRS else REPLICA
