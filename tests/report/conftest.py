"""The tests of the report share ``made.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
