"""Rates each row of the triage table against the known facts: it fits, may fit, or is contradicted.

A row *fits* if its symptom, the release and all its needs are known and true. That is no proof: other rows
may fit as well, and so may a cause that nobody has found yet. A measurement in which the incident did not
show lowers a row; a fact that contradicts it excludes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from staleproof.triage import table
from staleproof.triage.facts import ASK, Facts
from staleproof.triage.table import GRADES, Row

FITS, SO_FAR, ONLY_IF, MEASURED, AGAINST = (
    "fits",
    "fits as far as known",
    "fits only if more is true",
    "possible, but measured otherwise",
    "speaks against",
)
# Questions a person is asked at most.
MOST = 5


@dataclass(frozen=True)
class Judgement:
    """One row, and how it stands.

    Attributes:
        row: the row.
        status: one of the five above.
        because: facts that fit, each with its origin.
        unknown: unknown facts that would decide.
        against: what contradicts the row.
        measured: measurements in which the incident did not show although everything fits.
        signs: further evidence for it: where it was reported, and what the log names.
    """

    row: Row
    status: str
    because: list[str]
    unknown: list[str]
    against: list[str]
    measured: list[str]
    signs: list[str]

    @property
    def alive(self) -> bool:
        """Whether nothing contradicts it."""
        return self.status != AGAINST

    def rank(self, symptom: str | None) -> tuple[int, ...]:
        """Sort key, best first: status, first symptom, signs, kind of model, how much fits, evidence.

        Rows about hybrids come before rows about any MoE, because they are more specific: every MoE has a
        router, but not every MoE is a hybrid.
        """
        order = {FITS: 0, MEASURED: 3 if self.unknown else 1, SO_FAR: 2, ONLY_IF: 4, AGAINST: 5}
        first = self.row.symptoms[0] != symptom
        models = () if "model" in self.unknown else self.row.needs.get("model", ())
        common = not any(value.startswith("hybrid") for value in models)
        fits, grade = -len(self.because), GRADES.index(self.row.grade)
        return order[self.status], first, -len(self.signs), common, fits, grade, len(self.unknown)

    def asks(self, name: str) -> str:
        """An unknown fact by its option, with what this row needs of it.

        >>> judge(table.of("decode_buffer")[0], Facts()).asks("phase")
        '--phase serving?'
        """
        values = self.row.needs.get(name, ())
        return f"{option(name)} {' or '.join(values)}?" if values else option(name)


def option(name: str) -> str:
    """The option of a fact.

    >>> option("moe_backend")
    '--moe-backend'
    """
    return f"--{name.replace('_', '-')}"


def judge(row: Row, facts: Facts) -> Judgement:
    """Weigh one row.

    >>> facts = Facts(known={"symptom": "oom", "version": "0.20.2"})
    >>> row = table.of("decode_buffer")[0]
    >>> judge(row, facts).against
    ['vLLM 0.20.2 does not have it (0.18.0 to 0.19.1 do)']
    """
    because: list[str] = []
    unknown: list[str] = []
    against: list[str] = []
    for name, values in (("symptom", row.symptoms), ("version", row.releases), *row.needs.items()):
        met = facts.meets(name, tuple(values))
        if met is None:
            unknown.append(name)
        elif met:
            because.append(fact(facts, name))
        elif name == "symptom":
            against.append(f"its symptom is {' or '.join(values)}, not {facts.known['symptom']}")
        elif name == "version":
            against.append(f"vLLM {facts.known['version']} does not have it ({row.affected} do)")
        else:
            against.append(f"{fact(facts, name)}; it needs {' or '.join(values)}")
    in_place = [patch for patch in row.patches if patch in facts.in_place]
    if in_place and len(in_place) == len(_needed(row, facts)):
        against.append(f"patched, by the log: {', '.join(in_place)}")
    measured, signs = _of(row.weighs, facts), _of(row.hints, facts)
    signs += [f"the log names {sign}" for sign in row.signs if sign in facts.lines]
    if against:
        status = AGAINST
    elif measured:
        status = MEASURED
    elif row.also:
        status = ONLY_IF
    else:
        status = SO_FAR if unknown else FITS
    return Judgement(row, status, because, unknown, against, measured, signs)


def _of(said: Mapping[str, Mapping[str, str]], facts: Facts) -> list[str]:
    """The texts that belong to known facts."""
    return [text for name, by in said.items() for word, text in by.items() if facts.known.get(name) == word]


def _needed(row: Row, facts: Facts) -> list[str]:
    """The row's patches that the release needs."""
    needs = table.probes().get(facts.known.get("version", ""), {})
    return [patch for patch in row.patches if needs.get(patch, {}).get("needed")]


def fact(facts: Facts, name: str) -> str:
    """One fact and where it comes from.

    >>> fact(Facts(known={"gpu": "sm90"}, origin={"gpu": "line 12"}), "gpu")
    'gpu sm90 (line 12)'
    """
    word = facts.known.get(name, "")
    if name == "model":
        word = " ".join(trait if there else f"no {trait}" for trait, there in facts.traits.items())
    return f"{name} {word} ({facts.origin[name]})" if name in facts.origin else f"{name} {word}"


def judge_all(facts: Facts) -> list[Judgement]:
    """Every row, the best fit first.

    >>> facts = Facts(known={"symptom": "leak", "version": "0.22.1"}, traits={"hybrid": False})
    >>> judge_all(facts)[0].row.key, judge_all(facts)[0].status
    ('undrained_ids', 'fits')
    """
    found = [judge(row, facts) for row in table.rows()]
    return sorted(found, key=lambda j: j.rank(facts.known.get("symptom")))


def alike(one: Judgement, others: Sequence[Judgement]) -> list[Judgement]:
    """The other rows with the same status, which the known facts do not distinguish from this one."""
    return [other for other in others if other is not one and other.status == one.status and one.alive]


def tells_apart(one: Judgement, other: Judgement) -> list[str]:
    """The unknown facts that could tell two rows apart."""
    names = dict.fromkeys((*one.unknown, *other.unknown))
    return [name for name in names if one.row.needs.get(name) != other.row.needs.get(name)]


def next_question(facts: Facts, asked: Sequence[str]) -> str | None:
    """The fact to ask for next; ``None`` if no answer could change anything, or enough was asked.

    The symptom and the release come first. Then the fact that most of the rows still standing need.

    >>> next_question(Facts(), []), next_question(Facts(known={"symptom": "leak"}), ["symptom"])
    ('symptom', 'version')
    """
    if len(asked) >= MOST:
        return None
    for name in ("symptom", "version"):
        if name not in asked and not facts.has(name):
            return name
    standing = [found for found in judge_all(facts) if found.alive]
    wanted = [name for found in standing for name in found.unknown if name not in asked]
    order = [*ASK]
    return min(wanted, key=lambda name: (-wanted.count(name), order.index(name)), default=None)
