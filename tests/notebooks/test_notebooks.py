"""The stored notebooks, without a kernel; nbval executes them and compares their outputs."""

import re
from pathlib import Path

import pytest
from nbformat import v4, validator
from tools.canonical import canonical

from staleproof.incidents.registry import INCIDENTS

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
LOCAL_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work)/|[A-Za-z]:\\|site-packages")


def text_of(output: dict) -> str:
    """What an output shows, pictures aside."""
    data = output.get("data", {})
    return output.get("text", "") + "".join(str(v) for k, v in data.items() if not k.startswith("image/"))


def test_each_incident_has_its_notebook():
    assert {about.notebook for about in INCIDENTS.values()} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_executed_in_order_without_errors_or_local_paths(path):
    text = path.read_text("utf-8")
    notebook = v4.reads(text)
    assert not [error.message for error in validator.iter_validate(notebook)]
    assert text == canonical(notebook), "run python -m tools.canonical on it"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [*map(text_of, outputs), *(cell.source for cell in notebook.cells)]
    assert not [found.group() for text in shown if (found := LOCAL_PATH.search(text))]
