"""Moved to :mod:`staleproof.child`; this name goes when the last incident has moved."""

import sys

from staleproof import child as _moved
from staleproof.child import *  # noqa: F403

sys.modules[__name__] = _moved
