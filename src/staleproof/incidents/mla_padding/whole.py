"""Incident 1 in a whole vLLM: which rows of MLA decode are NaN under full CUDA graphs, and what users read.

DeepSeek-V2's shape in small, drawn weights: 3 requests replay a graph of 8 rows. A spy behind each layer's
decode copies its output into memory of its own. The copy is captured with the graph: it holds what the last
replay wrote. Then SmolLM2 over the same backends (:mod:`staleproof.whole.latent`): two users read its answers
while all KV memory that nobody has written is NaN. Each answer is one engine in a child process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from staleproof.child import report
from staleproof.lab import Answer, Fix, Incident, bad, good, needs_cuda
from staleproof.vllm.plugin import VARIABLE
from staleproof.vllm.sources import numbers
from staleproof.whole import latent, place
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
    "enforce_eager": False, "max_model_len": 2048, "max_num_seqs": 64,
    "enable_prefix_caching": False, "moe_backend": "triton",
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [ROWS]
    },
}  # fmt: skip


def _spied(backend: str) -> dict[int, Any]:
    """Layer -> attention's output of the last replay of a graph of :data:`ROWS` rows, from now on."""
    import torch

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
    return kept


def _nan_rows(kept: Mapping[int, Any]) -> list[list[bool]]:
    """Layer by layer, which rows hold a NaN."""
    return [out.isnan().flatten(1).any(1).tolist() for out in kept.values()]


def ask(backend: str, options: dict[str, Any]) -> None:
    """In the child: serve :data:`LIVE` requests, and tell which rows of attention's output are NaN.

    Args:
        backend: of :data:`BACKENDS`.
        options: of ``vllm.LLM``, beside :data:`OPTIONS`.
    """
    import torch

    from staleproof.whole.engine import Engine, draw_dummies, states_of

    draw_dummies()
    kept = _spied(backend)
    engine = Engine(DEEPSEEK_V2, attention_backend=backend, **OPTIONS | options)
    draw = torch.Generator().manual_seed(1)
    load = [
        Arrival(f"r{i}", torch.randint(2, 31999, (37 + 11 * i,), generator=draw).tolist(), 24)
        for i in range(LIVE)
    ]
    served = engine.serve(load, ends=False)
    nan = _nan_rows(kept)
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


# What the model answers in float32 over zeroed memory, with vLLM's own Llama too (tests/whole).
WORDS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 2 + 2?": "The answer is 4.",
}
CPU_OPTIONS: dict[str, Any] = {"max_model_len": 512, "dtype": "float32"}


def read(backend: str, options: dict[str, Any], fill: float) -> None:
    """In the child: ask :data:`WORDS` of SmolLM2, and tell its answers and NaN rows of padding.

    Args:
        backend: of MLA, e.g. ``CPU_MLA``; empty for vLLM's own Llama.
        options: of ``vllm.LLM``.
        fill: what stands in all KV memory before the first request.
    """
    from staleproof.whole.engine import Engine

    kept = _spied(backend) if backend in BACKENDS else {}
    if backend:
        latent.register()
        options = {**options, **latent.OPTIONS, "attention_backend": backend}
        # The CPU's kernel takes blocks of 16.
        options |= {"block_size": 16} if backend == "CPU_MLA" else {}
    engine = Engine(Path(sys.prefix, place.MODEL), **options)
    engine.empty(fill=fill)
    asked = {q: engine.tokens(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q in WORDS}
    served = engine.serve([Arrival(question, tokens, 16) for question, tokens in asked.items()])
    texts = {question: served[question].text for question in WORDS}
    report({"texts": texts, "padding": sum(sum(rows[len(WORDS) :]) for rows in _nan_rows(kept))})


# --- The questions.

# Backend, dtype, STALEPROOF_PATCHES.
Subject = tuple[str, str, str]
# Leaves the plugin on, which offers CUSTOM, and patches nothing that is asked about here.
OTHERS = "undrained_ids"


def _call(function: Callable[..., None], patches: str, *args: Any) -> dict[str, Any]:
    """What a function of this module tells in one engine with these patches."""
    env = {"VLLM_PLUGINS": "staleproof", VARIABLE: patches}
    answer: dict[str, Any] = place.call(function, *args, env=env, timeout_s=600).answer()
    return answer


def _serve(subject: Subject, device: str, rows: int = ROWS) -> dict[str, Any]:
    backend, dtype, patches = subject
    graphs = {**OPTIONS["compilation_config"], "cudagraph_capture_sizes": [rows]}
    return _call(ask, patches, backend, {**DTYPES[dtype], "compilation_config": graphs})


def _missing(subject: Subject, device: str) -> str | None:
    return needs_cuda(subject, device) or place.unavailable_reason(cpu=False)


def rows(subject: Subject, device: str) -> Answer:
    """3 requests in a graph of 8 rows: which rows of attention's output hold NaN, over all layers?"""
    one = _serve(subject, device)
    numbers = {name: one[name] for name in ("layers", "padding", "live", "nan_logprobs", "patch", "tokens")}
    numbers["evidence"] = place.evidence()
    if one["live"] or one["nan_logprobs"]:
        return bad("NaN in live rows", **numbers)
    return bad("NaN in padding", **numbers) if one["padding"] else good("no NaN", **numbers)


def words(subject: Subject, device: str) -> Answer:
    """SmolLM2 over vLLM's MLA backend, NaN in all KV memory that nobody wrote: what do two users read?"""
    backend, dtype, patches = subject
    options = CPU_OPTIONS if backend == "CPU_MLA" else {**OPTIONS, **DTYPES[dtype], "max_model_len": 512}
    right = WORDS
    if dtype == "fp8":
        # Rounded weights have other words: those with the patch, over zeros.
        right = _call(read, "mla_padding", backend, options, 0.0)["texts"]
    told = _call(read, patches, backend, options, float("nan"))
    numbers = {"texts": told["texts"], "padding": told["padding"], "evidence": place.evidence()}
    return good("right words", **numbers) if told["texts"] == right else bad("other words", **numbers)


def _wordless(subject: Subject, device: str) -> str | None:
    if subject[0] != "CPU_MLA":
        return _missing(subject, device)
    reason = place.unavailable_reason()
    if reason is None and numbers(place.release(place.python())[1]) < (0, 32):
        return "vLLM's MLA for CPUs was asked in 0.32.0; this is an older release"
    return reason


def compare(subject: Subject, device: str) -> str | None:
    """With the patch the requests must get the tokens that they get without.

    With fp8 weights vLLM scales the experts' input once for all rows, padding too: live rows are rounded as
    padding has it. So there it is a graph without padding in which the tokens must be equal.
    """
    rows = LIVE if subject[1] == "fp8" else ROWS
    on, off = (_serve((*subject[:2], patches), device, rows) for patches in (subject[2], OTHERS))
    if on["patch"] != "in place":
        return f"the patch is {on['patch']}"
    return None if on["tokens"] == off["tokens"] else "tokens of live requests differ"


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    variants = {f"{name}, {dtype}": (name, dtype, OTHERS) for name in BACKENDS for dtype in DTYPES}
    expect = {name: "NaN in padding" if name.startswith("TRITON_MLA") else "no NaN" for name in variants}
    incident.question("whole vLLM, NaN rows", variants, expect=expect, needs=_missing)(rows)
    read_by = {
        "CPU_MLA": ("CPU_MLA", "float32", OTHERS),
        "TRITON_MLA, bf16": ("TRITON_MLA", "bf16", OTHERS),
        "TRITON_MLA, fp8": ("TRITON_MLA", "fp8", OTHERS),
        "TRITON_MLA, bf16, patched": ("TRITON_MLA", "bf16", "mla_padding"),
        "CUSTOM, bf16": ("CUSTOM", "bf16", OTHERS),
    }
    right = dict.fromkeys(read_by, "right words")
    incident.question("whole vLLM, words over NaN", read_by, expect=right, needs=_wordless)(words)
    fixes = {
        name: Fix(*(("TRITON_MLA", dtype, patches) for patches in (OTHERS, "mla_padding")))
        for name, dtype in (("mla_padding, whole vLLM", "bf16"), ("mla_padding, whole vLLM, fp8", "fp8"))
    }
    incident.fixes(rows, fixes, compare=compare, needs=_missing)
