"""A made-up vLLM for a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import made_up


@pytest.fixture(name="made_up")
def made_up_fixture(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], Path]]:
    """Writes a package ``vllm``; its argument maps a module's name below ``vllm`` to the module's text."""
    with made_up.made_up(tmp_path) as write:
        yield write
