"""Patch for incident 2: MLA layers no longer keep a decode output buffer each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of

BACKENDS = "vllm.v1.attention.backends.mla"
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
# vLLM's CUTLASS backend allocates its output for this many heads, whatever the model has.
CUTLASS_HEADS = 128


@contextmanager
def _borrowed(impl: Any, q: Any, requests: int, heads: int | None) -> Iterator[None]:
    """Set ``_decode_out`` to a zeroed buffer for one call, and drop it after the call.

    vLLM uses a ``_decode_out`` that is large enough and has the right dtype. Otherwise it allocates
    one and keeps it there; that one is dropped as well. vLLM's buffer starts as zeros, and so does
    this one: its kernels leave the rows of empty requests as they are.
    """
    import torch

    like = q[0] if isinstance(q, tuple) else q
    if like.shape[0] == requests:
        quantized = str(impl.kv_cache_dtype).startswith("fp8")
        impl._decode_out = torch.zeros(
            requests,
            heads or like.shape[-2],
            impl.kv_lora_rank,
            dtype=torch.bfloat16 if quantized else like.dtype,
            device=like.device,
        )
    try:
        yield
    finally:
        # The result is a view of it, so the memory is freed when the layer drops the result.
        impl._decode_out = None


def _cutlass(args: Arguments, kwargs: Keywords) -> Any:
    q = argument(args, kwargs, 1, "q")
    requests = (q[0] if isinstance(q, tuple) else q).shape[0]
    return _borrowed(args[0], q, requests, CUTLASS_HEADS)


def _flashinfer(args: Arguments, kwargs: Keywords) -> Any:
    # With several query tokens a request, vLLM passes no buffer to the kernel.
    metadata = argument(args, kwargs, 3, "attn_metadata")
    return _borrowed(args[0], argument(args, kwargs, 1, "q"), metadata.num_decodes, None)


def _probe(sources: Sources) -> Evidence:
    path = file_of(f"{BACKENDS}.cutlass_mla")
    for line, text in enumerate(sources.text(path).splitlines(), start=1):
        if "self._decode_out" in text:
            return Evidence(True, f"{path}:{line} keeps an output buffer a layer")
    return Evidence(False, f"{path} keeps no output buffer")


PATCHES = (
    Patch(
        name="decode_buffer",
        incident="decode_buffer",
        summary="keeps no decode output a layer",
        models="MLA models on CUTLASS or FlashInfer MLA",
        versions=(("0.18.0", "0.19.1"),),
        targets=(
            Target(f"{BACKENDS}.cutlass_mla", "CutlassMLAImpl.forward_mqa", FORWARD_MQA, around=_cutlass),
            Target(
                f"{BACKENDS}.flashinfer_mla", "FlashInferMLAImpl.forward_mqa", FORWARD_MQA, around=_flashinfer
            ),
        ),
        probe=_probe,
        mechanism=(
            "The first cure of incident 1 keeps a zeroed output (requests, heads, 512) a layer, in "
            "a branch that the memory profile never takes: 61 layers of DeepSeek at 1,024 requests "
            "hold 7.6 GiB that nobody budgeted. With the patch each call gets a zeroed buffer that "
            "dies with its result."
        ),
        threads=("vLLM #37442", "vLLM #37777", "vLLM #37799", "vLLM #38359"),
        cost="one fill of the output a layer; saves the buffers",
        requires=("mla_padding",),
    ),
)
