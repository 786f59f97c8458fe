"""Moved to :mod:`staleproof.evidence.compare`; this name goes when the last incident has moved."""

import sys

from staleproof.evidence import compare as _moved
from staleproof.evidence.compare import *  # noqa: F403

sys.modules[__name__] = _moved
