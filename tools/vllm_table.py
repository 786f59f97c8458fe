"""Probe every release's source distribution and write what `staleproof patches --version` reads.

    python -m tools.vllm_table [RELEASE ...]

reads the releases of the table, and new ones that are named, in order; fetches what is not there yet, about
35 MB a release, and writes src/staleproof/vllm/versions.json.
The tests check the file against the sources that are there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.vllm import environment

from staleproof.vllm import plugin as vllm_plugin
from staleproof.vllm.releases import TABLE, table
from staleproof.vllm.sources import Sources


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
    releases = [*table(), *sys.argv[1:]]
    found = {version: probed(sources_of(environment.sources(version))) for version in releases}
    write(found)
    print(f"{len(found)} releases, {len(vllm_plugin.patches())} patches: {TABLE.name}")
