"""The part of block zeroing that torch.compile must not trace.

This is a module of its own, imported only while torch traces: ``torch.compiler.disable`` imports Dynamo,
which would take longer than everything else in a first call of ``BlockZeroer``.
"""

from __future__ import annotations

from typing import Any

import torch


def _zero(zeroer: Any, block_ids: Any) -> None:
    zeroer._zero_from_host(block_ids)


zero_from_host = torch.compiler.disable(_zero, reason="block_ids on the host: pass a tensor on the device")
