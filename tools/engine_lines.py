"""Read what `diagnose` knows of vLLM's releases out of their source distributions.

    python -m tools.engine_lines [RELEASE ...]

reads the releases of the table, fetches what is not there yet (35 MB a release), and writes
src/staleproof/triage/engine.json: the lines that name a backend, what each architecture is made of, the GPUs
that an attention backend runs on, and the releases with a defect that no patch is for.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.vllm import environment

from staleproof.triage.table import ENGINE
from staleproof.vllm.releases import table
from staleproof.vllm.sources import PatchError, Sources

# Fact -> what a line that names it has in it. A line of ViT, a LoRA or a draft names another layer's backend.
LINES = {
    "moe_backend": re.compile(
        r"^(?!.*(?:[Ll]o[Rr][Aa]|[Uu]nknown|[Uu]nsupported)).*(?:%s.{0,2} (?:[\w-]+ )*MoE backend\b"
        r"|Using (?:.* )?\w+Experts M[oO]E backend|%s backend for (?:Unquantized|WNA16) MoE|for MXFP4 MoE"
        r"|MXFP4.* backend for SM"
        r"|^Using (?:Triton|Marlin) backend$|Enabling FlashInfer \w+ MoE|MXFP4 MoE backend)"
    ),
    "backend": re.compile(
        r"^Using (?!.*(?:ViT|vit|cascade|speculative))(?:%s attention backend out|%s backend out of"
        r"|(?:AttentionBackendEnum\.)?%s backend\.|[\w ]+ [Aa]ttention backend\.|\w*(?:MLA|ATTN)\w* backend)"
    ),
    "prefill": re.compile(r"prefill for MLA$|^Using %s MLA prefill backend"),
}
MODELS = "model_executor/models"
ENTRY = re.compile(r'"(\w+)": \(\s*"([\w.]+)",\s*"(\w+)",?\s*\)')


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a file, with %s for what is put into it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "%s" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[drs]", "%s", node.value)


def lines(package: Path) -> dict[str, set[str]]:
    """Fact -> the lines that say it."""
    found: dict[str, set[str]] = {name: set() for name in LINES}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        # Parsing every file of a release would take a minute.
        if not re.search(r"[\"'](?:Using |Enabling FlashInfer)", text):
            continue
        for said in _texts(ast.parse(text)):
            line = said.split("\n")[0]
            for name, pattern in LINES.items():
                if line.startswith(("Using ", "Enabling ")) and len(line) < 200 and pattern.search(line):
                    found[name].add(re.split(r", For |\. This |\. Using ", line)[0])
    return found


def gpus(package: Path) -> dict[str, list[str]]:
    """Attention backend -> the GPUs it runs on, where one major capability or several are named."""
    found = {}
    for path in sorted(package.glob("v1/attention/backends/**/*.py")):
        text = path.read_text(encoding="utf-8")
        for part in re.split(r"^class ", text, flags=re.M)[1:]:
            name = re.search(r"def get_name\(\).*?return \"(\w+)\"", part, re.S)
            said = re.search(
                r"def supports_compute_capability\(.*?return capability\.major (?:==|in) ([\[(]?[\d, ]+)",
                part,
                re.S,
            )
            if name and said:
                majors = [int(number) for number in re.findall(r"\d+", said[1])]
                found[name[1].lower()] = [f"sm{major}0" for major in majors]
    return found


def architectures(package: Path) -> dict[str, dict[str, bool]]:
    """Architecture -> which of mla, moe and hybrid its source says it is, or is not, if it says so."""
    text = (package / MODELS / "registry.py").read_text(encoding="utf-8")
    entries = {name: (module, class_name) for name, module, class_name in ENTRY.findall(text)}
    found = {}
    for name, (module, class_name) in entries.items():
        if re.search(r"For(CausalLM|ConditionalGeneration)$", name) and not re.match("P?[Ee]agle", name):
            found[name] = _traits(package, entries, module, class_name)
    return {name: traits for name, traits in found.items() if traits}


def _traits(package: Path, entries: Mapping[str, tuple[str, str]], module: str, name: str) -> dict[str, bool]:
    folder = package / module.removeprefix("vllm.").replace(".", "/")
    if module.startswith("vllm.") and folder.is_dir():
        text = bases = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    else:
        text, bases = _closure(package / MODELS, module, name)
    if not text:
        return {}
    inner = re.findall(r"architectures=\[\"(\w+)\"", text)
    if "init_vllm_registered_model" in bases:
        return {}
    if "init_vllm_registered_model" in text:
        # A wrapper is what it wraps, if it names one.
        known = [entries[one] for one in inner if one in entries and entries[one][0] != module]
        return _traits(package, entries, *known[0]) if len(known) == 1 else {}
    traits = {} if "IsAttentionFree" in bases else {"hybrid": "IsHybrid" in bases}
    # A class that can hold experts may serve a dense model as well; the name of one that must, says so.
    if re.search("moe", name, re.I):
        traits["moe"] = True
    elif not re.search("FusedMoE|MoE", text):
        traits["moe"] = False
    if not re.search(r"MLAModules|MultiHeadLatentAttention|MLAAttention|DeepseekV2MLA|DeepseekV2Model", text):
        traits["mla"] = False
    return traits


def _closure(folder: Path, module: str, name: str) -> tuple[str, str]:
    """The text of a class's file and of those of its bases, and what they are derived from."""
    path = folder / f"{module.removeprefix('vllm.model_executor.models.')}.py"
    if not path.is_file():
        return "", ""
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"^class {name}\(([^)]*)\)", text, re.M)
    bases = found[1] if found else ""
    for base in re.findall(r"\w+", bases):
        if re.search(rf"^class {base}\b", text, re.M):
            bases += _closure(folder, module, base)[1]
        elif other := re.search(
            rf"^from (?:\.|vllm\.model_executor\.models\.)(\w+) import (?:[\w, ]*|\([^)]*)\b{base}\b",
            text,
            re.M,
        ):
            more, derived = _closure(folder, other[1], base)
            if other[1] not in ("interfaces", "utils", "interfaces_base"):
                text, bases = text + more, bases + derived
    return text, bases


def defects(sources: Sources) -> dict[str, bool]:
    """Row -> whether a release has the defect that no patch of ours is for."""

    def text(*paths: str) -> str:
        return "".join(_or_nothing(sources, path) for path in paths)

    ragged = text(
        "model_executor/layers/attention/mla_attention.py",
        "v1/attention/backends/mla/prefill/trtllm_ragged.py",
    )
    manager = text("v1/core/kv_cache_manager.py", "v1/core/single_type_kv_cache_manager.py")
    nixl = "distributed/kv_transfer/kv_connector/v1"
    workers = text(*(f"{nixl}/{name}.py" for name in ("nixl_connector", "nixl/worker", "nixl/base_worker")))
    failed = re.search(r"def _handle_failed_transfer\(.*?\n    def ", workers, re.S)
    return {
        "ragged_prefill": "trtllm_ragged" in ragged.lower()
        and "mask_empty_context" not in ragged
        and "plan_mla_context_chunks" not in ragged,
        "async_load": "get_zeroing_block_ids_in_range" in manager or "record_for_zeroing: bool" in manager,
        "failed_transfer": bool(failed and "not self._is_hma_required" in failed[0]),
    }


def _or_nothing(sources: Sources, path: str) -> str:
    try:
        return sources.text(path)
    except PatchError:
        return ""


def gathered(packages: Mapping[str, Path]) -> dict[str, object]:
    """What the file holds, of these releases in their order; the newest says what an architecture is."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in LINES}
    known: dict[str, dict[str, bool]] = {}
    capable: dict[str, list[str]] = {}
    affected: dict[str, list[str]] = {}
    for release, package in packages.items():
        for name, texts in lines(package).items():
            for text in sorted(texts):
                found[name].setdefault(text, []).append(release)
        known |= architectures(package)
        capable |= gpus(package)
        for row, defect in defects(Sources(package)).items():
            affected.setdefault(row, []).extend([release] * defect)
    spans = {
        name: {text: f"{releases[0]} to {releases[-1]}" for text, releases in texts.items()}
        for name, texts in found.items()
    }
    words = {
        name: " ".join(sorted(trait if there else f"no-{trait}" for trait, there in traits.items()))
        for name, traits in sorted(known.items())
    }
    return {
        "releases": [*packages],
        "lines": spans,
        "gpus": dict(sorted(capable.items())),
        "defects": affected,
        "architectures": words,
    }


if __name__ == "__main__":
    names = sys.argv[1:] or [*table()]
    found = gathered({name: environment.sources(name) / "vllm" for name in names})
    ENGINE.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    print(f"{len(names)} releases: {ENGINE.name}")
