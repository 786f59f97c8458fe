"""Ranges of releases in the notebooks are those that reading each release's source gave."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from staleproof.vllm import releases

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def ranges(patch: str, needed: bool = True) -> list[str]:
    """Runs of releases in which a patch is needed, or is not: ``["0.18.0 to 0.19.1"]``."""
    runs = groupby(releases.table().items(), lambda row: row[1][patch]["needed"])
    names = [[name for name, _ in rows] for state, rows in runs if state is needed]
    return [f"{run[0]} to {run[-1]}" for run in names]


def prose(notebook: str) -> str:
    cells = json.loads((NOTEBOOKS / notebook).read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


FP4, FILLED = ranges("scale_padding"), ranges("scale_padding", needed=False)


@pytest.mark.parametrize(
    ("notebook", "says"),
    [
        ("02_decode_buffer_oom.ipynb", f"wheels: {ranges('decode_buffer')[0]}, on the CUTLASS"),
        ("02_decode_buffer_oom.ipynb", f"vLLM #37442; {ranges('decode_buffer')[0]} |"),
        ("04_kv_reuse.ipynb", f"asynchronously | {ranges('staging_race')[0]};"),
        ("05_the_revert.ipynb", f"unwritten in {FP4[0]}, {FP4[1]} and {FP4[2]};"),
        ("05_the_revert.ipynb", f"block 0 in {ranges('dummy_slots')[0]};"),
        ("05_the_revert.ipynb", f"by default in {ranges('routing_simulator')[0]}."),
        ("05_the_revert.ipynb", f"vLLM {FP4[0]}, {FP4[1]} (#42988) and {FP4[2]} |"),
        ("05_the_revert.ipynb", f"vLLM #38148; {FILLED[0]} |"),
        ("05_the_revert.ipynb", f"vLLM #45739; {FILLED[1]} |"),
    ],
)
def test_a_range_in_a_notebook_is_what_the_sources_say(notebook, says):
    assert says in prose(notebook)
