"""Which patch ran where: ``workbook/support.md``, written from the recorded probes, findings and soaks.

    python -m tools.support

A test compares the page with what this would write.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.vllm import environment

from staleproof.cases import store
from staleproof.cases.finding import Finding
from staleproof.vllm import plugin, releases

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "workbook/support.md"
RUNS = ("nvidia-h200", "nvidia-h200-engine", "nvidia-h200-engine-0.26.0")
# What the variants of an engine's finding name -> the patch whose words they show.
SHOWS = {
    r"(?P<backend>TRITON_MLA), full graphs(?!.* padding)": "mla_padding",
    r"(?P<backend>TRITON_MLA), .* padding": "fp8_scale",
    r"(?P<backend>.*) router, NaN bias": "topk_nan_bias",
    r"unpublish, whole vLLM": "unpublish",
    r"(?P<backend>Qwen3 dense), undrained_ids": "undrained_ids",
    r"(?P<backend>staging_race)": "staging_race",
    r"mla_recording, (?P<backend>Kimi-Linear)": "mla_recording",
}
INTRODUCTION = """# What ran where

Written by `python -m tools.support` from the recorded probes, findings and soaks; do not edit it.

Four strengths of evidence, weakest first:

- **Source read**: a probe read the release's source and found what the patch mends. Nothing ran.
- **CPU**: the release's own Python ran, without the patches and with them, compiled kernels as stubs.
- **One H200, whole**: in a whole vLLM with dummy weights the fault showed without the patch, not with it, and
  again without it. Some faults show in padding rows, blocks or ids, and change no answer.
- **Under load**: `vllm serve` with {patches} patches (without {without}) answered {answered} of {sent}
  requests in two minutes.

The H200 (SM90) is the only GPU that ran any of it. Backends for SM100 (CUTLASS and FlashInfer MLA, FP4)
were read in source, and their Python ran on a CPU behind stubs."""


def _whole(findings: Sequence[Finding]) -> Iterator[tuple[str, str, str]]:
    """Patch, release and variant of each cure, off / on / off, that a whole vLLM showed."""
    for one in findings:
        release = re.match(r"vLLM ([\d.]+)(, whole)?$", one.of)
        if one.three and one.verdict == "fixed" and release:
            for pattern, patch in SHOWS.items():
                if re.match(pattern, one.variant):
                    yield patch, release[1], re.sub(rf"{patch}, |, {patch}|, whole vLLM", "", one.variant)


def _table(*rows: Sequence[str]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _per_release(cures: Sequence[tuple[str, str, str]], served: str) -> str:
    rows = [
        ("vLLM", "needed patches", "source read", "CPU: its own Python ran", "one H200, whole", "under load")
    ]
    for release, patches in releases.table().items():
        cured = sorted({patch for patch, of, _ in cures if of == release})
        states = Counter(one.state for one in plugin.decisions(release, choice=plugin.chosen("all")))
        refused = f", {states[plugin.REFUSED]} refused there" * bool(states[plugin.REFUSED])
        rows.append(
            (
                release,
                f"{sum(row['needed'] for row in patches.values())}{refused}",
                "yes",
                "yes" if release in environment.RECORDED else "-",
                ", ".join(f"`{name}`" for name in cured) or "-",
                "two minutes" if release == served else "-",
            )
        )
    return _table(*rows)


def _per_patch(cures: Sequence[tuple[str, str, str]]) -> str:
    ends = json.loads(releases.TABLE.read_text())["no longer needed from"]
    rows = [("patch", "incident", "needed in", "no longer needed from", "where it was on an H200")]
    for name, patch in plugin.patches().items():
        needed = [release for release, found in releases.table().items() if found[name]["needed"]]
        shown = sorted({f"{release}: {variant}" for of, release, variant in cures if of == name})
        rows.append(
            (
                f"`{name}`",
                f"`{patch.incident}`",
                releases.spans(needed),
                ends[name] or "not yet",
                "; ".join(shown) or "-",
            )
        )
    return _table(*rows)


def page() -> str:
    """The page as it should be."""
    findings = [one for name in RUNS for one in store.find(name).findings]
    cures = [*_whole(findings)]
    text = (ROOT / "workbook/soak-serve.json").read_text()
    soak = json.loads(text)["watch"]
    # Its file names the patches that its servers had in place.
    needed = [name for name, found in releases.table()[soak["vllm"]].items() if found["needed"]]
    absent = [name for name in needed if not re.search(rf"\b{name}\b", text)]
    counts = {"patches": len(needed) - len(absent), "without": ", ".join(f"`{name}`" for name in absent)}
    parts = [
        INTRODUCTION.format(**soak["load"], **counts),
        "## By release",
        _per_release(cures, soak["vllm"]),
        "## By patch",
        _per_patch(cures),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
