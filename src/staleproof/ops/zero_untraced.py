"""What of block zeroing torch.compile must not trace.

A module of its own, imported while something is traced: ``torch.compiler.disable`` imports Dynamo, which
takes longer than all else that a first call of ``BlockZeroer`` waits for.
"""

from __future__ import annotations

from typing import Any

import torch


def _zero(zeroer: Any, block_ids: Any) -> None:
    zeroer._zero_from_host(block_ids)


zero_from_host = torch.compiler.disable(_zero, reason="block_ids on the host: pass a tensor on the device")
