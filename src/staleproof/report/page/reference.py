"""The API reference: signatures and docstrings of the public names.

>>> [name for name, _ in sections('Sums.\\n\\nArgs:\\n    x: a number,\\n        any.\\n\\n>>> 1 + 1\\n2')]
['', 'Args', 'Example']
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from markupsafe import Markup, escape

from staleproof.report.page import texts
from staleproof.report.page.tables import fold

# Module -> what its public names are for.
MODULES = {
    "staleproof": "Operations that a server calls",
    "staleproof.evidence": "Detectors for anybody's kernels",
    "staleproof.audit": "Decorators that register a kernel for the padding contract",
}
_SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes")


def sections(docstring: str) -> list[tuple[str, str]]:
    """A docstring by its parts: the text without a name first, then ``Args`` and so on, then ``Example``."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(docstring).splitlines():
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in _SECTIONS:
            found.append((heading[1], []))
        elif line.startswith(">>> ") and found[-1][0] != "Example":
            found.append(("Example", [line]))
        elif line and not line.startswith((" ", ">", ".")) and found[-1][0] in _SECTIONS:
            found.append(("", [line]))
        else:
            found[-1][1].append(line)
    return [(name, "\n".join(lines).strip("\n")) for name, lines in found if any(lines)]


def _docstring_html(docstring: str) -> Markup:
    parts = []
    for name, text in sections(docstring):
        if name == "Example":
            parts.append(texts.code(text))
        elif name in ("Returns", "Yields") or not name:
            head = Markup("<b>{}</b> ").format(name) if name else Markup("")
            parts.append(Markup("<div>{}{}</div>").format(head, _words(inspect.cleandoc(text))))
        else:
            entries = Markup("").join(_entries(text))
            parts.append(Markup("<p><b>{}</b></p><dl>{}</dl>").format(name, entries))
    return Markup("\n").join(parts)


def _entries(text: str) -> Iterator[Markup]:
    # An entry begins where a line is not indented further than the first.
    for entry in re.split(r"\n(?! )", inspect.cleandoc(text)):
        name, _, about = entry.partition(":")
        yield Markup("<dt><code>{}</code></dt><dd>{}</dd>").format(
            name.strip("`"), _words(inspect.cleandoc(about))
        )


def _words(text: str) -> Markup:
    """A docstring's text: roles such as ``:func:`x` `` become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return texts.render(text)


def _one(module: str, name: str) -> Markup:
    value = getattr(importlib.import_module(module), name)
    anchor = f"api-{module.rpartition('.')[2]}-{name}"
    if not (inspect.isfunction(value) or inspect.isclass(value)) or not inspect.getdoc(value):
        return fold(
            Markup("<code>{}</code>").format(name),
            Markup("<p>A constant of <code>{}</code>, of type <code>{}</code>.</p>").format(
                module, type(value).__name__
            ),
            kind="api",
            name=anchor,
        )
    documented = inspect.getdoc(value) or ""
    first = documented.splitlines()[0]
    body = [Markup("<pre tabindex='0'>{}</pre>").format(_signature(name, value))]
    body.append(_docstring_html(documented))
    for method, function in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(function) and method[0] != "_" and function.__doc__:
            head = Markup("<h4><code>{}.{}</code></h4><pre tabindex='0'>{}</pre>")
            body.append(head.format(name, method, _signature(method, function)))
            body.append(_docstring_html(function.__doc__))
    summary = Markup("<code>{}</code> {}").format(name, texts.plain(str(_words(first))))
    return fold(summary, Markup("\n").join(body), kind="api", name=anchor)


def _signature(name: str, value: object) -> str:
    try:
        signature = inspect.signature(value, eval_str=False)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    said = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return name + re.sub(r"<([\w. ]+) at 0x[0-9a-f]+>", r"\1", said)


def html() -> Markup:
    """The reference, a fold for each public name."""
    parts = []
    for module, about in MODULES.items():
        names = importlib.import_module(module).__all__
        folds = Markup("\n").join(_one(module, name) for name in names)
        parts.append(Markup("<h3>{}</h3><p><code>{}</code></p>{}").format(about, escape(module), folds))
    return Markup("\n").join(parts)
