"""Moved to :mod:`staleproof.measure`; this name goes when the last incident has moved."""

import sys

from staleproof import measure as _moved
from staleproof.measure import *  # noqa: F403

sys.modules[__name__] = _moved
