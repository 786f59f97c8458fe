"""What of block zeroing torch.compile must not trace.

A module of its own, imported while something is traced: ``torch.compiler.disable`` imports Dynamo, which
takes longer than all else that a first call of ``BlockZeroer`` waits for.
"""

from __future__ import annotations

import torch

from staleproof.ops.zero_blocks import BlockZeroer

zero_from_host = torch.compiler.disable(
    BlockZeroer._zero_from_host, reason="block_ids on the host: pass a tensor on the device"
)
