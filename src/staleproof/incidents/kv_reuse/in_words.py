"""Incident 4 in words: a real small model over blocks that held float32 state, or another request's KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from staleproof import device as devices
from staleproof import words
from staleproof.grades import REPLICA, Evidence, real
from staleproof.kernels.mla import torch_sdpa
from staleproof.lab import Answer, Fix, Incident
from staleproof.ops.zero_blocks import BlockZeroer

# Ten requests, one after another, in a pool that three of them fill.
PAGE, BLOCKS, TOKENS = 8, 18, 5
REQUESTS = (words.PROMPTS * 2)[:10]


@dataclass(frozen=True)
class Pool:
    """A server of one row whose requests also hold a block of float32 state.

    Attributes:
        masks_loads: attention loads no position past ``seq_len``. Otherwise it is torch's with a boolean
            mask, which gives such a position the weight 0 and multiplies.
        zeroes: new KV blocks are zeroed first.
        blocks: of the pool.
    """

    masks_loads: bool = False
    zeroes: bool = False
    blocks: int = BLOCKS


def _server(
    pool: Pool, kind: type[words.Server] = words.Server, page: int = PAGE, **options: Any
) -> words.Server:
    from staleproof.words.kernels import torch_unwritten

    sdpa = torch_sdpa()
    server = kind(
        words.load(device=devices.select()),
        kernel=torch_unwritten if pool.masks_loads else sdpa,
        rows=1,
        page=page,
        blocks=pool.blocks,
        longest=64,
        dtype=torch.bfloat16,
        **options,
    )
    if pool.zeroes:
        server.on_new = BlockZeroer([server.cache], block_dim=1).zero
    return server


def _serve(pool: Pool) -> words.Served:
    with torch.inference_mode():
        return _server(pool, state_blocks=1).serve(REQUESTS, TOKENS)


@cache
def _clean() -> words.Served:
    """Over a pool so large that no block is used twice."""
    return _serve(Pool(blocks=10 * BLOCKS))


def over_uptime(pool: Pool, device: str) -> Answer:
    """Requests come one after another, each gets the blocks free for longest. Which answers are right?"""
    return words.judged(_serve(pool), _clean())


def _not_the_clean_words(pool: Pool, device: str) -> str | None:
    other = sum(a != b for a, b in zip(_serve(pool).token_ids, _clean().token_ids, strict=True))
    return f"{other} of 10 texts are not those over fresh memory" if other else None


class Unwritten(words.Server):
    """Takes the KV of the prompt :data:`ANIMAL` for written, as after a transfer that failed in silence."""

    def admit(self, row: int, prompt: str) -> list[int]:
        """Gives the row blocks for its prompt, of which only the last token is computed."""
        if prompt != ANIMAL:
            return super().admit(row, prompt)
        ids = self.model.encode(prompt)
        self.allocate(row, -(-len(ids) // self.page))
        self.seq_lens[row], self.tokens[row] = len(ids) - 1, ids[-1]
        return []


SECRET, ANIMAL = "My password is swordfish. Repeat it.", "Which animal barks?"
# What the block held -> requests that are served before, and whether the block is zeroed for the last one.
HELD: dict[str, tuple[tuple[str, ...], bool]] = {
    "another request's KV": ((SECRET,), False),
    "another request's KV, zeroed": ((SECRET,), True),
    "float32 state": ((), False),
}


def unwritten(block: tuple[tuple[str, ...], bool], device: str) -> Answer:
    """A request's prompt was never written to its block. Whose answer does its user read?

    A block takes a whole chat here, as in hybrid models, whose blocks are as large as a Mamba state.
    """
    before, zeroes = block
    with torch.inference_mode():
        server = _server(Pool(masks_loads=True, zeroes=zeroes, blocks=1), Unwritten, page=64)
        if not before:
            state = server.cache.view(torch.float32)
            state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(0)))
        server.serve(before, 12)
        served = server.serve([ANIMAL], 12)
        clean = _server(Pool(masks_loads=True)).serve([ANIMAL], 12)
    answer = words.judged(served, clean)
    if "swordfish" in served.texts[0].lower():
        return replace(answer, verdict="another user's secret")
    return answer


def _attention(pool: Pool) -> Evidence:
    return (
        REPLICA if pool.masks_loads else real("torch", "SDPA with a boolean mask, in our server of SmolLM2")
    )


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    incident.question(
        "words over uptime",
        {"masked by multiplication": Pool(), "masked loads": Pool(masks_loads=True)},
        expect={"masked by multiplication": "6 of 10 dead", "masked loads": words.RIGHT},
        needs=words.needs_model,
        evidence=_attention,
    )(over_uptime)
    incident.question(
        "words over an unwritten block",
        HELD,
        expect={
            "another request's KV": "another user's secret",
            "another request's KV, zeroed": words.OTHER,
            "float32 state": "1 of 1 dead",
        },
        needs=words.needs_model,
    )(unwritten)
    fix = {"words, BlockZeroer": Fix(off=Pool(), on=Pool(zeroes=True))}
    incident.fixes(
        over_uptime, fix, compare=_not_the_clean_words, needs=words.needs_model, evidence=_attention
    )
