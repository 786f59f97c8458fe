"""The decode output buffers that took servers down, each named after what it does wrong.

They show which memory upstream kept, and from when on. The kernel that writes it is the stub of
:mod:`staleproof.incidents.decode_buffer.model`.
"""

from __future__ import annotations

import torch

from staleproof.incidents.decode_buffer.model import Attention, Experts, ServerConfig


class ZerosPerLayer(Attention):
    """A zeroed buffer a layer, allocated at the first decode and grown for a larger one.

    vLLM #37442 (0.18.0 to 0.19.1). The profile run returns before this branch, so the KV cache is
    sized as if the buffer did not exist.
    """

    _decode_out: torch.Tensor | None = None

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The first rows of the layer's buffer (batch, heads, rank), the same for every micro-batch."""
        buffer = self._decode_out
        if buffer is None or len(buffer) < len(q) or buffer.dtype != q.dtype:
            self._decode_out = buffer = torch.zeros_like(q)
        return buffer[: len(q)]


class ZerosBeforeProfile(ZerosPerLayer):
    """The same buffers, allocated with the layer: the profile counts them, and the KV cache is smaller.

    Upstream never did this; it removes one ingredient of the failure and leaves the others.
    """

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__(config, device)
        self._decode_out = self.weight.new_zeros(config.batch, config.heads, config.rank)


_shared_out: dict[str, torch.Tensor] = {}


class ModuleSingleton(Attention):
    """One buffer for the whole process in a module-level global, reused if batch and dtype fit.

    vLLM #37799 (closed). Its review found a race on the global, and that heads and rank are not checked.
    """

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The buffer's first rows, in the shape of the model that allocated it."""
        buffer = _shared_out.get("out")
        if buffer is None or len(buffer) < len(q) or buffer.dtype != q.dtype:
            _shared_out["out"] = buffer = torch.zeros_like(q)
        return buffer[: len(q)]


def forget_singleton() -> None:
    """Drop :class:`ModuleSingleton`'s buffer, as the end of its process would."""
    _shared_out.clear()


class LazyMoeWorkspace(Experts):
    """The same mistake in another place: each layer keeps a workspace, but only in the decode branch.

    Stands for TurboQuant's prefill scratch, which grows where the memory profile does not look
    (vLLM #40420).
    """

    _decode_workspace: torch.Tensor | None = None

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__(config, device)
        self.kept_per_token = config.heads * config.rank * config.dtype.itemsize

    def workspace(self, x: torch.Tensor, decoding: bool) -> torch.Tensor:
        """New memory for a prefill, which includes the profile run; kept and grown for a decode."""
        if not decoding:
            return super().workspace(x, decoding)
        wanted = len(x) * self.kept_per_token
        buffer = self._decode_workspace
        if buffer is None or len(buffer) < wanted:
            self._decode_workspace = buffer = torch.empty(wanted, dtype=torch.uint8, device=x.device)
        return buffer
