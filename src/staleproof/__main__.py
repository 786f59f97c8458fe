"""``python -m staleproof``: the command, where its script is not on the path."""

from __future__ import annotations

import sys

from staleproof.cli.app import main

sys.exit(main())
