"""The book: Sphinx over the notebooks and pages of this repository, as they are.

The repository's root is the source folder, so that links between notebooks and pages are the same here and on
GitHub. Notebooks show their stored outputs, which nbval checks. `make book` builds it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

sys.path.insert(0, str(Path(__file__).parent))

project = "staleproof"
author = "the staleproof authors"
html_title = "staleproof"

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "tables"]
root_doc = "index"
include_patterns = [
    "index.md",
    "book/*.md",
    "notebooks/*.ipynb",
    "workbook/*.md",
    "src/staleproof/ops/mla/README.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# Our pages begin sections with a level that fits GitHub.
suppress_warnings = ["myst.header"]

nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"
nb_custom_formats = {".ipynb": ["conf.read_notebook", {}, False]}

html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 1,
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
}

BANNER = "show.start("


def fold(cell: nbformat.NotebookNode, prompt: str) -> None:
    """Fold a cell with its output."""
    cell.metadata.tags.append("hide-cell")
    cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}


def parts(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """A cell, in two if tables follow its picture: MyST-NB would give each of them the picture's caption."""
    outputs = cell.get("outputs", [])
    pictures = [at for at, output in enumerate(outputs) if "image/svg+xml" in output.get("data", {})]
    if not pictures or pictures[-1] == len(outputs) - 1:
        return [cell]
    rest = nbformat.v4.new_code_cell(outputs=outputs[pictures[-1] + 1 :], metadata={"tags": ["remove-input"]})
    cell.outputs = outputs[: pictures[-1] + 1]
    return [cell, rest]


def read_notebook(text: str) -> nbformat.NotebookNode:
    """A notebook for the book: what its metadata says about folds and pictures, in the words of MyST-NB.

    The banner and the answers of exercises are folded with their outputs. A picture's alternative text and
    caption lie in the metadata of its output.
    """
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tags = cell.metadata.setdefault("tags", [])
        if "parameters" in tags:
            tags.append("remove-input")
        elif BANNER in cell.source and len(cell.source) < 200:
            fold(cell, "The machine of these outputs")
        elif "answer" in tags:
            fold(cell, "The answer")
        for output in cell.outputs:
            for about in output.get("metadata", {}).values():
                if isinstance(about, dict) and "alt" in about:
                    picture = {"image": {"alt": about["alt"]}}
                    if about.get("caption"):
                        picture["figure"] = {"caption": about["caption"]}
                    cell.metadata["mystnb"] = picture
            if output.output_type == "stream":
                # A terminal's line for the caption, which stands below the picture here.
                lines = output.text.splitlines(keepends=True)
                output.text = "".join(line for line in lines if not line.startswith("Picture, "))
        cell.outputs = [output for output in cell.outputs if output.get("text", "-").strip()]
    notebook.cells = [part for cell in notebook.cells for part in parts(cell)]
    return notebook


class RegisterAnchors(SphinxTransform):
    """Links find ``<a id="word"></a>``, as in the glossary, and Jupyter's anchors: ``#First-bad-stage``."""

    default_priority = 870

    def apply(self, **kwargs: Any) -> None:
        slugs = getattr(self.document, "myst_slugs", {})
        for raw in self.document.findall(nodes.raw):
            for name in re.findall(r'<a id="([^"]+)">', raw.astext()):
                slugs.setdefault(name, (raw.line or 0, name, name))
        for section in self.document.findall(nodes.section):
            heading = section.next_node(nodes.title)
            if heading is not None:
                title = heading.astext()
                slugs.setdefault(title.replace(" ", "-"), (section.line or 0, section["ids"][0], title))
        self.env.metadata[self.env.docname]["myst_slugs"] = slugs


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_transform(RegisterAnchors)
