"""CONTRIBUTING's worked example, followed word for word in a copy of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import warm

MAIN = "import sys; from staleproof.cli.app import main; sys.exit(main())"
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = dict(re.findall(r"^```python (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The checkout with the example's files in it."""
    root = tmp_path_factory.mktemp("checkout")
    # With what Python has compiled: a copy keeps the dates that decide whether that is still right.
    shutil.copytree(ROOT / "src", root / "src")
    for name in ("notebooks", "benchmarks", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    (root / "workbook").mkdir()
    for path in (ROOT / "workbook").iterdir():
        if path.name != "_build":
            (root / "workbook" / path.name).symlink_to(path)
    incidents = root / "src/staleproof/incidents"
    for name, text in BLOCKS.items():
        if name == "registry":
            with (incidents / "registry.py").open("a") as file:
                file.write(text)
        else:
            (incidents / name).parent.mkdir(exist_ok=True)
            (incidents / name).write_text(text)
    return root


def staleproof(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{tree}/src", "COLUMNS": "100"}
    return warm.run("-c", MAIN, *arguments, cwd=tree, env=env, timeout=300, vllm=False)


def test_the_example_runs_and_is_in_matrix_and_list(tree):
    done = staleproof(tree, "run", "stale_rows", "-v", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "3 as expected, 0 not as expected, 0 not run" in done.stdout
    assert re.search(r"^every_row +replica +clean +fixed$", done.stdout, re.MULTILINE), done.stdout
    kept = [json.loads(line) for line in (tree / "workbook/_build/findings.jsonl").read_text().splitlines()]
    assert [(row["variant"], row["verdict"], row["outcome"]) for row in kept] == [
        ("live_rows_only", "pad_only", "bad"),
        ("every_row", "clean", "good"),
        ("every_row", "fixed", "good"),
    ]
    assert "99  stale_rows: Stale rows" in staleproof(tree, "list").stdout
