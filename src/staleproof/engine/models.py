"""The models that a real engine loads: small configurations of our own, with dummy weights.

Each has the shape of a published model (its attention, its router, its cache groups) and few layers, so
that an engine starts in a minute or so and needs no download. ``models.json`` holds the ``config.json``
of each:

- ``deepseek_v2``: MLA attention, softmax router without groups.
- ``deepseek_v3``: its router: sigmoid scores, groups, and a bias that takes part in the choice only.
- ``qwen3``: full attention only: vLLM records the blocks it hands out, and nothing reads the record.
- ``qwen3_moe``: the shape of Qwen3-30B-A3B: a softmax router without groups, 8 of 128 experts.
- ``qwen3_next``: three layers of linear attention, one of full attention: blocks change hands between them.
- ``kimi_linear``: three layers of linear attention (KDA, numbered from 1), one of MLA, which has no
  positions; DeepSeek's router.
- ``minimax_m2``: a router with sigmoid scores and a bias, without groups.
- ``ernie4_5_moe``: a router with softmax scores and a bias, without groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from staleproof.check import require

# Tokens are numbers, so that no tokenizer is needed.
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))


def write_config(folder: Path, model: str, changes: Mapping[str, Any]) -> None:
    """Write ``config.json`` of a model, as ``vllm.LLM(model=folder)`` reads it.

    Args:
        folder: where; it exists.
        model: a key of :data:`MODELS`.
        changes: fields that differ from the table's.

    Raises:
        ValueError: an unknown model; nothing was written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_config(Path(folder), "qwen3", {"num_hidden_layers": 2})
    ...     json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"]
    2
    """
    require(model in MODELS, "model", f"one of {sorted(MODELS)}", model)
    (folder / "config.json").write_text(json.dumps({**MODELS[model], **changes}, indent=1))
