"""What an operator reads about patches: a table, JSON, one patch explained, advice."""

from __future__ import annotations

import importlib.metadata
import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from staleproof.vllm.patches import NOTEBOOKS
from staleproof.vllm.plugin import AFFECTED, REFUSED, WILL, Decision, base, decisions, patches
from staleproof.vllm.releases import last_of_series, release, table
from staleproof.vllm.sources import PatchError, installed

GROUP, NAME = "vllm.general_plugins", "staleproof"
MISSING = f"no entry point {NAME} in {GROUP} is installed"
PROJECTS = {"vLLM": "vllm-project/vllm", "FlashInfer": "flashinfer-ai/flashinfer"}


def inactive() -> str | None:
    """Say why vLLM would not load the plugin; ``None`` if it would.

    >>> os.environ.get("VLLM_PLUGINS") is not None or inactive() in (None, MISSING)
    True
    """
    if not importlib.metadata.entry_points(group=GROUP, name=NAME):
        return MISSING
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and NAME not in [name.strip() for name in chosen.split(",")]:
        return f"VLLM_PLUGINS={chosen} leaves {NAME} out"
    return None


# What a patch would do to a release that is not installed here.
WOULD = "would apply"


class Answer(NamedTuple):
    """What is known about one vLLM.

    Attributes:
        version: as it names itself, or as the user spelled it.
        installed: whether it was probed where it is installed.
        decided: one decision a patch.
        notes: lines for the reader: what the version is, why nothing is patched, advice.
    """

    version: str
    installed: bool
    decided: list[Decision]
    notes: list[str]


def answer(version: str | None = None) -> Answer:
    """Decide about a release of the table, or the installed vLLM, and add what a reader should know.

    Raises:
        PatchError: an unknown version, no vLLM, or an unknown name in ``STALEPROOF_PATCHES``.

    >>> answer("0.28.0").decided[0].state, answer("v0.18").version
    ('would apply', '0.18.1')
    """
    if version is not None:
        name = release(last_of_series(version))
        decided = [replace(d, state=WOULD) if d.state == AFFECTED else d for d in decisions(name)]
        notes = [] if name in version else [f"note: {version} is read as {name}, the last of that series"]
        return Answer(name, False, decided, [*notes, f"advice: {advice(decided, name)}"])
    version, sources = installed()
    decided, of, why = decisions(version, sources), base(version), inactive()
    notes = [f"note: {of.unknown}"] if of.unknown else []
    if why is not None:
        decided = [replace(d, state=AFFECTED) if d.state == WILL else d for d in decided]
        notes.append(f"warning: {why}: nothing is patched")
    notes.append(f"advice: {advice(decided, None if of.unknown else of.name)}")
    return Answer(version, True, decided, notes)


def must_worry(decided: Sequence[Decision]) -> bool:
    """Say whether something that this vLLM is, or may be, affected by is refused.

    >>> from staleproof.vllm.plugin import decisions, chosen
    >>> must_worry(decisions("0.18.1", choice=chosen("all")))
    False
    >>> must_worry(decisions("0.18.1", choice=chosen("-undrained_ids")))
    True
    """
    return any(d.state == REFUSED for d in decided)


def advice(decided: Sequence[Decision], release: str | None) -> str:
    """Say in one line which models are affected, and which release has fewer of these defects.

    Args:
        release: the release of the table that was decided about, or ``None``.

    >>> from staleproof.vllm.plugin import decisions, chosen
    >>> advice(decisions("0.20.2", choice=chosen("mla_padding")), "0.20.2")[:20]
    'affected: MLA models'
    """
    needed = [d.patch for d in decided if d.needed]
    if not needed:
        return "no defect that we know of" if all(d.needed is False for d in decided) else "not known"
    groups: dict[str, list[str]] = {}
    for patch in needed:
        groups.setdefault(patch.models, []).append(patch.name)
    text = "affected: " + "; ".join(f"{models} ({', '.join(names)})" for models, names in groups.items())
    if release is None:
        return text
    fewest, best = len(patches()) + 1, None
    for name in [*table()][[*table()].index(release) :]:
        left = [patch.name for patch in patches().values() if table()[name][patch.name]["needed"]]
        if name == release:
            fewest = len(left)
        elif len(left) < fewest:
            fewest, best = len(left), f"upgrade to {name}, which needs only {', '.join(left) or 'none'}"
    return f"{text}; {best or 'no later release has fewer'}"


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
