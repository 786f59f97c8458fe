"""Moved to :mod:`staleproof.runs`; this name goes when the last incident has moved."""

import sys

from staleproof import runs as _moved
from staleproof.runs import *  # noqa: F403

sys.modules[__name__] = _moved
