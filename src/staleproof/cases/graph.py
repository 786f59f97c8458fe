"""Moved to :mod:`staleproof.graph`; this name goes when the last incident has moved."""

import sys

from staleproof import graph as _moved
from staleproof.graph import *  # noqa: F403

sys.modules[__name__] = _moved
