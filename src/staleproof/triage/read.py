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

# Options by vLLM's name -> the fact that their value is.
VALUES = {
    "model": "model",
    "model_tag": "model",
    "quantization": "quant",
    "attention_backend": "backend",
    "moe_backend": "moe_backend",
    "mla_prefill_backend": "prefill",
    "cudagraph_mode": "graphs",
}
# Options -> the trait that they switch on, unless their value is one of OFF.
FLAGS = {
    "data_parallel_size": "dp",
    "enable_expert_parallel": "ep",
    "decode_context_parallel_size": "dcp",
    "pipeline_parallel_size": "pp",
    "speculative_config": "spec",
    "num_speculative_tokens": "spec",
    "enable_lora": "lora",
    "kv_transfer_config": "kv-transfer",
    "scheduling_policy": "priority",
}
SHORT = {"dp": "data_parallel_size", "dcp": "decode_context_parallel_size", "pp": "pipeline_parallel_size"}
SHORT |= {"q": "quantization", "ep": "enable_expert_parallel", "sc": "speculative_config"}
OFF = re.compile(r"(0|1|none|null|false|fcfs|no|)", re.I)
# Variables -> fact or trait, and its word; without a word, the value.
ENVIRONMENT = {
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("simulated-routing", ""),
    "VLLM_BATCH_INVARIANT": ("batch-invariant", ""),
    "VLLM_ATTENTION_BACKEND": ("backend", ""),
    "VLLM_MXFP4_USE_MARLIN": ("moe_backend", "marlin"),
    "VLLM_USE_V2_MODEL_RUNNER": ("runner", "v2"),
}
VARIABLE = re.compile(r"\b(VLLM_[A-Z0-9_]+)[=:]\s*['\"]?([\w.-]+)")
IMAGE = re.compile(r"vllm/vllm-openai[\w-]*:(v?[\w.+-]+)|\bvllm==(\S+)")
COMMAND = re.compile(r"\bvllm serve\b|\bvllm\.entrypoints\.[\w.]+|vllm/vllm-openai[\w-]*:?\S*")
PAIR = re.compile(r"'?\b([a-z_]\w*)'?[=:] ?('[^']*'|[{\[]|<?[\w./+-]+(?:\.[A-Z_]+)?)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

VERSION = re.compile(
    r"Initializing a V1 LLM engine \(v([^)]+)\)|vLLM (?:API )?server version (\S+?),?(?:\s|$)"
    r"|█\s+version\s+(\S+)|staleproof on vLLM ([\w.+]+)[:,]"
)
GRAPHS = re.compile(
    r"cudagraph_mode'?[:=] ?<?(?:CUDAGraphMode\.)?([A-Z][A-Z_]+)"
    r"|(?:[Ss]etting|Overriding) cudagraph_mode(?: from \w+)?(?:=| to )([A-Z][A-Z_]+)"
    r"|(Cudagraph is disabled under eager)"
)
NAMED = re.compile(
    r"serving model (\S+)|█\s+model\s+(\S+)|non-default args: .*?'model(?:_tag)?': '([^']+)'"
    r"|with config: model='([^']+)'|Starting to load model ([^\s]+?)\.*(?:\s|$)"
)
ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
ASYNC = re.compile(r"Asynchronous scheduling is (enabled|disabled)")
PLATFORM = re.compile(r"Automatically detected platform (cpu|rocm|xpu)")
DEVICE = re.compile(
    r"(?:NVIDIA|AMD Instinct|AMD Radeon)[ _](?:GeForce[ _])?"
    r"((?:RTX[ _](?:PRO[ _])?)?\w+(?:[ _]\d{4}\w*)?)"
)
HYBRID = re.compile(r"mamba page size|Using \S+ GDN |MambaSpec|GatedDeltaNet")
EXPERT = re.compile(r"^\(?Worker\w*_EP\d|EP rank [1-9]")
SIMULATED = re.compile(r"Simulating MoE routing using")
IN_PLACE = re.compile(r"staleproof on vLLM \S+, this process: in place: ([\w, ]+)")
# The first of these says that the server served. Each begins with a text, so that a search is quick.
READY = tuple(
    re.compile(pattern)
    for pattern in (
        *(
            r"init engine \(profile, create kv cache",
            "Graph capturing finished",
            "Application startup complete",
        ),
        *(
            r"Starting vLLM (?:API )?server",
            r"Running: [1-9]\d* reqs",
            "EngineCore encountered a fatal error",
        ),
        *('" 200 OK', "Dumping input data", r", in execute_model\b"),
    )
)
FAILED_TO_START = re.compile(r"EngineCore failed to start")
STARTING = re.compile(
    r", in (?:load_model|determine_available_memory|profile_run|capture_model|_capture_cudagraphs"
    r"|initialize_from_config|compile_or_warm_up_model)\b"
)
# Symptom -> what a line says of it.
SYMPTOMS = {
    "oom": re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|HIP out of memory"),
    "crash": re.compile(
        r"illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS|Warp Illegal Address"
        r"|unspecified launch failure|misaligned address|Xid.*: 31\b"
    ),
    "nan": re.compile(
        r"Corrupted: [1-9]\d* reqs|NaNs? .*in .*logits|first live row with NaN|\bNaN detected"
        r"|not JSON compliant: nan|!{8,}"
    ),
}
# In a log of another server, and in a sentence.
SERVERS = {
    "sglang": r"server_args=ServerArgs\(|sgl-workspace|\bsglang\b|sgl.kernel|Scheduler hit an exception",
    "TensorRT-LLM": r"\[TensorRT-LLM\]|tensorrt.llm|\btrt.?llm\b(?! ragged| attention)|trtllm-serve",
    "vllm-ascend": r"vllm.ascend|torch_npu|\bascend\b|\bnpus?\b",
    "another server": r"\b(?:lmdeploy|ollama|llama\.cpp|tgi|mindie)\b",
}
IN_LOG = re.compile(
    r"server_args=ServerArgs\(|sgl-workspace|Scheduler hit an exception|\[TensorRT-LLM\]"
    r"|vllm_ascend|torch_npu"
)
# Skip parts of a log without any of these: logs have millions of lines.
MARKS = (
    *(
        "Initializing a V1",
        "version",
        "staleproof",
        "Resolved arch",
        "udagraph",
        "Using ",
        "Enabling Fl",
        "non-default",
    ),
    *(
        "Asynchronous",
        "NVIDIA",
        "AMD ",
        "detected platform",
        "_EP",
        "EP rank",
        "amba",
        "GDN",
        "GatedDelta",
        "Xid",
    ),
    *("Starting to load", "failed to start", "llegal", "ILLEGAL", "launch failure"),
    *(
        "out of memory",
        "OutOfMemory",
        "Corrupted: ",
        "NaN",
        "!!!!!!!!",
        "serving model",
        "model   ",
        "misaligned",
    ),
    *("JSON compliant", "Simulating MoE", "vllm serve", "vllm.entrypoints", "vllm-openai", " in load_model"),
    *(" in determine_available_memory", " in profile_run", " in capture_model", " in _capture_cudagraphs"),
    *(" in initialize_from_config", " in compile_or_warm_up_model", "launch failure"),
    *("ServerArgs", "sgl-workspace", "Scheduler hit", "TensorRT-LLM", "vllm_ascend", "torch_npu"),
)
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
    text = COLOURS.sub("", text) if "\x1b" in text else text
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    facts.lines += text
    begun = [found.end() for pattern in READY if (found := pattern.search(text))]
    ready = text.count("\n", 0, min(begun)) + 1 if begun else math.inf
    architecture, symptom = False, 0
    for number, line, place in _marked(text):
        at = f"line {number}"
        if not facts.server and (other := IN_LOG.search(line)):
            facts.server = next(name for name, p in SERVERS.items() if re.search(p, other[0], re.I))
            facts.origin["server"] = at
        if found := ARCHITECTURE.search(line):
            architecture = True
            facts.learn("model", found[1], at)
        elif (found := NAMED.search(line)) and (name := found[found.lastindex or 0]):
            # The architecture says more than a name; a name says the quantisation.
            kept = dict(facts.traits) if architecture else {}
            notes = len(facts.notes)
            facts.learn("model", name, at)
            facts.traits |= kept
            del facts.notes[notes:]
        if "with config:" in line or "non-default args" in line or "server args" in line:
            _pairs(facts, line, at)
        _line(facts, line, at)
        if COMMAND.search(line):
            command(facts, _joined(text[place : place + 10_000]), at)
        if not symptom and (
            seen := next((name for name, sign in SYMPTOMS.items() if sign.search(line)), None)
        ):
            symptom = number
            facts.see(seen, at)
            if number >= ready:
                facts.learn("phase", "serving", at)
        for word, entry in _others().items():
            if word in line and (not symptom or symptom == number):
                facts.others.setdefault(entry, at)
        if FAILED_TO_START.search(line) or (not symptom and STARTING.search(line)):
            facts.learn("phase", "start", at)


def _line(facts: Facts, line: str, at: str) -> None:
    """What one line of a log says, whatever stands around it."""
    for name, pattern in (("version", VERSION), ("graphs", GRAPHS)):
        for found in pattern.finditer(line):
            word = found[found.lastindex or 0]
            facts.learn(name, "none" if "disabled" in word else word, at)
    for name, pattern, word in _backends():
        if name == "backend" and "MoE" in line:
            continue
        for found in pattern.finditer(line):
            facts.learn(name, word or found[1], at)
            if name == "moe_backend" and (quant := _quant(found[0])):
                facts.learn("quant", quant, at)
    if " for NVFP4 GEMM" in line:
        facts.learn("quant", "nvfp4", at)
    if said := ASYNC.search(line):
        facts.learn("scheduling", said[1], at)
    if "Using V2 Model Runner" in line:
        facts.learn("runner", "v2", at)
    if said := PLATFORM.search(line):
        facts.learn("gpu", said[1], at)
    if said := DEVICE.search(line):
        # Not every line that names a maker names a GPU.
        notes = len(facts.notes)
        facts.learn("gpu", f"{'amd' if 'AMD' in line else ''} {said[1]}", at)
        del facts.notes[notes:]
    for trait, pattern in (("hybrid", HYBRID), ("ep", EXPERT), ("simulated-routing", SIMULATED)):
        if pattern.search(line):
            facts.trait(trait, True, at)
    if said := IN_PLACE.search(line):
        facts.in_place = tuple(said[1].replace(" ", "").split(","))


def _quant(line: str) -> str:
    low = line.lower()
    for word, says in (
        ("nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("wna16", "other"),
        ("w4a8", "other"),
        ("int8", "other"),
    ):
        if word in low:
            return says
    return "fp8" if " fp8 " in low else "none" if "unquantized" in low else ""


@cache
def _backends() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """Fact, pattern of a line, and the word where the line has none of its own."""
    found = []
    for name, lines in {**engine()["lines"], "": {}}.items():
        for line in [*lines, *(terms("lines").get(name, ()))]:
            word = "" if "%s" in line else next(w for p, w in terms("same") if re.search(p, _plain(line)))
            literal = re.escape(line.rstrip(".")).replace("'%s'", "%s")
            # "Using %s backend." would be any backend's; those of attention are named in capitals.
            value = (
                r"'?(?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]*(?:MLA|ATTN|ATTENTION|QUANT)\w*|FLASH\w*)'?"
            )
            one = value if name == "backend" else r"'?(\w+)'?"
            if name == "moe_backend" and line != "Using %s MoE backend":
                one = r"'?([\w ]+?)'?"
            pattern = literal.replace("%s", one, 1).replace("%s", ".*?").replace("Using\\ ", "Using ")
            end = r"(?=\.|\s*$| for mxfp4)" if line.endswith(("backend", "backend.")) else ""
            found.append((name, re.compile(pattern + end), word))
    return tuple(found)


def _plain(line: str) -> str:
    return re.sub(r"[\s-]+", "_", line.lower())


@cache
def _others() -> dict[str, str]:
    """Text of a line about another kind of failure -> the key of its entry."""
    return {word: entry["key"] for entry in table.others() for word in entry.get("words", ())}


def _marked(text: str) -> Iterator[tuple[int, str, int]]:
    """The lines with a mark, their numbers, and where they begin. A part without a mark is passed over."""
    marks = (*MARKS, *_others())
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


def _pairs(facts: Facts, line: str, at: str) -> None:
    """The options in a line that vLLM prints of itself."""
    if "non-default args" in line or "with config:" in line:
        facts.options = at if "non-default" in line else facts.options
    for key, value in PAIR.findall(line):
        if key not in ("model", "model_tag"):
            option(facts, key, value, at)


def option(facts: Facts, key: str, value: str, at: str) -> None:
    """One option of vLLM, by its name as in Python or as on a command line."""
    key = key.lstrip("-").replace("-", "_").rpartition(".")[2]
    key, word = SHORT.get(key, key), value.strip("'\"")
    off = bool(OFF.fullmatch(word))
    if key in VALUES and word.lower() not in ("none", "auto", "null", "default", ""):
        asked = (
            VALUES[key] == "quant"
            and word.lower() == "fp8"
            and "config:" not in facts.origin.get("quant", "")
        )
        given = "fp8-tensor" if asked and at == "--command" else word
        if key == "cudagraph_mode":
            given = word.lstrip("<").rpartition(".")[2]
        if not (given == "fp8-tensor" and facts.known.get("quant") in ("fp8-block", "nvfp4")):
            facts.learn(VALUES[key], given, at)
    elif key == "quantization" and word.lower() == "none":
        facts.known.setdefault("quant", "none")
        facts.origin.setdefault("quant", at)
    elif key in FLAGS:
        facts.trait(FLAGS[key], not off, at)
    elif key in ("enforce_eager", "no_enforce_eager") and word.lower() != "false":
        facts.learn("graphs", "none" if key == "enforce_eager" else "full", at)
    elif key in ("async_scheduling", "no_async_scheduling"):
        facts.learn("scheduling", "sync" if key[:2] == "no" or word.lower() == "false" else "async", at)
    elif key == "kv_cache_dtype":
        facts.trait("nvfp4-kv", "nvfp4" in word.lower(), at)


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
    for found in IMAGE.finditer(text):
        facts.learn("version", found[1] or found[2], at)
        for word in ("rocm", "cpu", "xpu"):
            if f"openai-{word}" in found[0]:
                facts.learn("gpu", word, at)
    for name, value in VARIABLE.findall(text):
        _variable(facts, name, value, at)
    start = COMMAND.search(text)
    if not start and not whole:
        return text
    begin = start.end() if start else 0
    if whole or (start and "serve" in start[0]):
        facts.options = at
    tokens = [*re.finditer(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", text[begin:])]
    place, end, named = 0, 0, False
    while place < len(tokens):
        token = tokens[place][0].strip("'\"[],")
        after = tokens[place + 1][0].strip("[],") if place + 1 < len(tokens) else ""
        if re.match(r"--?[A-Za-z]", token):
            key, sign, value = token.partition("=")
            facts.options = at
            if not sign and after and not re.match(r"--?[A-Za-z]", after.strip("'\"")):
                bare = re.sub("-", "_", key.lstrip("-"))
                if not re.match(r"enforce_eager|(no_)?async_scheduling|enable_|no_|disable_|trust_", bare):
                    value, place = after, place + 1
            option(facts, key, value, at) if value or not sign else None
            if not value and FLAGS.get(re.sub("-", "_", key.lstrip("-"))):
                facts.trait(FLAGS[re.sub("-", "_", key.lstrip("-"))], True, at)
        elif not named and place == 0 and re.search(r"\w", token):
            named = True
            facts.learn("model", token, at)
        elif token not in ("-", "\\", "") and not whole:
            break
        end, place = tokens[place].end() if place < len(tokens) else len(text), place + 1
    return (text[: start.start() if start else 0] + " " + text[begin + end :]).strip() if not whole else ""


def _variable(facts: Facts, name: str, value: str, at: str) -> None:
    fact, word = ENVIRONMENT.get(name, ("", ""))
    if fact in ("simulated-routing", "batch-invariant"):
        facts.trait(fact, value not in ("0", "false", "''"), at)
    elif fact and not (word and value == "0"):
        facts.learn(fact, word or value, at)


# Where one statement ends and another begins.
CLAUSE = re.compile(r"[;,()\n]|:\s|\.\s|\s(?:but|while|whereas|yet|though|although|however)\s|\s->\s")
WELL = re.compile(
    r"\b(?:works?|worked|working|fine|ok|okay|good|correct|right|clean|gone|fix(?:es|ed)?|cur(?:es|ed)|disappear\w*"
    r"|vanish\w*|helps?|helped|goes away|went away|solve[sd]?|sane|resolves?d?|no longer \w+|only without)\b"
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
        facts.see(name, f"{at}: {found.strip()}")
    names = [name for name, pattern in SERVERS.items() if re.search(pattern, low)]
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
        for fact, pattern, word in terms("words"):
            if (said := re.search(pattern, clause)) and not (well and tried):
                facts.learn(fact, word or re.sub(r"\s", "_", said[1]), at)
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
        if seen := re.search(rf"(?<![a-z0-9])(?:{entry['words']})", text):
            found[name] = seen[0]
    if "leak" in found and "cuda" not in low:
        found.pop("oom", None)
    return found
