"""Rules for which step may replay the graph of decode; vLLM's own is :func:`~.scene.by_shape`."""

from __future__ import annotations

from staleproof.incidents.uniform_decode.scene import Plan, by_shape


def whole_drafts(plan: Plan, k: int) -> bool:
    """The patch's rule: every request verifies k drafts."""
    return by_shape(plan, k) and all(part.drafts == k for part in plan)


def prompt_computed(plan: Plan, k: int) -> bool:
    """The rule proposed in #53059, by its description: every request has computed its whole prompt."""
    return by_shape(plan, k) and all(part.request.computed >= part.request.prompt for part in plan)


def never(plan: Plan, k: int) -> bool:
    """``--enforce-eager``: no graph."""
    return False
