"""What the checks of one real vLLM say, as a table: each question without and with the patches.

    python -m tools.before_after

runs them for some releases and writes workbook/patches.json, which the report shows. The
tests compare the file with what they have just seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/vllm"))

import environment
import warm

CHECKS = Path(__file__).parents[1] / "tests/vllm/real_checks.py"
FILE = Path(__file__).parents[1] / "workbook/patches.json"
# The question as a reader asks it; what of the answer is shown.
QUESTIONS = {
    "leak": ("ids of new blocks that nobody took, after 300 requests", lambda a: a[-1]),
    "hybrid": ("ids that a Mamba and attention model zeroes", lambda a: _ids(a["asked"])),
    "hybrid MLA": ("ids that a Mamba and MLA model zeroes", lambda a: _ids(a["asked"])),
    "race": (
        "zeroed when steps ask for 1, 2 and 8, 9 before the first copy",
        lambda a: "no shared buffer" if a is None else "; ".join(_list(x) for x in a),
    ),
    "zeroed": ("MLA blocks zeroed when 3 and 5 are asked for", lambda a: _list(a["mla"])),
    "Triton MLA": ("NaN rows, Triton MLA (its real kernel)", lambda a: _list(a["bad"])),
    "CUTLASS MLA": ("NaN rows, CUTLASS MLA", lambda a: _list(a["bad"])),
    "FlashInfer MLA": ("NaN rows, FlashInfer MLA", lambda a: _list(a["bad"])),
    "FlashInfer MLA, q_len 4": ("NaN rows, FlashInfer MLA, 4 query tokens", lambda a: len(a["bad"])),
    "FlashInfer MLA, ragged": ("NaN rows, FlashInfer MLA, ragged", lambda a: _list(a["bad"])),
    "routing": (
        "of 6 rows with repeated experts: softmax, sigmoid, grouped; NaN bias",
        lambda a: (
            ", ".join(str(a[k]) for k in ("softmax", "sigmoid", "grouped"))
            + f"; {max(a[k] for k in a if 'bias' in k)}"
        ),
    ),
    "hash routing": (
        "of 6 rows with repeated experts, DeepSeek-V4's selection; NaN bias",
        lambda a: "no such selection" if a is None else f"{a['logits']}; {a['bias']}",
    ),
    "fused MoE": ("ids that reach FlashInfer from 3, 1, 3", lambda a: _list(a["ids"][0])),
    "simulator": (
        "simulated tokens that name an expert twice, uniform and normal; id dtype",
        lambda a: f"{a['uniform']:.0%}, {a['normal']:.0%}; {a['dtype'].removeprefix('torch.')}",
    ),
    "fp4 scales, traced": (
        "stale bytes of 512 in new FP4 scales of a compiled graph",
        lambda a: "allocated in the op" if a is None else a["stale"],
    ),
    "dummy run": (
        "slots that a dummy run of 8 tokens may write",
        lambda a: sum(slot >= 0 for slot in a["dummy"][:8]),
    ),
    "decode buffer": ("decode outputs kept a layer", lambda a: int(a["kept"])),
}


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def _ids(steps: list[list[int]]) -> str:
    return _list([i for ids in steps for i in ids])


def run(version: str) -> dict[str, Any]:
    """Run every check of one release in a process of its own.

    Raises:
        UnavailableError: it cannot be fetched.
    """
    return dict(warm.answer(warm.released(version, str(CHECKS))))


def table(result: dict[str, Any]) -> dict[str, list[str]]:
    """Question -> its answer without the patches and with them."""
    found = {}
    for key, (question, show) in QUESTIONS.items():
        source = "CUTLASS MLA" if key == "decode buffer" else key
        if source in result["off"]:
            found[question] = [str(show(result[state][source])) for state in ("off", "on")]
    return found


if __name__ == "__main__":
    FILE.write_text(
        json.dumps({v: table(run(v)) for v in environment.RECORDED}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    print(FILE)
