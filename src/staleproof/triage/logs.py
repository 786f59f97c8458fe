"""Facts from a pasted vLLM log.

Patterns are of lines that vLLM prints (read in the sources of 0.16.0 to 0.33.0, and in logs of 0.22.1). A
process prefix, colours and timestamps do not matter. A line that says a fact again replaces the earlier one:
vLLM prints the options as given, then the configuration that came of them, then what it changed.

The first line that says what went wrong decides what the log is about. If that is none of ours
(:data:`OTHERS`), the symptom is ``other``: no row has it, and the answer says what it looks like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from staleproof.triage import table
from staleproof.triage.facts import GPU, OTHER, Facts, known_model

# Text in a line about another kind of failure -> what the log looks like.
OTHERS = {word: entry["says"] for entry in table.others() for word in entry["words"]}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Skip lines without any of these, which match no pattern below: logs have millions of them.
MARKS = (
    *("Initializing a V1", "version", "staleproof", "Resolved arch", "udagraph", "backend", "quantization"),
    *("Asynchronous", "NVIDIA", "data_parallel", "enable_expert", "EP rank", "amba", "GDN", "GatedDelta"),
    *("init engine", "startup", "Starting vLLM", "failed to start", "llegal", "ILLEGAL", "out of memory"),
    *("OutOfMemory", "Corrupted: ", "NaN", "!!!!", "serving model", "model   ", "'model'", "fatal error"),
    *("Starting to load", "JSON compliant", " in load_model", " in determine_available_memory"),
    *(" in profile_run", " in capture_model", " in initialize_from_config"),
    *OTHERS,
)
# Lines in which marks are looked for at once.
BLOCK = 1000
TOO_LARGE = "a model that does not fit at start: fewer --max-num-seqs, a shorter --max-model-len, more GPUs"
# Fact -> patterns; the last group that matches is the value.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("version", r"Initializing a V1 LLM engine \(v([^)]+)\)"),
    ("version", r"vLLM (?:API )?server version (\S+?),?(?:\s|$)"),
    ("version", r"█\s+version\s+(\S+)"),
    ("version", r"staleproof on vLLM ([\w.+]+)[:,]"),
    ("graphs", r"'?cudagraph_mode'?[:=] ?<?(?:CUDAGraphMode\.)?([A-Z][A-Z_]+)"),
    ("graphs", r"(?:setting|Overriding) cudagraph_mode(?: from \w+)?(?:=| to )([A-Z][A-Z_]+)"),
    ("graphs", r"Cudagraph is disabled (under eager)"),
    ("backend", r"Using (\w+) attention backend out of"),
    (
        "backend",
        r"Using (?:AttentionBackendEnum\.)?([A-Z_]*(?:MLA|ATTN|FLASHINFER)\w*) backend(?:\.| \(sel| out of)",
    ),
    ("moe_backend", r"Using '?([\w ]+?)'? (?:Fp8|NvFp4|Unquantized|Int8|MxFp4) MoE backend"),
    ("moe_backend", r"Using ([\w ]+?) backend for Unquantized MoE"),
    ("quant", r"[ (]quantization='?(\w+)'?,"),
    ("quant", r"Using '?\w+'? (NvFp4) MoE backend"),
    ("scheduling", r"Asynchronous scheduling is (enabled|disabled)"),
    ("gpu", rf"NVIDIA[ _](?:GeForce[ _])?((?:{GPU})(?!\d))"),
)
# Where a log names the model. The architecture says more than a name, wherever it stands.
ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
MODEL = re.compile(
    r"serving model (\S+)|█\s+model\s+(\S+)|non-default args: .*?'model(?:_tag)?': '([^']+)'"
    r"|with config: model='([^']+)'|Starting to load model ([^\s.]+)"
)
DATA_PARALLEL = re.compile(r"data_parallel_size'?[=:] ?(\d+)")
EXPERT_PARALLEL = re.compile(r"enable_expert_parallel'?[=:] ?True|EP rank [1-9]")
HYBRID = re.compile(r"mamba page size|Using \S+ GDN |MambaSpec|GatedDeltaNet")
READY = re.compile(
    r"init engine \(profile, create kv cache|Graph capturing finished|Application startup complete"
    r"|Starting vLLM (?:API )?server"
    r"|Running: [1-9]\d* reqs|EngineCore encountered a fatal error"
    r'|" 200 OK|Dumping input data|, in execute_model\b'
)
FAILED_TO_START = re.compile(r"EngineCore failed to start")
# Frames of what runs at start only.
STARTING = re.compile(
    r", in (?:load_model|determine_available_memory|profile_run|capture_model|initialize_from_config)\b"
)
IN_PLACE = re.compile(r"staleproof on vLLM \S+, this process: in place: ([\w, ]+)")
# Symptom -> the line that says it.
SYMPTOMS = (
    ("crash", re.compile(r"illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS")),
    ("oom", re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory")),
    (
        "nan",
        re.compile(
            r"Corrupted: [1-9]\d* reqs|NaNs? .*in .*logits|first live row with NaN|\bNaN detected"
            r"|not JSON compliant: nan"
        ),
    ),
    ("nan", re.compile(r"!{8,}")),
)


def read(text: str) -> Facts:
    """Read a log.

    Args:
        text: some or all of what vLLM printed.

    Returns:
        The facts; empty where nothing is recognised.

    >>> facts = read("(EngineCore_DP0 pid=7) INFO 11-21 20:24:16 [cuda.py:318] Using FLASHINFER_MLA "
    ...              "attention backend out of potential backends: ['FLASHINFER_MLA'].")
    >>> facts.known, facts.traits
    ({'backend': 'flashinfer_mla'}, {'mla': True})
    """
    facts = Facts(lines=COLOURS.sub("", text))
    first = READY.search(facts.lines)
    ready = len(facts.lines[: first.end()].splitlines()) if first else math.inf
    architecture = False
    parallel: dict[str, int] = {}
    for number, line in _marked(facts.lines.splitlines()):
        at = f"line {number}"
        if named := ARCHITECTURE.search(line):
            architecture = True
            _learn(facts, "model", named[1], at)
        elif not architecture and (traits := _named(line)):
            facts.traits, facts.origin["model"] = traits, at
        for name, pattern in PATTERNS:
            for match in re.finditer(pattern, line, re.IGNORECASE if name == "gpu" else 0):
                _learn(facts, name, match[1], at)
        for size in DATA_PARALLEL.findall(line):
            parallel["dp"] = number if int(size) > 1 else 0
        if EXPERT_PARALLEL.search(line):
            parallel["ep"] = number
        if HYBRID.search(line):
            facts.traits["hybrid"] = True
            facts.origin.setdefault("model", at)
        if patched := IN_PLACE.search(line):
            facts.in_place = tuple(patched[1].replace(" ", "").split(","))
        if "symptom" not in facts.known:
            _symptom(facts, line, at, number >= ready)
        if FAILED_TO_START.search(line) or ("symptom" not in facts.known and STARTING.search(line)):
            facts.learn("phase", "start", at)
    if parallel:
        there = [name for name in ("dp", "ep") if parallel.get(name)]
        at = f"line {max(parallel.values())}" if there else "data_parallel_size=1 in the log"
        facts.learn("parallel", "+".join(there) or "none", at)
    if facts.known.get("symptom") == "oom" and facts.known.get("phase") == "start":
        facts.looks_like = TOO_LARGE
    facts.derive()
    return facts


def _marked(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines with a mark, and their numbers. A whole block without a mark is passed over at once."""
    for start in range(0, len(lines), BLOCK):
        block = lines[start : start + BLOCK]
        text = "\n".join(block)
        if marks := [mark for mark in MARKS if mark in text]:
            for number, line in enumerate(block, start + 1):
                if any(mark in line for mark in marks):
                    yield number, line


def _named(line: str) -> dict[str, bool]:
    """The model's traits by its name in a line; empty without a name, or if the name is not known."""
    found = MODEL.search(line)
    return known_model(found[found.lastindex or 0].rpartition("/")[2].lower())[1] if found else {}


def _symptom(facts: Facts, line: str, at: str, ready: bool) -> None:
    """Learn the failure that this line shows, if any: one of our symptoms, or another kind of failure."""
    found = next((name for name, sign in SYMPTOMS if sign.search(line)), None)
    if found is not None:
        facts.learn("symptom", found, at)
        if ready:
            facts.learn("phase", "serving", at)
    elif other := next((says for word, says in OTHERS.items() if word in line), None):
        facts.known["symptom"], facts.origin["symptom"], facts.looks_like = OTHER, at, other


def _learn(facts: Facts, name: str, word: str, at: str) -> None:
    """Learn what a line says; a word that we do not know stays unknown, with a note."""
    try:
        facts.learn(name, "none" if name == "graphs" and "eager" in word else word, at)
    except ValueError as error:
        facts.notes.append(f"{at}: {error}")
