"""From what an operator sees to what to do: the triage table, and ``staleproof diagnose``.

``triage.toml`` is the one source, with ``engine.json`` for what vLLM's releases say of themselves. ``table``
renders it, ``facts`` and ``read`` say what is known of a deployment, ``judge`` weighs the rows, ``answer``
prints. Nothing here loads torch.
"""

from __future__ import annotations

from staleproof.triage.table import in_production, symptom

__all__ = ["in_production", "symptom"]
