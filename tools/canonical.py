"""The one form in which a notebook is committed: ``python -m tools.canonical FILE...``.

Executing a notebook stores timestamps, random ids and versions in it, so two executions with the
same results differ in a hundred lines. The canonical form keeps what a reader sees and what nbval
compares, and makes the rest the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Left out: its model id is random, and without the widget's state, which is not stored, it shows nothing.
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# What JupyterLab folds, by tag: the source of an exercise's answer; all of a cell that answers a prediction,
# or its output if the source gives nothing away (in the book that takes ``hide-output`` too).
FOLDED = {
    "answer": {"source_hidden": True},
    "hide-cell": {"outputs_hidden": True, "source_hidden": True},
    "predict": {"outputs_hidden": True},
}


def canonical(nb: NotebookNode) -> str:
    """The canonical text of a notebook.

    The text is nbformat 4.5 as ``nbformat.writes`` prints it. Metadata is :data:`METADATA`; that of
    a cell is its sorted tags, and what :data:`FOLDED` says of them. Cells are named ``cell-01``,
    ``cell-02`` and so on. Outputs are kept, with neighbouring chunks of one stream joined. The text
    ends with one newline.

    Args:
        nb: a notebook of major format 4; it is not changed.

    Returns:
        The text. Parsed and made canonical again, it is the same text.
    """
    cells = []
    for number, cell in enumerate(nb.cells, 1):
        tags = sorted(cell.metadata.get("tags", []))
        metadata: dict[str, object] = {"tags": tags} if tags else {}
        for tag in set(tags) & FOLDED.keys():
            metadata["jupyter"] = FOLDED[tag]
        kept = {
            "cell_type": cell.cell_type,
            "id": f"cell-{number:02d}",
            "metadata": metadata,
            "source": cell.source,
        }
        if cell.cell_type == "code":
            kept |= {"execution_count": cell.execution_count, "outputs": _outputs(cell)}
        if "attachments" in cell:
            kept["attachments"] = cell.attachments
        cells.append(kept)
    form = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return nbformat.writes(nbformat.from_dict(form)).rstrip("\n") + "\n"


def _outputs(cell: NotebookNode) -> list[dict]:
    """A code cell's outputs, with the chunks of a stream joined: their sizes vary from run to run."""
    outputs: list[dict] = []
    for output in cell.outputs:
        kept = dict(output)
        if "data" in kept:
            kept["data"] = {k: v for k, v in output.data.items() if k != WIDGET_VIEW}
        last = outputs[-1] if outputs else {}
        if kept["output_type"] == "stream" and last.get("name") == kept["name"]:
            last["text"] += kept["text"]
        else:
            outputs.append(kept)
    return outputs


def main(argv: list[str] | None = None) -> int:
    """Rewrite notebooks in canonical form; those that are canonical already are not written.

    Returns:
        0, or 2 if a file is not a notebook or cannot be read or written. The others are rewritten.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.canonical")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    status = 0
    for path in parser.parse_args(argv).files:
        try:
            have = path.read_bytes()
            want = canonical(nbformat.reads(have.decode(), as_version=4)).encode()
            if have != want:
                path.write_bytes(want)
                print(f"{path}: rewritten")
        except (OSError, ValueError, nbformat.ValidationError, AttributeError, TypeError) as error:
            print(f"{path}: cannot be rewritten: {str(error).splitlines()[0]}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
