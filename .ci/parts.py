"""Runs the parts of `make test` one after another, whatever each one says, and sums them up at the end.

    python .ci/parts.py NAME ESTIMATE COMMAND [NAME ESTIMATE COMMAND ...]

Each command is a line for the shell. What it prints is passed on as it comes; the counts of tests are read
from pytest's last line. Ends with 1 if a part failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

# "2 failed, 40 passed, 3 skipped in 12.34s", with colours and rules around it in a terminal.
CLOSING = re.compile(r"\d+ \w+(, \d+ \w+)* in [\d.]+s")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)\b")


class Part(NamedTuple):
    """One part after its end; ``counts`` are of tests, and empty for a part that is none."""

    name: str
    code: int
    seconds: float
    counts: Counter[str]

    def __str__(self) -> str:
        result = "passed" if self.code == 0 else "FAILED"
        tests = ", ".join(f"{number} {word}" for word, number in self.counts.items())
        return f"{self.name:<20} {result:<7} {self.seconds:>5.0f} s   {tests}".rstrip()


def run(name: str, command: str) -> Part:
    """Run one part and pass on what it prints."""
    began = time.monotonic()
    process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout
    end = b""
    # Dots come one by one, without the end of a line.
    while chunk := os.read(process.stdout.fileno(), 65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        end = (end + chunk)[-4096:]
    code = process.wait()
    closing = [line for line in end.decode(errors="replace").splitlines() if CLOSING.search(line)]
    counts: Counter[str] = Counter()
    for number, word in COUNT.findall(closing[-1]) if closing else ():
        counts[word.replace("errors", "error")] += int(number)
    return Part(name, code, time.monotonic() - began, counts)


def main(arguments: Sequence[str]) -> int:
    if not arguments or len(arguments) % 3:
        raise SystemExit(f"expected name, estimate and command of each part, got {len(arguments)} words")
    given = [arguments[i : i + 3] for i in range(0, len(arguments), 3)]
    parts = []
    for number, (name, estimate, command) in enumerate(given, start=1):
        print(f"\npart {number} of {len(given)}: {name}, about {estimate}", flush=True)
        parts.append(run(name, command))
    print("\n" + "\n".join(map(str, parts)))
    total = sum((part.counts for part in parts), Counter())
    failed = total["failed"] + total["error"]
    print(f"total: {total['passed']} passed, {failed} failed, {total['skipped']} skipped", flush=True)
    return int(any(part.code for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
