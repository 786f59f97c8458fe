"""Facts from a log, from a command line, and from a sentence.

A log and a command line are exact: what they say is taken as it stands. The lines that name a backend come
from the sources of every release of the table (``engine.json``, written by ``tools/engine_lines.py``). A
sentence is searched for names and for the words of the seven symptoms; what is taken from it is said, and a
part of it that says that something is well, or that a remedy helped, is not taken for how the server runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

from staleproof.triage import table
from staleproof.triage.facts import Facts, family, remedies
from staleproof.triage.table import engine, terms

OFF = re.compile(r"0|1|none|null|false|fcfs|no|auto|default|fp8\w*|bf\w*|float\w*", re.I)
VARIABLE = re.compile(r"\b(VLLM_[A-Z0-9_]+)[=:]\s*['\"]?([\w.-]+)")
IMAGE = re.compile(r"vllm/vllm-openai-?([\w-]*):(v?[\w.+-]+)|\bvllm==(\S+)")
COMMAND = re.compile(r"\bvllm serve\b|\bvllm\.entrypoints\.[\w.]+|vllm/vllm-openai[\w-]*:?\S*")
PAIR = re.compile(r"'?\b([a-z_]\w*)'?[=:] ?('[^']*'|[{\[]|<?[\w./+-]+(?:\.[A-Z_]+)?)")
ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
IN_PLACE = re.compile(r"staleproof on vLLM \S+, this process: in place: ([\w, ]+)")
SWITCHED = re.compile(r"staleproof: ([\w, ]+): (switched off by|in service again)")
# An attention backend as vLLM prints it; "Using %s backend." would be any backend's.
ATTENTION = r"'?(?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]*(?:MLA|ATTN|ATTENTION|QUANT)\w*|FLASH\w*)'?"
# What a line about an MoE backend says of the quantisation.
QUANTS = {
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "wna16": "other",
    "w4a8": "other",
    "int8": "other",
    " fp8 ": "fp8",
}
PART = 1 << 16


def log(facts: Facts, text: str) -> None:
    """Read a log.

    Args:
        facts: to add to; what the log says replaces what they hold.
        text: some or all of what vLLM printed.

    >>> facts = Facts()
    >>> log(facts, "(EngineCore_DP0 pid=7) INFO 11-21 20:24:16 [cuda.py:318] Using FLASHINFER_MLA "
    ...            "attention backend out of potential backends: ['FLASHINFER_MLA'].")
    >>> facts.known, facts.traits
    ({'backend': 'flashinfer_mla'}, {})
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text) if "\x1b" in text else text
    if "\r" in text:
        # A progress bar stands in one line, as in an editor.
        text = text.replace("\r\n", "\n").replace("\r", " ")
    facts.lines += text
    logs = terms("logs")
    begun = [found.end() for pattern in logs["serving"] if (found := re.search(pattern, text))]
    ready = text.count("\n", 0, min(begun)) + 1 if begun else math.inf
    architecture, symptom = False, 0
    for number, line, place in _marked(text):
        at = f"line {number}"
        for name, (sign, _) in terms("servers").items():
            if not facts.server and re.search(sign, line):
                facts.server, facts.origin["server"] = name, at
        if found := ARCHITECTURE.search(line):
            architecture = True
            facts.learn("model", found[1], at)
        elif found := re.search(logs["model"], line):
            # The architecture says more than a name; a name says the quantisation.
            kept = dict(facts.traits) if architecture else {}
            facts.learn("model", found[found.lastindex or 0], at, note=False)
            facts.traits |= kept
        options = "with config:" in line or "non-default args" in line
        if options:
            facts.options = at if "non-default" in line else facts.options
            for key, value in PAIR.findall(line):
                if key not in ("model", "model_tag"):
                    # What was asked for scales a tensor; what a checkpoint has may be otherwise.
                    is_fp8_option = key == "quantization" and "non-default" in line and value == "'fp8'"
                    option(facts, key, "fp8-tensor" if is_fp8_option else value, at)
        _line(facts, line, at)
        if COMMAND.search(line):
            command(facts, _joined(text[place : place + 10_000]), at)
        hits = [name for name, entry in table.symptoms().items() if re.search(entry.get("log", "(?!)"), line)]
        if hits and not symptom:
            symptom = number
            facts.add_symptom(hits[0], at)
            if number >= ready:
                facts.learn("phase", "serving", at)
        # Names of options are no names of kernels.
        for word, entry in _others().items() if not options else ():
            if word in line and (not symptom or symptom == number):
                facts.others.setdefault(entry, at)
        if "EngineCore failed to start" in line or (not symptom and re.search(logs["start"], line)):
            facts.learn("phase", "start", at)


def _line(facts: Facts, line: str, at: str) -> None:
    """What one line of a log says, whatever stands around it."""
    for name, pattern, word in terms("logs")["facts"]:
        for found in re.finditer(pattern, line):
            # Not every line that names a maker names a GPU.
            facts.learn(name, word or found[found.lastindex or 0], at, note=name != "gpu")
    for name, backend, word in _backends():
        for found in backend.finditer(line) if name != "backend" or "MoE" not in line else ():
            facts.learn(name, word or found[1], at)
            low = found[0].lower()
            quants = [quant for text, quant in QUANTS.items() if text in low] + ["none"] * (
                "unquantized" in low
            )
            if name == "moe_backend" and quants:
                facts.learn("quant", quants[0], at)
    if match := IN_PLACE.search(line):
        facts.in_place = tuple(match[1].replace(" ", "").split(","))
    if match := SWITCHED.search(line):
        names = match[1].replace(" ", "").split(",")
        there = tuple(name for name in facts.in_place if name not in names)
        facts.in_place = (*there, *names) if match[2] == "in service again" else there


@cache
def _backends() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """Fact, pattern of a line, and the word where the line has none of its own."""
    found = []
    for name, lines in engine()["lines"].items():
        for line in [*lines, *terms("lines").get(name, ())]:
            plain = re.sub(r"[\s-]+", "_", line.lower())
            word = "" if "%s" in line else next(w for p, w in terms("same") if re.search(p, plain))
            value = ATTENTION if name == "backend" else r"'?(\w+)'?"
            if name == "moe_backend" and line != "Using %s MoE backend":
                value = r"'?([\w ]+?)'?"
            pattern = re.escape(line.rstrip(".")).replace("'%s'", "%s").replace("%s", value, 1)
            end = r"(?=\.|\s*$| for mxfp4)" if line.endswith(("backend", "backend.")) else ""
            found.append((name, re.compile(pattern.replace("%s", ".*?") + end), word))
    return tuple(found)


@cache
def _others() -> dict[str, str]:
    """Text of a line about another kind of failure -> the key of its entry."""
    return {word: entry["key"] for entry in table.others() for word in entry.get("words", ())}


def _marked(text: str) -> Iterator[tuple[int, str, int]]:
    """The lines with a mark, their numbers, and where they begin. A part without a mark is passed over."""
    marks = (*terms("logs")["marks"], *_others())
    start, before = 0, 0
    while start < len(text):
        end = text.find("\n", start + PART)
        part = text[start : end if end >= 0 else len(text)]
        here = [mark for mark in marks if mark in part]
        if here:
            place = start
            for number, line in enumerate(part.split("\n"), before + 1):
                if any(mark in line for mark in here):
                    yield number, line, place
                place += len(line) + 1
        before += part.count("\n") + 1
        start = end + 1 if end >= 0 else len(text)


def _joined(text: str) -> str:
    """A line and those that it is continued on."""
    lines = text.split("\n")
    last = next((i for i, line in enumerate(lines) if not line.rstrip().endswith("\\")), len(lines) - 1)
    return "\n".join(lines[: last + 1])


def option(facts: Facts, key: str, value: str, at: str) -> None:
    """One option of vLLM, by its name as in Python or on a command line, or a variable."""
    key, value = key.lstrip("-").replace("-", "_").rpartition(".")[2], value.strip("'\"").lstrip("<")
    fact, _, word = terms("options").get(key, "").partition(" ")
    # An option without a value is on.
    off = OFF.fullmatch(value)
    if fact == "with":
        facts.trait(word, not off, at)
    elif fact == "scheduling" and off and value.lower() == "false":
        facts.learn(fact, "sync" if word == "async" else "async", at)
    elif fact and word and not off:
        facts.learn(fact, word, at)
    elif fact == "quant" and (value.lower() == "none" or (value == "fp8-tensor" and "quant" in facts.known)):
        if value != "fp8-tensor":
            facts.known.setdefault("quant", "none")
            facts.origin.setdefault("quant", at)
    elif value and fact and not word and not off:
        facts.learn(fact, value, at)


def command(facts: Facts, text: str, at: str, *, whole: bool = False) -> str:
    """Read a command line that starts vLLM.

    Args:
        facts: to add to.
        text: with the command somewhere in it; may have several lines.
        at: where it stands.
        whole: all of the text is the command, also without ``vllm serve``.

    Returns:
        The text without the command.

    >>> facts = Facts()
    >>> command(facts, "docker run vllm/vllm-openai:v0.20.2 --model Qwen/Qwen3-Next-80B -dp 2", "--command")
    'docker run'
    >>> facts.releases, facts.traits["dp"], facts.traits["hybrid"]
    (('0.20.2',), True, True)
    """
    text = re.sub(r"\\\s*\n", " ", text)
    for device, tag, package in IMAGE.findall(text):
        facts.learn("version", tag or package, at)
        if device in ("rocm", "cpu", "xpu"):
            facts.learn("gpu", device, at)
    for name, value in VARIABLE.findall(text):
        option(facts, name, "on" if value == "1" else value, at)
    start = COMMAND.search(text)
    if not start and not whole:
        return text
    begin = start.end() if start else 0
    if whole or (start and "serve" in start[0]):
        facts.options = at
    end, waiting = begin, ""
    for number, found in enumerate(re.finditer(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", text[begin:])):
        token = found[0].strip("'\"[],")
        flag = re.fullmatch(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", token, re.S)
        if not flag and not waiting and not (number == 0 and re.search(r"\w$", token)) and not whole:
            break
        if flag:
            facts.options = at
            # Without a value, or with one that follows.
            option(facts, flag[1], flag[2] or "", at)
            waiting = "" if flag[2] else flag[1]
        elif waiting:
            value = "fp8-tensor" if waiting in ("quantization", "q") and token == "fp8" else token
            option(facts, waiting, value, at)
            waiting = ""
        elif number == 0 and re.search(r"\w$", token):
            # A log also has sentences with "vllm serve" in them.
            facts.learn("model", token, at, note=whole)
        end = begin + found.end()
    return "" if whole else f"{text[: start.start() if start else 0]} {text[end:]}".strip()


# Where one statement ends and another begins.
CLAUSE = re.compile(r"[;,()\n]|:\s|\.\s|\s(?:but|while|whereas|yet|though|although|however)\s|\s->\s")
WELL = re.compile(
    r"\b(?:works?|worked|working|fine|ok|okay|good|correct|right|clean|gone|fix(?:es|ed)?|cur(?:es|ed)|disappear\w*"
    r"|vanish\w*|helps?|helped|goes away|went away|solve[sd]?|sane|resolves?d?|no longer \w+|only without"
    r"|no (?:problem|issue|trouble|error|crash|nan|garbage)\w*)\b"
)
ILL = re.compile(
    r"\b(?:not|never|cannot|\w+n['’]t|stop(?:s|ped)? working|wrong|also|still|too|either|same|even|nothing"
    r"|fail\w*|broken|breaks|no (?:effect|difference|change|help))\b"
)
DENIED = re.compile(
    r"\b(?:no|without|never|nor|neither)\s+(?:any\s+|an?\s+)?[\w!]+|\bnot (?:an? )?(?:nan|crash|oom|leak)\w*",
    re.I,
)
RELEASE = re.compile(
    r"(?<![\w.-])(?:vllm[ =v-]*|v)?(\d+\.\d+\.\d+\w*(?:\.dev\d+\S*)?)(?![\w.]*%)"
    r"|(?:\bvllm[ =v-]*|\bv|\b(?:on|since|after|version|release|to) v?)(0\.[1-9]\d)(?![\w.%])"
)
PACKAGE = re.compile(
    r"(?:flashinfer|xformers|lmcache|nixl|aiter|transformers|staleproof|torch|triton|cuda|nccl|sglang"
    r"|(?<!v)llm|python|driver)[ =v-]*$"
)


def words(facts: Facts, text: str, at: str = "your words") -> None:
    """Take from a sentence the symptoms and the names in it; never how two statements hang together.

    >>> facts = Facts()
    >>> words(facts, "garbage from DeepSeek R1 on B200, 0.20.2; gone with --enforce-eager, 0.19.1 works")
    >>> facts.symptoms, facts.releases, facts.helped
    (['nan'], ('0.20.2',), ['enforce-eager'])
    """
    text = command(facts, text, at)
    facts.lines += f"{text}\n"
    for word, entry in _others().items():
        if "_" in word and word.removeprefix("in ") in text:
            facts.others.setdefault(entry, at)
    low = text.lower()
    for name, found in symptoms(low).items():
        facts.add_symptom(name, f"{at}: {found.strip()}")
    names = [name for name, (_, typed) in terms("servers").items() if re.search(typed, low)]
    if names and not re.search(r"\bvllm\b(?!.ascend)", low):
        facts.server, facts.origin["server"] = names[0], at
    for trait in re.findall(r"\b(?:no|without|not an?) (mla|moe|hybrid)\b", low):
        facts.trait(trait, False, at)
    name, _ = family(DENIED.sub(" ", low))
    if name:
        facts.learn("model", re.sub(r"\s+", "-", name), f"known of {name}")
    for trait in re.findall(r"\b(mla|moe|hybrid|dense)\b", DENIED.sub(" ", low)):
        if trait == "dense" or trait not in facts.traits:
            facts.learn("model", trait, at)
    numbers: list[str] = []
    for clause in CLAUSE.split(low):
        tried = remedies(clause)
        well = bool(WELL.search(clause)) and not ILL.search(re.sub("no longer", "", clause))
        if tried and well:
            facts.helped += [one for one in tried if one not in facts.helped]
        elif tried and ILL.search(clause) and not symptoms(clause):
            facts.failed += [one for one in tried if one not in facts.failed]
        if well and not symptoms(clause):
            continue
        for number in RELEASE.finditer(clause):
            if not PACKAGE.search(clause[: number.start()]) and (number[1] or _series(number[2])):
                numbers.append(number[1] or number[2])
        # A flag that is only named may be how the server runs, or what was tried.
        named = "--" in clause and tried and not symptoms(clause)
        taken = {fact for one in tried for fact in terms("remedies")[one].get("turns", ()) if named or well}
        if named and not well and not ILL.search(clause):
            facts.notes.append(
                f"{at}: does the server run with {', '.join(tried)}, or did it help? see --helped"
            )
        for fact, pattern, word in terms("words"):
            if fact not in taken and (match := re.search(pattern, clause)):
                facts.learn(fact, word or re.sub(r"\s", "_", match[1]), at)
                # The first pattern says most; of the set-up several may be there.
                taken |= {fact} - {"with", "parallel"}
    if numbers:
        # Of a regression the newer release is the one that is asked about.
        facts.learn(
            "version", max(numbers, key=lambda one: [int(part) for part in re.findall(r"\d+", one)[:3]]), at
        )


def _series(number: str) -> bool:
    return any(name.startswith(f"{number}.") for name in engine()["releases"])


def symptoms(low: str) -> dict[str, str]:
    """The symptoms that a text in small letters names, each with the words that name it.

    >>> symptoms("no nan, but accuracy drops after some hours")
    {'drift': 'accuracy drops'}
    """
    text = DENIED.sub(" ", low)
    found = {}
    for name, entry in table.symptoms().items():
        if hits := re.search(rf"(?<![a-z0-9])(?:{entry['words']})", text):
            found[name] = hits[0]
    if "leak" in found and "cuda" not in low:
        found.pop("oom", None)
    return found
