"""No child of a test outlives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from staleproof.cases import children


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    yield
    left = [*children._running]
    children.end_all()
    assert not left
