"""A whole vLLM with gpt-oss' shape on a GPU: what is in memory after the scales, and if it changes answers.

Nothing is placed by hand. The weights are random instead of read from a checkpoint. vLLM converts them,
profiles, captures graphs, and samples as in a server.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from staleproof.cases.children import tell
from staleproof.cases.mapping import at_address
from staleproof.incidents.mxfp4_scales import real
from staleproof.incidents.mxfp4_scales.broken import Shape
from staleproof.incidents.mxfp4_scales.scene import GPT_OSS
from staleproof.kernels.mxfp4 import quantized
from staleproof.kernels.whole_vllm import ENVIRONMENT

# The other sizes of gpt-oss are transformers' defaults.
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": GPT_OSS.experts,
    "num_hidden_layers": real.LAYERS,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
STEPS = (8, 64, 256)


class _Engine:
    def __init__(self) -> None:
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        from vllm import LLM

        experts, hidden, inter, _ = GPT_OSS
        generator, self.experts = torch.Generator("cuda").manual_seed(0), dict[str, torch.Tensor]()
        for name, n, k in (("w13", 2 * inter, hidden), ("w2", hidden, inter)):
            made = quantized(Shape(experts, n, k), generator).on("cpu")
            self.experts |= {f"{name}_weight": made.weight, f"{name}_weight_scale": made.scale}
        torch.cuda.empty_cache()
        DummyModelLoader.load_weights = lambda loader, model, config: self._draw(model)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            self.llm = LLM(
                model=folder, skip_tokenizer_init=True, load_format="dummy", seed=0, moe_backend="triton",
                attention_backend="TRITON_ATTN", kv_cache_memory_bytes=2**33, max_model_len=2048,
                max_num_seqs=256, max_num_batched_tokens=8192, enable_prefix_caching=False,
                async_scheduling=False, compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [*STEPS]},
            )  # fmt: skip
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        modules = getattr(worker, "worker", worker).model_runner.model.modules()
        methods = [getattr(module, "quant_method", None) for module in modules]
        configs = [getattr(method, "w13_precision_config", None) for method in methods]
        # Several modules share a quantisation method, so keep each scale once.
        self.scales = [*{id(c): c.weight_scale.storage.data for c in configs if c is not None}.values()]

    @torch.no_grad()
    def _draw(self, model: torch.nn.Module) -> None:
        """Draw weights that keep the scale of their input; the experts' are in a checkpoint's format."""
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            elif weight.is_floating_point():
                weight.zero_() if weight.ndim == 1 else weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.copy_(self.experts[name.rpartition(".")[2]])

    def serve(self, requests: int, tokens: int, **sampling: float) -> list[Any]:
        """Each request's tokens, and the log-probability of its last token."""
        from vllm import SamplingParams

        generator = torch.Generator().manual_seed(requests)
        drawn = torch.randint(2, 200_000, (requests, 16), generator=generator).tolist()
        asked = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0, **sampling)
        done = self.llm.generate([{"prompt_token_ids": each} for each in drawn], asked, use_tqdm=False)
        outs = [each.outputs[0] for each in done]
        return [([*out.token_ids], out.logprobs[-1][out.token_ids[-1]].logprob) for out in outs]

    def stage(self, name: str) -> None:
        """Inspect the bytes after every layer's scales, and serve; then again with free bytes set to zero."""
        behind = [real.behind(data) for data in self.scales]
        answers = self.serve(8, 1, temperature=0.0)
        for data, (owner, _) in zip(self.scales, behind, strict=True):
            if owner == "free":
                at_address(data.data_ptr() + data.numel(), 64).zero_()
        told = {
            "owners": dict(Counter(owner for owner, _ in behind)),
            "harmful": [[i, owner, bytes(at).hex()] for i, (owner, at) in enumerate(behind) if 0xFF in at],
            "answers": answers,
            "over_zeros": self.serve(8, 1, temperature=0.0),
        }
        tell((name, told))


def ask() -> None:
    """Child: start a vLLM, and report the result of each stage."""
    os.environ.update(ENVIRONMENT, STALEPROOF_PATCHES="none")
    engine = _Engine()
    engine.stage("started")
    for requests in STEPS:
        engine.serve(requests, 4, temperature=1.0, top_p=0.9)
        engine.stage(f"{requests} requests sampled")
