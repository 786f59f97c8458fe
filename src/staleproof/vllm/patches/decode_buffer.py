"""Incident 2 in an installed vLLM: no decode output is kept a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from staleproof.vllm.hooks import Arguments, Evidence, Keywords, Patch, Sources, Target, argument

BACKENDS = "vllm.v1.attention.backends.mla"
FORWARD_MQA = ("self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")
# CUTLASS pads its output to as many heads.
CUTLASS_HEADS = 128


@contextmanager
def _borrowed(impl: Any, q: Any, requests: int, heads: int | None) -> Iterator[None]:
    """Lend ``_decode_out`` for one call what would otherwise be allocated and kept.

    vLLM keeps a buffer that is large enough and of the right dtype; where this one is not, it
    allocates its own, and that is dropped as well. Nothing needs to be zero in it: incident 1's
    patch clears the rows that the kernel leaves out.
    """
    import torch

    like = q[0] if isinstance(q, tuple) else q
    if like.shape[0] == requests:
        quantized = str(impl.kv_cache_dtype).startswith("fp8")
        impl._decode_out = torch.empty(
            requests,
            heads or like.shape[-2],
            impl.kv_lora_rank,
            dtype=torch.bfloat16 if quantized else like.dtype,
            device=like.device,
        )
    try:
        yield
    finally:
        # The result is a view of it: the memory goes back when the layer is done with that.
        impl._decode_out = None


def _cutlass(args: Arguments, kwargs: Keywords) -> Any:
    q = argument(args, kwargs, 1, "q")
    requests = (q[0] if isinstance(q, tuple) else q).shape[0]
    return _borrowed(args[0], q, requests, CUTLASS_HEADS)


def _flashinfer(args: Arguments, kwargs: Keywords) -> Any:
    # With several query tokens a request it passes no buffer at all.
    metadata = argument(args, kwargs, 3, "attn_metadata")
    return _borrowed(args[0], argument(args, kwargs, 1, "q"), metadata.num_decodes, None)


def _probe(sources: Sources) -> Evidence:
    path = "v1/attention/backends/mla/cutlass_mla.py"
    for line, text in enumerate(sources.text(path).splitlines(), start=1):
        if "self._decode_out" in text:
            return Evidence(True, f"{path}:{line} keeps an output buffer a layer")
    return Evidence(False, f"{path} keeps no output buffer")


PATCHES = (
    Patch(
        name="decode_buffer",
        incident="decode_buffer",
        summary="keeps no decode output a layer",
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
            "hold 7.6 GiB that nobody budgeted. With the patch each call gets a buffer that dies "
            "with its result; the rows it was zeroed for are cleared by mla_padding."
        ),
        threads=("vLLM #37442", "vLLM #37777", "vLLM #37799", "vLLM #38359"),
        cost="nothing on the device; saves the buffers",
        requires=("mla_padding",),
    ),
)
