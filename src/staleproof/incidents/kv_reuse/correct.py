"""Whether a remedy of incident 4 zeroes the blocks that it says, and no other byte."""

from __future__ import annotations

from itertools import islice

import torch

from staleproof.cases.compare import other_bits
from staleproof.incidents.kv_reuse.hybrid import Zeroing
from staleproof.incidents.kv_reuse.scene import Remedy, Scene, ZeroNewBlocks, trace_of
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA

STEPS = 3


def wrong_bytes(scene: Scene, remedy: Remedy) -> str | None:
    """What a remedy leaves in a block that it says it zeroed, or changes elsewhere, or ``None``.

    Asked in the first steps of the scene that zero anything. That the outputs of all requests have the
    bits of a run on clean memory is the verdict ``clean`` of the run itself.
    """
    buffers = scene.buffers()
    zeroing: Zeroing = remedy(buffers)
    busy = (step for step in trace_of(scene).steps if step.new[ATTENTION] and step.new[MAMBA] and step.freed)
    for step in islice(busy, STEPS):
        for memory in buffers.raw:
            memory.fill_(0x5A)
        zeroed = torch.as_tensor(zeroing.run(zeroing.submit(step))).tolist()
        if isinstance(zeroing, ZeroNewBlocks) and set(zeroed) != {*step.new[ATTENTION], *step.new[MAMBA]}:
            return f"zeroed the blocks {sorted(set(zeroed))}, which are not the new ones"
        want = torch.full_like(buffers.raw[0], 0x5A)
        want[zeroed] = 0
        for layer, raw in enumerate(buffers.raw):
            if found := other_bits(f"layer {layer}", raw, want):
                return found
    return None
