"""What the users of a server saw: a real small model behind the kernels of the incidents.

The model is real (SmolLM2-135M-Instruct) and runs exactly; the kernels are those of the incidents or released
ones. That they run together, one fp8 scale for all rows, and what memory held before are ours.

>>> from staleproof import words
>>> if words.unavailable_reason() is None:
...     answer = words.serve(["What is the capital of France?"], tokens=8)
...     assert answer.texts == ["The capital of France is Paris."] and answer.died == [None]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from staleproof import check
from staleproof.device import one_thread, select
from staleproof.lab import Answer, bad, good
from staleproof.words.model import INSTALL as INSTALL
from staleproof.words.model import load, unavailable_reason
from staleproof.words.server import Kernel, Served, Server

__all__ = ["OTHER", "PROMPTS", "RIGHT", "Served", "Server", "judged", "load", "needs_model", "serve"]
__all__ += ["unavailable_reason"]
# Verdicts of :func:`judged`. The third is "n of m dead".
RIGHT, OTHER = "right words", "other words"
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three primary colours.",
    "What do bees make?",
    "Give me a short greeting.",
    "What is ice made of?",
    "How many days has a week?",
    "Which animal barks?",
)


def serve(
    prompts: Sequence[str],
    *,
    kernel: str | Kernel = "torch",
    memory: float = 0.0,
    clear: bool = False,
    fp8: bool = True,
    rows: int = 8,
    tokens: int = 12,
) -> Served:
    """Serve prompts in padded decode steps, and return what their users saw.

    On a CPU all is float32; on a CUDA device q, the KV cache and the attention output are bfloat16.

    Compare token ids of two calls only if both have the same ``fp8``: one scale for the batch changes texts
    by itself, without any fault.

    Args:
        prompts: at most as many as ``rows`` are served at once; rows without a request are padding.
        kernel: MLA decode: a name of :data:`staleproof.words.kernels.KERNELS`, or a function that is called
            as :func:`staleproof.mla_decode` is, with ``out``.
        memory: what the attention output's memory held before each step: normal numbers times this factor;
            0 for zeros, NaN for NaN.
        clear: call :func:`staleproof.clear_empty_rows` after the kernel.
        fp8: quantise the attention output, with one scale for all rows of a step, as vLLM's
            ``QuantFP8.forward_native`` does.
        rows: of a step.
        tokens: of an answer, at most.

    Raises:
        RuntimeError: the model, or vLLM's source, is not here; the message has the command that gets it.
        ValueError: an argument does not fit.
    """
    from staleproof.ops.clear_empty_rows import clear_empty_rows
    from staleproof.ops.reference.fp8 import quantize_fp8_per_tensor
    from staleproof.words.kernels import KERNELS, memory_of

    if isinstance(kernel, str):
        check.require(kernel in KERNELS, "kernel", f"one of {[*KERNELS]}", repr(kernel))
        kernel = KERNELS[kernel]
    check.require(tokens > 0, "tokens", "at least 1", tokens)
    check.require(rows > 0, "rows", "at least 1", rows)
    model = load(device=select())
    # A second thread gains these small products nothing, and waits on a busy machine.
    with one_thread(), torch.inference_mode():
        server = Server(
            model,
            kernel=kernel,
            memory=memory_of(memory),
            quantise=quantize_fp8_per_tensor if fp8 else None,
            clear=clear_empty_rows if clear else None,
            rows=rows,
            dtype=torch.float32 if model.device == "cpu" else torch.bfloat16,
        )
        return server.serve(prompts, tokens)


def needs_model(subject: object, device: str) -> str | None:
    """``needs`` of a question that asks the model: why it is not here, or ``None``."""
    return unavailable_reason()


def judged(served: Served, clean: Served | None) -> Answer:
    """The answer of a question, from what a server answered and what it answers without the fault.

    Good is ``right words``, the token ids of ``clean``; without ``clean`` it is ``all alive``. Bad are ``n of
    m dead``, if logits were not finite, and ``other words``. The texts are among the numbers.
    """
    numbers = {name: getattr(served, name) for name in ("prompts", "texts", "died", "ended")}
    dead = sum(step is not None for step in served.died)
    if dead:
        return bad(f"{dead} of {len(served.died)} dead", **numbers)
    if clean is None:
        return good("all alive", **numbers)
    if served.token_ids != clean.token_ids:
        return bad(OTHER, **numbers)
    return good(RIGHT, **numbers)
