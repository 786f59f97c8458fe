"""What a reader writes to mend a notebook's few faulty lines: right answers pass, wrong ones get a hint."""

import ast
import contextlib
import io
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

BUFFERS = """def mended(kept, decoding):
    for layer in range(layers):
        kept[layer] = buffer
"""
# By notebook: mends that are right.
RIGHT = {
    "02": [
        BUFFERS + "    return sum(kept.values()) + (0 if decoding else workspace)",
        "def mended(kept, decoding): return 0 if decoding else workspace",
    ],
    "03": [
        """def mended(scores, k):
    key = [-s if s == s else float("inf") for s in scores]
    return sorted(range(len(scores)), key=lambda expert: (key[expert], expert))[:k]
""",
        """def mended(scores, k):
    scores, ids = [s if s == s else -float("inf") for s in scores], []
    for _ in range(k):
        ids.append(max((e for e in range(len(scores)) if e not in ids), key=scores.__getitem__))
    return ids
""",
    ],
    "04": ["def take(block, hit): hit or block.zero_()"],
    "05": [
        "def product(values, scales, owned): return torch.where(owned, values * scales, 0.0).sum()",
        "def product(values, scales, owned): return (values * scales)[owned].sum()",
    ],
}
# By notebook: mends that are wrong, each with a part of its hint.
WRONG = {
    "02": [
        (BUFFERS + "    return 0", "not in what `mended` returns"),
        (BUFFERS + "    return 0 if decoding else workspace", "not in what `mended` returns"),
        ("mended = step", "the profile did not make"),
    ],
    "03": [
        ("def mended(scores, k): return choose(scores, k)", "not 3 different experts"),
        ("def mended(scores, k): return [0, 1, 2, 3]", "not 3 different experts"),
        ("def mended(scores, k): return choose([s if s == s else 9.0 for s in scores], k)", "not the best"),
        # These fail for negative scores, for those below -5000, and where every score is NaN.
        ("def mended(scores, k): return choose([s if s == s else 0.0 for s in scores], k)", "not the best"),
        (
            "def mended(scores, k): return choose([s if s == s else -5e3 for s in scores], k)",
            "not 2 different",
        ),
        ("def mended(scores, k): return choose([s if s == s else -9e9 for s in scores], k)", "different"),
    ],
    "04": [
        ("def take(block, hit): pass", "the state's bytes"),
        ("def take(block, hit): block.zero_()", "the cached prefix is gone"),
        ("def take(block, hit): values.fill_(1)", "the cached prefix is gone"),
    ],
    "05": [
        ("def product(values, scales, owned): return (values * scales).sum()", "padding still matters"),
        ("def product(values, scales, owned): return (values * scales)[:2].sum()", "see owned"),
        (
            "def product(values, scales, owned): return torch.where(values != 0, values * scales, 0.0).sum()",
            "a block of zeros",
        ),
        ("def product(values, scales, owned): return (values * scales).nansum()", "own NaN is hidden"),
    ],
}


def printed(notebook: str, mend: str) -> str:
    """What the notebook's check prints for a mend, after the cell with the faulty lines has run."""
    (path,) = NOTEBOOKS.glob(f"{notebook}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    title = next(at for at, cell in enumerate(cells) if "## In a few lines" in cell.source)
    faulty = next(cell.source for cell in cells[title:] if cell.cell_type == "code")
    check = ast.parse(next(cell.source for cell in cells if "<- not yet" in cell.source))
    at = next(n for n, node in enumerate(check.body) if isinstance(node, ast.FunctionDef))
    check.body[at : at + 1] = ast.parse(mend).body
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(faulty, names)
        out.truncate(out.seek(0))
        exec(compile(check, path.name, "exec"), names)
    return out.getvalue()


@pytest.mark.parametrize(("notebook", "mend"), [(name, mend) for name in RIGHT for mend in RIGHT[name]])
def test_right_mend_passes(notebook, mend):
    assert "not yet" not in printed(notebook, mend)


@pytest.mark.parametrize(("notebook", "mend", "hint"), [(n, *case) for n in WRONG for case in WRONG[n]])
def test_wrong_mend_gets_a_hint(notebook, mend, hint):
    hints = [line.partition("<- not yet: ")[2] for line in printed(notebook, mend).splitlines()]
    assert any(hint in text for text in hints)
