"""The answers about patches as an operator reads them: a table, JSON, one patch explained."""

from __future__ import annotations

import json
import textwrap

from staleproof.vllm.patches import NOTEBOOKS
from staleproof.vllm.plugin import patches
from staleproof.vllm.sources import PatchError
from staleproof.vllm.status import Answer

PROJECTS = {
    "vLLM": "vllm-project/vllm",
    "FlashInfer": "flashinfer-ai/flashinfer",
    "SGLang": "sgl-project/sglang",
    "Triton": "triton-lang/triton",
}


def as_text(given: Answer, width: int | None = None) -> str:
    """Format an answer as a table: state, patch, incident, and the evidence or the reason.

    Args:
        given: the answer.
        width: columns of a terminal. The evidence then stands below its patch, and no word is cut;
            ``None`` puts a patch on a line.

    >>> print(as_text(Answer("0.20.2", False, [], ["advice: none"])))
    vLLM 0.20.2, recorded probes of its source
    <BLANKLINE>
    state  patch  incident  evidence
    -----  -----  --------  --------
    <BLANKLINE>
    advice: none
    """
    origin = "installed, probed now" if given.installed else "recorded probes of its source"
    rows = [["state", "patch", "incident", "evidence"]]
    rows += [[d.state, d.patch.name, d.patch.incident, d.why] for d in given.decided]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ["-" * size for size in (*widths, 8)])
    lines = []
    for row in rows:
        first = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=False))
        if width is None or len(first) + 2 + len(row[3]) <= width:
            lines.append(f"{first}  {row[3]}")
        else:
            lines += [first.rstrip(), *_wrapped(row[3], width, "    ")]
    notes = [part for note in given.notes for part in _wrapped(note, width)]
    return "\n".join([f"vLLM {given.version}, {origin}", "", *lines, "", *notes])


def _wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Text in lines of a width, broken between words only; as it is without a width."""
    if width is None:
        return [text]
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(given: Answer) -> str:
    """Format an answer as JSON, for programs.

    >>> from staleproof.vllm.status import answer
    >>> row = json.loads(as_json(answer("0.20.2")))["patches"][0]
    >>> row["state"], row["needed"], row["requires"], row["targets"][0].rpartition(":")[2]
    ('would apply', True, [], '_fwd_kernel_stage2')
    """
    rows = [
        {
            "patch": d.patch.name,
            "incident": d.patch.incident,
            "state": d.state,
            "needed": d.needed,
            "why": d.why,
            "summary": d.patch.summary,
            "models": d.patch.models,
            "traced": d.patch.traced,
            "requires": [*d.patch.requires],
            "targets": [target.place for target in d.patch.targets],
            "urls": [url(thread) for thread in d.patch.threads],
        }
        for d in given.decided
    ]
    found = {"vllm": given.version, "installed": given.installed, "notes": given.notes, "patches": rows}
    return json.dumps(found, indent=1)


def url(thread: str) -> str:
    """Return the address of an upstream issue or pull request; GitHub sends one on to the other.

    >>> url("vLLM #39391")
    'https://github.com/vllm-project/vllm/issues/39391'
    """
    project, number = thread.split(" #")
    return f"https://github.com/{PROJECTS[project]}/issues/{number}"


def explanation(name: str) -> str:
    """Describe one patch: summary, mechanism, models, releases, targets, threads, cost, notebook.

    Raises:
        PatchError: no patch has this name.

    >>> print(explanation("scale_padding").splitlines()[0])
    scale_padding: allocates swizzled FP4 scales zeroed
    """
    if name not in patches():
        raise PatchError(f"unknown patch {name!r}; known: {', '.join(patches())}")
    patch = patches()[name]
    spans = ", ".join(f"{first} to {last}" for first, last in patch.versions)
    wraps = [*dict.fromkeys(f"{target.module}: {target.name}" for target in patch.targets)]
    threads = [f"{thread}  {url(thread)}" for thread in patch.threads]
    cache = (
        "the patch is a factor of vLLM's compile-cache key: each state has graphs of its own"
        if patch.traced
        else "torch.compile does not see it"
    )
    lines = [
        f"{name}: {patch.summary}",
        "",
        *textwrap.wrap(patch.mechanism, 88),
        "",
        f"affects    {patch.models}",
        f"releases   {spans}, if the probe finds the defect",
        *(f"{'' if i else 'wraps':<11}{place}" for i, place in enumerate(wraps)),
        *(f"{'' if i else 'upstream':<11}{thread}" for i, thread in enumerate(threads)),
        f"cost       {patch.cost}",
        *([f"needs      {', '.join(patch.requires)}"] if patch.requires else []),
        f"cache      {cache}",
        f"notebook   notebooks/{NOTEBOOKS[patch.incident]}",
    ]
    return "\n".join(lines)
