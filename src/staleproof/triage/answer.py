"""The answer of ``staleproof diagnose``, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from staleproof.triage import judge
from staleproof.triage.facts import ASK, Facts, described
from staleproof.triage.judge import AGAINST, MEASURED, OPEN, UNLESS, Judgement
from staleproof.triage.table import GRADES, Row, plain, symptoms
from staleproof.triage.text import wrapped
from staleproof.vllm import status
from staleproof.vllm.sources import numbers
from staleproof.vllm.watch import OLDEST

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


def grade(row: Row, facts: Facts) -> str:
    """The strongest grade of a row's evidence; by attention backend, if that decides and is unknown.

    >>> from staleproof.triage.table import of
    >>> row = of("mla_padding")[0]
    >>> grade(row, Facts(known={"backend": "cutlass_mla"}))
    'source'
    >>> grade(row, Facts())
    'real with TRITON_MLA, source with CUTLASS_MLA or FLASHINFER_MLA'
    """
    backend = facts.known.get("backend")
    strongest = {}
    for item in sorted(row.evidence, key=lambda item: GRADES.index(item.grade), reverse=True):
        strongest[item.backends] = item.grade
    if found := [one for backends, one in strongest.items() if backend in backends or not backends]:
        return min(found, key=GRADES.index)
    parts = [f"{one} with {' or '.join(map(str.upper, backends))}" for backends, one in strongest.items()]
    return ", ".join(reversed(parts))


def ceiling(row: Row, facts: Facts) -> str:
    """How much the row's evidence can carry.

    >>> from staleproof.triage.table import rows
    >>> {row.key: ceiling(row, Facts())[:7] for row in rows()}["dummy_slots"]
    'replica'
    """
    strongest = grade(row, facts).partition(" ")[0]
    if strongest == "real":
        return "real: third-party code showed a link of it; your server was not asked"
    if strongest == "source":
        return "source: released code says so; nobody ran it here"
    return f"{strongest}: at best consistent with it; no released code ran"


def as_json(facts: Facts, found: Sequence[Judgement]) -> str:
    """Everything that :func:`as_text` says, for programs.

    >>> facts = Facts(symptoms=["leak"]); facts.learn("version", "0.22.1", "--version")
    >>> answer = json.loads(as_json(facts, judge.judge_all(facts)))
    >>> answer["answer"], answer["ask"], answer["rows"][0]["key"]
    ('not decided', ['--model'], 'undrained_ids')
    """
    other, where = judge.looks_like(facts, found)
    hidden = {"lines", "in_place", "others", "options", "failed", "server"}
    answer: dict[str, Any] = {
        **{name: value for name, value in vars(facts).items() if name not in hidden},
        "did_not_help": facts.failed,
        "server": facts.server or "vllm",
        "answer": kind(facts, found),
        "ask": [judge.option(name) for name in judge.deciding(facts, found) if not facts.server],
        "looks_like": {"says": other, "by": where} if other and not facts.server else None,
        "known_there_as": judge.elsewhere(facts),
        "next": [_next(symptom, facts) for symptom in facts.symptoms],
        "rows": [_as_dict(one, facts, one is found[0]) for one in found if not facts.server],
    }
    return json.dumps(answer, indent=1, ensure_ascii=False)


def _next(symptom: str, facts: Facts) -> str:
    """The next step for a symptom; the watch only where it may run."""
    of = symptoms()[symptom]
    runs = not facts.releases or numbers(facts.releases[-1]) >= numbers(OLDEST)
    return ". ".join([of["next"], *([of["watch"]] if runs and "watch" in of else [])])


def _as_dict(one: Judgement, facts: Facts, first: bool) -> dict[str, Any]:
    """A row and how it stands; ``do_now`` has a text only in the headline."""
    cells = {
        name: plain(getattr(one.row, name))
        for name in ("see", "flag", "confirm", "control", "not_when", "also", "release")
    }
    patches = [
        dict(zip(("patch", "state", "touches"), line, strict=True)) for line in patch_lines(one.row, facts)
    ]
    return {
        "key": one.row.key,
        "incident": one.row.incident,
        "do_now": cells["flag"] if first and one.leads else None,
        **{name: value for name, value in vars(one).items() if name != "row"},
        **cells,
        "affected": one.row.affected,
        "patches": patches,
        "notebook": f"notebooks/{one.row.notebook}",
        "ceiling": ceiling(one.row, facts),
        "evidence": [{**vars(item), "rests_on": item.rests_on} for item in one.row.evidence],
    }


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
    lines: list[str] = []
    for first, text in _parts(facts, found, verbose):
        lines += wrapped(text, min(width, 100), first, " " * min(len(first), 13))
    return "\n".join(lines)


def _parts(facts: Facts, found: Sequence[Judgement], verbose: bool) -> Iterator[tuple[str, str]]:
    """The answer's parts: how a line begins, and its text."""
    names = ["symptom", *(name for name in (*ASK, *facts.known) if name in facts.known), "model", "setup"]
    known = [
        line for name in dict.fromkeys(names) if not (line := described(facts, name)).endswith(f"{name} ")
    ]
    yield "known: ", "; ".join(known) or "nothing"
    for name, tried in (("helped: ", facts.helped), ("did not help: ", facts.failed)):
        if tried:
            yield name, ", ".join(tried)
    yield from (("note: ", note) for note in dict.fromkeys(facts.notes))
    yield "", ""
    if facts.server:
        yield "another server: ", f"{facts.server} ({facts.origin['server']}). The table is of vLLM."
        yield from (("  known there: ", line) for line in judge.elsewhere(facts))
        return
    first = found[0]
    other, where = judge.looks_like(facts, found)
    if first.leads:
        yield from _headline(first, facts, verbose)
        if other:
            yield "but it may also be: ", f"{other} ({where})"
    elif other:
        yield f"{NONE}. This looks like ", f"{other} ({where})."
    elif kind(facts, found) == OPEN:
        yield _question(facts, found)
    else:
        rare = any(one.status == UNLESS for one in found)
        unless = ', unless your server has what stands under "only with"' if rare else ""
        yield (
            f"{NONE}: ",
            f"no row fits{unless}. That is the normal answer; a wrong fact above would mislead.",
        )
        if asked := [judge.option(name) for name in judge.deciding(facts, found)]:
            yield "tell also: ", ", ".join(asked)
    yield "", ""
    yield from _further(facts, found[first.leads :], "not ruled out:" if other else "may fit:")
    if not first.leads:
        yield from ((f"next ({name}): ", _next(name, facts)) for name in facts.symptoms)
    if verbose:
        yield from _against(found)
    elif first.alive:
        yield "", "-v says why, by what evidence, and what speaks against"


def _question(facts: Facts, found: Sequence[Judgement]) -> tuple[str, str]:
    """The missing fact that would decide, and what it decides."""
    for name in judge.deciding(facts, found):
        ask = f"--symptom {CHOICES}" if name == "symptom" else judge.option(name)
        open_rows = [one.row.weighs.get(name, {}) for one in found if one.status == OPEN]
        weighs = [f" Here it decides: {text}." for by in open_rows for text in by.values()]
        return "not decided: ", f"{ask}? {ASK[name]}" + "".join(weighs[:1])
    return "not decided: ", "the release is not one that we read; of those these rows come nearest."


def _further(facts: Facts, rows: Sequence[Judgement], title: str) -> Iterator[tuple[str, str]]:
    """Other rows: what may fit and what would decide, what was measured otherwise, and what is rare."""
    if not facts.symptoms:
        keys = [one.row.key for one in rows if one.status in (OPEN, MEASURED)]
        yield "release and deployment do not rule out: ", ", ".join(keys) or "no row"
        return
    may = [one for one in rows if one.leads or one.status == OPEN]
    if may:
        yield title, ""
    for one in may[:SHOWN]:
        needs = [*map(one.question, one.unknown)]
        if "version" in one.unknown and "version" in facts.known:
            needs = [need for need in needs if need != "--version"] + [f"a release of {one.row.affected}"]
        yield f"  {one.row.key}: ", "; ".join([*one.signs, *one.reported, *needs]) or one.status
    if len(may) > SHOWN:
        yield "  and ", ", ".join(one.row.key for one in may[SHOWN:])
    for one in rows:
        if one.status == MEASURED and not (one.unknown and facts.helped):
            yield f"measured otherwise: {one.row.key}: ", "; ".join(one.measured)
    rare: dict[str, list[str]] = {}
    for one in rows:
        if one.status == UNLESS:
            rare.setdefault(judge.condition(one.setup[0]), []).append(one.row.key)
    if rare:
        yield "only with:", ""
    yield from (("  ", f"{condition}: {', '.join(keys)}") for condition, keys in rare.items())


def _headline(one: Judgement, facts: Facts, verbose: bool) -> Iterator[tuple[str, str]]:
    row = one.row
    patches = ", ".join(f"{patch}: {state}, {touches}" for patch, state, touches in patch_lines(row, facts))
    if f": {status.WOULD}" in patches and "does not touch" not in patches:
        patches += ". Install beside vLLM (pip install .), restart; STALEPROOF_PATCHES=none: off"
    yield f"{one.status}: ", f"{row.key} (evidence: {grade(row, facts)}). {plain(row.see)}"
    fields = [
        ("do now", f"{plain(row.flag)}; release: {row.release}"),
        ("confirm", plain(row.confirm)),
        ("control", plain(row.control)),
        ("not when", plain(row.not_when)),
        ("patch", patches or "none"),
        ("only if", row.also),
        ("signs", "; ".join([*one.signs, *one.reported])),
        ("read", f"notebooks/{row.notebook}; staleproof run {row.incident}"),
    ]
    if verbose:
        fields += [("because", "; ".join(one.because)), ("evidence", ceiling(row, facts))]
        fields += [("", f"{item.grade}: {item.says} [{item.rests_on}]") for item in row.evidence]
    yield from ((f"   {name:<10}", text) for name, text in fields if text)


def _against(found: Sequence[Judgement]) -> Iterator[tuple[str, str]]:
    yield "", ""
    yield "speaks against:", ""
    elsewhere = [one.row.key for one in found if any(text.startswith("its symptom") for text in one.against)]
    if elsewhere:
        yield "  another symptom: ", ", ".join(elsewhere)
    for one in found:
        if one.status == AGAINST and one.row.key not in elsewhere:
            yield f"  {one.row.key}: ", "; ".join(one.against)
