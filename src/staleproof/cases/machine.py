"""Moved to :mod:`staleproof.machine`; this name goes when the last incident has moved."""

import sys

from staleproof import machine as _moved
from staleproof.machine import *  # noqa: F403

sys.modules[__name__] = _moved
