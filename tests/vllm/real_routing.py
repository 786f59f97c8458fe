"""vLLM's own expert routing, driven on a CPU; run inside a vLLM environment only.

The compiled selection and FlashInfer's fused MoE are stubs that model their faults. The checks
show that the patches reach vLLM's calls and clean what goes through them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def first_wins(scores: torch.Tensor, choice: torch.Tensor, k: int) -> tuple[Any, Any]:
    """Select as vLLM does, in k rounds of ``>``. No comparison with NaN is true, so expert 0 stays."""
    ids = torch.zeros(scores.shape[0], k, dtype=torch.int64)
    for row, values in enumerate(choice.clone().tolist()):
        for slot in range(k):
            best = 0
            for expert, value in enumerate(values):
                if value > values[best]:
                    best = expert
            ids[row, slot] = best
            values[best] = -10000.0
    return scores.gather(1, ids), ids


class CompiledOps:
    """Stubs of the routing ops of ``_moe_C``, registered for the CPU."""

    def __init__(self, clamped: bool, hash_clamped: bool = False) -> None:
        ops = importlib.import_module("vllm._custom_ops")
        types = {"is_padding": "Tensor?", "routed_scaling_factor": "float"}
        self.clamped = clamped
        self.hash_clamped = hash_clamped
        self.library = torch.library.Library("_moe_C", "FRAGMENT")
        common = "Tensor(a!) w, Tensor(b!) ids, Tensor(c!) i, Tensor x, bool renorm, Tensor? bias"
        for name in ("topk_softmax", "topk_sigmoid"):
            given = [*inspect.signature(getattr(ops, name)).parameters][6:]
            rest = "".join(f", {types[argument]} {argument}" for argument in given)
            self.library.define(f"{name}({common}{rest}) -> ()")
        self.library.define(
            "grouped_topk(Tensor x, int groups, int chosen, int k, bool renorm, float scaling, "
            "Tensor bias, int scoring) -> (Tensor, Tensor)"
        )
        self.library.impl("topk_softmax", self._topk(lambda x: x.softmax(-1)), "CPU")
        self.library.impl("topk_sigmoid", self._topk(lambda x: x.sigmoid()), "CPU")
        self.library.impl("grouped_topk", self._grouped, "CPU")
        if hasattr(ops, "topk_hash_softplus_sqrt"):
            known = inspect.signature(ops.topk_hash_softplus_sqrt).parameters
            rest = [f"{'int' if name.endswith('_lo') else 'Tensor?'} {name}" for name in [*known][6:]]
            given = common.removesuffix(", Tensor? bias")
            self.library.define(f"topk_softplus_sqrt({given}, float scaling, {', '.join(rest)}) -> ()")
            self.library.impl("topk_softplus_sqrt", self._hash, "CPU")
        for name in ("topk_softmax", "topk_sigmoid"):
            torch.library.register_fake(f"_moe_C::{name}", lambda *args: None, lib=self.library)

    def _topk(self, score: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
        def run(w: Any, ids: Any, i: Any, x: Any, renorm: bool, bias: Any, *rest: Any) -> None:
            self._write(w, ids, _selected(score(x.float()), bias, ids.shape[1], self.clamped), renorm)

        return run

    def _hash(
        self, w: Any, ids: Any, i: Any, x: Any, renorm: bool, scaling: float, bias: Any, *rest: Any
    ) -> None:
        scores = torch.nn.functional.softplus(x.float()).sqrt()
        self._write(w, ids, _selected(scores, bias, ids.shape[1], self.hash_clamped), renorm, scaling)

    def _write(self, w: Any, ids: Any, selected: Any, renorm: bool, scaling: float = 1.0) -> None:
        values, found = selected
        w.copy_((values / values.sum(-1, keepdim=True) if renorm else values) * scaling)
        ids.copy_(found)

    def _grouped(
        self, x: Any, groups: int, chosen: int, k: int, renorm: bool, scaling: float, bias: Any, scoring: int
    ) -> Any:
        values, found = _selected(x.float().sigmoid() if scoring else x.float(), bias, k, self.clamped)
        return values, found.int()


def _selected(scores: torch.Tensor, bias: Any, k: int, clamped: bool) -> tuple[Any, Any]:
    """Weights and ids of the best k; if clamped, a score that is NaN or infinite counts as 0."""
    if clamped:
        scores = torch.where(scores.isfinite(), scores, 0.0)
    return first_wins(scores, scores if bias is None else scores + bias, k)


def _duplicates(ids: torch.Tensor) -> int:
    return sum(len(set(row)) < len(row) for row in ids.tolist())


def _logits(experts: int = 32, rows: int = 6) -> torch.Tensor:
    x = torch.randn(rows, experts, generator=torch.Generator().manual_seed(1))
    x[3] = torch.nan
    x[4, 0] = torch.nan
    return x


def _results() -> tuple[torch.Tensor, ...]:
    """Weights, ids and their sources for 6 rows of 4 experts."""
    return torch.empty(6, 4), *(torch.empty(6, 4, dtype=torch.int32) for _ in range(2))


ROUTERS = "vllm.model_executor.layers.fused_moe.router"


def routing() -> dict[str, Any]:
    """Rows of 6 with a repeated expert, through vLLM's own callers; NaN in two rows or the bias."""
    plain = importlib.import_module(f"{ROUTERS}.fused_topk_router")
    biased = importlib.import_module(f"{ROUTERS}.fused_topk_bias_router")
    grouped = importlib.import_module(f"{ROUTERS}.grouped_topk_router")
    ops = importlib.import_module("vllm._custom_ops")
    x, hidden = _logits(), torch.zeros(6, 8)
    clean = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    bias = torch.zeros(32)
    bias[:30] = torch.nan
    found = {}
    platform = mock.Mock(is_cuda=lambda: True, is_xpu=lambda: False)
    with (
        mock.patch.object(ops, "current_platform", platform),
        mock.patch.object(biased.rocm_aiter_ops, "is_fused_moe_enabled", return_value=False),
    ):
        for scoring in ("softmax", "sigmoid"):
            weights, ids, _ = plain.fused_topk(hidden, x, 4, False, scoring_func=scoring)
            found[scoring] = _duplicates(ids)
            found[f"{scoring} weights"] = int((~weights.isfinite()).sum())
        for scoring in ("softmax", "sigmoid"):
            select = getattr(biased, f"vllm_topk_{scoring}")
            _, ids = select(*_results(), clean, False, bias)
            found[f"{scoring} NaN bias"] = _duplicates(ids)
        _, ids = grouped.fused_grouped_topk(hidden, x, 4, False, torch.zeros(32), 4, 2, "sigmoid", 1.0)
        found["grouped"] = _duplicates(ids)
        _, ids = grouped.fused_grouped_topk(hidden, clean, 4, False, bias, 4, 2, "sigmoid", 1.0)
        found["grouped NaN bias"] = _duplicates(ids)
    return found


def hash_routing() -> dict[str, int] | None:
    """Rows of 6 with a repeated expert, through vLLM's caller of DeepSeek-V4's selection.

    ``None`` where there is none (before 0.20.0).
    """
    biased = importlib.import_module(f"{ROUTERS}.fused_topk_bias_router")
    if not hasattr(biased, "vllm_topk_softplus_sqrt"):
        return None
    clean = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    bias = torch.zeros(32)
    found = {}
    for name, logits, value in (("logits", _logits(), 0.0), ("bias", clean, torch.nan)):
        bias[:30] = value
        weights, ids, unread = _results()
        biased.vllm_topk_softplus_sqrt(weights, ids, unread, logits, False, bias)
        found[name] = _duplicates(ids)
        found[f"{name} weights"] = int((~weights.isfinite()).sum())
    return found


def traced_routing() -> int:
    """Rows with a repeated expert where torch.compile has traced vLLM's caller, in one graph."""
    plain = importlib.import_module(f"{ROUTERS}.fused_topk_router")
    torch._dynamo.reset()
    run = torch.compile(plain.vllm_topk_softmax, backend="eager", fullgraph=True)
    weights, ids, unread = _results()
    run(weights, ids, unread, _logits(), False)
    return _duplicates(ids)


def simulator() -> dict[str, Any]:
    """Default id dtype, and the part of 2,000 tokens that name an expert twice (8 of 128)."""
    module = importlib.import_module(f"{ROUTERS}.routing_simulator_router")
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for distribution in ("uniform", "normal"):
        router = module.DistributionBasedRouting(distribution)
        _, ids = router.route_tokens(torch.zeros(2000, 8), torch.zeros(2000, 128), 8)
        found[distribution] = round(_duplicates(ids) / len(ids), 2)
        found["dtype"] = str(ids.dtype)
        found[f"{distribution} range"] = bool(((ids >= 0) & (ids < 128)).all())
    return found


def fused_moe_ids() -> dict[str, Any]:
    """Ids and weights that reach FlashInfer's fused MoE from a row that names expert 3 twice."""
    name = "vllm.model_executor.layers.fused_moe"
    try:
        module = importlib.import_module(f"{name}.flashinfer_cutlass_moe")
    except ImportError:
        module = importlib.import_module(f"{name}.experts.flashinfer_cutlass_moe")
    impl = module.FlashInferExperts.__new__(module.FlashInferExperts)
    seen: dict[str, Any] = {}

    def kernel(**given: Any) -> None:
        seen["ids"] = given["token_selected_experts"].tolist()
        seen["weights"] = given["token_final_scales"].tolist()

    handed = mock.MagicMock(name="attributes")
    activation = module.MoEActivation.SILU
    with (
        mock.patch.object(module, "flashinfer_cutlass_fused_moe", kernel),
        mock.patch.object(
            module.FlashInferExperts, "__getattr__", lambda self, name: _moe_attribute(name), create=True
        ),
    ):
        for name in ("quant_dtype", "w1_scale", "w2_scale"):
            with contextlib.suppress(AttributeError):
                setattr(impl, name, None)
        impl.apply(
            torch.zeros(2, 8),
            torch.zeros(2, 8, dtype=torch.bfloat16),
            handed,
            handed,
            torch.tensor([[0.4, 0.3, 0.2], [0.5, 0.3, 0.2]]),
            torch.tensor([[3, 1, 3], [0, 1, 2]], dtype=torch.int32),
            *(activation, 8, None, None, None, None, None, None, False),
        )
    return seen


def _moe_attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    flags = name.startswith(("use_", "is_"))
    return False if flags else 1 if "size" in name or "rank" in name else None
