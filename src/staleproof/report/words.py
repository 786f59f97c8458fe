"""Shows what users of a real model read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.lab import Finding

_REPEATED = re.compile(r"(<\|\w+\|>)\1+")


def one_line(text: str) -> str:
    """A text in one line, with a repeated special token once, and how often.

    >>> one_line("The sea<|endoftext|><|endoftext|>")
    'The sea<|endoftext|> x 2'
    """
    shown = _REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])}", text)
    return shown.replace("\n", "⏎")


def read_by_users(found: Finding) -> Sequence[tuple[str, str, str]]:
    """Prompts, and the texts without a remedy and with it; empty unless a real model was asked.

    Args:
        found: off / on / off of a remedy.
    """
    columns = [found.numbers.get(name, ()) for name in ("prompts_off", "texts_off", "texts_on")]
    return [(prompt, one_line(off), one_line(on)) for prompt, off, on in zip(*columns, strict=True)]
