"""Whether a remedy of incident 4 zeroes the blocks that it is given, and no other byte."""

from __future__ import annotations

import torch

from staleproof.harness.compare import other_bits
from staleproof.incidents.kv_reuse.hybrid import Zeroing
from staleproof.incidents.kv_reuse.scene import Remedy, Scene, ZeroNewBlocks


def wrong_bytes(scene: Scene, remedy: Remedy) -> str | None:
    """What a remedy leaves in a block that it was given, or changes elsewhere, or ``None``.

    The outputs of all requests were compared with a run on clean memory before: this is asked of
    :class:`ZeroNewBlocks`, which may not write elsewhere either.
    """
    buffers = scene.buffers(12)
    for memory in buffers.raw:
        memory.fill_(0x5A)
    zeroing: Zeroing = remedy(buffers)
    if not isinstance(zeroing, ZeroNewBlocks):
        return None
    zeroing.run([3, 4, 9])
    want = torch.full_like(buffers.raw[0], 0x5A)
    want[[3, 4, 9]] = 0
    found = (other_bits(f"layer {layer}", raw, want) for layer, raw in enumerate(buffers.raw))
    return next(filter(None, found), None)
