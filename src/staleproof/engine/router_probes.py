"""Probes of incident 3, and of what a quantizer of incident 1 makes of padding rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from staleproof.engine.probes import Engine, rows


def nan_bias(engine: Engine, live: int = 50, experts: Sequence[int] = (5, 8)) -> dict[str, Any]:
    """Serve ``live`` requests, then again with a NaN in every router's correction bias, at one expert.

    A kernel that lets a thread compare several experts may notice a NaN at the first of them only, so the
    NaN is put at several experts in turn.

    Returns:
        ``sound`` and ``spoilt`` (expert -> the same): what :func:`~staleproof.engine.probes.rows` returns
        of a round; ``chosen``: rows of the last step that name the expert, with a sound bias and with the
        NaN; ``first``: see :meth:`~staleproof.engine.spies.Rows.first_experts`, of each round;
        ``routers``: how many biases were set; ``kind``: the class of the model's routers.
    """
    import torch

    model = engine.runner.get_model()
    biases = [p for n, p in model.named_parameters() if "e_score_correction_bias" in n]
    (sound,) = rows(engine, [live])
    usual = {expert: engine.watch.chosen(expert) for expert in experts}
    spoilt, chosen, first = {}, {}, {}
    sound_first = engine.watch.first_experts()
    for expert in experts:
        with torch.inference_mode():
            kept = [bias[expert].clone() for bias in biases]
            for bias in biases:
                bias.data[expert] = float("nan")
            (spoilt[expert],) = rows(engine, [live])
            chosen[expert] = [usual[expert], engine.watch.chosen(expert)]
            first[expert] = engine.watch.first_experts()
            for bias, value in zip(biases, kept, strict=True):
                bias.data[expert] = value
    return {
        "sound": sound,
        "spoilt": spoilt,
        "chosen": chosen,
        "first": {"sound": sound_first, **first},
        "routers": len(biases),
        "kind": sorted(engine.watch.kinds),
        "top_k": max((ids.shape[1] for ids in engine.watch.ids.values()), default=0),
    }


def same_choice(
    engine: Engine, tokens: int = 512, experts: int = 64, top_k: int = 6
) -> dict[str, list[float]]:
    """Do the operations that a router calls choose as vLLM's kernels do, with a bias without NaN?

    With the plugin the first are ours. The kernels are called past every patch.

    Returns:
        Operation -> rows in which the chosen experts differ, and the largest difference of a weight.
    """
    import torch

    from vllm import _custom_ops as ops

    draw = torch.Generator(device="cuda").manual_seed(0)
    logits = torch.randn(tokens, experts, generator=draw, device="cuda")
    bias = torch.rand(experts, generator=draw, device="cuda")
    found = {}
    for name in ("topk_sigmoid", "topk_softmax"):
        results = []
        kernel = getattr(torch.ops._moe_C, name)
        # Later releases take a factor of the weights too.
        takes = len(kernel.default._schema.arguments)
        for call in (getattr(ops, name), kernel):
            weights = torch.empty(tokens, top_k, device="cuda")
            ids, rows = (torch.empty(tokens, top_k, dtype=torch.int32, device="cuda") for _ in range(2))
            call(*(weights, ids, rows, logits, True, bias, 1.0)[:takes])
            results.append(_sorted(ids, weights))
        found[name] = _apart(*results)
    results = []
    for grouped in (ops.grouped_topk, torch.ops._moe_C.grouped_topk):
        weights, ids = grouped(logits, 8, 4, top_k, True, 1.0, bias, 1)
        results.append(_sorted(ids, weights))
    found["grouped_topk"] = _apart(*results)
    return found


def _sorted(ids: Any, weights: Any) -> tuple[Any, Any]:
    ids, order = ids.sort(-1)
    return ids, weights.gather(1, order)


def _apart(one: tuple[Any, Any], two: tuple[Any, Any]) -> list[float]:
    same = (one[0] == two[0]).all(-1)
    error = (one[1] - two[1]).abs()[same]
    return [int((~same).sum()), float(error.max()) if error.numel() else 0.0]


def quantizers(engine: Engine) -> dict[str, list[Any]]:
    """What vLLM's dynamic fp8 quantizers make of 3 sound rows and 5 rows of NaN.

    Returns:
        Quantizer -> its first scale for the sound rows alone, its first scale for all eight rows (as text: it
        may be NaN), and how many values of the sound rows differ from those without the NaN rows.
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


def planted(engine: Engine, live: Sequence[int] = (3, 50), tokens: int = 12) -> dict[str, list[Any]]:
    """Serve the same requests twice, with another token in all padding rows.

    The second one's embedding is one large value, so that its rows have a larger magnitude than any live row
    wherever a norm comes before.

    Returns:
        ``plain`` and ``spike``: what :func:`~staleproof.engine.probes.rows` returns.
    """
    import torch

    (weight,) = (w for n, w in engine.runner.get_model().named_parameters() if "embed_tokens.weight" in n)
    # Prompts have tokens from 2 on.
    plain, spike = 0, 1
    with torch.inference_mode():
        weight.data[spike] = 0.0
        weight.data[spike, 0] = 8.0
    found = {}
    for name, token in {"plain": plain, "spike": spike}.items():
        with _padded_with(engine.runner, token):
            found[name] = rows(engine, live, tokens)
    return found


@contextmanager
def _padded_with(runner: Any, token: int) -> Iterator[None]:
    """Put this token into the padding rows of each step, which follow its own tokens."""
    import torch

    original = runner.execute_model
    # Of the first model runner, and of the second.
    ids = runner.input_ids.gpu if hasattr(runner, "input_ids") else runner.input_buffers.input_ids

    def execute(output: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            ids[output.total_num_scheduled_tokens :].fill_(token)
        return original(output, *args, **kwargs)

    runner.execute_model = execute
    try:
        yield
    finally:
        del runner.execute_model


def _configured(engine: Engine) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(engine.llm.llm_engine.vllm_config)
