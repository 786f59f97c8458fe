"""Incident 1 in a whole vLLM on a GPU: which rows of MLA decode are NaN under full CUDA graphs.

DeepSeek-V2's shape in small, drawn weights: 3 requests replay a graph of 8 rows. A spy behind each layer's
decode copies its output into memory of its own. The copy is captured with the graph: it holds what the last
replay wrote. Each answer is one engine in a child process.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from staleproof.child import report
from staleproof.grades import Evidence, Grade
from staleproof.lab import Answer, Fix, Incident, MissingError, bad, good, needs_cuda
from staleproof.vllm.plugin import VARIABLE
from staleproof.whole import place
from staleproof.whole.load import Arrival
from staleproof.whole.shapes import DEEPSEEK_V2

LIVE, ROWS = 3, 8
# Backend -> module and class of its layers.
BACKENDS = {
    "TRITON_MLA": ("vllm.v1.attention.backends.mla.triton_mla", "TritonMLAImpl"),
    "FLASHMLA": ("vllm.v1.attention.backends.mla.flashmla", "FlashMLAImpl"),
    "FLASH_ATTN_MLA": ("vllm.v1.attention.backends.mla.flashattn_mla", "FlashAttnMLAImpl"),
    "CUSTOM": ("staleproof.vllm.mla_backend", "MLADecodeImpl"),
}
DTYPES: Mapping[str, dict[str, Any]] = {"bf16": {}, "fp8": {"quantization": "fp8"}}
OPTIONS: dict[str, Any] = {
    "enforce_eager": False, "max_model_len": 2048, "max_num_seqs": 64, "gpu_memory_utilization": 0.15,
    "enable_prefix_caching": False, "moe_backend": "triton",
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [ROWS]
    },
}  # fmt: skip


def ask(backend: str, options: dict[str, Any]) -> None:
    """In the child: serve :data:`LIVE` requests, and tell which rows of attention's output are NaN.

    Args:
        backend: of :data:`BACKENDS`.
        options: of ``vllm.LLM``, beside :data:`OPTIONS`.
    """
    import torch

    from staleproof.whole.engine import Engine, states_of

    module, name = BACKENDS[backend]
    impl = getattr(importlib.import_module(module), name)
    decode = impl.forward_mqa
    kept: dict[int, torch.Tensor] = {}

    def spied(layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = decode(layer, *args, **kwargs)
        out = result[0]
        if len(out) == ROWS:
            kept.setdefault(id(layer), torch.zeros_like(out)).copy_(out)
        return result

    impl.forward_mqa = spied
    engine = Engine(DEEPSEEK_V2, attention_backend=backend, **OPTIONS | options)
    engine.draw_weights()
    draw = torch.Generator().manual_seed(1)
    load = [
        Arrival(f"r{i}", torch.randint(2, 31999, (37 + 11 * i,), generator=draw).tolist(), 24)
        for i in range(LIVE)
    ]
    served = engine.serve(load, ends=False)
    torch.cuda.synchronize()
    nan = [out.isnan().flatten(1).any(1).tolist() for out in kept.values()]
    report(
        {
            "layers": len(nan),
            "padding": sum(map(sum, (rows[LIVE:] for rows in nan))),
            "live": sum(map(sum, (rows[:LIVE] for rows in nan))),
            "tokens": {name: list(one.tokens) for name, one in served.items()},
            "nan_logprobs": sum(one.nan for one in served.values()),
            "patch": states_of("mla_padding")["mla_padding"],
        }
    )


# --- The questions.

# Backend, dtype, STALEPROOF_PATCHES.
Subject = tuple[str, str, str]
# Leaves the plugin on, which offers CUSTOM, and patches nothing that is asked about here.
OTHERS = "undrained_ids"


def _serve(subject: Subject, device: str) -> dict[str, Any]:
    backend, dtype, patches = subject
    env = {"VLLM_PLUGINS": "staleproof", VARIABLE: patches}
    try:
        answer: dict[str, Any] = place.call(ask, backend, DTYPES[dtype], env=env, timeout_s=600).answer()
    except place.WholeError as error:
        raise MissingError(str(error)) from error
    return answer


def _missing(subject: Subject, device: str) -> str | None:
    return needs_cuda(subject, device) or place.unavailable_reason(cpu=False)


def rows(subject: Subject, device: str) -> Answer:
    """3 requests in a graph of 8 rows: which rows of attention's output hold NaN, over all layers?"""
    one = _serve(subject, device)
    numbers = {name: one[name] for name in ("layers", "padding", "live", "nan_logprobs", "patch", "tokens")}
    numbers["evidence"] = Evidence(Grade.REAL, " ".join((*place.release(place.python()), "whole")))
    if one["live"] or one["nan_logprobs"]:
        return bad("NaN in live rows", **numbers)
    return bad("NaN in padding", **numbers) if one["padding"] else good("no NaN", **numbers)


def compare(subject: Subject, device: str) -> str | None:
    """With the patch the requests must get the tokens that they get without."""
    on, off = (_serve((*subject[:2], patches), device) for patches in (subject[2], OTHERS))
    if on["patch"] != "in place":
        return f"the patch is {on['patch']}"
    return None if on["tokens"] == off["tokens"] else "tokens of live requests differ"


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    asked = {f"{name}, {dtype}": (name, dtype, OTHERS) for name in BACKENDS for dtype in DTYPES}
    expect = {name: "NaN in padding" if name.startswith("TRITON_MLA") else "no NaN" for name in asked}
    incident.question("whole vLLM, NaN rows", asked, expect=expect, needs=_missing)(rows)
    off, on = (("TRITON_MLA", "bf16", patches) for patches in (OTHERS, "mla_padding"))
    incident.fixes(rows, {"mla_padding, whole vLLM": Fix(off, on)}, compare=compare, needs=_missing)
