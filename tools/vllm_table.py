"""Probe every release's source distribution and write what `staleproof patches --version` reads.

    python -m tools.vllm_table

fetches what is not there yet, about 35 MB a release, and writes src/staleproof/vllm/versions.json.
The tests check the file against the sources that are there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/vllm"))

import environment

from staleproof.vllm import plugin as vllm_plugin
from staleproof.vllm.releases import TABLE
from staleproof.vllm.sources import Sources

# All that the package index has from the first to the last.
RELEASES = [
    "0.16.0",
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.18.1",
    "0.19.0",
    "0.19.1",
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
]


def sources_of(folder: Path) -> Sources:
    """An unpacked source distribution, with the FlashInfer it asks for."""
    return Sources(folder / "vllm", folder / "csrc", environment.pinned_flashinfer(folder))


def probed(sources: Sources) -> dict[str, dict[str, Any]]:
    """What each patch's probe finds in one release."""
    return {name: patch.is_needed(sources)._asdict() for name, patch in vllm_plugin.patches().items()}


def write(found: dict[str, dict[str, Any]]) -> None:
    """Write the table, and from which release on each patch is no longer needed."""
    newest = [*found][-1]
    ends = {}
    for name in found[newest]:
        needed = [release for release in found if found[release][name]["needed"]]
        behind = [*found][[*found].index(needed[-1]) + 1 :] if needed else [*found]
        ends[name] = behind[0] if behind else None
    text = json.dumps({"no longer needed from": ends, "releases": found}, indent=1)
    TABLE.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    found = {version: probed(sources_of(environment.sources(version))) for version in RELEASES}
    write(found)
    print(f"{len(found)} releases, {len(vllm_plugin.patches())} patches: {TABLE.name}")
