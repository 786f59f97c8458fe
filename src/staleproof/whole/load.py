"""A scripted load: which requests arrive when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """A request of a load.

    Attributes:
        name: unique in the load.
        prompt: its tokens.
        reply: tokens that it generates.
        priority: 0 is the highest.
        at: the step before which it arrives.
        after: it arrives once this request has ended, if one is named.
        leaves: the client goes away before this step; 0: it stays.
    """

    name: str
    prompt: Sequence[int]
    reply: int
    priority: int = 0
    at: int = 0
    after: str = ""
    leaves: int = 0
