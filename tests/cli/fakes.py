"""What the tests of the commands share: answers of a fake incident, and a measurement."""

from __future__ import annotations

from tests.made import finding, measurement, not_run, off_on_off

from staleproof.lab import Finding

MEASUREMENT = measurement()


def leaked() -> Finding:
    return finding("fake", "empty_row", "broken", "leaked", expected="leaked", bad_rows=3)


def clean() -> Finding:
    return finding("fake", "empty_row", "ours", "clean", expected="clean")


def wrong() -> Finding:
    return finding("fake", "empty_row", "remedy", "clean", expected="leaked")


def absent() -> Finding:
    return not_run("fake", "empty_row", "cutlass", "needs SM100")


def verified() -> Finding:
    return off_on_off("fake", "ours", off="leaked", on="clean", again="leaked", wrong=None)


def interrupted() -> Finding:
    raise KeyboardInterrupt


def one_line(captured: str) -> str:
    lines = captured.strip().splitlines()
    assert len(lines) == 1, captured
    return lines[0]
