"""What the tests of the report share: ``made.py``, and recorded runs of their own."""

import sys
from pathlib import Path

import pytest

from staleproof import runs as store

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The folder of recorded runs, empty."""
    monkeypatch.setattr(store, "runs_folder", lambda: tmp_path)
    monkeypatch.setattr("IPython.display.display", lambda shown: None)
    return tmp_path
