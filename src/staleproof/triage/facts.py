"""What is known of a deployment: a few facts, each with where it comes from.

A fact is a word (``graphs`` = ``full``), or a trait that is there or not (``mla``, ``spec``). What nobody
said stays unknown. An option that a command line, or vLLM's own line of options, leaves out has its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from staleproof.triage.table import engine, terms
from staleproof.vllm import releases
from staleproof.vllm.sources import numbers

# Fact -> one line that asks for it.
ASK: Mapping[str, str] = terms("ask")
MODEL = "mla", "moe", "hybrid"
_WRITTEN = {"mla": "MLA", "moe": "MoE"}
SETUP: Mapping[str, str] = terms("setup")
# Those that vLLM's options say, so that they are known to be off where the options are known.
OPTIONAL = {on.removeprefix("with ") for key, on in terms("options").items() if key.islower()} & {*SETUP}
SCALED = {"fp8-tensor", "fp8-block"}


@dataclass
class Facts:
    """Everything known.

    Attributes:
        symptoms: keys of :func:`staleproof.triage.table.symptoms`.
        known: fact -> word.
        traits: trait of the model or of the set-up -> whether it is there.
        origin: fact or trait -> where it comes from, e.g. ``--gpu`` or ``line 12``.
        releases: those of the table that the version may be: one, two around a development build, or none.
        helped, failed: remedies that were tried, keys of the table's ``remedies``.
        options: where vLLM's options stand; empty if nobody gave them.
        lines: the text of a log, in which signs are looked for.
        in_place: patches of ours that are in place by the log.
        others: failures of another kind that the log shows, each with its line.
        server: another server than vLLM; empty for vLLM.
        notes: what the reader should know about these facts.
    """

    symptoms: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    traits: dict[str, bool] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    releases: tuple[str, ...] = ()
    helped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    options: str = ""
    lines: str = ""
    in_place: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)
    server: str = ""
    notes: list[str] = field(default_factory=list)

    def learn(self, name: str, given: str, origin: str, *, note: bool = True) -> None:
        """Take a fact as a person or a log spells it; a later one replaces an earlier one.

        A word that we do not know becomes a note, unless none is wanted, and the fact stays as it was.

        >>> facts = Facts()
        >>> facts.learn("gpu", "NVIDIA GB200", "--gpu"); facts.learn("model", "DeepSeek-R1", "--model")
        >>> facts.known["gpu"], facts.traits["mla"], facts.known["quant"]
        ('sm100', True, 'fp8-block')
        >>> facts.learn("gpu", "voodoo2", "--gpu"); facts.notes
        ['--gpu: voodoo2 is no word for gpu that we know (e.g. H200, B200, MI300X, cpu); answered without it']
        """
        word, notes = given.strip().strip("'\""), len(self.notes)
        if name == "symptom":
            self.add_symptom(word, origin)
        elif name == "version":
            self._learn_version(word, origin)
        elif name in ("model", "parallel", "with"):
            self._learn_traits(name, word, origin)
        elif found := _word(name, word):
            # "fp8" says less than whose scales they are.
            if not (found == "fp8" and self.known.get("quant") in SCALED):
                self.known[name], self.origin[name] = found, origin
        elif name != "quant" or word.lower().replace("_", "-") not in terms("formats"):
            # What the question for it names.
            such = re.sub(r".*\?", "", ASK.get(name, ""))
            self.notes.append(
                f"{origin}: {word} is no word for {name} that we know{such}; answered without it"
            )
        del self.notes[len(self.notes) if note else notes :]

    def add_symptom(self, symptom: str, origin: str) -> None:
        """Take a symptom; several may be true."""
        if symptom not in self.symptoms:
            self.symptoms.append(symptom)
            self.origin[symptom] = origin

    def trait(self, name: str, there: bool, origin: str) -> None:
        """Take whether the model or the set-up has something."""
        self.traits[name], self.origin[name] = there, origin

    def _learn_version(self, word: str, origin: str) -> None:
        given = word.removeprefix("vllm").strip(" =-")
        name = releases.last_of_series(given)
        if not numbers(name):
            self.notes.append(f"{origin}: {word} is not a release; answered without it")
            return
        kind = releases.kind(name)
        number = ".".join(map(str, numbers(name)))
        first, *_, last = releases.table()
        note = f"{origin}: {name} is {kind}; "
        before, after = releases.neighbours(name)
        if kind is None:
            found: tuple[str | None, ...] = (name.partition("+")[0],)
        elif number in releases.table() and re.search("post|build of its own", kind):
            found, note = (number,), f"{note}taken for {number}"
        elif number in releases.table() and number != first:
            known = [*releases.table()]
            found = (known[known.index(number) - 1], number)
        else:
            found = (before, after)
        if None in found:
            found, note = (), f"{note}outside of {first} to {last}; answered without the release"
        elif len(found) == 2:
            note += f"rows that both {found[0]} and {found[1]} lack are ruled out"
        if kind is not None and self.known.get("version") != name:
            self.notes.append(note)
        if name != given.removeprefix("v"):
            self.notes.append(f"{origin}: {given} is read as {name}, the last release of its series")
        self.releases = tuple(one for one in found if one is not None)
        self.known["version"], self.origin["version"] = name, origin

    def _learn_traits(self, name: str, word: str, origin: str) -> None:
        found = model(word) if name == "model" else _named(word)
        if name == "parallel" and re.fullmatch(r"none|no|tp\d*", word.lower()):
            found = dict.fromkeys(("dp", "ep", "dcp", "pp"), False)
        if not found:
            choices = ", ".join((*MODEL, "dense") if name == "model" else SETUP)
            self.notes.append(
                f"{origin}: {word} is no word for {name} that we know (or say {choices}); answered without it"
            )
        for trait, there in found.items():
            self.trait(trait, there, origin)
        quants = [value for pattern, value in terms("quants") if re.search(pattern, word.lower())]
        if name == "model" and quants and (quants[0] != "none" or "quant" not in self.known):
            self.known["quant"], self.origin["quant"] = quants[0], f"known of {word.rpartition('/')[2]}"

    def meets(self, name: str, values: Iterable[str]) -> bool | None:
        """Whether one of the values is true; ``None`` if that is not known.

        >>> facts = Facts(traits={"mla": True})
        >>> facts.meets("model", ["mla"]), facts.meets("model", ["hybrid+mla"]), facts.meets("gpu", ["sm90"])
        (True, None, None)
        """
        values = [*values]
        if name == "symptom":
            return bool({*self.symptoms} & {*values}) if self.symptoms else None
        if name == "version":
            found: list[bool | None] = [release in values for release in self.releases]
            return None if len({*found}) != 1 else found[0]
        if name not in ("model", "setup"):
            word = self.known.get(name)
            if word is None or (word == "fp8" and SCALED & {*values}):
                return None
            return word in values
        found = [self._trait(value) for value in values]
        return True if True in found else None if None in found else False

    def _trait(self, value: str) -> bool | None:
        if value.startswith("not "):
            known = self.traits.get(value.removeprefix("not "))
            return None if known is None else not known
        found = [self.traits.get(trait) for trait in value.split("+")]
        return False if False in found else None if None in found else True

    def derive(self) -> None:
        """Add what follows: from a backend its model and GPU, and defaults where the options are known."""
        backend, known = self.known.get("backend", ""), self.known
        if backend:
            if "mla" in backend and "mla" not in self.traits:
                self.trait("mla", True, self.origin["backend"])
            only = engine()["gpus"].get(backend) or re.findall("^(?:rocm|cpu|xpu)", backend)
            if len(only) == 1 and "gpu" not in known:
                known["gpu"], self.origin["gpu"] = only[0], f"{backend.upper()} runs on no other"
        for remedy in (*self.helped, *self.failed):
            # What was tried is not how the server runs.
            for name, word in terms("remedies")[remedy].get("turns", {}).items():
                if known.get(name) == word and self.origin[name] != f"--{name}":
                    del known[name], self.origin[name]
        for remedy in self.helped:
            # It changed something, so that the server ran otherwise.
            for name, word in terms("remedies")[remedy].get("from", {}).items():
                if name not in known:
                    known[name], self.origin[name] = word, f"{remedy} helped"
        if self.options:
            default = f"default: not in the options of {self.options}"
            for trait in sorted(OPTIONAL):
                if trait not in self.traits:
                    self.trait(trait, False, default)
            if known.get("gpu") not in ("cpu", "xpu"):
                for name, word in (("graphs", "full"), ("scheduling", "async")):
                    if name not in known and not (name == "scheduling" and self.traits["spec"]):
                        known[name], self.origin[name] = word, default
        old = self.releases and numbers(self.releases[-1]) < numbers("0.22.0")
        if backend == "triton_mla" and old and known.get("graphs") == "full":
            known["graphs"], self.origin["graphs"] = (
                "piecewise",
                "Triton MLA has no full graphs before 0.22.0",
            )


def _word(name: str, given: str) -> str:
    """The word of a fact for what somebody wrote; empty if it is none.

    >>> _word("gpu", "NVIDIA_H200"), _word("graphs", "CUDAGraphMode.FULL"), _word("gpu", "sm_103a")
    ('sm90', 'full', 'sm100')
    """
    low = given.lower().removeprefix("cudagraphmode.")
    if name == "gpu":
        low = re.sub(r"[\s_-]|nvidia|geforce|amd|instinct|intel", "", low)
        return next(
            (family for family, names in terms("gpus").items() if re.match(f"(?:{names})(?!\\d)", low)), ""
        )
    if name in terms("choices"):
        return next((word for word, spelled in terms("choices")[name].items() if low in (word, *spelled)), "")
    found = re.sub(r"[\s-]+", "_", low)
    parts = terms("backends").get(name, "")
    return (
        next((word for p, word in terms("same") if re.fullmatch(p, found)), found)
        if re.search(parts, found)
        else ""
    )


def model(given: str) -> dict[str, bool]:
    """What is known of a model: by traits that are named, by its architecture, or by its name.

    >>> model("mla,moe"), model("Qwen/Qwen3.5-9B")
    ({'mla': True, 'moe': True}, {'mla': False, 'moe': False, 'hybrid': True, 'gpt-oss': False})
    >>> model("NobodysForCausalLM")
    {}
    """
    low = given.lower().strip()
    if low == "dense":
        return dict.fromkeys((*MODEL, "gpt-oss"), False)
    named = re.split(r"[,+ ]+", low)
    if {*named} <= {*MODEL}:
        return dict.fromkeys(named, True)
    return {
        **_traits(engine()["architectures"].get(given, "")),
        **family(low.rstrip("/").rpartition("/")[2])[1],
    }


def family(text: str) -> tuple[str, dict[str, bool]]:
    """The first name of a known family of models in a text, and what all of that family are.

    >>> family("nan from kimi k2 instruct")
    ('kimi k2', {'mla': True, 'moe': True, 'hybrid': False, 'gpt-oss': False})
    """
    for pattern, value in terms("models"):
        if found := re.search(rf"(?<![a-z])(?:{pattern})", text):
            return found[0], {**_traits(value), "gpt-oss": "gpt-oss" in value}
    return "", {}


def _traits(value: str) -> dict[str, bool]:
    return {word.removeprefix("no-"): not word.startswith("no-") for word in value.split()}


def _named(word: str) -> dict[str, bool]:
    """Traits of the set-up that are named, e.g. ``dp+ep`` or ``DEP8``; all of them must be known."""
    low = re.sub(r"\bdep", "dp+ep", word.lower())
    named = [re.sub(r"\d+$", "", one) for one in re.split(r"[,+ ]+", low)]
    return dict.fromkeys(named, True) if {*named} <= {*SETUP} else {}


def remedies(text: str) -> list[str]:
    """The remedies that a text names, e.g. ``enforce-eager``.

    >>> remedies("--enforce-eager"), remedies("Marlin and eager"), remedies("aspirin")
    (['enforce-eager'], ['enforce-eager', 'marlin'], [])
    """
    low = text.lower().replace("_", "-")
    return [name for name, entry in terms("remedies").items() if re.search(entry["words"], low)]


def described(facts: Facts, name: str) -> str:
    """One fact and where it comes from.

    >>> described(Facts(known={"gpu": "sm90"}, origin={"gpu": "line 12"}), "gpu")
    'gpu sm90 (line 12)'
    >>> described(Facts(traits={"mla": True, "moe": True, "hybrid": False}), "model")
    'model: MLA, MoE, not hybrid'
    """
    if name in ("symptom", "model", "setup"):
        names: Sequence[str] = {"symptom": facts.symptoms, "model": MODEL, "setup": tuple(SETUP)}[name]
        there = [one for one in names if one in (*facts.symptoms, *facts.traits)]
        words = [f"{'' if facts.traits.get(one, True) else 'not '}{_WRITTEN.get(one, one)}" for one in there]
        if name == "setup":
            there = [one for one in there if facts.traits[one]]
            words = there
        colon = ":" if len(words) > 1 else ""
        word, places = ", ".join(words), dict.fromkeys(facts.origin.get(one, "") for one in there)
    else:
        colon, word, places = "", facts.known.get(name, ""), {facts.origin.get(name, ""): None}
    where = ", ".join(filter(None, places))
    return f"{name}{colon} {word} ({where})" if where else f"{name}{colon} {word}"
