"""What a kernel of another package looks like to us: called as :func:`staleproof.mla_decode` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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
    """

    name: str
    unavailable_reason: str | None
    prepare: Callable[..., Launch]

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        softmax_scale: float,
        num_kv_splits: int | None = None,
        out: torch.Tensor | None = None,
    ) -> Result:
        """Decode once.

        Args:
            q: (batch, heads, 576).
            kv_cache: (pages, page_size, 576).
            block_table: (batch, max_pages) int32.
            seq_lens: (batch,) int32.
            softmax_scale: factor of the scores.
            num_kv_splits: parts that vLLM's kernel splits the keys into, 4 by default.
            out: (batch, heads, 512), written and returned if given.

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
        return self.prepare(q, kv_cache, block_table, seq_lens, softmax_scale, num_kv_splits, out)()


def pages_in_use(
    block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of each request, (batch,), and which entries of the table name them, like the table.

    Entries after a request's last page are arbitrary.

    >>> table = torch.tensor([[2, 1], [0, 0]])
    >>> counts, used = pages_in_use(table, torch.tensor([65, 64]), 64)
    >>> counts.tolist(), used.tolist()
    ([2, 1], [[True, True], [True, False]])
    """
    counts = (seq_lens + page_size - 1) // page_size
    column = torch.arange(block_table.shape[1], device=block_table.device)
    return counts, column[None, :] < counts[:, None]


def new_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(*q.shape[:-1], RANK, dtype=q.dtype, device=q.device) if out is None else out
