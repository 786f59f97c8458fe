"""A model reduced to what it allocates; the variants replace its attention or its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from staleproof import check
from staleproof.evidence.ledger import size_text
from staleproof.incidents.decode_buffer.allocator import GIB


def decode_out_bytes(batch: int, heads: int, *, rank: int = 512, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of one layer's MLA decode output (batch, heads, rank)."""
    return batch * heads * rank * dtype.itemsize


def kv_cache_bytes(total: int, utilisation: float, weights: int, peak: int, other: int) -> int:
    """What the KV cache gets: ``utilisation * total - weights - peak - other``, in bytes.

    Args:
        total: device memory.
        utilisation: share of it that the engine may plan with, in (0, 1].
        weights: allocated before the profile run.
        peak: the most that the profile run allocated on top.
        other: taken by others than torch, such as the driver's context and communicators.

    Raises:
        ValueError: a utilisation outside (0, 1], or nothing is left.
    """
    check.require(0 < utilisation <= 1, "utilisation", "a number in (0, 1]", utilisation)
    left = int(utilisation * total) - weights - peak - other
    check.require(
        left > 0,
        "total",
        f"utilisation x total of more than weights {size_text(weights)} + peak {size_text(peak)}"
        f" + other {size_text(other)}",
        f"{utilisation} x {size_text(total)}",
    )
    return left


@dataclass(frozen=True)
class ServerConfig:
    """Sizes of a server. The defaults are the reported command's (vLLM #37777, 4 x GB200).

    Attributes:
        total_bytes: device memory.
        utilisation: share that the engine plans with.
        layers: attention layers.
        batch: rows of the largest captured decode step.
        tokens: tokens of the largest prefill, which is also the profile run.
        heads: query heads a rank.
        rank: ``kv_lora_rank``.
        weight_bytes: an assumption, since the thread does not give it.
        workspace_per_token: bytes of the transient workspace a token. With 8192 tokens it is the
            3.94 GiB whose allocation failed: by the report, the first large one of an MoE kernel. That
            each layer takes and frees them is an assumption.
        dtype: of the decode output; bf16, since the KV cache of the report is fp8.
    """

    total_bytes: int = 184 * GIB
    utilisation: float = 0.9
    layers: int = 61
    batch: int = 2048
    tokens: int = 8192
    heads: int = 128
    rank: int = 512
    weight_bytes: int = 80 * GIB
    workspace_per_token: int = 504 * 2**10
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("total_bytes", "layers", "batch", "tokens", "heads", "rank"):
            check.require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("weight_bytes", "workspace_per_token"):
            check.require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check.require(self.batch <= self.tokens, "batch", f"at most {self.tokens} tokens", self.batch)
        # Raises for a utilisation outside (0, 1] and for weights beyond the budget.
        kv_cache_bytes(self.total_bytes, self.utilisation, self.weight_bytes, 0, 0)

    @property
    def decode_out_bytes(self) -> int:
        """Bytes of one layer's decode output at the largest captured batch."""
        return decode_out_bytes(self.batch, self.heads, rank=self.rank, dtype=self.dtype)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace of the largest prefill."""
        return self.tokens * self.workspace_per_token

    def scaled(self, by: int) -> ServerConfig:
        """The same server with memory, batch, tokens and weights divided by ``by``."""
        return replace(
            self,
            total_bytes=self.total_bytes // by,
            batch=self.batch // by,
            tokens=self.tokens // by,
            weight_bytes=self.weight_bytes // by,
        )

    def headroom_bytes(self, after_profile: int) -> int:
        """Device memory left to serve with when ``after_profile`` bytes were taken after the profile run.

        The workspace counts as free: the profile run saw it, so the KV cache leaves room for it.
        """
        outside = self.total_bytes - int(self.utilisation * self.total_bytes)
        return outside + self.workspace_bytes - after_profile


def decode_live_rows(q: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Stub of a decode kernel: copies live rows of ``q`` to ``out`` and leaves the others unwritten.

    Args:
        q: (batch, heads, rank).
        seq_lens: (batch,) int32.
        out: like q, in place; allocates nothing of its size.
    """
    torch.where((seq_lens > 0)[:, None, None], q, out, out=out)


class Attention(nn.Module):
    """One layer's MLA decode, with new output memory for every call: no buffer at all.

    Variants override :meth:`output`.

    Args:
        config: sizes.
        device: where the weights go.
    """

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__()
        weight = torch.ones(config.heads, config.rank, dtype=config.dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Uninitialised memory for the decode output of ``q`` (batch, heads, rank)."""
        return torch.empty_like(q)

    def decode(self, q: torch.Tensor, seq_lens: torch.Tensor, micro_batch: int = 0) -> torch.Tensor:
        """The output (batch, heads, rank) of one decode launch."""
        out = self.output(q, micro_batch)
        decode_live_rows(q, seq_lens, out)
        return out

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """x (tokens,) -> (tokens,). ``seq_lens`` is ``None`` without metadata: nothing is decoded then."""
        q = x[:, None, None] * self.weight
        if seq_lens is None:
            return torch.zeros_like(x)
        return self.decode(q, seq_lens).mean((1, 2))


class Experts(nn.Module):
    """One layer's experts, with a workspace in proportion to the tokens, freed after the call.

    Variants override :meth:`workspace`.
    """

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__()
        self.per_token = config.workspace_per_token
        weight = torch.ones(1, dtype=config.dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def workspace(self, x: torch.Tensor, decoding: bool) -> torch.Tensor:
        """Uninitialised memory (tokens * bytes a token,) uint8."""
        return torch.empty(len(x) * self.per_token, dtype=torch.uint8, device=x.device)

    def forward(self, x: torch.Tensor, decoding: bool) -> torch.Tensor:
        """x (tokens,) -> (tokens,)."""
        staged = self.workspace(x, decoding)[: x.numel() * x.element_size()].view(x.dtype)
        staged.copy_(x)
        return staged * self.weight


class Layer(nn.Module):
    """Attention and experts, each with a residual."""

    def __init__(self, attn: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.attn, self.experts = attn, experts

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """x (tokens,) -> (tokens,)."""
        x = x + self.attn(x, seq_lens)
        return x + self.experts(x, seq_lens is not None)


Part = Callable[[ServerConfig, str], nn.Module]


class Model(nn.Module):
    """A decoder with a hidden size of 1: it allocates what a large one does and computes little.

    Attributes:
        kv_cache: empty until the server allocates it.
    """

    def __init__(self, config: ServerConfig, device: str, attention: Part, experts: Part) -> None:
        super().__init__()
        lump = torch.empty(config.weight_bytes, dtype=torch.uint8, device=device)
        self.weights = nn.Parameter(lump, requires_grad=False)
        self.layers = nn.ModuleList(
            Layer(attention(config, device), experts(config, device)) for _ in range(config.layers)
        )
        self.kv_cache: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """x (tokens,) -> (tokens,); ``seq_lens`` (tokens,) int32 for a decode step, else None."""
        for layer in self.layers:
            x = layer(x, seq_lens)
        return x
