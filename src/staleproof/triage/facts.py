"""What is known of a deployment: a few facts, each with where it comes from.

A fact is a word (``graphs`` = ``full``) or, for ``model``, a set of traits that are known to be there or not.
What nobody said stays unknown; nothing is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from staleproof.check import fail
from staleproof.triage import table
from staleproof.vllm import status
from staleproof.vllm.releases import release
from staleproof.vllm.sources import PatchError, numbers

# Fact -> what it is called, and one line that asks for it.
ASK = {
    "symptom": "What do you see? (" + ", ".join(str(s["says"]) for s in table.symptoms().values()) + ")",
    "version": "Which vLLM release? (e.g. 0.18.1)",
    "model": "Which model? (a name, or mla, moe, hybrid, dense)",
    "gpu": "Which GPU? (e.g. H200, B200, GB200)",
    "graphs": "Which CUDA graphs? (full, piecewise, none)",
    "quant": "Which quantisation? (nvfp4, mxfp4, fp8, other, none)",
    "parallel": "Data or expert parallel? (dp, ep, dp+ep, none)",
    "backend": "Which attention backend? (e.g. FLASHINFER_MLA, TRITON_MLA; in the log after 'Using')",
    "moe_backend": "Which MoE backend? (e.g. flashinfer_cutlass, triton)",
    "scheduling": "Asynchronous scheduling? (async, sync; the log says at start)",
    "phase": "When? (start, serving)",
}
# The symptom of a log that says what went wrong, and it is none of ours.
OTHER = "other"
TRAITS = "mla", "moe", "hybrid"
# GPU -> compute capability, as families of kernels are named.
GPUS = {
    "sm80": ("a100", "a800"),
    "sm89": ("l4", "l40s", "rtx4090"),
    "sm90": ("h100", "h200", "h20", "h800", "gh200"),
    "sm100": ("b200", "gb200", "b300", "gb300"),
    "sm120": ("rtx5090", "rtxpro6000"),
}
# Pattern of a model's or architecture's name -> its traits, and whether these are all of the three.
MODELS = (
    (r"deepseek.?coder-(1\.3|6\.7|33)b", (), True),
    (r"distill|deepseek.?(coder(?!.?v2)|llm)", (), False),
    (r"deepseek.?v4", ("moe",), False),
    (r"deepseek.?(v?[23]|r1|coder.?v2)|kimi.?k2|mistral.?large.?3", ("mla", "moe"), True),
    (r"kimi.?linear", ("mla", "moe", "hybrid"), True),
    (r"qwen.?3.?(coder.?)?next|qwen.?3[._]5.?moe|qwen.?3[._]5-\d+b-a\d+b", ("moe", "hybrid"), True),
    (r"qwen.?3[._]5", ("hybrid",), False),
    (r"gpt.?oss|llama.?4(?!\d|.?bit)", ("moe",), True),
    (r"qwen.?3.?moe|qwen.?3-((vl|omni|coder)-)?(30|235|480)b|mixtral", ("moe",), True),
    (r"nemotron.?h|jamba|falcon.?h1|zamba|granitemoehybrid|bamba|lfm2", ("hybrid",), False),
    # As names are made: 26 B parameters, of which a token uses 4 B.
    (r"\d+b-a\d+b", ("moe",), False),
    (r"^llama$|^(llama|qwen[23]|mistral|gemma[23]?|phi3)forcausallm$|llama.?[23](?!\d)", (), True),
    (r"qwen.?3-(vl-)?(0\.6|1\.7|4|8|14|32)b(?!\d)", (), True),
    (r"qwen.?2([._]5)?-((vl|coder)-)?(0\.5|1\.5|3|7|14|32|72)b(?!\d)", (), True),
    (r"mistral-7b|gemma.?[23](?!\d)", (), True),
)
# Fact -> its words -> how they are spelled.
CHOICES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "graphs": {
        "none": ("none", "eager", "off", "no"),
        "piecewise": ("piecewise",),
        "full": ("full", "full_decode_only", "full_and_piecewise"),
    },
    "quant": {
        "mxfp4": ("mxfp4", "gpt_oss_mxfp4"),
        "nvfp4": ("nvfp4", "modelopt_fp4", "petit_nvfp4", "fp4"),
        "fp8": ("fp8", "modelopt", "fbgemm_fp8"),
        "other": (
            *("other", "awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "bitsandbytes", "bnb"),
            *("int4", "int8", "w4a16", "moe_wna16", "hqq"),
        ),
        "none": ("none", "bf16", "fp16", "no"),
    },
    "scheduling": {"async": ("async", "yes", "enabled"), "sync": ("sync", "no", "disabled")},
    "phase": {"start": ("start", "startup", "at start"), "serving": ("serving", "load", "under load")},
}
# Formats of checkpoints that hold one of several quantisations.
FORMATS = "compressed-tensors", "quark", "torchao"


@dataclass
class Facts:
    """Everything known.

    Attributes:
        known: fact -> word; ``model`` is in ``traits``.
        traits: trait of the model -> whether it has it.
        origin: fact -> where it comes from, e.g. ``--gpu`` or ``line 12``.
        lines: text of the log in which ``signs`` are looked for.
        in_place: patches of ours that are in place by the log.
        looks_like: what kind of other failure the log shows; empty if it shows none.
        notes: what the reader should know about these facts.
    """

    known: dict[str, str] = field(default_factory=dict)
    traits: dict[str, bool] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    lines: str = ""
    in_place: tuple[str, ...] = ()
    looks_like: str = ""
    notes: list[str] = field(default_factory=list)

    def learn(self, name: str, given: str, origin: str) -> None:
        """Take one fact as a person or a log spells it; a later one replaces an earlier one.

        Raises:
            ValueError: the word is not one we know, naming the option.

        >>> facts = Facts()
        >>> facts.learn("gpu", "NVIDIA GB200", "--gpu"); facts.learn("model", "DeepSeek-R1", "--model")
        >>> facts.known["gpu"], facts.traits
        ('sm100', {'mla': True, 'moe': True, 'hybrid': False})
        """
        word = given.strip()
        if name == "model":
            found = traits(word)
            self.traits.update(found)
            if not found:
                self.notes.append(f"{origin}: {word} is no model that we know; say mla, moe, hybrid or dense")
                return
        elif name == "quant" and word.lower().replace("_", "-") in FORMATS:
            self.notes.append(f"{origin}: {word} holds fp8, fp4 or another; say which")
            return
        else:
            self.known[name] = READ[name](word)
        self.origin[name] = origin

    def add(self, said: Facts) -> None:
        """Take every fact of a sentence; it replaces an earlier one."""
        self.known |= said.known
        self.traits |= said.traits
        self.origin |= said.origin
        self.notes += said.notes

    def has(self, name: str) -> bool:
        """Whether anything is known of this fact."""
        return name in self.known or (name == "model" and bool(self.traits))

    def meets(self, name: str, values: tuple[str, ...]) -> bool | None:
        """Whether one of the values is true; ``None`` if that is not known.

        >>> facts = Facts(traits={"mla": True})
        >>> facts.meets("model", ("mla",)), facts.meets("model", ("hybrid+mla",))
        (True, None)
        """
        if name != "model":
            return None if name not in self.known else bool({*self.known[name].split("+")} & {*values})
        found = [self._trait(value) for value in values]
        return True if True in found else None if None in found else False

    def _trait(self, value: str) -> bool | None:
        if value.startswith("not "):
            known = self.traits.get(value.removeprefix("not "))
            return None if known is None else not known
        found = [self.traits.get(trait) for trait in value.split("+")]
        return False if False in found else None if None in found else True

    def derive(self) -> None:
        """Add what follows from the facts: traits from the backend, and graphs that a backend lacks."""
        backend, version = self.known.get("backend", ""), self.known.get("version")
        if backend.endswith("mla") and "mla" not in self.traits:
            self.traits["mla"] = True
            self.origin.setdefault("model", self.origin["backend"])
        old = version is not None and numbers(version) < numbers("0.22.0")
        if backend == "triton_mla" and old and self.known.get("graphs") == "full":
            self.known["graphs"] = "piecewise"
            self.origin["graphs"] = "Triton MLA has no full graphs before 0.22.0"


def _one_of(name: str, given: str) -> str:
    low = given.lower().removeprefix("cudagraphmode.")
    for word, spellings in CHOICES[name].items():
        if low in spellings:
            return word
    return fail(name, f"one of {', '.join(CHOICES[name])}", repr(given))


def symptom(given: str) -> str:
    """The symptom that a phrase names.

    Raises:
        ValueError: it names no known symptom.

    >>> symptom("OOM after upgrade"), symptom("the model prints !!!!"), symptom("no NaN, accuracy drops")
    ('oom', 'nan', 'drift')
    """
    low = affirmed(given)
    known = table.symptoms()
    if low in known:
        return low
    # A longer word says more: "oom killer" is not "oom".
    words = sorted(
        ((w, name) for name, entry in known.items() for w in entry["words"]), key=lambda p: -len(p[0])
    )
    for word, name in words:
        # NaNs, crashed, out-of-memory, ILLEGAL_ADDRESS.
        spelled = rf"{ENDING}[\s_-]+".join(map(re.escape, word.split()))
        if re.search(rf"(?<![^\W_]){spelled}{ENDING}(?![^\W_])", low):
            return name
    said = "; ".join(f"{name} ({entry['says']})" for name, entry in known.items())
    return fail("symptom", f"one of {said}", repr(given))


def traits(given: str) -> dict[str, bool]:
    """What is known of a model by its name, or by traits that are named.

    Raises:
        ValueError: an empty word.

    >>> traits("mla"), traits("mla,moe"), traits("dense"), traits("NobodysForCausalLM")
    ({'mla': True}, {'mla': True, 'moe': True}, {'mla': False, 'moe': False, 'hybrid': False}, {})
    """
    low = given.lower()
    if not low:
        fail("model", "a model's name, or some of mla, moe, hybrid, dense", repr(given))
    if low == "dense":
        return dict.fromkeys(TRAITS, False)
    named = re.split(r"[,+ ]+", low)
    if {*named} <= {*TRAITS}:
        return dict.fromkeys(named, True)
    return known_model(low.rpartition("/")[2])[1]


def known_model(text: str) -> tuple[str, dict[str, bool]]:
    """The name of a model in a text, and what is known of it; nothing of one that is not in :data:`MODELS`.

    >>> known_model("kimi-k2-instruct"), known_model("mine")
    (('kimi-k2', {'mla': True, 'moe': True, 'hybrid': False}), ('', {}))
    """
    name = re.sub(r"\s+", "-", text)
    for pattern, present, complete in MODELS:
        if found := re.search(pattern, name):
            return found[0], {trait: trait in present for trait in TRAITS if complete or trait in present}
    return "", {}


def gpu(given: str) -> str:
    """The family of a GPU by its name, or by its compute capability.

    Raises:
        ValueError: a GPU that is not in our list.

    >>> gpu("NVIDIA_H200"), gpu("sm_100"), gpu("NVIDIA RTX PRO 6000")
    ('sm90', 'sm100', 'sm120')
    """
    low = re.sub(r"[\s_-]|nvidia|geforce", "", given.lower())
    match = re.fullmatch(r"sm(\d+)[af]?", low)
    if match:
        return {"sm103": "sm100"}.get(low.rstrip("af"), low.rstrip("af"))
    for family, names in GPUS.items():
        if any(re.match(rf"{name}(?!\d)", low) for name in names):
            return family
    known = ", ".join(name.upper() for names in GPUS.values() for name in names)
    return fail("gpu", f"one of {known}, or sm_90 and the like", repr(given))


def version(given: str) -> str:
    """The release of the table that a version names, as ``staleproof patches --version`` takes it.

    Raises:
        ValueError: it is not in the table.

    >>> version("v0.18.1")
    '0.18.1'
    """
    try:
        return release(status.answer(given).version)
    except PatchError as error:
        raise ValueError(f"version: {str(error).removesuffix('; nothing is patched')}") from error


def parallel(given: str) -> str:
    """``dp``, ``ep``, ``dp+ep`` or ``none``.

    >>> parallel("DEP"), parallel("dp,ep"), parallel("none")
    ('dp+ep', 'dp+ep', 'none')
    """
    named = {*re.split(r"[,+ ]+", given.lower().replace("dep", "dp+ep"))}
    if named in ({"none"}, {"no"}, {"tp"}):
        return "none"
    if not named or not named <= {"dp", "ep"}:
        fail("parallel", "dp, ep, dp+ep or none", repr(given))
    return "+".join(sorted(named))


# What a backend's name has in it, as vLLM prints it.
BACKENDS = {
    "backend": ("mla", "attn", "attention", "flashinfer", "turboquant"),
    "moe_backend": (
        *("triton", "cutlass", "trtllm", "deep", "cutedsl", "marlin"),
        *("aiter", "humming", "cpu", "xpu"),
    ),
}


def _backend(name: str, given: str) -> str:
    word = re.sub(r"[\s-]", "_", given.lower())
    if not any(part in word for part in BACKENDS[name]):
        fail(name, f"a name as vLLM prints it, with one of {', '.join(BACKENDS[name])} in it", repr(given))
    return word


# Of a word of a symptom: crashes, crashed, crashing.
ENDING = "(?:e?s|e?d|ing)?"
# What a sentence denies. A switch that is off, and the name of a symptom, say something themselves.
NOT = (
    r"\b(?:no|not|never|without|neither|nor|\w+n['’]t) "
    r"(?:(?:an?|any|the|on|in|with|from|cuda(?! graph)|vllm|happen|occur|seen?|\S+ n?or"
    r"|(?:0\.[\d.]+|[a-z]+\d+\w*) and) )*+(?!(?:full |cuda )*graphs?\b|async|reproducib|determinis)"
)
# A denied verb, which means "no": "do not use dp", "CUDA graphs are not used".
UNUSED = (
    r"\b(?:not|never|without|cannot|\w+n['’]t) (?:us(?:e|ed|ing)|enabl(?:e|ed|ing)|have|had"
    r"|run(?:ning)?(?= (?:any|the|cuda|full|async|data|expert|dp|ep|eager)\b))(?= \w)"
)
UNUSED_AFTER = (
    r"((?:cuda |full )*graphs?|async\w*(?: scheduling)?|(?:data|expert).parallel\w*"
    r"|\b(?!ha(?:ve|s|d)\b)[^\s,;]+) "
    r"(?:(?:is|are|was|were) not|(?:is|are|was|were)n['’]t|not) (?:used|enabled|active)\b"
)
# What a sentence says is well, e.g. "fine on H100". Its group: "stopped" working is not well.
WHERE = r"(?:on|in|with|under|before|until|till|up to|using) "
FINE = (
    r"\b((?:not|never|longer|stop\w*|to|cannot|\w+n['’]t) )?+"
    rf"(?:fine|ok(?:ay)?|good|correct|work(?:s|ed|ing)?) {WHERE}"
    rf"(?:(?:an?|the|vllm|full|cuda|\S+ (?:or|and)(?: {WHERE[:-1]})?) )*+[^\s,;]+"
)
NO_MEASURE = r"\b(?! ?(?:%|(?:m?s|sec\w*|min\w*|h|hours?|[gm]i?b|of|times)\b))"
RELEASE = rf"(0\.\d+(?:\.\d+)?){NO_MEASURE}"
# What stands before a release, the surest first: the target of an upgrade, a word, nothing.
BEFORE = (
    r"\bto (?:vllm[ =v-]*|v)?",
    r"\bvllm(?: version| release)?[ =:v-]*",
    r"\b(?:on|since|after|version|release) v?|(?<![\w.-])v",
    r"(?<![\w.-])",
)
# What makes a number one of something else: a package, or in two parts the value of an option or a measure.
SERVER = r"\b(?:sglang|tensorrt.llm|lmdeploy|ollama|llama\.cpp|tgi)\b"
PACKAGE = rf"(?:\b(?:flashinfer|xformers|lmcache|nixl|aiter|transformers|staleproof)|{SERVER})[ =v-]*$"
OF_VLLM = "the table is of vLLM's releases; of another server it says nothing"
VALUE = (
    r"(?:--[\w.-]+[ =]|_\w+=|(?:\b|_)(?:utili[sz]ation|temperature|accuracy|score|gsm8k|mmlu|top.p|min.p"
    r"|penalty|threshold|drop\w*|falls?|fell)\b)"
    r"(?:[ =:]+(?:of|is|was|at|by|from|to|drop\w*|falls?|fell|0\.\d+)\b)*[ =:]*$"
)
# Attention backends as vLLM prints them. Any other word before "MLA" is no name.
BACKEND = (
    r"(?:flashinfer|cutlass|triton|flash[_ ]attn|tokenspeed|rocm[_ ]aiter(?:[_ ]triton)?|xpu|cpu|amx)[_ ]mla"
    r"(?:[_ ]sparse)?|flashmla(?:[_ ]sparse)?|flex[_ ]attention"
    r"|(?:flash|triton|rocm(?:[_ ]aiter[_ ]unified)?|cpu|tree|gdn)[_ ]attn"
)
OFF = r"(?:(?:is|are|was|were) )?(?:off|disabled)\b"
# GPUs by name, e.g. "rtx pro 6000".
GPU = "|".join(re.sub(r"^(rtx)(pro)?", r"\1[ _]?\2[ _]?", name) for names in GPUS.values() for name in names)
DP, EP = r"(?:\bdp\b|\bdata.parallel)", r"(?:\bep\b|\bexpert.parallel)"
# (fact, pattern of what people write, word). The patterns of a fact are tried in order, and the first match
# counts. If the pattern has a group, the group is the word.
WORDS: tuple[tuple[str, str, str], ...] = (
    ("gpu", rf"\b(?:\d+ ?x ?)?({GPU}|sm_?\d+)\b", ""),
    ("gpu", r"\bblackwell\b", "b200"),
    ("gpu", r"\bhopper\b", "h200"),
    ("graphs", r"\b(?:enforce.)?eager\b(?!\W*(?:false|0)\b)", "none"),
    ("graphs", rf"\b(?:no|without|disabled?) (?:(?:any|the|full|cuda) )*graphs?\b|graphs? {OFF}", "none"),
    ("graphs", r"\bpiecewise\b", "piecewise"),
    # vLLM's default is full and piecewise.
    ("graphs", r"\b(?:cuda|full) ?graphs?\b", "full"),
    ("moe_backend", r"\b((?:flashinfer )?\w*(?:cutlass|trtllm|deep_?gemm|marlin))\b(?! mla)", ""),
    ("backend", rf"\b({BACKEND})\b", ""),
    ("backend", r"\bflash[_ ]?attention\b", "flash_attn"),
    ("quant", r"\bmxfp4\b", "mxfp4"),
    ("quant", r"\b(?:nv)?fp4\b", "nvfp4"),
    ("quant", r"\bfp8\b", "fp8"),
    ("quant", r"\b(?:awq|gptq|gguf)\b", "other"),
    ("quant", r"\b(?:bf16|fp16)\b", "none"),
    ("parallel", rf"\bdep\b|(?s:^(?=.*{DP})(?=.*{EP}))", "dp+ep"),
    ("parallel", DP, "dp"),
    ("parallel", EP, "ep"),
    ("scheduling", rf"\b(?:not?|without|disabled?).async\w*|\basync\w*(?: scheduling)? {OFF}", "sync"),
    ("scheduling", r"\bsync scheduling", "sync"),
    ("scheduling", r"\basync\w*", "async"),
    ("phase", r"\bat start\w*|\bon start\w*", "start"),
    ("phase", r"\bunder load\b|\bserving\b", "serving"),
    ("model", r"\b(mla|moe|hybrid|dense)\b", ""),
)


def _negated(text: str) -> str:
    """A sentence in small letters, with "no" for each denied verb.

    >>> _negated("We do not use DP, graphs are not used")
    'we do no dp, no graphs'
    """
    return re.sub(UNUSED, "no", re.sub(UNUSED_AFTER, r"no \1", text.lower()))


def affirmed(text: str) -> str:
    """A sentence in small letters, without what it denies.

    >>> affirmed("NaN, not on H100 but on B200, no CUDA graphs")
    'nan,  but on b200, no cuda graphs'
    """
    return re.sub(rf"{NOT}[^\s,;]+", "", _negated(text)).strip()


def _release(low: str) -> str | None:
    """The release that a sentence names. Without a word before it, two parts must be those of a known one."""
    known = {name.rpartition(".")[0] for name in table.probes()}
    for before in BEFORE:
        for match in re.finditer(rf"(?:{before}){RELEASE}", low):
            at = match.start(1)
            number, said = match[1], low[max(0, at - 80) : at]
            full = number.count(".") == 2
            other = re.search(PACKAGE if full else f"{PACKAGE}|{VALUE}", said)
            if not other and (full or number in known or at > match.start()):
                return number
    # Refused with the nearest release, as 0.95 is.
    unknown = re.search(rf"{BEFORE[1]}([1-9]\d*\.\d+(?:\.\d+)?){NO_MEASURE}", low)
    return unknown and unknown[1]


def from_words(text: str) -> Facts:
    """What a sentence says: the symptom, and whatever else it names, but not where it says that all is well.

    Raises:
        ValueError: no symptom that we know, or a release that does not exist.

    >>> found = from_words("NaN from DeepSeek R1 with CUDA graphs on 0.20, B200")
    >>> found.known
    {'symptom': 'nan', 'version': '0.20.2', 'gpu': 'sm100', 'graphs': 'full'}
    >>> found.traits
    {'mla': True, 'moe': True, 'hybrid': False}
    """
    found = Facts()
    found.learn("symptom", text, "your words")
    low = affirmed(re.sub(FINE, lambda well: well[0] if well[1] else "", text.lower()))
    if number := _release(low):
        found.learn("version", number, "your words")
    if re.search(SERVER, low) and "vllm" not in low:
        found.notes.append(OF_VLLM)
    for name, pattern, word in WORDS:
        match = re.search(pattern, low)
        if match and not found.has(name):
            found.learn(name, re.sub(r"\s", "_", word or match[1]), "your words")
    for trait in re.findall(rf"{NOT}(mla|moe|hybrid)\b", _negated(text)):
        found.traits[trait] = False
        found.origin.setdefault("model", "your words")
    # A name may be several words: "kimi linear" first, and then "qwen3", which "qwen3 next" is not.
    for word in [low, *re.findall(r"[\w./-]+", low)]:
        name, named = known_model(word)
        if name:
            found.traits = {**named, **found.traits}
            if named:
                found.origin["model"] = f"known of {name}"
            break
    else:
        if "deepseek" in low and not found.traits:
            found.traits = known_model("deepseek-v3")[1]
            found.origin["model"] = "DeepSeek, taken for V2, V3 or R1"
    return found


# Fact -> what reads the word for it.
READ: dict[str, Callable[[str], str]] = {
    "symptom": symptom,
    "version": version,
    "gpu": gpu,
    "parallel": parallel,
    **{name: partial(_one_of, name) for name in CHOICES},
    **{name: partial(_backend, name) for name in BACKENDS},
}
