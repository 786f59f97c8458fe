"""The hooks of the patch fp8_scale on a made-up vLLM, whose quantiser takes one scale of all rows."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch

from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.vllm import fp8_scales, hooks
from staleproof.vllm.plugin import patches
from staleproof.vllm.standing import registry

RUNNER = """
class GPUModelRunner:
    def __init__(self, device):
        self.device = device
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return self.forward()
"""
MODULES = {
    "forward_context": "_forward_context = None",
    "v1.worker.gpu_model_runner": RUNNER,
    "v1.worker.gpu.model_runner": RUNNER.replace("=None)", "=None, dummy_run=False)"),
    "v1.worker.gpu_worker": """
class Worker:
    def __init__(self, vllm_config, device):
        self.vllm_config, self.device = vllm_config, device
    def init_device(self):
        pass
""",
    "model_executor.layers.fused_moe.utils": """
from staleproof.ops.reference.fp8 import quantize_fp8_per_tensor

def _fp8_quantize(A, A_scale, per_act_token, block_shape=None):
    if A_scale is not None or per_act_token or block_shape is not None:
        return "another scale"
    return quantize_fp8_per_tensor(A, saturate_nan=True)
""",
    "model_executor.layers.fused_moe.prepare_finalize.no_dp_ep": """
from vllm.model_executor.layers.fused_moe.utils import _fp8_quantize

def _quantize_input(a1, quant_config=None, defer_input_quant=False):
    return _fp8_quantize(a1, None, False, None)
""",
    # What releases from 0.27.0 on have by default, and what those before have.
    "envs": "VLLM_MOE_SKIP_PADDING = True",
    "model_executor.layers.fused_moe.experts.triton_moe": """
from vllm.model_executor.layers.fused_moe.utils import _fp8_quantize

class TritonExperts:
    def apply(self, output, hidden_states, slots):
        return _fp8_quantize(slots, None, False, None)
""",
}
RUNNERS = ["v1.worker.gpu_model_runner", "v1.worker.gpu.model_runner"]
TOKENS, TOP_K, HIDDEN = 8, 2, 32


class Engine:
    """A runner of the made-up vLLM, and what its experts' two quantisers made of the last step."""

    def __init__(self, on: str, runner: str, **parallel: int) -> None:
        layers = "vllm.model_executor.layers.fused_moe"
        self.prepare = importlib.import_module(f"{layers}.prepare_finalize.no_dp_ep")
        self.experts = importlib.import_module(f"{layers}.experts.triton_moe").TritonExperts()
        self.utils = importlib.import_module(f"{layers}.utils")
        self.context = importlib.import_module("vllm.forward_context")
        self.envs = importlib.import_module("vllm.envs")
        config = Space(parallel_config=Space(**parallel))
        # With its number, as vLLM's.
        device = torch.empty(0, device=on).device
        importlib.import_module("vllm.v1.worker.gpu_worker").Worker(config, device).init_device()
        self.runner = importlib.import_module(f"vllm.{runner}").GPUModelRunner(device)
        self.runner.forward = self.forward
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(TOKENS, HIDDEN, generator=draw).to(device)
        self.slots = torch.randn(TOKENS * TOP_K, HIDDEN, generator=draw).to(device)

    def forward(self) -> tuple[Any, Any]:
        x, slots = self.x.clone(), self.slots.clone()
        x[self.live :], slots[self.live * TOP_K :] = self.padding, self.padding
        return self.prepare._quantize_input(x), self.experts.apply(None, x, slots)

    def step(self, live: int, padding: float, **more: Any) -> list[torch.Tensor]:
        """Codes of the live rows and scales of a step whose padding rows hold one value."""
        self.live, self.padding = live, padding
        output = Space(total_num_scheduled_tokens=live)
        (x, x_scale), (slots, slots_scale) = self.runner.execute_model(output, **more)
        return [x[:live].view(torch.uint8), x_scale, slots[: live * TOP_K].view(torch.uint8), slots_scale]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


@pytest.fixture(autouse=True)
def _asked_anew():
    """A process asks its vLLM once; here each test has another, and the next file's tests have none."""
    fp8_scales._writes_masks.cache_clear()
    yield
    fp8_scales._writes_masks.cache_clear()


@pytest.fixture(name="engine")
def engine_fixture(made_up, device):
    made_up(MODULES)
    patch = patches()[fp8_scales.NAME]
    patch.apply("0.22.1")
    yield partial(Engine, device)
    patch.revert()
    fp8_scales._counts.clear()
    registry.of(patch.name).undo = None
    registry.forget(patch.name)


@pytest.fixture(name="on")
def on_fixture(engine):
    return engine(RUNNERS[0])


@pytest.mark.parametrize("runner", RUNNERS)
def test_padding_decides_nothing_with_the_patch_and_does_without(engine, runner):
    on = engine(runner)
    alone = on.step(TOKENS, 0.0)
    assert equal(alone, on.step(TOKENS, 0.0)), "no padding row"
    for live in (3, 7, 1):
        assert equal(on.step(live, 0.0), on.step(live, 1e4))
        # The bits of vLLM's own quantiser of these rows alone.
        want = quantize_fp8_per_tensor(on.x[:live])
        assert equal(on.step(live, 1e4)[:2], [want[0].view(torch.uint8), want[1]])
    patches()[fp8_scales.NAME].revert()
    assert not equal(on.step(3, 0.0), on.step(3, 1e4))


def test_the_slots_of_a_token_are_live_with_it(on):
    # The largest value of all is in the last slot of the last live token.
    on.slots[3 * TOP_K - 1, 5] = 50.0
    codes, scale = on.step(3, 1e4)[2:]
    assert scale.item() == torch.tensor(50.0 / 448.0).item()
    assert codes[-1, 5] == 0x7E


def test_a_nan_of_a_live_row_stays_there_as_in_vllm(on):
    on.x[1, 3] = torch.nan
    codes, scale = on.step(3, 1e4)[:2]
    assert scale.isfinite()
    assert not codes.view(torch.float8_e4m3fn).float().isnan().any()


def test_a_mask_of_vllm_goes_before_the_count(engine):
    on = engine(RUNNERS[1])
    mask = torch.zeros(TOKENS, dtype=torch.bool, device=on.x.device)
    mask[2] = True
    on.context._forward_context = Space(is_padding=mask)
    on.x[2], on.slots[2 * TOP_K : 3 * TOP_K] = 1e4, 1e4
    scales = on.step(TOKENS, 0.0)[1::2]
    assert max(map(float, scales)) < 0.1
    # That of a larger batch says nothing about these rows: the count decides.
    on.context._forward_context = Space(is_padding=mask.repeat(2))
    assert equal(on.step(2, 0.0), on.step(2, 1e4))


@pytest.mark.parametrize("known", [True, False])
def test_a_mask_that_no_step_writes_says_nothing(engine, known):
    """As in 0.25.0 to 0.26.0 by default: a capture has marked every row as padding, and so it stays."""
    on = engine(RUNNERS[1])
    on.envs.VLLM_MOE_SKIP_PADDING = False
    if not known:
        del on.envs.VLLM_MOE_SKIP_PADDING
    want = on.step(TOKENS, 0.0)
    mask = torch.ones(TOKENS, dtype=torch.bool, device=on.x.device)
    on.context._forward_context = Space(is_padding=mask)
    assert equal(on.step(TOKENS, 0.0), want)
    assert equal(on.step(3, 0.0), on.step(3, 1e4))
    assert fp8_scales.padding_mask(TOKENS) is None, "nor to the watch"


@pytest.mark.parametrize(("rows", "long_enough"), [(7, True), (8, True), (9, False)])
def test_a_mask_is_taken_if_it_has_all_rows(made_up, rows, long_enough):
    made_up(MODULES)
    importlib.import_module("vllm.envs")
    assert fp8_scales.padding_mask(rows) is None
    context = importlib.import_module("vllm.forward_context")
    assert fp8_scales.padding_mask(rows) is None
    context._forward_context = Space(is_padding=torch.zeros(8, dtype=torch.bool))
    assert fp8_scales.padding_mask(rows) is (context._forward_context.is_padding if long_enough else None)


def test_a_draft_model_has_vllms_own_scale(on):
    on.runner.speculative_config = "eagle"
    assert on.step(3, 1e4)[1].item() < 0.1
    assert on.forward()[0][1].item() > 20


@pytest.mark.parametrize("way", ["switched off", "reverted", "another thread"])
def test_a_graph_that_outlives_the_patch_takes_all_rows(on, way, monkeypatch):
    on.step(3, 1e4)
    count = fp8_scales._counts[on.runner.device]
    assert count.tensor.item() == 3, "a captured kernel reads it"
    if way == "reverted":
        patches()[fp8_scales.NAME].revert()
    elif way == "switched off":
        registry.switch([fp8_scales.NAME], "a file")
        on.step(5, 1e4)
    else:
        say = count.say

        def slow(tokens: int) -> None:
            registry.switch([fp8_scales.NAME], "a file")
            say(tokens)

        monkeypatch.setattr(count, "say", slow)
        on.step(5, 1e4)
    assert count.tensor.item() == fp8_scales.ALL
    # Back in service, the next step counts again.
    if way == "switched off":
        registry.switch([], "a file")
        on.step(5, 1e4)
        assert count.tensor.item() == 5


def test_steps_of_as_many_tokens_write_nothing(on, monkeypatch):
    want = on.step(3, 1e4)
    count = fp8_scales._counts[on.runner.device]
    version = count.tensor._version
    assert equal(on.step(3, 0.0), want)
    on.step(0, 0.0)
    assert count.tensor._version == version
    on.step(4, 0.0)
    assert count.tensor._version > version


def test_a_count_that_was_made_in_inference_mode_is_written_outside_of_it():
    """vLLM's worker starts in that mode; a thread that switches the patch off is in none."""
    with torch.inference_mode():
        count = fp8_scales.Count("cpu")
    count.say(3)
    assert count.tensor.item() == 3


def test_a_dummy_step_of_the_second_runner_has_no_padding(engine):
    on = engine(RUNNERS[1])
    assert on.step(3, 1e4, dummy_run=True)[1].item() > 20
    assert fp8_scales._counts[on.runner.device].tensor.item() == fp8_scales.ALL


@pytest.mark.parametrize("name", ["data_parallel_size", "prefill_context_parallel_size", "use_ubatching"])
def test_rows_of_other_ranks_are_left_to_vllm_and_one_line_says_so(engine, name, caplog, monkeypatch):
    monkeypatch.setattr(hooks.logger, "propagate", True)
    on = engine(RUNNERS[0], **{name: 2})
    assert on.step(3, 1e4)[1].item() > 20
    on.step(3, 1e4)
    assert caplog.text.count("padding rows count in the fp8 scale") == 1


def test_other_scales_and_other_callers_are_vllms(on):
    one = torch.ones(1)
    with fp8_scales.over_tokens(0, "x", (on.x,), {}):
        for given in ((on.x, one, False, None), (on.x, None, True, None), (on.x, None, False, [1, 128])):
            assert on.utils._fp8_quantize(*given) == "another scale"
        # Rows that are no whole number of slots a token.
        assert fp8_scales.quantize((on.x[:5], None, False, None), {}) is NotImplemented
        # An expert layer without a token, inside of one with some.
        with fp8_scales.over_tokens(0, "x", (on.x[:0],), {}):
            assert fp8_scales.quantize((on.x[:0], None, False, None), {}) is NotImplemented
        # The slots of a token do not lie side by side.
        assert fp8_scales.quantize((on.slots.T.contiguous().T, None, False, None), {}) is NotImplemented
        assert fp8_scales.quantize((on.x, None, False, None), {}) is not NotImplemented
    # A caller that nobody says a token count of, e.g. one that quantises weights.
    assert fp8_scales.quantize((on.x, None, False, None), {}) is NotImplemented


def test_a_replacement_that_fails_leaves_the_step_to_vllm(on, monkeypatch):
    monkeypatch.setattr("staleproof.ops.fp8.quantize_fp8_per_tensor", lambda *args, **kwargs: 1 / 0)
    assert on.step(3, 1e4)[1].item() > 20
    assert registry.reason(fp8_scales.NAME) is not None
    # Captured graphs go on with our kernel: for them all rows are live again.
    assert fp8_scales._counts[on.runner.device].tensor.item() == fp8_scales.ALL
