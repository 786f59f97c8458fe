"""The answer of ``staleproof diagnose``, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from staleproof.triage import judge
from staleproof.triage.facts import Facts
from staleproof.triage.judge import Judgement
from staleproof.triage.table import Row, plain
from staleproof.triage.text import wrapped
from staleproof.vllm import status

# How many rows are shown in full.
SHOWN = 3
NO_SYMPTOM = "no symptom is known (--symptom): what follows fits the release and the deployment only"
NOTHING = (
    "Nothing in the table fits. That says only that it is none of these incidents as we know them: it may be "
    "one of another kind. See what speaks against each; a wrong fact above would mislead."
)


def use_of(lines: Sequence[tuple[str, str, str]]) -> str:
    """How to install the patches that would apply, what proves that they stand, and how to switch them off.

    >>> use_of([("decode_buffer", "not needed", "")])
    ''
    """
    patches = ", ".join(patch for patch, state, _ in lines if state == status.WOULD)
    if not patches:
        return ""
    proof = f"its log then says in place: {patches}"
    return f"Install beside vLLM (pip install .), restart; {proof}; STALEPROOF_PATCHES=none: off"


def patch_lines(row: Row, version: str | None) -> list[tuple[str, str, str]]:
    """Patch, state and evidence of a row's patches, as ``staleproof patches --version`` says.

    >>> from staleproof.triage.table import of
    >>> patch_lines(of("decode_buffer")[0], "0.20.2")[0][:2]
    ('decode_buffer', 'not needed')
    """
    if version is None:
        return [(patch, "depends on the release", "give --version") for patch in row.patches]
    states = {decision.patch.name: decision for decision in status.answer(version).decided}
    return [(patch, states[patch].state, states[patch].why) for patch in row.patches]


def ceiling(row: Row) -> str:
    """How much the row's evidence can carry.

    >>> from staleproof.triage.table import rows
    >>> {row.key: ceiling(row)[:7] for row in rows()}["dummy_slots"]
    'replica'
    """
    if row.grade == "real":
        return "real: third-party code showed a link of it; your server was not asked"
    if row.grade == "source":
        return "source: released code says so; nobody ran it here"
    return f"{row.grade}: at best consistent with it; no released code ran"


def as_json(facts: Facts, found: list[Judgement]) -> str:
    """Everything that :func:`as_text` says, for programs.

    >>> facts = Facts(known={"symptom": "leak", "version": "0.22.1"}, traits={"hybrid": False})
    >>> json.loads(as_json(facts, judge.judge_all(facts)))["rows"][0]["incident"]
    'kv_reuse'
    """
    version = facts.known.get("version")
    rows = [
        {
            "key": j.row.key,
            "incident": j.row.incident,
            "status": j.status,
            "because": [*j.because, *j.signs],
            "not_known": j.unknown,
            "also_needs": j.row.also or None,
            "measured_otherwise": j.measured,
            "against": j.against,
            "cannot_be_told_apart_from": [other.row.key for other in judge.alike(j, found)],
            "flag": plain(j.row.flag),
            "affected": j.row.affected,
            "release": j.row.release,
            "patches": [
                dict(zip(("patch", "state", "why"), line, strict=True))
                for line in patch_lines(j.row, version)
            ],
            "confirm": plain(j.row.confirm),
            "notebook": f"notebooks/{j.row.notebook}",
            "ceiling": ceiling(j.row),
            "evidence": [
                {"grade": item.grade, "says": item.says, "rests_on": item.rests_on} for item in j.row.evidence
            ],
        }
        for j in found
    ]
    known: dict[str, Any] = {**facts.known, **({"model": facts.traits} if facts.traits else {})}
    return json.dumps(
        {
            "known": known,
            "origin": facts.origin,
            "notes": facts.notes,
            "nothing_fits": not any(j.alive for j in found),
            "looks_like": facts.looks_like or None,
            "rows": rows,
        },
        indent=1,
    )


def as_text(facts: Facts, found: list[Judgement], width: int = 80, *, verbose: bool = False) -> str:
    """The best row in five lines and the others that may fit in a line each; ``verbose``: all of it.

    Args:
        facts: what is known.
        found: every row, as :func:`staleproof.triage.judge.judge_all` ordered them.
        width: columns of the terminal.
        verbose: say of the first rows why they fit, of each other row what speaks against it.

    >>> print(as_text(Facts(), judge.judge_all(Facts())).splitlines()[0])
    known: nothing
    """
    return "\n".join((_lines if verbose else _short)(facts, found, min(width, 100)))


def _known(facts: Facts, width: int) -> Iterator[str]:
    known = [judge.fact(facts, name) for name in (*facts.known, *(["model"] if facts.traits else []))]
    yield from _wrap("known: ", ", ".join(known) or "nothing", width)
    notes = [] if facts.has("symptom") else [NO_SYMPTOM]
    for note in (*facts.notes, *notes):
        yield from _wrap("note: ", note, width)
    yield ""


def _nothing(facts: Facts, width: int) -> Iterator[str]:
    if facts.looks_like:
        where = f" ({facts.origin['symptom']})" if "symptom" in facts.origin else ""
        yield from _wrap("", f"nothing here fits; this looks like {facts.looks_like}{where}.", width)
    else:
        yield from _wrap("", NOTHING, width)


def _short(facts: Facts, found: list[Judgement], width: int) -> Iterator[str]:
    """Fits, do now, confirm, patch, read; then what else may fit, and what would decide."""
    yield from _known(facts, width)
    standing = [j for j in found if j.alive]
    if not standing:
        yield from _nothing(facts, width)
        yield "-v says what speaks against each."
        return
    first, *others = standing
    row = first.row
    lines = patch_lines(row, facts.known.get("version"))
    patched = ", ".join(f"{patch}: {state}" for patch, state, _ in lines) or "none"
    decides = dict.fromkeys(first.asks(name) for name in first.unknown)
    more = [*decides, *([f"only if there is also {row.also}"] if row.also else []), *first.measured]
    yield from _wrap(f"{first.status}: ", f"{row.key} (evidence: {row.grade}). {plain(row.see)}", width)
    yield from _fields(
        width,
        ("do now", f"{plain(row.flag)}; release: {row.release}"),
        ("confirm", plain(row.confirm)),
        ("patch", ". ".join(filter(None, (patched, use_of(lines))))),
        ("read", f"notebooks/{row.notebook}; staleproof run {row.incident}"),
        ("but", "; ".join(more)),
    )
    if others:
        yield ""
        yield "may fit as well:"
    for j in others[:SHOWN]:
        needs = [*map(j.asks, j.unknown), *([j.row.also] if j.row.also else []), *j.measured[:1]]
        yield from _wrap(f"  {j.row.key}: ", ", ".join(needs) or j.status, width)
    hidden = len(others) - SHOWN
    yield ""
    last = f"and {hidden} more; " if hidden > 0 else ""
    yield from _wrap(last, "-v says why, by what evidence, and what speaks against", width)


def _lines(facts: Facts, found: list[Judgement], width: int) -> Iterator[str]:
    yield from _known(facts, width)
    standing = [j for j in found if j.alive]
    if not standing:
        yield from _nothing(facts, width)
        yield ""
    for number, j in enumerate(standing[:SHOWN], 1):
        yield from _row(number, j, facts, standing, width)
        yield ""
    if len(standing) > SHOWN:
        yield "may fit as well:"
        for j in standing[SHOWN:]:
            more = [*map(j.asks, j.unknown), *([j.row.also] if j.row.also else []), *j.measured]
            yield from _wrap(f"  {j.row.key}: ", f"{j.status}: {', '.join(more)}", width)
        yield ""
    contradicted = [j for j in found if not j.alive]
    elsewhere = [
        j.row.key for j in contradicted if facts.known.get("symptom", "") not in ("", *j.row.symptoms)
    ]
    if contradicted:
        yield "speaks against:"
    if elsewhere:
        yield from _wrap("  another symptom: ", ", ".join(elsewhere), width)
    for j in contradicted:
        if j.row.key not in elsewhere:
            yield from _wrap(f"  {j.row.key}: ", "; ".join(j.against), width)


def _row(number: int, j: Judgement, facts: Facts, standing: list[Judgement], width: int) -> Iterator[str]:
    row, alike = j.row, judge.alike(j, standing)
    lines = patch_lines(row, facts.known.get("version"))
    apart = dict.fromkeys(name for other in alike for name in judge.tells_apart(j, other))
    tell = ", ".join(map(judge.option, apart)) or "only the confirmation below"
    keys = ", ".join(other.row.key for other in alike)
    yield from _wrap(f"{number}. ", f"{j.status}: {row.key} ({row.incident})", width)
    yield from _fields(
        width,
        ("sees", plain(row.see)),
        ("because", "; ".join([*j.because, *j.signs])),
        ("only if", row.also and f"there is also {row.also}"),
        *(("but", text) for text in j.measured),
        ("unknown", ", ".join(map(j.asks, j.unknown))),
        ("alike", keys and f"cannot be told apart from {keys}; {tell} may tell"),
        ("not seen", plain(row.not_when)),
        ("flag", plain(row.flag)),
        ("release", row.release),
        *(("patch", f"{patch}: {state}" + f" ({why})" * (number == 1)) for patch, state, why in lines),
        ("patch", "" if lines else "none: no patch"),
        ("", use_of(lines) if number == 1 else ""),
        ("confirm", plain(row.confirm)),
        ("evidence", ceiling(row)),
        *(("", f"{e.grade}: {e.says} [{e.rests_on}]") for e in row.evidence if number == 1),
        ("read", f"notebooks/{row.notebook}; staleproof run {row.incident}"),
    )


def _fields(width: int, *fields: tuple[str, str]) -> Iterator[str]:
    """Names and texts below each other; what has no text is left out."""
    for name, text in fields:
        if text:
            yield from _wrap(f"   {name:<10}", text, width)


def _wrap(first: str, text: str, width: int) -> Iterator[str]:
    yield from wrapped(text, width, first, " " * min(len(first), 13))
