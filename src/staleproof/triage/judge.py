"""Rates each row of the triage table against the known facts, and says which fact would decide.

A row leads only if its symptom was named, every need is known and met, and nothing recorded speaks against
it.
That is no proof: other rows may fit as well, and so may a cause that nobody has found yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from staleproof.triage import table
from staleproof.triage.facts import ASK, SETUP, Facts, described
from staleproof.triage.table import GRADES, Row

FITS, SO_FAR, OPEN, MEASURED, UNLESS, AGAINST = (
    "fits",
    "fits as far as known",
    "not decided",
    "measured otherwise",
    "only if",
    "speaks against",
)
ORDER = (FITS, SO_FAR, OPEN, MEASURED, UNLESS, AGAINST)
RELEASE = re.compile(r"\b0\.\d+\.\d+")
# Questions a person is asked at most, after the symptom.
MOST = 5


@dataclass(frozen=True)
class Judgement:
    """One row, and how it stands.

    Attributes:
        row: the row.
        status: one of ``ORDER``.
        because: facts that fit, each with its origin.
        unknown: unknown facts that would decide.
        against: what contradicts the row.
        measured: what was recorded or tried that speaks against it although everything fits.
        signs: further evidence for it: what the log names, and what helped.
        reported: where the same was reported.
        setup: what most servers do not have and this row needs, where it is unknown.
    """

    row: Row
    status: str
    because: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether nothing contradicts it."""
        return self.status != AGAINST

    @property
    def leads(self) -> bool:
        """Whether it may be the headline, with something to do now."""
        return self.status in (FITS, SO_FAR)

    def rank(self, symptoms: Sequence[str]) -> tuple[Any, ...]:
        """Sort key, best first: status, signs, symptoms, then what fits, was reported and is unknown."""
        shared = sum(symptom in symptoms for symptom in self.row.symptoms)
        first = self.row.symptoms[0] not in symptoms
        fits, reported = -len(self.because), -len(self.reported)
        # Every MoE has a router, and not every MoE is a hybrid.
        common = not any(value.startswith("hybrid") for value in self.row.needs.get("model", ()))
        unknown = sum(name in ("symptom", "version", *self.row.needs) for name in self.unknown)
        grade = GRADES.index(self.row.grade)
        rest = (reported, unknown, fits) if self.unknown else (fits, reported, unknown)
        return ORDER.index(self.status), -len(self.signs), -shared, first, common, *rest, grade

    def question(self, name: str) -> str:
        """An unknown fact by its option, with what this row needs of it.

        >>> judge(table.of("decode_buffer")[0], Facts()).question("phase")
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

    >>> facts = Facts(symptoms=["oom"]); facts.learn("version", "0.20.2", "--version")
    >>> judge(table.of("decode_buffer")[0], facts).against
    ['vLLM 0.20.2 does not have it (0.18.0 to 0.19.1 do)']
    """
    because: list[str] = []
    unknown: list[str] = []
    against: list[str] = []
    setup: list[str] = []
    for name, values in (("symptom", row.symptoms), ("version", row.releases), *row.needs.items()):
        met = facts.meets(name, values)
        if met:
            because.append(described(facts, name))
        elif met is None:
            # Few servers run on a CPU.
            (setup if name == "setup" or values == ["cpu"] else unknown).append(name)
        elif name == "symptom":
            against.append(f"its symptom is {' or '.join(values)}, not {', '.join(facts.symptoms)}")
        elif name == "version":
            against.append(f"vLLM {facts.known['version']} does not have it ({row.affected} do)")
        else:
            against.append(f"{described(facts, name)}; it needs {' or '.join(values)}")
    against += [
        described(facts, name) for name, values in row.excludes.items() if facts.known.get(name) in values
    ]
    signs = [f"the log names {sign}" for sign in row.signs if sign in facts.lines]
    if signs:
        # It happened, so the set-up was such, and no patch was in place then.
        setup.clear()
    in_place = [patch for patch in row.patches if patch in facts.in_place and not signs]
    if in_place and len(in_place) == len(_needed(row, facts)):
        against.append(f"patched, by the log: {', '.join(in_place)}")
    against += [f"{remedy} did not help, and cures it" for remedy in row.remedies if remedy in facts.failed]
    signs += [f"{remedy} helped" for remedy in row.remedies if remedy in facts.helped and remedy != "restart"]
    measured = [_with_release(text, facts) for text in _of(row.weighs, facts)]
    measured += [
        f"it does not say why {r} helped" for r in facts.helped if r not in (*row.remedies, "restart")
    ]
    # A GPU or backend on which it was measured otherwise decides as well, unless it was reported here.
    hints = _of(row.hints, facts)
    if not hints and not measured:
        unknown += [name for name in row.weighs if name not in facts.known and name not in unknown]
        if "gpu" in facts.known and "gpu" in row.weighs and "backend" in unknown:
            unknown.remove("backend")
    status = SO_FAR
    if against:
        status = AGAINST
    elif setup:
        status = UNLESS
    elif measured:
        status = MEASURED
    elif unknown:
        status = OPEN
    elif signs:
        status = FITS
    needed = [value for name in setup for value in row.needs[name]]
    return Judgement(row, status, because, unknown, against, measured, signs, hints, needed)


def _of(texts: Mapping[str, Mapping[str, str]], facts: Facts) -> list[str]:
    """The texts that belong to known facts."""
    return [text for name, by in texts.items() for word, text in by.items() if facts.known.get(name) == word]


def _with_release(text: str, facts: Facts) -> str:
    """What was measured, and that the known release was not, if the text names others."""
    version, measured = facts.known.get("version"), RELEASE.findall(text)
    return f"{text}; {version} was not tried" if version and measured and version not in measured else text


def _needed(row: Row, facts: Facts) -> list[str]:
    """The row's patches that the release needs."""
    needs = table.probes().get(facts.releases[0], {}) if facts.releases else {}
    return [patch for patch in row.patches if needs.get(patch, {}).get("needed")]


def judge_all(facts: Facts) -> list[Judgement]:
    """Every row, the best fit first.

    >>> facts = Facts(symptoms=["leak"], traits={"hybrid": False})
    >>> facts.learn("version", "0.22.1", "--version")
    >>> judge_all(facts)[0].row.key, judge_all(facts)[0].status
    ('undrained_ids', 'fits as far as known')
    """
    found = [judge(row, facts) for row in table.rows()]
    return sorted(found, key=lambda one: one.rank(facts.symptoms))


def looks_like(facts: Facts, found: Sequence[Judgement] = ()) -> tuple[str, str]:
    """What kind of other failure this is, and by what; two empty texts if none is known.

    A line of the log that names it says so; of those that only the set-up suggests, the first whose needs are
    all met. If a row has signs of its own, only a set-up of three facts and more says otherwise.

    >>> looks_like(Facts(symptoms=["nan"], traits={"lora": True}, known={"gpu": "sm90"}))[0][:25]
    "LoRA's expand kernel on H"
    """
    signed = any(one.alive and one.signs for one in found)
    for entry in table.others():
        if entry["key"] in facts.others:
            if not facts.symptoms or {*facts.symptoms} & {*entry.get("symptoms", facts.symptoms)}:
                return entry["says"], facts.others[entry["key"]]
        elif needs := entry.get("needs"):
            met = all(facts.meets(name, values) for name, values in needs.items())
            if met and {*facts.symptoms} & {*entry["symptoms"]} and not (signed and len(needs) < 3):
                return entry["says"], ", ".join(described(facts, name) for name in needs)
    return "", ""


def elsewhere(facts: Facts) -> list[str]:
    """The same faults in the other server that the facts name, each with its thread."""
    found: list[tuple[bool, str]] = []
    for entry in table.elsewhere():
        met = [facts.meets(name, values) for name, values in entry["needs"].items()]
        if entry["server"] == facts.server and False not in met and {*facts.symptoms} & {*entry["symptoms"]}:
            found.append((None in met, f"{entry['thread']}: {entry['says']}"))
    sure = [text for unsure, text in found if not unsure]
    return sure or [f"{text}, if that is your case" for _, text in found]


def deciding(facts: Facts, found: Sequence[Judgement], skip: Sequence[str] = ()) -> list[str]:
    """The unknown facts that would decide most, best first: those that the rows still open lack.

    If none is open, those of rows that need what few servers have.

    >>> deciding(Facts(), judge_all(Facts()))[:2]
    ['symptom', 'version']
    """
    open_rows = [one for one in found if one.status == OPEN]
    if not open_rows and not any(one.leads for one in found):
        open_rows = [one for one in found if one.status == UNLESS]
    wanted = [name for one in open_rows for name in one.unknown if name not in skip]
    # A release that is named and not in the table cannot be asked for.
    names = [name for name in dict.fromkeys(wanted) if not (name == "version" and name in facts.known)]
    first = {"symptom": -2, "version": -1}
    # The row that comes first is decided first.
    row = {n: next(i for i, one in enumerate(open_rows) if n in one.unknown) for n in names}
    return sorted(names, key=lambda n: (first.get(n, 0), row[n], [*ASK].index(n)))


def condition(name: str) -> str:
    """A part of the set-up and how to say that it is there.

    >>> condition("dp")
    'data parallelism (--with dp)'
    """
    if name == "cpu":
        return "vLLM's CPU backend (--gpu cpu)"
    names = name.split("+")
    return f"{' and '.join(SETUP[one] for one in names)} (--with {','.join(names)})"
