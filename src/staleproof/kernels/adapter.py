"""MLA decode kernels of other packages, each called as :func:`staleproof.mla_decode` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from staleproof.check import bound

# DeepSeek's sizes, which every peer here is built for.
RANK, ROPE = 512, 64

Result = tuple[torch.Tensor, torch.Tensor | None]
Launch = Callable[[], Result]


@dataclass(frozen=True)
class Peer:
    """One implementation of MLA decode.

    Attributes:
        name: package, version where known, kernel.
        unavailable_reason: one line that says why it cannot run here, or ``None``.
        prepare: takes (q, kv_cache, block_table, seq_lens, softmax_scale, num_kv_splits, out) and
            returns a closure that only launches the kernel, so that it can be captured in a graph.
        num_kv_splits: parts that vLLM's kernel splits the keys into, 4 by default.
    """

    name: str
    unavailable_reason: str | None
    prepare: Callable[..., Launch]
    num_kv_splits: int | None = None

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        softmax_scale: float,
        out: torch.Tensor | None = None,
    ) -> Result:
        """Decode once.

        Args:
            q: (batch, heads, 576), or (batch, 1, heads, 576); some kernels take a larger q_len.
            kv_cache: (pages, page_size, 576).
            block_table: (batch, max_pages) int32.
            seq_lens: (batch,) int32.
            softmax_scale: factor of the scores.
            out: memory with as many elements as the result, which is written there.

        Returns:
            ``out`` (batch, heads, 512), and ``lse`` (batch, heads), a natural logarithm, or ``None``
            if the kernel returns none. Rows of empty requests hold whatever the kernel left there.

        Raises:
            RuntimeError: the peer cannot run here.

        >>> q, kv_cache = torch.ones(1, 2, 576), torch.ones(1, 16, 576)
        >>> block_table, seq_lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3])
        >>> from staleproof.kernels.mla import torch_sdpa
        >>> out, _ = torch_sdpa()(q, kv_cache, block_table, seq_lens, softmax_scale=0.1)
        >>> out.shape
        torch.Size([1, 2, 512])
        """
        if self.unavailable_reason is not None:
            raise RuntimeError(f"{self.name} is not available: {self.unavailable_reason}")
        q = q.squeeze(1) if q.ndim == 4 and q.shape[1] == 1 else q
        out = None if out is None else out.view(*q.shape[:-1], RANK)
        return self.prepare(q, kv_cache, block_table, seq_lens, softmax_scale, self.num_kv_splits, out)()


def peer(name: str, unavailable_reason: str | None, adapter: Callable[..., Any], **given: Any) -> Peer:
    """A peer made from an adapter that prepares a launch, as the adapters of this folder do.

    Args:
        name, unavailable_reason: of the peer.
        adapter: names any of q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, max_seq_len and
            num_kv_splits, and returns a launch, which returns out, or out and lse.
        given: its other arguments.
    """

    def prepare(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        num_kv_splits: int | None,
        out: torch.Tensor | None,
    ) -> Launch:
        known: dict[str, Any] = {"q": q, "kv_cache": kv_cache, "block_table": block_table} | given
        if out is None:
            out = torch.empty(*q.shape[:-1], RANK, dtype=q.dtype, device=q.device)
        known |= {"seq_lens": seq_lens, "softmax_scale": softmax_scale, "out": out}
        known["lse"] = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        known["max_seq_len"] = block_table.shape[1] * kv_cache.shape[1]
        if num_kv_splits is not None:
            known["num_kv_splits"] = num_kv_splits
        run = adapter(**bound(adapter, known))

        def launch() -> Result:
            returned = run()
            result, lse = returned if isinstance(returned, tuple | list) else (returned, None)
            return result.view(out.shape), None if lse is None else lse.view(q.shape[:-1])

        return launch

    return Peer(name, unavailable_reason, prepare)


def pages_in_use(
    block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of each request, (batch,), and a mask, shaped like the table, of the entries that name them.

    Entries after a request's last page are arbitrary.

    >>> table = torch.tensor([[2, 1], [0, 0]])
    >>> counts, used = pages_in_use(table, torch.tensor([65, 64]), 64)
    >>> counts.tolist(), used.tolist()
    ([2, 1], [[True, True], [True, False]])
    """
    counts = (seq_lens + page_size - 1) // page_size
    column = torch.arange(block_table.shape[1], device=block_table.device)
    return counts, column[None, :] < counts[:, None]
