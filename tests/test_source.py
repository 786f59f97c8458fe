"""A rule of the kernels without which they run on a CPU alone."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/staleproof"
LOADS = {"tl.load", "gl.load"}


def test_masked_load_names_the_value_outside_its_mask():
    """Compiled code has any value there; the interpreter has 0."""
    masked, wrong = 0, []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADS:
                names = {keyword.arg for keyword in node.keywords}
                masked += "mask" in names
                if "mask" in names and "other" not in names:
                    wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert masked > 40
    assert wrong == []
