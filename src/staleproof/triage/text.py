"""Text in lines of a width, which cuts no word: a path or an option that is cut would no longer be one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells in columns, two blanks apart, with a rule below the head.

    >>> aligned(["row", "state"], [["0", "finite"]])
    ['row  state', '---  ------', '0    finite']
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def wrapped(text: str, width: int | None, first: str = "", later: str = "") -> list[str]:
    """The lines of a text, at least one.

    Args:
        text: without line breaks.
        width: columns; a longer word has a line of its own. ``None``: one line.
        first, later: how the first line begins, and the others.

    >>> wrapped("set --enforce-eager now", 14, "do  ", "    ")
    ['do  set', '    --enforce-eager', '    now']
    """
    if width is None:
        return [first + text]
    wrapper = textwrap.TextWrapper(width, first, later, break_on_hyphens=False, break_long_words=False)
    wrapper.replace_whitespace = False
    return wrapper.wrap(text) or [first]
