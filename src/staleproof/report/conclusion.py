"""Conclusions of a run for each incident: symptom, cause, which remedy fails where, which works, what next.

>>> from staleproof.lab import Key
>>> from staleproof.lab import Three
>>> from staleproof.lab import finding, good
>>> three = Three("NaN", "clean", "NaN", ("bad", "good", "bad"), right=True)
>>> fix = finding(Key("kv_reuse", "off/on/off", "BlockZeroer"), good("fixed"), three=three)
>>> [line for line in text([fix]).splitlines() if line.startswith("  fixed")]
['  fixed    BlockZeroer']
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from staleproof.incidents.registry import INCIDENTS, Incident
from staleproof.lab import FIXED, NOT_RUN, OFF_ON_OFF, WRONG, Finding, Outcome
from staleproof.report import matrix
from staleproof.triage import symptom
from staleproof.triage.text import wrapped

# Questions of incident 5: one remedy each, put to every cause.
MATRIX = "matrix, "
SHOWN = 5
# For findings that belong to no registered incident: those of a whole vLLM.
_UNKNOWN = Incident(0, "", "", "")


def text(findings: Sequence[Finding], width: int = 80, *, hint: bool = True) -> str:
    """The conclusion about each incident, then one line for all that was not run.

    Args:
        findings: of one run.
        width: columns; words are not cut.
        hint: whether the command has ``-v``, which lists what was not run.
    """
    checked = [*findings]
    lines: list[str] = []
    for incident in dict.fromkeys(found.incident for found in checked):
        lines += [*_incident(incident, [f for f in checked if f.incident == incident], width), ""]
    if len({found.incident for found in checked}) > 1:
        lines.append(matrix.counts(checked))
    return "\n".join([*lines, *not_run_line(checked, width, hint=hint)])


def not_run_line(findings: Sequence[Finding], width: int = 80, *, hint: bool = True) -> list[str]:
    """One line for all that was not run, with the reasons that fit; no line if everything ran.

    Without ``hint`` no other output has the reasons: a line for each.
    """
    reasons = Counter(found.note or "no reason given" for found in findings if not found.ran)
    if not reasons:
        return []
    if not hint:
        return [f"{NOT_RUN}: {count} {why}" for why, count in reasons.most_common()]
    line, rest, option = f"{NOT_RUN}:", reasons.total(), " (-v)"
    for why, count in reasons.most_common():
        more = f"{line}{'' if line[-1] == ':' else ','} {count} {why}"
        if len(more) + len(f", {rest - count} other{option}") > width:
            break
        line, rest = more, rest - count
    if not rest:
        return [line + " (-v lists them)"[: width - len(line)]]
    return [f"{line} {rest}{option}" if line[-1] == ":" else f"{line}, {rest} other{option}"]


def _incident(name: str, findings: Sequence[Finding], width: int) -> Iterable[str]:
    """The conclusion about one incident."""
    about = INCIDENTS.get(name, _UNKNOWN)
    ran = [found for found in findings if found.ran]
    yield f"{name}: {about.title}" if about.title else name
    whose = f"{matrix.provenance(ran)}, evidence: {matrix.grades(ran).replace('+', ', ')}"
    verdicts = _field("verdicts", matrix.counts(findings) + (f" ({whose})" if ran else ""), width)
    if not ran:
        # What did not run shows nothing.
        yield from verdicts
        return
    unexpected = [f"{f.question}, {f.variant}: {f.verdict}, expected {f.expected}" for f in ran if f.failed]
    shown = [*unexpected[:SHOWN], *([f"and {len(unexpected) - SHOWN} more"] if unexpected[SHOWN:] else [])]
    if unexpected:
        yield from _field("wrong", "; ".join(shown), width)
    yield from _field("symptom", symptom(name), width)
    yield from _field("cause", about.summary + ("; not confirmed by this run" if unexpected else ""), width)
    yield from _field("fails", "; ".join(_failing(about, ran)), width)
    yield from _field("fixed", _fixed(ran) or "no fix was shown to hold by this run", width)
    yield from verdicts
    for number, step in enumerate(_next(name, about, bool(unexpected))):
        yield from _field("" if number else "next", step, width)


def _field(name: str, text: str, width: int) -> list[str]:
    return wrapped(text, width, f"  {name:<9}", " " * 11) if text else []


def _split(variant: str) -> tuple[str, str]:
    """A remedy and the case it was put into: ``zero_on_free``, ``with prefix caching``."""
    name, _, where = variant.partition(", ")
    return name, where


def _failing(about: Incident, ran: Iterable[Finding]) -> list[str]:
    """Each remedy that leaves a fault, with the cases in which it does and the verdict there."""
    cases: dict[str, dict[str, str]] = {}
    cures: dict[str, list[bool]] = {}
    for found in ran:
        if found.question == OFF_ON_OFF and found.verdict != FIXED:
            name, where = _split(found.variant)
            # A wrong result shows no fault in its three runs.
            verdict = found.three.on if found.three and found.verdict != WRONG else found.verdict
            cases.setdefault(name, {})[where] = verdict
        elif found.question.startswith(MATRIX):
            cures.setdefault(found.question.removeprefix(MATRIX), []).append(found.verdict == "cured")
    for found in ran:
        is_tried = found.question in about.served and found.variant in about.tried
        if is_tried and found.outcome is not Outcome.GOOD and "" not in cases.get(found.variant, {}):
            where = found.question.removeprefix("served ")
            cases.setdefault(found.variant, {})[where] = found.verdict
    lines = []
    for name, verdicts in cases.items():
        parts = [f"{where}: {verdict}" if where else verdict for where, verdict in verdicts.items()]
        lines.append(f"{name} ({'; '.join(parts)})")
    return lines + [f"{name} (cures none of {len(c)} causes)" for name, c in cures.items() if not any(c)]


def _fixed(ran: Sequence[Finding]) -> str:
    """The remedies that off / on / off shows to hold, with the cases if they were put into several."""
    cases: dict[str, list[str]] = {}
    for found in ran:
        if found.question == OFF_ON_OFF and found.verdict == FIXED:
            name, where = _split(found.variant)
            cases.setdefault(name, []).append(where)
    fails = {_split(f.variant)[0] for f in ran if f.question == OFF_ON_OFF and f.verdict != FIXED}
    parts = []
    for name, wheres in cases.items():
        named = f"{len(wheres)} cases" if len(wheres) > 3 else "; ".join(filter(None, wheres))
        where = named or ("in the other cases" if name in fails else "")
        parts.append(f"{name} ({where})" if where else name)
    return ", ".join(parts)


def _next(name: str, about: Incident, is_wrong: bool) -> list[str]:
    """The commands to type after this run."""
    from staleproof.vllm.plugin import patches

    if is_wrong:
        return [f"staleproof run {name} -v: every finding and the matrices"]
    if not about.notebook:
        return []
    helps = ", ".join(patch.name for patch in patches().values() if patch.incident == name)
    ask = [f"staleproof patches: does your vLLM need a patch? ({helps})"] if helps else []
    return [*ask, f"make lab: the walkthrough, notebooks/{about.notebook}"]
