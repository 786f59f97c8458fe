"""A miniature decode engine: MLA decode to logits, captured at a padded batch size.

It is as small as the incidents allow. Weights are fixed and random, the KV cache is filled once,
and nothing is sampled: what a live row's logits say, and whether padding changed them, is the
question.

Sources: capture sizes as vLLM's ``compilation.cudagraph_capture_sizes`` default; padding rows get
``seq_lens = 0`` in FULL mode (vLLM 0.18.1 ``gpu_model_runner.py:1796``) and ``num_decodes`` counts
them (``v1/attention/backends/utils.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from staleproof import check
from staleproof.evidence.rows import CLEAN, Fill, Verdict, judge_rows, pad_invariance
from staleproof.harness.graph import Graph, capture

if TYPE_CHECKING:
    from staleproof.evidence.counters import RowCounters

KV_LORA_RANK, ROPE_DIM = 512, 64
LATENT = KV_LORA_RANK + ROPE_DIM

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

    @classmethod
    def for_device(cls, device: str, **changes: object) -> EngineConfig:
        """Sizes that a CPU interprets in seconds, or that keep a GPU's kernels honest."""
        if device == "cuda":
            return cls(**{**_ON_GPU, **changes})  # type: ignore[arg-type]
        return cls(**changes)  # type: ignore[arg-type]

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head dim of DeepSeek MLA before absorption: 128 nope + 64 rope)."""
        return 1 / math.sqrt(128 + ROPE_DIM)


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
    """What one MLA decode gets.

    Attributes:
        q: (batch, q_len, heads, 576).
        kv_cache: (pages, page_size, 576).
        block_table: (batch, max_pages) int32; -1 where a request has no page.
        seq_lens: (batch,) int32, 0 for padding rows.
        num_decodes: host integer, the *padded* batch in FULL graphs, as in vLLM.
        layer: which layer asks, for remedies that keep something a layer.
        softmax_scale: fp scalar.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    layer: int
    softmax_scale: float

    def new_out(self) -> torch.Tensor:
        """(batch, q_len, heads, 512) memory for the output; nobody has written it."""
        return self.q.new_empty(*self.q.shape[:-1], KV_LORA_RANK)


Attention = Callable[[AttentionInputs], torch.Tensor]
# (x (rows, hidden), live_rows (rows,) bool) -> fp8 tensor, scale
Quantiser = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Variant:
    """What plugs into the engine.

    Attributes:
        name: short name.
        attend: returns the attention output (batch, q_len, heads, 512) it wrote.
        quantise: per-tensor fp8 quantiser of the attention output, or ``None`` for none.
        judged_from: the first stage this variant answers for.
        keeps_memory: whether ``attend`` writes into memory of its own that outlives the step.
    """

    name: str
    attend: Attention
    quantise: Quantiser | None
    judged_from: str = "attention"
    keeps_memory: bool = False


@dataclass(frozen=True)
class Batch:
    """One step's requests: how many are live and how long each is, in tokens."""

    live: int
    seq_len: int | None = None
    poisoned_row: int | None = None


@dataclass
class Weights:
    """Fixed random weights of one layer."""

    q: torch.Tensor
    o: torch.Tensor
    norm: torch.Tensor
    router: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Engine:
    """One captured decode step over static tensors.

    Args:
        variant: what plugs into the stages.
        config: sizes and device.
        counters: optional :class:`staleproof.evidence.RowCounters` over :meth:`stage_names`,
            captured with the step.
    """

    def __init__(self, variant: Variant, config: EngineConfig, counters: RowCounters | None = None) -> None:
        self.variant, self.config = variant, config
        c = config
        self._counters = counters
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            w = torch.randn(*shape, generator=generator) / math.sqrt(shape[-2])
            return w.to(c.device, c.dtype)

        self.weights = [
            Weights(
                q=weight(c.hidden, c.heads * LATENT),
                o=weight(c.heads * KV_LORA_RANK, c.hidden),
                norm=torch.ones(c.hidden, device=c.device, dtype=c.dtype),
                router=weight(c.hidden, c.experts),
                up=weight(c.experts, c.hidden, c.inter),
                down=weight(c.experts, c.inter, c.hidden),
            )
            for _ in range(c.layers)
        ]
        self.head = weight(c.hidden, c.vocab)
        rows = c.batch * c.q_len
        self.max_pages = -(-c.context // c.page_size)
        # Block 0 is the null block, as in vLLM: it belongs to no request.
        pages = c.batch * self.max_pages + 1
        self.kv_cache = [
            torch.randn(pages, c.page_size, LATENT, generator=generator).to(c.device, c.dtype)
            for _ in range(c.layers)
        ]
        self.pages = torch.arange(1, pages, dtype=torch.int32).view(c.batch, self.max_pages)
        self.hidden = torch.randn(rows, c.hidden, generator=generator).to(c.device, c.dtype)
        self.block_table = torch.empty(c.batch, self.max_pages, dtype=torch.int32, device=c.device)
        self.seq_lens = torch.empty(c.batch, dtype=torch.int32, device=c.device)
        self.live = torch.empty(rows, dtype=torch.bool, device=c.device)
        # Static output tensors of each layer, by stage: what the detectors look at.
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

        Padding rows get ``seq_lens`` 0 and block-table entries -1. ``poisoned_row`` puts NaN into
        the KV cache of one live request (a request that is sick by itself); the next call heals it.

        Raises:
            ValueError: more live requests than the captured batch, or longer than the cache holds.
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
        if batch.poisoned_row is not None:
            page = int(self.pages[batch.poisoned_row, 0])
            self._healthy = page, self.kv_cache[0][page].clone()
            self.kv_cache[0][page] = float("nan")
        seq_lens = torch.zeros(c.batch, dtype=torch.int32)
        seq_lens[: batch.live] = seq_len
        table = torch.full_like(self.pages, -1)
        table[: batch.live] = self.pages[: batch.live]
        self.seq_lens.copy_(seq_lens)
        self.block_table.copy_(table)
        self.live.copy_((seq_lens > 0).repeat_interleave(c.q_len))
        self.live_rows = batch.live * c.q_len

    def _observe(self, name: str, x: torch.Tensor) -> None:
        if self._counters is not None:
            self._counters.observe(name, x, self.live)

    def _step(self) -> None:
        """One decode step. Captured once; only the operations survive, not this Python."""
        if self._counters is not None:
            self._counters.begin()
        x = self.hidden
        for layer, w in enumerate(self.weights):
            outputs = self._layer(layer, w, x)
            self.taps[layer] = dict(zip(STAGES, outputs, strict=True))
            x = outputs[-1]
        self.logits = x @ self.head
        self._observe("logits", self.logits)

    def _layer(self, layer: int, w: Weights, x: torch.Tensor) -> list[torch.Tensor]:
        c = self.config
        q = (x @ w.q).view(c.batch, c.q_len, c.heads, LATENT)
        attended = self.variant.attend(
            AttentionInputs(
                q, self.kv_cache[layer], self.block_table, self.seq_lens, c.batch, layer, c.softmax_scale
            )
        )
        flat = attended.reshape(c.batch * c.q_len, c.heads * KV_LORA_RANK)
        if self._overlay is not None:
            self._overlay(flat[self.live_rows :])
        self._observe(f"{layer}.attention", flat)

        if self.variant.quantise is None:
            quantised, values = flat, flat
        else:
            quantised, scale = self.variant.quantise(flat, self.live)
            values = (quantised.float() * scale).to(c.dtype)
        self._observe(f"{layer}.quantise", quantised)

        projected = values @ w.o
        self._observe(f"{layer}.projection", projected)
        residual = projected + x
        normed = F.rms_norm(residual, (c.hidden,), w.norm)
        self._observe(f"{layer}.norm", normed)
        router_logits = normed @ w.router
        self._observe(f"{layer}.router", router_logits)
        weights, ids = torch.topk(router_logits.float().softmax(-1), c.top_k)
        # Every expert sees every row and a row keeps the experts it chose: rows never meet.
        up = F.silu(torch.matmul(normed, w.up))
        by_expert = torch.matmul(up, w.down).transpose(0, 1)
        chosen = by_expert.gather(1, ids[..., None].expand(-1, -1, c.hidden))
        mixed = (weights[..., None].to(c.dtype) * chosen).sum(1)
        out = residual + mixed
        self._observe(f"{layer}.experts", out)
        return [flat, quantised, projected, normed, router_logits, out]

    def poison(self, write: Callable[[torch.Tensor], object]) -> None:
        """Write into memory that belongs to no request: what its last tenant left there.

        That is the null block of every layer's KV cache, and, unless the variant keeps its output
        memory from step to step, the attention output of every layer.
        """
        for taps, kv_cache in zip(self.taps, self.kv_cache, strict=True):
            write(kv_cache[0])
            if not self.variant.keeps_memory:
                write(taps["attention"])

    def forget_taps(self) -> None:
        """Drop our own references to the stage outputs, which a serving engine does not hold."""
        self.taps = []

    def replay(self) -> torch.Tensor:
        """Replay the captured step; returns the static logits (rows, vocab)."""
        self.graph.replay()
        return self.logits

    def outputs(self) -> list[torch.Tensor]:
        """Static outputs of all stages the variant answers for, in order, logits last."""
        # A consumer's fix takes the attention output as given: it is judged from its own stage on.
        kept = STAGES[STAGES.index(self.variant.judged_from) :]
        return [*(taps[stage] for taps in self.taps for stage in kept), self.logits]

    def run(self, fill: Fill | None) -> Sequence[torch.Tensor]:
        """The current step, for :func:`judge_rows` and :func:`pad_invariance`.

        ``None`` replays as is. :data:`CLEAN` runs the same step with zeros in the padding rows of
        every attention output, whatever the kernel left there. Another fill is put into that memory
        *before* the replay: bytes of an earlier tenant, which a correct step never reads.
        """
        if fill is None:
            self.replay()
            return self.outputs()
        if fill is CLEAN:
            return self._run_over_clean_padding()
        memory = [taps["attention"] for taps in self.taps]
        before = [x.clone() for x in memory]
        for x in memory:
            fill(x[self.live_rows :])
        self.replay()
        seen = [x.clone() for x in self.outputs()]
        for x, old in zip(memory, before, strict=True):
            x.copy_(old)
        return seen

    def _run_over_clean_padding(self) -> list[torch.Tensor]:
        # Eager, so that the overlay can be put between the kernel and its consumer; the counters
        # and the static taps of the captured step are put back afterwards.
        kept = [*self.taps], self.logits, self._counters
        memory = [t["attention"] for t in self.taps]
        before = [x.clone() for x in memory]
        self._counters, self._overlay = None, CLEAN
        try:
            self._step()
            return [x.clone() for x in self.outputs()]
        finally:
            self._overlay = None
            self.taps, self.logits, self._counters = kept
            for x, old in zip(memory, before, strict=True):
                x.copy_(old)

    def verdict(self) -> Verdict:
        """Row verdict of the current step."""
        return judge_rows(self.run, self.live_rows)

    def invariant(self, trials: int = 4) -> bool:
        """Whether padding content leaves the live rows of the current step bit-identical."""
        return bool(pad_invariance(self.run, self.live_rows, trials))
