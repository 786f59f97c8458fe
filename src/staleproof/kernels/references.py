"""Expected results of kernels over rows and over packed sequences: plain PyTorch in float64."""

from __future__ import annotations

from itertools import pairwise

import torch


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """x (rows, hidden), without a weight."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def add_rms_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With x as its own residual: the norm of the sum, and the sum."""
    return rms_norm(2 * x), 2 * x


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """x (rows, hidden), without weight and bias."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """x (rows, hidden)."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis."""
    return x.softmax(-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x (rows, 2 * hidden): gate, then up."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """With x as gate and as up."""
    return torch.nn.functional.silu(x) * x


def top_k_renorm(x: torch.Tensor) -> torch.Tensor:
    """The 4 largest probabilities of softmax(x), divided by their sum."""
    p = x.softmax(-1)
    p = p * (p >= p.topk(4, -1).values[:, -1:])
    return p / p.sum(-1, keepdim=True)


def top_p_renorm(x: torch.Tensor) -> torch.Tensor:
    """The fewest probabilities of softmax(x) that reach 0.9, divided by their sum."""
    p, order = x.softmax(-1).sort(-1, descending=True)
    p = p * (p.cumsum(-1) - p < 0.9)
    return torch.empty_like(p).scatter(1, order, p / p.sum(-1, keepdim=True))


def grouped_product(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Each sequence times a matrix of its own, (hidden, 32), drawn with seed 0."""
    torch.manual_seed(0)
    return _products(x, starts, torch.randn(len(starts) - 1, x.shape[1], 32))


def masked_product(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Like :func:`grouped_product`, with matrices of (128, hidden), transposed."""
    torch.manual_seed(0)
    return _products(x, starts, torch.randn(len(starts) - 1, 128, x.shape[1]).mT)


def _products(x: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(len(x), weights.shape[2])
    for weight, start, end in zip(
        weights.bfloat16().double(), starts.tolist(), starts.tolist()[1:], strict=False
    ):
        out[start:end] = x[start:end] @ weight
    return out


def sum_of_four(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """A causal convolution with four weights of 1 over each sequence."""
    out = torch.zeros_like(x)
    for start, end in pairwise(starts.tolist()):
        for row in range(start, end):
            out[row] = x[max(start, row - 3) : row + 1].sum(0)
    return out


def gated_delta_rule(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """x (tokens, 2 * dim) as q, k and v of two heads; gate -0.1, beta 0.5; q and k of length 1."""
    tokens = x.view(len(x), 2, -1)
    unit, out = l2_norm(tokens), torch.zeros_like(tokens)
    for start, end in pairwise(starts.tolist()):
        state = x.new_zeros(2, tokens.shape[2], tokens.shape[2])
        for row in range(start, end):
            k, v = unit[row], tokens[row]
            state = state * torch.tensor(-0.1).double().exp()
            change = 0.5 * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + torch.einsum("hk,hv->hkv", k, change)
            out[row] = torch.einsum("hkv,hk->hv", state, k) * tokens.shape[2] ** -0.5
    return out
