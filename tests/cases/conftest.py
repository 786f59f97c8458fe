"""No child of a test outlives it."""

import pytest

from staleproof.cases import children


@pytest.fixture(autouse=True)
def _no_child_is_left():
    yield
    left = [*children._running]
    children.end_all()
    assert not left
