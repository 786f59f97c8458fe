"""Whether a remedy of incident 4 zeroes the blocks that it must, and no other byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from staleproof.evidence.compare import other_bits
from staleproof.incidents.kv_reuse.broken import Pick
from staleproof.incidents.kv_reuse.scene import Remedy, Scene, trace_of
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA

STEPS = 2


def wrong_bytes(scene: Scene, remedy: Remedy, wanted: Pick) -> str | None:
    """What a remedy leaves in a block that it must zero, or changes elsewhere, or ``None``.

    The pool is 16 times as large as the scene's, so that larger ids occur. The steps are the first and the
    last ones that allocate and free blocks, then one that allocates two thirds of the pool and frees none.
    The host is one step ahead: it submits the next step before this one runs. This checks the zeroed bytes;
    whether outputs are equal to those on clean memory is the verdict ``clean`` of the run itself.

    Args:
        scene: the load.
        remedy: the remedy to check.
        wanted: the blocks that must be zeroed before a step.
    """
    large = replace(scene, blocks=16 * scene.blocks)
    buffers = large.buffers()
    zeroing = remedy(buffers)
    busy = [step for step in trace_of(large).steps if all(step.new.values()) and step.freed]
    most = {group: [*range(at, large.blocks, 3)] for at, group in ((1, ATTENTION), (2, MAMBA))}
    steps = [*busy[:STEPS], *busy[-STEPS:], replace(busy[0], new=most, freed=())]
    ahead = zeroing.submit(steps[0])
    for step, later in pairwise([*steps, steps[0]]):
        for memory in buffers.raw:
            memory.fill_(0x5A)
        ticket, ahead = ahead, zeroing.submit(later)
        zeroing.run(ticket)
        want = torch.full_like(buffers.raw[0], 0x5A)
        want[list(wanted(step))] = 0
        for layer, raw in enumerate(buffers.raw):
            if found := other_bits(f"layer {layer}", raw, want):
                return found
    return None
