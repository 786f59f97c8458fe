"""A plugin for nbval's run, which loads no conftest before nbformat: see ``rfc3987_syntax`` there.

PYTHONPATH=tests/notebooks python -m pytest -p without_iris --nbval notebooks/
"""

from __future__ import annotations

import sys

# Seconds for each process of the run, and for a format that no notebook has.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
