"""A miniature decode engine: MLA decode to logits, captured at a padded batch size.

It is as small as the incident allows. Weights are fixed and random, the KV cache is filled once, and
nothing is sampled. The detectors look at the logits of live rows, and at whether padding changed them.

Sources: in FULL mode padding rows get ``seq_lens = 0`` (vLLM 0.18.1 ``gpu_model_runner.py:1796``), and
``num_decodes`` counts them (``v1/attention/backends/utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from staleproof import check
from staleproof.evidence.compare import rounding
from staleproof.evidence.rows import CLEAN, Fill, Verdict, judge_rows, pad_invariance
from staleproof.graph import Graph, capture

if TYPE_CHECKING:
    from staleproof.evidence.counters import RowCounters

KV_LORA_RANK, ROPE_DIM = 512, 64
LATENT = KV_LORA_RANK + ROPE_DIM
# 1 / sqrt(head size of DeepSeek's MLA before absorption: 128 without rope, 64 with it).
SCALE = (128 + ROPE_DIM) ** -0.5

STAGES = ("attention", "quantise", "projection", "norm", "router", "experts")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the miniature model. All in elements; ``context`` and ``page_size`` in tokens."""

    batch: int = 8
    q_len: int = 1
    heads: int = 4
    context: int = 16
    page_size: int = 16
    layers: int = 1
    hidden: int = 64
    experts: int = 8
    top_k: int = 2
    inter: int = 32
    vocab: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"

    @property
    def max_pages(self) -> int:
        """Pages of a request."""
        return -(-self.context // self.page_size)

    @classmethod
    def for_device(cls, device: str, **changes: object) -> EngineConfig:
        """Sizes that a CPU interprets in seconds, or realistic sizes for a GPU's kernels."""
        if device == "cuda":
            return cls(**{**_ON_GPU, **changes})  # type: ignore[arg-type]
        return cls(**changes)  # type: ignore[arg-type]


_ON_GPU = {
    "batch": 128,
    "heads": 128,
    "context": 512,
    "page_size": 64,
    "hidden": 1024,
    "experts": 32,
    "inter": 512,
    "device": "cuda",
}


@dataclass
class AttentionInputs:
    """The inputs of one MLA decode.

    Attributes:
        q: (batch, q_len, heads, 576).
        kv_cache: (pages, page_size, 576).
        block_table: (batch, max_pages) int32; -1 where a request has no page.
        seq_lens: (batch,) int32, 0 for padding rows.
        num_decodes: host integer, the *padded* batch in FULL graphs, as in vLLM.
        layer: index of the layer, for remedies that keep a buffer a layer.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    layer: int


Attention = Callable[[AttentionInputs], torch.Tensor]
# (x (rows, hidden), live_rows (rows,) bool) -> fp8 tensor, scale
Quantiser = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Variant:
    """The exchangeable parts of the engine.

    Attributes:
        name: short name.
        attend: writes and returns the attention output (batch, q_len, heads, 512).
        quantise: per-tensor fp8 quantiser of the attention output, or ``None`` for none.
        judged_from: the detectors look at this stage and the later ones.
        keeps_memory: whether ``attend`` writes into memory of its own that it keeps after the step.
    """

    name: str
    attend: Attention
    quantise: Quantiser | None
    judged_from: str = "attention"
    keeps_memory: bool = False


def live_rows(rows: int, live: int, spread: bool) -> torch.Tensor:
    """The rows of the live requests: the first ones, or with ``spread`` every second one as far as possible.

    >>> live_rows(8, 3, spread=True), live_rows(4, 3, spread=True)
    (tensor([1, 3, 5]), tensor([1, 2, 3]))
    """
    first = torch.arange(live)
    return torch.minimum(2 * first + 1, rows - live + first) if spread else first


@dataclass(frozen=True)
class Batch:
    """One step of ``live`` requests of ``seq_len`` tokens each.

    Attributes:
        live: number of captured rows that belong to requests: the first ones, as vLLM orders them.
        seq_len: their tokens; by default as many as the cache has room for.
        poisoned_row: the live row that has NaN in its KV cache.
        spread: whether empty requests are between the live ones (:func:`live_rows`).
    """

    live: int
    seq_len: int | None = None
    poisoned_row: int | None = None
    spread: bool = False


Drawn = tuple[list[dict[str, torch.Tensor]], torch.Tensor, list[torch.Tensor], torch.Tensor]


@lru_cache(maxsize=2)
def _drawn(c: EngineConfig) -> Drawn:
    """Weights of each layer, the head, a KV cache a layer, and hidden states, of one seed.

    Drawing them for a GPU's engine takes a CPU seconds, and the incident creates a hundred engines of a few
    sizes. So engines share these tensors, and none may write into them.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def weight(*shape: int) -> torch.Tensor:
        return (draw(*shape) / math.sqrt(shape[-2])).to(c.device, c.dtype)

    weights = [
        {
            "q": weight(c.hidden, c.heads * LATENT),
            "o": weight(c.heads * KV_LORA_RANK, c.hidden),
            "router": weight(c.hidden, c.experts),
            "up": weight(c.experts, c.hidden, c.inter),
            "down": weight(c.experts, c.inter, c.hidden),
        }
        for _ in range(c.layers)
    ]
    head = weight(c.hidden, c.vocab)
    # Block 0 is the null block, as in vLLM: it belongs to no request.
    pages = c.batch * c.max_pages + 1
    kv_cache = [draw(pages, c.page_size, LATENT).to(c.device, c.dtype) for _ in range(c.layers)]
    return weights, head, kv_cache, draw(c.batch * c.q_len, c.hidden).to(c.device, c.dtype)


class Engine:
    """One captured decode step over static tensors.

    Args:
        variant: the exchangeable parts.
        config: sizes and device.
        counters: optional :class:`staleproof.evidence.RowCounters` over :meth:`stage_names`; they are
            captured with the step.
    """

    def __init__(self, variant: Variant, config: EngineConfig, counters: RowCounters | None = None) -> None:
        self.variant, self.config = variant, config
        c = config
        self._counters = counters
        self.weights, self.head, kv_cache, hidden = _drawn(c)
        self.kv_cache, self.hidden = [layer.clone() for layer in kv_cache], hidden.clone()
        self.pages = torch.arange(1, len(kv_cache[0]), dtype=torch.int32).view(c.batch, c.max_pages)
        self.block_table = torch.empty(c.batch, c.max_pages, dtype=torch.int32, device=c.device)
        self.seq_lens = torch.empty(c.batch, dtype=torch.int32, device=c.device)
        self.live = torch.empty(len(self.hidden), dtype=torch.bool, device=c.device)
        # The static output tensors of each layer, by stage, for the detectors.
        self.taps: list[dict[str, torch.Tensor]] = [{} for _ in range(c.layers)]
        self.logits = torch.empty(0)
        self._overlay: Fill | None = None
        self._healthy: tuple[int, torch.Tensor] | None = None
        self.set_batch(Batch(live=1))
        self.graph: Graph = capture(self._step, c.device)
        if counters is not None:
            counters.reset()

    @staticmethod
    def stage_names(layers: int) -> list[str]:
        """Names of all stages in order: ``0.attention``, ..., ``logits``."""
        return [f"{layer}.{stage}" for layer in range(layers) for stage in STAGES] + ["logits"]

    def set_batch(self, batch: Batch) -> None:
        """Write one step's metadata into the static tensors, as a model runner does.

        Padding rows get ``seq_lens`` 0 and block-table entries -1. The KV cache of the batch's
        ``poisoned_row`` gets NaN; the next call puts back what it held.

        Raises:
            ValueError: more live requests than the captured batch, requests longer than the cache
                holds, or a ``poisoned_row`` that is not live.
        """
        c = self.config
        seq_len = c.context if batch.seq_len is None else batch.seq_len
        check.require(1 <= batch.live <= c.batch, "batch.live", f"1 to {c.batch}", batch.live)
        check.require(c.q_len <= seq_len <= c.context, "batch.seq_len", f"{c.q_len} to {c.context}", seq_len)
        if batch.poisoned_row is not None:
            check.require(
                0 <= batch.poisoned_row < batch.live,
                "batch.poisoned_row",
                f"a live row, 0 to {batch.live - 1}",
                batch.poisoned_row,
            )
        if self._healthy is not None:
            page, content = self._healthy
            self.kv_cache[0][page] = content
            self._healthy = None
        rows = live_rows(c.batch, batch.live, batch.spread)
        if batch.poisoned_row is not None:
            page = int(self.pages[rows[batch.poisoned_row], 0])
            self._healthy = page, self.kv_cache[0][page].clone()
            self.kv_cache[0][page] = float("nan")
        seq_lens = torch.zeros(c.batch, dtype=torch.int32)
        seq_lens[rows] = seq_len
        table = torch.full_like(self.pages, -1)
        table[rows] = self.pages[rows]
        self.seq_lens.copy_(seq_lens)
        self.block_table.copy_(table)
        self.live.copy_((seq_lens > 0).repeat_interleave(c.q_len))

    def _step(self) -> None:
        """One decode step; captured once, and replayed without this Python."""
        if self._counters is not None:
            self._counters.begin()
        x = self.hidden
        for layer, w in enumerate(self.weights):
            self.taps[layer] = outputs = self._layer(layer, w, x)
            x = outputs["experts"]
            # Now, because the next layer may overwrite the attention output of this one.
            self._observe({f"{layer}.{stage}": output for stage, output in outputs.items()})
        self.logits = x @ self.head
        self._observe({"logits": self.logits})

    def _observe(self, outputs: dict[str, torch.Tensor]) -> None:
        if self._counters is not None:
            for name, x in outputs.items():
                self._counters.observe(name, x, self.live)

    def _fill_padding(self, x: torch.Tensor, fill: Fill) -> None:
        padding = x[~self.live]
        fill(padding)
        x[~self.live] = padding

    def _layer(self, layer: int, w: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs of one layer by stage, (rows, columns) each."""
        c = self.config
        q = (x @ w["q"]).view(c.batch, c.q_len, c.heads, LATENT)
        attended = self.variant.attend(
            AttentionInputs(q, self.kv_cache[layer], self.block_table, self.seq_lens, c.batch, layer)
        )
        flat = attended.reshape(c.batch * c.q_len, c.heads * KV_LORA_RANK)
        if self._overlay is not None:
            self._fill_padding(flat, self._overlay)
        quantised, values = flat, flat
        if self.variant.quantise is not None:
            quantised, scale = self.variant.quantise(flat, self.live)
            values = (quantised.float() * scale).to(c.dtype)
        projected = values @ w["o"]
        residual = projected + x
        normed = F.rms_norm(residual, (c.hidden,))
        router_logits = normed @ w["router"]
        weights, ids = torch.topk(router_logits.float().softmax(-1), c.top_k)
        # Every expert computes every row, and each row then takes the experts it chose: no operation
        # mixes rows, so that this stage carries no NaN from one row to another.
        up = F.silu(torch.matmul(normed, w["up"]))
        by_expert = torch.matmul(up, w["down"]).transpose(0, 1)
        chosen = by_expert.gather(1, ids[..., None].expand(-1, -1, c.hidden))
        out = residual + (weights[..., None].to(c.dtype) * chosen).sum(1)
        return dict(zip(STAGES, (flat, quantised, projected, normed, router_logits, out), strict=True))

    def poison(self, write: Callable[[torch.Tensor], object]) -> None:
        """Fill the memory that belongs to no request, as an earlier tenant would have.

        This is the null block of every layer's KV cache and the attention output of every layer. If a variant
        keeps its output memory from step to step, that memory is not filled.
        """
        for taps, kv_cache in zip(self.taps, self.kv_cache, strict=True):
            write(kv_cache[0])
            if not self.variant.keeps_memory:
                write(taps["attention"])

    def replay(self) -> torch.Tensor:
        """Replay the captured step; returns the static logits (rows, vocab)."""
        self.graph.replay()
        return self.logits

    def outputs(self, judged_from: str | None = None) -> list[torch.Tensor]:
        """Static outputs from one stage on, logits last; by default from the variant's ``judged_from``."""
        # A fix in the consumer does not change the attention output, so that output does not judge the fix.
        kept = STAGES[STAGES.index(judged_from or self.variant.judged_from) :]
        return [*(taps[stage] for taps in self.taps for stage in kept), self.logits]

    def run(self, fill: Fill | None) -> Sequence[torch.Tensor]:
        """The current step, for :func:`judge_rows` and :func:`pad_invariance`.

        ``None`` replays the step. :data:`CLEAN` runs it with zeros in the padding rows of every
        attention output, whatever the kernel left there. Any other fill is written into that memory
        *before* the replay, like bytes of an earlier owner; a correct step never reads them.
        """
        if fill is None:
            self.replay()
            return self.outputs()
        memory = [taps["attention"] for taps in self.taps]
        before = [x.clone() for x in memory]
        kept = [*self.taps], self.logits, self._counters
        try:
            if fill is CLEAN:
                # Eager, so that the zeros can be written between the kernel and its consumer. Afterwards the
                # counters and the static outputs of the captured step are put back.
                self._counters, self._overlay = None, CLEAN
                self._step()
            else:
                for x in memory:
                    self._fill_padding(x, fill)
                self.replay()
            return [x.clone() for x in self.outputs()]
        finally:
            self._overlay = None
            self.taps, self.logits, self._counters = kept
            for x, old in zip(memory, before, strict=True):
                x.copy_(old)

    def verdict(self) -> Verdict:
        """Row verdict of the current step."""
        return judge_rows(self.run, self.live)

    def invariant(self, trials: int = 4) -> bool:
        """Whether padding content leaves the live rows of the current step bit-identical."""
        return bool(pad_invariance(self.run, self.live, trials))


class Call(NamedTuple):
    """The positional arguments of one ``mla_decode``."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def compared_dtype(device: str) -> torch.dtype:
    """The dtype in which a decode is compared with a reference: bf16, but fp32 under Triton's interpreter.

    The interpreter truncates float32 to bf16 where a GPU rounds, and multiplies the bit patterns of bf16
    operands if a kernel does not convert them.
    """
    return torch.bfloat16 if device == "cuda" else torch.float32


def decode_budget(dtype: torch.dtype, tokens: int, times: int = 2) -> float:
    """How far a right decode may be from a float64 reference (:mod:`staleproof.evidence.compare`).

    Args:
        dtype: of the kernel. In bf16 it rounds softmax weights and result. In fp32 it rounds each term of two
            sums, over the latent and over the tokens.
        tokens: of the longest request.
        times: roundings of a kernel in bf16.

    >>> decode_budget(torch.bfloat16, tokens=84), round(decode_budget(torch.float32, tokens=84), 6)
    (0.0078125, 3.9e-05)
    """
    return rounding(dtype, times) if dtype == torch.bfloat16 else rounding(dtype, LATENT + tokens)


def make_call(
    device: str,
    *,
    rows: int,
    live: int,
    tokens: int,
    q_len: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spread: bool = False,
) -> Call:
    """A decode batch with ``live`` requests of ``tokens`` tokens among ``rows`` rows (:func:`live_rows`).

    q is (rows, heads, 576) or, with ``q_len``, (rows, q_len, heads, 576); 128 heads on a GPU, 4 under
    the interpreter. Pages hold 64 tokens. Each request's last entry of the block table is unused, and
    names a page that belongs to nobody.
    """
    heads, page_size = 128 if device == "cuda" else 4, 64
    generator = torch.Generator().manual_seed(1)
    pages = -(-tokens // page_size)
    shape = (rows, heads, LATENT) if q_len is None else (rows, q_len, heads, LATENT)
    q = torch.randn(shape, generator=generator).to(device, dtype)
    kv_cache = torch.randn(live * (pages + 1) + 1, page_size, LATENT, generator=generator)
    table = torch.zeros(rows, pages + 1, dtype=torch.int32)
    is_live = live_rows(rows, live, spread)
    table[is_live] = torch.arange(1, live * (pages + 1) + 1, dtype=torch.int32).view(live, pages + 1)
    seq_lens = torch.zeros(rows, dtype=torch.int32)
    seq_lens[is_live] = tokens
    return Call(q, kv_cache.to(device, dtype), table.to(device), seq_lens.to(device))
