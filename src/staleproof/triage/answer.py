"""The answer of ``staleproof diagnose``, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from staleproof.triage import judge
from staleproof.triage.facts import ASK, Facts, says
from staleproof.triage.judge import AGAINST, MEASURED, OPEN, UNLESS, Judgement
from staleproof.triage.table import CONTROL, Row, plain, symptoms
from staleproof.triage.text import wrapped
from staleproof.vllm import status

# How many further rows are named.
SHOWN = 3
NONE = "none of these"
CHOICES = "|".join(symptoms())


def kind(facts: Facts, found: Sequence[Judgement]) -> str:
    """The answer: ``another server``, how the first row fits, ``not decided`` or ``none of these``.

    >>> kind(Facts(server="sglang"), []), kind(Facts(symptoms=["nan"]), [])
    ('another server', 'none of these')
    """
    if facts.server:
        return "another server"
    if found and found[0].leads:
        return found[0].status
    if judge.looks_like(facts, found)[0]:
        return NONE
    return OPEN if any(one.status == OPEN for one in found) else NONE


def patch_lines(row: Row, facts: Facts) -> list[tuple[str, str, str]]:
    """Patch, state, and whether it touches the backend that runs, of each of a row's patches.

    >>> from staleproof.triage.table import of
    >>> facts = Facts(known={"backend": "flash_attn_mla"}); facts.learn("version", "0.22.1", "--version")
    >>> patch_lines(of("mla_padding")[0], facts)
    [('mla_padding', 'would apply', 'does not touch FLASH_ATTN_MLA')]
    """
    states = {}
    if len(facts.releases) == 1:
        states = {d.patch.name: d.state for d in status.answer(facts.releases[0]).decided}
    return [(p, states.get(p, "depends on the release"), _touches(row, p, facts)) for p in row.patches]


def _touches(row: Row, patch: str, facts: Facts) -> str:
    """Whether a patch touches the backend that runs."""
    for name, values in row.touches.get(patch, {}).items():
        word = facts.known.get(name)
        if word is None:
            return (
                f"touches {', '.join(map(str.upper, values))} only; yours is unknown ({judge.option(name)})"
            )
        return f"touches {word.upper()}" if word in values else f"does not touch {word.upper()}"
    return "touches any backend"


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


def as_json(facts: Facts, found: Sequence[Judgement]) -> str:
    """Everything that :func:`as_text` says, for programs.

    >>> facts = Facts(symptoms=["leak"]); facts.learn("version", "0.22.1", "--version")
    >>> answer = json.loads(as_json(facts, judge.judge_all(facts)))
    >>> answer["answer"], answer["ask"], answer["rows"][0]["key"]
    ('not decided', ['--model'], 'undrained_ids')
    """
    rows = [
        {
            "key": one.row.key,
            "incident": one.row.incident,
            "status": one.status,
            "do_now": plain(one.row.flag) if one is found[0] and one.leads else None,
            "because": [*one.because, *one.signs, *one.reported],
            "not_known": one.unknown,
            "only_with": one.setup,
            "also_needs": one.row.also or None,
            "measured_otherwise": one.measured,
            "against": one.against,
            "flag": plain(one.row.flag),
            "affected": one.row.affected,
            "release": one.row.release,
            "patches": [
                dict(zip(("patch", "state", "touches"), line, strict=True))
                for line in patch_lines(one.row, facts)
            ],
            "confirm": plain(one.row.confirm),
            "control": CONTROL,
            "not_when": plain(one.row.not_when),
            "notebook": f"notebooks/{one.row.notebook}",
            "ceiling": ceiling(one.row),
            "evidence": [
                {"grade": item.grade, "says": item.says, "rests_on": item.rests_on}
                for item in one.row.evidence
            ],
        }
        for one in ([] if facts.server else found)
    ]
    other, where = judge.looks_like(facts, found)
    answer: dict[str, Any] = {
        "symptoms": facts.symptoms,
        "known": facts.known,
        "traits": facts.traits,
        "origin": facts.origin,
        "helped": facts.helped,
        "did_not_help": facts.failed,
        "notes": facts.notes,
        "server": facts.server or "vllm",
        "answer": kind(facts, found),
        "ask": [judge.option(name) for name in judge.deciding(facts, found)] if not facts.server else [],
        "looks_like": {"says": other, "by": where} if other and not facts.server else None,
        "known_there_as": judge.elsewhere(facts),
        "next": [symptoms()[symptom]["next"] for symptom in facts.symptoms],
        "rows": rows,
    }
    return json.dumps(answer, indent=1, ensure_ascii=False)


def as_text(facts: Facts, found: Sequence[Judgement], width: int = 80, *, verbose: bool = False) -> str:
    """What is known, the answer, and what would decide; ``verbose``: also why, and what speaks against.

    Args:
        facts: what is known.
        found: every row, as :func:`staleproof.triage.judge.judge_all` ordered them.
        width: columns of the terminal.
        verbose: say of the first rows why they fit, of each other row what speaks against it.

    >>> print(as_text(Facts(), judge.judge_all(Facts())).splitlines()[0])
    known: nothing
    """
    return "\n".join(_lines(facts, found, min(width, 100), verbose))


def _lines(facts: Facts, found: Sequence[Judgement], width: int, verbose: bool) -> Iterator[str]:
    names = [
        name for name in (*ASK, *facts.known) if name in facts.known and name not in ("symptom", "model")
    ]
    known = ["symptom"] * bool(facts.symptoms) + names
    known += [name for name in ("model", "setup") if not says(facts, name).endswith(f"{name} ")]
    yield from _wrap(
        "known: ", "; ".join(says(facts, name) for name in dict.fromkeys(known)) or "nothing", width
    )
    for name, tried in (("helped: ", facts.helped), ("did not help: ", facts.failed)):
        if tried:
            yield from _wrap(name, ", ".join(tried), width)
    for note in dict.fromkeys(facts.notes):
        yield from _wrap("note: ", note, width)
    yield ""
    if facts.server:
        yield from _wrap(
            "another server: ", f"{facts.server} ({facts.origin['server']}). The table is of vLLM.", width
        )
        for line in judge.elsewhere(facts):
            yield from _wrap("  known there: ", line, width)
        return
    answer = kind(facts, found)
    first = found[0]
    other, where = judge.looks_like(facts, found)
    if first.leads:
        yield from _headline(first, facts, width, verbose)
        if other:
            yield from _wrap("but it may also be: ", f"{other} ({where})", width)
    elif other:
        yield from _wrap(f"{NONE}. This looks like ", f"{other} ({where}).", width)
    elif answer == OPEN:
        yield from _question(facts, found, width)
    else:
        yield from _wrap(
            f"{NONE}: ", "no row fits, which is the normal answer. A wrong fact above would mislead.", width
        )
    yield ""
    yield from _further(facts, found[first.leads :], width, ruled_out=bool(other), led=first.leads)
    if not first.leads:
        for symptom in facts.symptoms:
            yield from _wrap(f"next ({symptom}): ", symptoms()[symptom]["next"], width)
    if verbose:
        yield from _against(found, width)
    elif first.alive:
        yield from _wrap("", "-v says why, by what evidence, and what speaks against", width)


def _question(facts: Facts, found: Sequence[Judgement], width: int) -> Iterator[str]:
    """The missing fact that would decide, and what it decides."""
    for name in judge.deciding(facts, found)[:1]:
        ask = f"--symptom {CHOICES}" if name == "symptom" else judge.option(name)
        weighs = [
            text for one in found if one.status == OPEN for text in one.row.weighs.get(name, {}).values()
        ]
        why = f" Here it decides: {weighs[0]}." if weighs else ""
        yield from _wrap(f"not decided: {ask}? ", f"{ASK[name]}{why}", width)
        return
    yield from _wrap(
        "not decided: ", "the release is not one that we read; of those these rows come nearest.", width
    )


def _further(
    facts: Facts, rows: Sequence[Judgement], width: int, *, ruled_out: bool, led: bool
) -> Iterator[str]:
    """Other rows: what may fit and what would decide, what was measured otherwise, and what is rare."""
    if not facts.symptoms:
        keys = [one.row.key for one in rows if one.status in (OPEN, MEASURED)]
        yield from _wrap("release and deployment do not rule out: ", ", ".join(keys) or "no row", width)
        return
    may = [one for one in rows if one.leads or one.status == OPEN]
    if may:
        yield "not ruled out:" if ruled_out else "may fit as well:" if led else "may fit:"
    for one in may[:SHOWN]:
        needs = [*map(one.asks, one.unknown)]
        if "version" in one.unknown and "version" in facts.known:
            needs = [need for need in needs if need != "--version"] + [f"a release of {one.row.affected}"]
        more = "; ".join([*one.signs, *one.reported, *needs]) or one.status
        yield from _wrap(f"  {one.row.key}: ", more, width)
    if len(may) > SHOWN:
        yield from _wrap("  and ", ", ".join(one.row.key for one in may[SHOWN:]), width)
    for one in rows:
        if one.status == MEASURED and not (one.unknown and facts.helped):
            yield from _wrap(f"measured otherwise: {one.row.key}: ", "; ".join(one.measured), width)
    rare: dict[str, list[str]] = {}
    for one in rows:
        if one.status == UNLESS:
            rare.setdefault(judge.condition(one.setup[0]), []).append(one.row.key)
    if rare:
        yield "only with:"
    for condition, keys in rare.items():
        yield from _wrap("  ", f"{condition}: {', '.join(keys)}", width)


def _headline(one: Judgement, facts: Facts, width: int, verbose: bool) -> Iterator[str]:
    row = one.row
    patches = ", ".join(f"{patch}: {state}, {touches}" for patch, state, touches in patch_lines(row, facts))
    use = ""
    if f": {status.WOULD}" in patches and "does not touch" not in patches:
        use = ". Install beside vLLM (pip install .), restart; STALEPROOF_PATCHES=none: off"
    yield from _wrap(f"{one.status}: ", f"{row.key} (evidence: {row.grade}). {plain(row.see)}", width)
    yield from _fields(
        width,
        ("do now", f"{plain(row.flag)}; release: {row.release}"),
        ("confirm", f"{plain(row.confirm)} {CONTROL}."),
        ("not when", plain(row.not_when)),
        ("patch", (patches or "none") + use),
        ("only if", row.also),
        ("signs", "; ".join([*one.signs, *one.reported])),
        ("read", f"notebooks/{row.notebook}; staleproof run {row.incident}"),
        *(("because", "; ".join(one.because)), ("evidence", ceiling(row))) * verbose,
        *[("", f"{e.grade}: {e.says} [{e.rests_on}]") for e in row.evidence] * verbose,
    )


def _against(found: Sequence[Judgement], width: int) -> Iterator[str]:
    yield ""
    yield "speaks against:"
    elsewhere = [one.row.key for one in found if any(text.startswith("its symptom") for text in one.against)]
    if elsewhere:
        yield from _wrap("  another symptom: ", ", ".join(elsewhere), width)
    for one in found:
        if one.status == AGAINST and one.row.key not in elsewhere:
            yield from _wrap(f"  {one.row.key}: ", "; ".join(one.against), width)


def _fields(width: int, *fields: tuple[str, str]) -> Iterator[str]:
    """Names and texts below each other; what has no text is left out."""
    for name, text in fields:
        if text:
            yield from _wrap(f"   {name:<10}", text, width)


def _wrap(first: str, text: str, width: int) -> Iterator[str]:
    yield from wrapped(text, width, first, " " * min(len(first), 13))
