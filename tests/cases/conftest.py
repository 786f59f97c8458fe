"""No child of a test outlives it."""

import pytest

from staleproof import child


@pytest.fixture(autouse=True)
def _no_child_is_left():
    yield
    left = [*child._running]
    child.end_all()
    assert not left
