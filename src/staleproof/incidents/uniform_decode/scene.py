"""A server of one recurrent layer, with drafts and a captured graph of decode.

What a user's text does to such a layer is a state: ``state = DECAY * state + token``, and the output of a
token is the state behind it. A request owns ``k + 1`` blocks: the first has its state, the others the states
behind each of ``k`` drafts, so that a rejected draft can be taken back.

The graph of decode reads which blocks to use from buffers at fixed addresses. A step that verifies drafts
fills them. A step with a prompt has its own index, outside these buffers, and runs eagerly; unless the server
takes it for a step of drafts because it has the same shape. The structure follows vLLM 0.22.1 (V1 model
runner, ``gdn_attn.py``); ``whole.py`` asks vLLM itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from staleproof.graph import Graph, capture

DECAY = 0.5
# Kernels skip rows of this block: padding points to it.
NULL = 0
BLOCKS, ROWS, TOKENS = 32, 2, 16


@dataclass
class Request:
    """One user's request.

    Attributes:
        tokens: all its tokens: first the prompt, then what was generated.
        prompt: tokens of its prompt.
        blocks: the blocks that it owns, ``k + 1`` of them.
        computed: tokens whose state is in its first block.
        outputs: what the server gave for each computed token.
    """

    tokens: list[float]
    prompt: int
    blocks: list[int]
    computed: int = 0
    outputs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What a step computes of one request: ``tokens`` of it, ``drafts`` of which are drafts to verify."""

    request: Request
    tokens: int
    drafts: int = 0


Plan = Sequence[Part]
# From a step's plan and k to whether it may replay the graph of decode.
Rule = Callable[[Plan, int], bool]


class Server:
    """One layer, its blocks, and its graphs.

    Args:
        k: draft tokens of a step of decode.
        rule: whether a step may replay the graph.
        device: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, k: int, rule: Rule, device: str) -> None:
        self.k, self.rule = k, rule
        self.states = torch.zeros(BLOCKS, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(TOKENS, dtype=torch.float64, device=device)
        self.slots = torch.full((ROWS, k + 1), NULL, device=device)
        # What no kernel writes keeps the NaN of the start.
        self.out = torch.full_like(self.tokens, torch.nan)
        self.graphs: dict[int, Graph] = {
            rows: capture(partial(self._decode, rows), device) for rows in range(1, ROWS + 1)
        }
        self.next_block = 1

    def request(self, tokens: Sequence[float], prompt: int | None = None) -> Request:
        """A new request in blocks of its own; all tokens are its prompt, unless ``prompt`` says how many."""
        blocks = [*range(self.next_block, self.next_block + self.k + 1)]
        self.next_block += len(blocks)
        return Request([*tokens], len(tokens) if prompt is None else prompt, blocks)

    def step(self, plan: Plan) -> bool:
        """Run one step; returns whether it replayed the graph."""
        token = [value for part in plan for value in self._tokens_of(part)]
        self.tokens[: len(token)].copy_(torch.tensor(token, dtype=torch.float64))
        if all(part.drafts == self.k and self._is_decode(part) for part in plan):
            # The buffers that the graph reads are filled by a step of decode alone.
            self.slots.fill_(NULL)
            for row, part in enumerate(plan):
                self.slots[row].copy_(torch.tensor(part.request.blocks))
        replayed = len(plan) <= ROWS and self.rule(plan, self.k)
        if replayed:
            self.graphs[len(plan)].replay()
        else:
            self._eager(plan)
        start = 0
        for part in plan:
            part.request.outputs += self.out[start : start + part.tokens].tolist()
            part.request.computed += part.tokens
            start += part.tokens
        return replayed

    def _is_decode(self, part: Part) -> bool:
        # vLLM's builder takes one token for a decode, also if it is a whole prompt (#51562).
        return part.drafts > 0 or part.tokens == 1

    def _tokens_of(self, part: Part) -> list[float]:
        computed = part.request.computed
        return part.request.tokens[computed : computed + part.tokens]

    def _decode(self, rows: int) -> None:
        """The captured layer: ``rows`` requests of ``k + 1`` tokens each, in the blocks of the buffers."""
        width = self.k + 1
        slots, tokens = self.slots[:rows], self.tokens[: rows * width].view(rows, width)
        out = self.out[: rows * width].view(rows, width)
        state = self.states[slots[:, 0]]
        for token in range(width):
            state = DECAY * state + tokens[:, token]
            live = slots[:, token] != NULL
            out[:, token] = torch.where(live, state, out[:, token])
            self.states[slots[:, token]] = torch.where(live, state, self.states[slots[:, token]])
        # All drafts are accepted here: the last state becomes the request's.
        live = slots[:, 0] != NULL
        self.states[slots[:, 0]] = torch.where(live, state, self.states[slots[:, 0]])

    def _eager(self, plan: Plan) -> None:
        start = 0
        for part in plan:
            block = part.request.blocks[0]
            state = self.states[block] if part.request.computed or self._is_decode(part) else 0.0
            for token in range(start, start + part.tokens):
                state = DECAY * state + self.tokens[token]
                self.out[token] = state
            self.states[block] = state
            start += part.tokens


def reference(tokens: Sequence[float], state: float = 0.0) -> list[float]:
    """The outputs of these tokens behind a state, in plain Python; the right ones start from 0.

    >>> reference([1.0, 2.0])
    [1.0, 2.5]
    """
    out = []
    for token in tokens:
        state = DECAY * state + token
        out.append(state)
    return out


def by_shape(plan: Plan, k: int) -> bool:
    """vLLM's rule: every request has k+1 tokens."""
    return all(part.tokens == k + 1 for part in plan)
