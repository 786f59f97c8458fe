"""Incident 3 in words: a real small model whose feed-forward layers are experts, behind faulty routers.

Each feed-forward layer of SmolLM2 is split into 8 experts, which stand among 120 experts of zeros. The router
scores the 8 with exactly 1, the others with about 0: a right choice gives the model's own layer, bit for
bit. A correction bias, as DeepSeek-V3 has one, orders them; for one expert that nobody needs it is NaN. Which
experts a faulty choice then repeats or loses depends on the place of that NaN; at some places it loses none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from staleproof import device as devices
from staleproof import words
from staleproof.incidents.moe_routing import broken
from staleproof.lab import Answer, Fix, Incident
from staleproof.ops.topk import topk_sigmoid

ALL, TOP_K, REQUESTS, TOKENS = 128, 8, 3, 12
REAL = torch.arange(TOP_K) * 16 + 5
# The expert whose bias is NaN.
SPOILT = 4
OURS = "topk_sigmoid"
PROMPTS = words.PROMPTS[:REQUESTS]


@dataclass(frozen=True)
class Router:
    """A way to choose 8 of 128 experts.

    Attributes:
        choice: a name of :data:`broken.CHOICES`, or :data:`OURS`.
        nan: whether the bias of one expert is NaN.
    """

    choice: str
    nan: bool = True

    def choose(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids, both (rows, 8)."""
        logits = torch.full((rows, ALL), -20.0)
        logits[:, REAL] = 20.0
        bias = 0.1 * torch.rand(ALL, generator=torch.Generator().manual_seed(0))
        if self.nan:
            bias[SPOILT] = torch.nan
        logits, bias = logits.to(devices.select()), bias.to(devices.select())
        if self.choice == OURS:
            return topk_sigmoid(logits, TOP_K, bias=bias)
        return broken.route(broken.CHOICES[self.choice], logits, TOP_K, softmax=False, bias=bias)

    def weigh(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, 8): the factor of each expert in the layer's sum; one that is named twice counts twice."""
        weights, ids = self.choose(len(x))
        shares = torch.zeros(len(x), ALL, device=x.device).scatter_add_(1, ids.long(), weights.float())
        return shares[:, REAL]


def _serve(router: Router | None) -> words.Served:
    from staleproof.words.kernels import torch_unwritten

    with torch.inference_mode():
        model = words.load(device=devices.select())
        route = None if router is None else router.weigh
        return words.Server(model, kernel=torch_unwritten, rows=REQUESTS, route=route).serve(PROMPTS, TOKENS)


_without_experts = cache(partial(_serve, None))


def words_by_router(router: Router, device: str) -> Answer:
    """Three requests. Are their words those of the model without experts?"""
    ids = router.choose(1)[1][0].tolist()
    answer = words.judged(_serve(router), _without_experts())
    counts = {"repeated": len(ids) - len({*ids}), "lost": len({*REAL.tolist()} - {*ids})}
    return replace(answer, numbers={**answer.numbers, **counts})


def _not_the_same_words(router: Router, device: str) -> str | None:
    same = _serve(router).token_ids == _without_experts().token_ids
    return None if same else "not the words of the model without experts"


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    warp, block = Router("warp_keeps_its_first_column"), Router("block_keeps_the_left")
    incident.question(
        "words by router",
        {
            "warp_keeps_its_first_column": warp,
            "block_keeps_the_left": block,
            "warp_keeps_its_first_column, no NaN": replace(warp, nan=False),
            OURS: Router(OURS),
        },
        expect={
            "warp_keeps_its_first_column": words.OTHER,
            "block_keeps_the_left": words.OTHER,
            "warp_keeps_its_first_column, no NaN": words.RIGHT,
            OURS: words.RIGHT,
        },
        needs=words.needs_model,
    )(words_by_router)
    fix = {f"words, {OURS}": Fix(off=warp, on=Router(OURS))}
    incident.fixes(words_by_router, fix, compare=_not_the_same_words, needs=words.needs_model)
