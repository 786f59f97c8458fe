"""The one form in which a notebook is committed: ``python -m staleproof.report.canonical FILE...``.

Executing a notebook writes into it things that say nothing (timestamps, random ids, the versions
of the author's kernel), so two honest executions differ in a hundred lines. The canonical form
keeps what a reader sees and what nbval compares, and fixes the rest.
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
# Its model id is random and the widget's state is not stored, so it could never be shown again.
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def canonical(nb: NotebookNode) -> str:
    """The canonical text of a notebook.

    nbformat 4.5 as ``nbformat.writes`` prints it, with :data:`METADATA` and nothing else as
    metadata, no cell metadata but sorted tags, cells numbered ``cell-01``, ``cell-02`` and on,
    outputs kept, neighbouring chunks of one stream joined, and one newline at the end.

    Args:
        nb: a notebook of major format 4; left as it is.

    Returns:
        The text; ``canonical`` of what it parses to is the same text.
    """
    cells = []
    for number, cell in enumerate(nb.cells, 1):
        tags = sorted(cell.metadata.get("tags", []))
        kept = {
            "cell_type": cell.cell_type,
            "id": f"cell-{number:02d}",
            "metadata": {"tags": tags} if tags else {},
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
    """A code cell's outputs; how a stream was cut into chunks is chance, so chunks are joined."""
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
    """Rewrite the given notebooks in canonical form; those that are so already are not touched.

    Returns:
        0, or 2 where a file is no notebook or cannot be read or written; the others are done.
    """
    parser = argparse.ArgumentParser(prog="python -m staleproof.report.canonical")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    status = 0
    for path in parser.parse_args(argv).files:
        try:
            have = path.read_bytes()
            want = canonical(nbformat.reads(have.decode(), as_version=4)).encode()
            if have != want:
                path.write_bytes(want)
                print(f"{path}: rewritten")
        except (OSError, ValueError, nbformat.ValidationError, AttributeError) as error:
            print(f"{path}: cannot be rewritten: {str(error).splitlines()[0]}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
