"""A plugin for nbval's run: its kernels are forked, so that each does not import torch anew.

PYTHONPATH=tests/notebooks python -m pytest -p forked_kernels --nbval notebooks/
"""

from __future__ import annotations

import sys

# Seconds for each process of the run, and for a format that no notebook has: see tests/conftest.py.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

from staleproof.report.kernels import forked

forked().__enter__()
