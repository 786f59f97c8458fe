"""A pseudo terminal for commands, and what is then on its screen."""

from __future__ import annotations

import os
import re
import sys

import pexpect

# What rich sends: colours and cursor visibility, which change no text; erase a line; move up.
_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


def typed(code: str, columns: int = 80) -> str:
    """All that a Python program sends to a terminal of this width."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "TRITON_INTERPRET": "1"}
    options = {"env": environment, "dimensions": (40, columns), "encoding": "utf-8", "timeout": 300}
    return pexpect.spawn(sys.executable, ["-c", code], **options).read()


def screen(sent: str) -> list[str]:
    """The lines that are left on a terminal of unlimited height and width."""
    lines = [""]
    row = column = 0
    at = 0
    while at < len(sent):
        code = _CODE.match(sent, at)
        if code:
            count, kind = code.groups()
            if kind == "A":
                row = max(0, row - int(count or 1))
            elif kind == "K":
                lines[row] = "" if count == "2" else lines[row][:column]
            at = code.end()
            continue
        character = sent[at]
        at += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return lines
