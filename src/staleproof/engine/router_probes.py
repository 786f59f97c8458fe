"""Probes of incident 3, and of what a quantizer of incident 1 makes of a NaN row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from staleproof.engine.probes import Engine, rows


def nan_bias(engine: Engine, live: int = 50, experts: Sequence[int] = (5, 8)) -> dict[str, Any]:
    """Serve ``live`` requests, then again with a NaN in every router's correction bias, at one expert.

    A kernel that lets a thread compare several experts may notice a NaN at the first of them only, so the
    NaN is put at several experts in turn.

    Returns:
        ``sound`` and ``spoilt`` (expert -> the same): what :func:`~staleproof.engine.probes.rows` returns
        of a round; ``chosen``: rows of the last step that name the expert, with a sound bias and with the
        NaN; ``routers``: how many biases were set; ``kind``: the class of the model's routers.
    """
    import torch

    model = engine.runner.get_model()
    biases = [p for n, p in model.named_parameters() if "e_score_correction_bias" in n]
    (sound,) = rows(engine, [live])
    usual = {expert: engine.watch.chosen(expert) for expert in experts}
    spoilt, chosen = {}, {}
    for expert in experts:
        with torch.inference_mode():
            kept = [bias[expert].clone() for bias in biases]
            for bias in biases:
                bias.data[expert] = float("nan")
            (spoilt[expert],) = rows(engine, [live])
            chosen[expert] = [usual[expert], engine.watch.chosen(expert)]
            for bias, value in zip(biases, kept, strict=True):
                bias.data[expert] = value
    return {
        "sound": sound,
        "spoilt": spoilt,
        "chosen": chosen,
        "routers": len(biases),
        "kind": sorted(engine.watch.kinds),
        "top_k": max((ids.shape[1] for ids in engine.watch.ids.values()), default=0),
    }


def quantizers(engine: Engine) -> dict[str, list[Any]]:
    """What vLLM's dynamic fp8 quantizers make of 3 sound rows and 5 rows of NaN.

    Returns:
        Quantizer -> its scale of the sound rows alone, its largest scale of all eight rows (a string if it
        is no number), and how many values of the sound rows come out otherwise than alone.
    """
    import torch
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    from vllm import _custom_ops as ops

    draw = torch.Generator(device="cuda").manual_seed(0)
    sound = torch.randn(3, 2048, generator=draw, device="cuda", dtype=torch.bfloat16)
    both = torch.cat([sound, torch.full((5, 2048), float("nan"), device="cuda", dtype=torch.bfloat16)])

    def native(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with _configured(engine):
            return QuantFP8(static=False, group_shape=GroupShape.PER_TENSOR).forward_native(x)

    found: dict[str, list[Any]] = {}
    for name, quantize in (
        ("CUDA, per tensor", lambda x: ops.scaled_fp8_quant(x)),
        ("CUDA, per token", lambda x: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)),
        ("torch, per tensor", native),
    ):
        alone, scale = quantize(sound)
        mixed, scales = quantize(both)
        other = int((alone.view(torch.uint8) != mixed[:3].view(torch.uint8)).sum())
        found[name] = [float(scale.flatten()[0]), str(float(scales.flatten()[0])), other]
    return found


def _configured(engine: Engine) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(engine.llm.llm_engine.vllm_config)
