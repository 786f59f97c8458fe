"""A server of one model: padded decode steps, as in a CUDA graph of fixed size, over a paged MLA cache.

SmolLM2 has no MLA, but its grouped-query attention runs exactly through an MLA decode kernel. A token's row
of the cache has V (192 elements) and the rotated K (192) in the latent of 512, and zeros in the rest. A query
head has its q in the columns of its group's K, so that its score is q K; the softmax scale is 1/8; its result
is in the group's V columns of the output. In float32 the largest error against plain attention in float64 is
3e-6 where outputs are up to 5.3 (30 layers, two steps), and greedy tokens are those of the plain model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from staleproof import check
from staleproof.words.model import END, Route, SmolLM2

RANK, ROPE, SCALE = 512, 64, 0.125
# Query heads are padded to 16, since many kernels need a multiple of that. The added ones are zeros.
HEADS = 16
# Called with q (rows, 16, 576), kv_cache (blocks, page, 576), block_table (rows, n) int32, seq_lens (rows,)
# int32, and the keywords softmax_scale and out (rows, 16, 512), which it writes.
Kernel = Callable[..., Any]
# From (rows, hidden) to fp8 values and a scale.
Quantiser = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Called with new memory, to fill it with what lay there before.
Memory = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Served:
    """What a server answered.

    Attributes:
        prompts: the requests.
        texts: what their users saw.
        token_ids: of the answers; the first comes from the prefill, one more from each decode step.
        died: the first decode step, from 1 on, whose logits of the request were not finite, or ``None``.
        ended: the decode step that ended the answer, or ``None`` if it reached the limit of tokens.
    """

    prompts: list[str]
    texts: list[str]
    token_ids: list[list[int]]
    died: list[int | None]
    ended: list[int | None]


class Server:
    """Serves prompts with greedy decoding. Rows without a request are padding, with ``seq_len`` 0.

    Args:
        model: serves.
        kernel: MLA decode.
        memory: fills each layer's attention output before each step.
        quantise: the attention output, before the output projection; ``None`` for no quantiser.
        clear: called with (out, seq_lens) after the kernel; a remedy.
        rows: of a step.
        page: tokens of a block.
        blocks: of the cache, besides the null block 0; by default enough for all rows.
        longest: tokens of a request, prompt included, at most.
        dtype: of the cache, of q and of the attention output.
        state_blocks: blocks that each request holds for float32 state beside its KV, as the Mamba layers of
            a hybrid model do in the same pool. Their content is normal numbers, written once.
        route: experts of the feed-forward layers in decode steps; see :meth:`SmolLM2.forward`.
        on_new: called with the ids of a request's new KV blocks before they are written; a remedy.
    """

    def __init__(
        self,
        model: SmolLM2,
        *,
        kernel: Kernel,
        memory: Memory = torch.Tensor.zero_,
        quantise: Quantiser | None = None,
        clear: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
        rows: int = 8,
        page: int = 16,
        blocks: int | None = None,
        longest: int = 96,
        dtype: torch.dtype = torch.float32,
        state_blocks: int = 0,
        route: Route | None = None,
        on_new: Callable[[list[int]], object] | None = None,
    ) -> None:
        self.model, self.kernel, self.memory = model, kernel, memory
        self.quantise, self.clear, self.on_new, self.route = quantise, clear, on_new, route
        self.rows, self.page, self.longest, self.state_blocks = rows, page, longest, state_blocks
        width, device = -(-longest // page), model.device
        blocks = rows * (width + state_blocks) if blocks is None else blocks
        self.cache = torch.zeros(model.layers, 1 + blocks, page, RANK + ROPE, dtype=dtype, device=device)
        self.out = torch.zeros(model.layers, rows, HEADS, RANK, dtype=dtype, device=device)
        self.free = deque(range(1, 1 + blocks))
        # A captured step reads and writes these, so they stay where they are.
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.logits = torch.zeros(rows, 0)
        self._states = torch.Generator().manual_seed(0)
        self._held: list[list[int]] = [[] for _ in range(rows)]
        self._row = torch.arange(rows, device=device)
        group = torch.arange(model.heads, device=device) // (model.heads // model.kv_heads)
        columns = group[:, None] * model.dim + torch.arange(model.dim, device=device)
        self._v_columns = columns.expand(rows, -1, -1)
        self._k_columns = self._v_columns + model.kv_heads * model.dim

    def serve(self, prompts: Sequence[str], tokens: int) -> Served:
        """Serve prompts, as many at once as rows and blocks allow, the others when some are free.

        A request gets blocks as it grows. When it ends they are free, and keep their bytes.

        Args:
            prompts: users' messages.
            tokens: of an answer, at most.

        Raises:
            ValueError: a prompt and its answer may need more tokens than :attr:`longest`, or a request needs
                more blocks than there are.
        """
        for prompt in prompts:
            longest = len(self.model.encode(prompt)) + tokens
            check.require(longest <= self.longest, "prompts", f"at most {self.longest} tokens each", longest)
        width = self.table.shape[1]
        most = width + self.state_blocks
        check.require(len(self.free) >= most, "blocks", f"at least {most}", len(self.free))
        waiting, step = deque(range(len(prompts))), 0
        serving: dict[int, int] = {}
        ids: list[list[int]] = [[] for _ in prompts]
        died: list[int | None] = [None] * len(prompts)
        ended: list[int | None] = [None] * len(prompts)
        while waiting or serving:
            for row in range(self.rows):
                # Those that are served may need more blocks until they end.
                promised = sum(most - len(self._held[other]) for other in serving)
                if row not in serving and waiting and len(self.free) >= promised + most:
                    serving[row] = waiting.popleft()
                    ids[serving[row]] += self.admit(row, prompts[serving[row]])
            assert serving, "every row is free, and so are all blocks"
            step += 1
            live = torch.tensor([row in serving for row in range(self.rows)], device=self.tokens.device)
            self.seq_lens += live.int()
            self.positions.copy_((self.seq_lens - 1).clamp(min=0))
            for row in serving:
                self.allocate(row, int(self.positions[row]) // self.page + 1)
            self.run_step()
            finite = self.logits.isfinite().all(-1).tolist()
            # The largest of a row of NaN is its first element: token 0.
            self.tokens.copy_(self.logits.argmax(-1))
            for row, request in [*serving.items()]:
                ids[request].append(int(self.tokens[row]))
                if not finite[row] and died[request] is None:
                    died[request] = step
                if ids[request][-1] == END:
                    ended[request] = step
                if ids[request][-1] == END or len(ids[request]) >= tokens:
                    del serving[row]
                    self.release(row)
        return Served([*prompts], [self.model.decode(one) for one in ids], ids, died, ended)

    def admit(self, row: int, prompt: str) -> list[int]:
        """Give a free row to a request, write its prompt's KV, and return the first token of its answer."""
        keys, values, token = self.model.prefill(prompt)
        count = keys.shape[1]
        for _ in range(self.state_blocks):
            block = self.free.popleft()
            self._held[row].append(block)
            state = self.cache[:, block].view(torch.float32)
            state.copy_(torch.randn(state.shape, generator=self._states))
        self.allocate(row, -(-count // self.page))
        at = torch.arange(count, device=self.table.device)
        self.cache[:, self.table[row, at // self.page].long(), at % self.page] = self.kv_rows(keys, values)
        self.tokens[row], self.seq_lens[row] = token, count
        return [token]

    def allocate(self, row: int, count: int) -> None:
        """Let a row have ``count`` KV blocks; new ones are those that were free for longest."""
        first = len(self._held[row]) - self.state_blocks
        new = [self.free.popleft() for _ in range(first, count)]
        if new:
            if self.on_new is not None:
                self.on_new(new)
            self.table[row, first:count] = torch.tensor(new, dtype=torch.int32)
            self._held[row] += new

    def release(self, row: int) -> None:
        """End a row's request: its blocks are free, and the row is padding."""
        self.free.extend(reversed(self._held[row]))
        self._held[row] = []
        self.seq_lens[row], self.tokens[row] = 0, 0
        self.table[row] = 0

    def run_step(self) -> None:
        """Fill the memory of the attention outputs, and run :meth:`step`, or replay a graph of it."""
        self.memory(self.out)
        self.step()

    def step(self) -> None:
        """One decode step of all rows, from :attr:`tokens` to :attr:`logits`. Can be captured in a graph."""
        self.logits = self.model.forward(self.tokens, self.positions, self.attend, route=self.route)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of one layer in a decode step: write k and v, run the kernel, then what comes behind it.

        Args:
            layer: its cache and its output are used.
            q: (rows, 9, 64), rotated.
            k, v: (rows, 3, 64); k is rotated. Those of padding rows go to the null block.

        Returns:
            (rows, 576) float32, quantised to fp8 and back if there is a quantiser.
        """
        cache, out = self.cache[layer], self.out[layer]
        block = self.table[self._row, self.positions // self.page].long()
        cache[block, self.positions % self.page] = self.kv_rows(k, v)
        q_mla = torch.zeros(self.rows, HEADS, RANK + ROPE, dtype=cache.dtype, device=cache.device)
        q_mla[:, : q.shape[1]].scatter_(2, self._k_columns, q.to(cache.dtype))
        self.kernel(q_mla, cache, self.table, self.seq_lens, softmax_scale=SCALE, out=out)
        if self.clear is not None:
            self.clear(out, self.seq_lens)
        result = out[:, : q.shape[1]].gather(2, self._v_columns).flatten(1).float()
        if self.quantise is None:
            return result
        values, scale = self.quantise(result)
        return values.float() * scale

    def kv_rows(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Rows of the cache (..., 576) of keys and values (..., 3, 64)."""
        k, v = k.flatten(-2), v.flatten(-2)
        rest = RANK + ROPE - k.shape[-1] - v.shape[-1]
        return torch.nn.functional.pad(torch.cat([v, k], -1), (0, rest)).to(self.cache.dtype)
