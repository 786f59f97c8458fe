"""The decode output buffers that took servers down, each named after what it does wrong.

They stand for what upstream kept and when, not for its kernels: attention is the stand-in of
:mod:`staleproof.incidents.decode_buffer.scene`.
"""

from __future__ import annotations

import torch

from staleproof.incidents.decode_buffer.scene import Attention, Experts, ServerConfig


class ZerosPerLayer(Attention):
    """A zeroed buffer a layer, allocated by the first decode, grown by a larger one.

    vLLM #37442 (0.18.0 to 0.19.1). The profile run returns before this branch, so the KV cache is
    sized without it.
    """

    _decode_out: torch.Tensor | None = None

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """(batch, heads, rank): the first rows of the layer's buffer, whatever micro-batch asks."""
        held = self._decode_out
        if held is None or len(held) < len(q) or held.dtype != q.dtype:
            self._decode_out = held = torch.zeros_like(q)
        return held[: len(q)]


class ZerosBeforeProfile(ZerosPerLayer):
    """The same buffers, made with the layer: the profile counts them, and the KV cache pays.

    Upstream never did this; it takes one ingredient of the failure away and leaves the rest.
    """

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__(config, device)
        self._decode_out = self.weight.new_zeros(config.batch, config.heads, config.rank)


_shared_out: dict[str, torch.Tensor] = {}


class ModuleSingleton(Attention):
    """One buffer for the whole process, in a module-level global; batch and dtype are its key.

    vLLM #37799 (closed). Review: a race on a global, and a check that ignores heads and rank.
    """

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The buffer's first rows, of the shape of whoever allocated it."""
        held = _shared_out.get("out")
        if held is None or len(held) < len(q) or held.dtype != q.dtype:
            _shared_out["out"] = held = torch.zeros_like(q)
        return held[: len(q)]


def forget_singleton() -> None:
    """What the end of the process does to :class:`ModuleSingleton`'s buffer."""
    _shared_out.clear()


class LazyMoeWorkspace(Experts):
    """The same mistake in another place: a workspace a layer, kept by the decode branch alone.

    Stands for TurboQuant's decode buffers (vLLM #40655, reported: about 16 GiB over the layers) and
    its prefill scratch, which grows where the memory profile does not look (vLLM #40420).
    """

    _decode_workspace: torch.Tensor | None = None

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__(config, device)
        self.kept_per_token = config.heads * config.rank * config.dtype.itemsize

    def workspace(self, x: torch.Tensor, decoding: bool) -> torch.Tensor:
        """As its parent for a prefill, and so in the profile run; kept and grown for a decode."""
        if not decoding:
            return super().workspace(x, decoding)
        wanted = len(x) * self.kept_per_token
        held = self._decode_workspace
        if held is None or len(held) < wanted:
            self._decode_workspace = held = torch.empty(wanted, dtype=torch.uint8, device=x.device)
        return held
