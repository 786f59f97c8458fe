"""The answers about patches as an operator reads them: a table, JSON, one patch explained."""

from __future__ import annotations

import json

from staleproof.triage.text import wrapped
from staleproof.vllm.patches import NOTEBOOKS
from staleproof.vllm.plugin import REFUSED, on_request, patches
from staleproof.vllm.sources import PatchError
from staleproof.vllm.status import Answer

PROJECTS = {
    "vLLM": "vllm-project/vllm",
    "FlashInfer": "flashinfer-ai/flashinfer",
    "SGLang": "sgl-project/sglang",
    "Triton": "triton-lang/triton",
}


def as_text(given: Answer, width: int | None = None, *, verbose: bool = False) -> str:
    """Format an answer: what to upgrade to, then state, patch, who is affected, and the evidence.

    Args:
        given: the answer.
        width: columns of a terminal, in which no word is cut. ``None``: a patch on a line.
        verbose: in a terminal, the evidence below each patch; it is always on a line that holds a patch.

    >>> print(as_text(Answer("0.20.2", False, [], ["note: a build"], "upgrade to 0.26.0")))
    vLLM 0.20.2, recorded probes of its source
    note: a build
    upgrade to 0.26.0
    <BLANKLINE>
    state  patch  affects  evidence
    -----  -----  -------  --------
    """
    origin = "installed, probed now" if given.installed else "recorded probes of its source"
    last = "evidence" if width is None else ""
    rows = [["state", "patch", "affects", last]]
    rows += [[d.state, d.patch.name, d.patch.models, d.why] for d in given.decided]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ["-" * size for size in (*widths[:2], 7, len(last))])
    head = [f"vLLM {given.version}, {origin}", *given.notes, *filter(None, [given.upgrade])]
    lines = [part for line in head for part in wrapped(line, width, "", "  ")]
    lines.append("")
    for state, patch, affects, evidence in rows:
        first = f"{state:<{widths[0]}}  {patch:<{widths[1]}}  "
        if width is None:
            lines.append(f"{first}{affects:<{widths[2]}}  {evidence}")
        else:
            lines += wrapped(affects, width, first, " " * len(first))
            # Why a patch is refused is the answer, and no detail.
            lines += wrapped(evidence, width, " " * 4, " " * 6) if verbose or state == REFUSED else []
    if width is not None:
        lines.append("")
        more = "" if verbose else "-v says by what evidence; "
        lines += wrapped(f"{more}--explain PATCH says what a patch does, and its cost", width, "", "  ")
    return "\n".join(lines)


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
    found = {"vllm": given.version, "installed": given.installed, "notes": given.notes}
    return json.dumps({**found, "upgrade": given.upgrade, "patches": rows}, indent=1)


def url(thread: str) -> str:
    """Return the address of an upstream issue or pull request; GitHub sends one on to the other.

    >>> url("vLLM #39391")
    'https://github.com/vllm-project/vllm/issues/39391'
    """
    project, number = thread.split(" #")
    return f"https://github.com/{PROJECTS[project]}/issues/{number}"


def explanation(name: str, width: int | None = None) -> str:
    """Describe one patch: summary, mechanism, models, releases, targets, threads, cost, notebook.

    Args:
        name: of the patch.
        width: columns of a terminal; ``None`` puts an entry on a line.

    Raises:
        PatchError: no patch has this name.

    >>> print(explanation("scale_padding").splitlines()[0])
    scale_padding: allocates swizzled FP4 scales zeroed
    """
    known = patches() | on_request()
    if name not in known:
        raise PatchError(f"unknown patch {name!r}; known: {', '.join(known)}")
    patch = known[name]
    spans = ", ".join(f"{first} to {last}" for first, last in patch.versions)
    cache = (
        "the patch is a factor of vLLM's compile-cache key: each state has graphs of its own"
        if patch.traced
        else "torch.compile does not see it"
    )
    fields = {
        "affects": [patch.models],
        "releases": [f"{spans}, if the probe finds the defect"],
        "wraps": [*dict.fromkeys(f"{target.module}: {target.name}" for target in patch.targets)],
        "upstream": [f"{thread}  {url(thread)}" for thread in patch.threads],
        "cost": [patch.cost],
        "needs": [", ".join(patch.requires)] if patch.requires else [],
        "cache": [cache],
        "notebook": [f"notebooks/{NOTEBOOKS[patch.incident]}"] if patch.incident in NOTEBOOKS else [],
    }
    lines = [*wrapped(f"{name}: {patch.summary}", width, "", "  "), "", *wrapped(patch.mechanism, width), ""]
    for field, entries in fields.items():
        for i, entry in enumerate(entries):
            lines += wrapped(entry, width, f"{'' if i else field:<11}", " " * 11)
    return "\n".join(lines)
