"""One table: the verdicts of this machine beside those of recorded runs, the differences first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from staleproof.cases.finding import Finding
from staleproof.cases.store import Key, Run
from staleproof.report.matrix import grades
from staleproof.report.page.tables import fold, table, verdict

THIS = "this machine"
# State of a row -> what its fold is called.
STATES = {
    "differ": "different verdicts",
    "unexpected": "not as expected",
    "there": "asked on a recorded machine only",
    "here": "asked on this machine only",
    "same": "the same verdict on every machine that was asked",
    "nowhere": "not run anywhere",
}


def states(answers: Mapping[Key, Mapping[str, Finding]]) -> dict[str, list[Key]]:
    """The keys by how their verdicts compare, in the order of :data:`STATES`.

    Args:
        answers: key -> machine -> its finding.
    """
    found: dict[str, list[Key]] = {state: [] for state in STATES}
    for key, row in answers.items():
        ran = {machine: one for machine, one in row.items() if one.ran}
        verdicts = {one.verdict for one in ran.values()}
        if len(verdicts) > 1:
            state = "differ"
        elif any(one.failed for one in ran.values()):
            state = "unexpected"
        elif not ran:
            state = "nowhere"
        elif THIS not in ran:
            state = "there"
        else:
            state = "here" if len(ran) == 1 else "same"
        found[state].append(key)
    return found


def html(findings: Sequence[Finding], runs: Sequence[Run]) -> Markup:
    """The table: what differs is open, the rest is folded.

    Args:
        findings: of this machine; there may be none.
        runs: recorded runs.
    """
    machines = {THIS: findings} if findings else {}
    machines |= {f"{run.machine}, {run.folder.name}": run.findings for run in runs}
    answers: dict[Key, dict[str, Finding]] = {}
    for machine, found in machines.items():
        for one in found:
            row = answers.setdefault(one.key, {})
            # An unexpected verdict is not hidden by a later one.
            if machine not in row or not row[machine].failed:
                row[machine] = one
    parts = []
    columns = ("incident", "question", "variant", *machines, "asked of")
    for state, keys in states(answers).items():
        rows = [
            (
                *key[:3],
                *(verdict(answers[key].get(machine)) for machine in machines),
                grades(answers[key].values()),
            )
            for key in keys
        ]
        if state in ("differ", "unexpected"):
            title = Markup("<h3>{}: {}</h3>").format(STATES[state].capitalize(), len(keys))
            parts.append(title + table(columns, rows) if keys else title)
        elif keys:
            parts.append(fold(f"{len(keys)} {STATES[state]}", table(columns, rows), kind="rows"))
    return Markup("\n").join(parts)
