"""Spies keep which rows of a step had a NaN, and name the stage; ``test_real_engine.py`` has a real vLLM."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from types import SimpleNamespace as Space

import pytest
import torch
from tests.engine.made_engine import NAN, stand_in, sums

from staleproof import evidence
from staleproof.engine import spies
from staleproof.engine.spies import Rows, checksum


class Backend:
    """The shape of an MLA backend: rows without a live request are NaN."""

    def forward_mqa(self, q, kv, metadata, layer):
        out = torch.ones(q.shape[0], 2, 4)
        out[metadata:] = NAN
        return out, None


def step(backend: Backend, rows: int, live: int, layer: int = 0) -> None:
    named = types.SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn")
    out, lse = backend.forward_mqa(torch.zeros(rows, 2, 6), None, live, named)
    assert (len(out.flatten(0, -3)), lse) == (rows, None), "what the backend returns reaches vLLM"


def test_flags_are_those_of_the_last_decode_step():
    watch, backend = Rows(), type("Watched", (Backend,), {})
    spies._attention(backend, watch)
    step(backend(), 8, 3)
    step(backend(), 8, 5, layer=1)
    assert dict(watch.seen()) == {
        "layers.0.attention": [0, 0, 0, 1, 1, 1, 1, 1],
        "layers.1.attention": [0, 0, 0, 0, 0, 1, 1, 1],
    }
    watch.clear()
    assert dict(watch.seen()) == {}
    step(backend(), 64, 50)
    assert [sum(flags) for _, flags in watch.seen()] == [14]
    # Requests only end: of two sizes the smaller ran last. A stage of another size is not of that step.
    step(backend(), 8, 3)
    watch.keep("layers.0.mlp", torch.full((8, 4), NAN))
    watch.keep("layers.0.warm_up", torch.full((64, 4), NAN))
    assert dict(watch.seen()) == {"layers.0.attention": [0] * 3 + [1] * 5, "layers.0.mlp": [1] * 8}


def test_the_largest_magnitude_of_what_experts_get_leaves_nan_out():
    watch, stage = Rows(), "layers.1.post_attention_layernorm"
    watch.keep(stage, torch.tensor([[1.0, -3.0], [NAN, 2.0], [NAN, NAN], [-math.inf, 1.0]]))
    assert watch.largest[stage, 4].tolist() == [3.0, 2.0, 0.0, math.inf]
    assert watch.flags[stage, 4].tolist() == [0, 1, 1, 0]


def test_query_tokens_of_a_request_are_rows(monkeypatch):
    class Ragged(Backend):
        def forward_mqa(self, q, kv, metadata, layer):
            return torch.full((4, 2, 2, 4), NAN), None

    watch = Rows()
    spies._attention(Ragged, watch)
    step(Ragged(), 8, 8)
    assert dict(watch.seen()) == {"layers.0.attention": [1] * 8}


def test_experts_that_are_named_twice_are_counted_by_kind_of_row():
    watch = Rows()
    watch.keep_ids("router 0", torch.tensor([[0, 1], [2, 2], [3, 3], [4, 5]]))
    assert watch.duplicates(2) == (1, 1)
    # The counts are of all steps since the last clear, not of the last.
    watch.keep_ids("router 0", torch.tensor([[0, 0], [2, 3], [3, 4], [4, 5]]))
    assert watch.duplicates(2) == (2, 1)
    assert (watch.chosen(3), watch.chosen(9)) == (2, 0)
    watch.keep_ids("router 0", torch.tensor([[1, 0], [0, 2], [0, 1], [4, 5]]))
    assert watch.first_experts() == [2, 4]
    watch.clear()
    assert watch.duplicates(2) == (0, 0)
    watch.keep_ids("router 0", torch.tensor([[0, 1], [2, 3], [3, 3], [4, 5]]))
    assert watch.duplicates(2) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_notices_one_bit_and_the_place_of_a_value(dtype):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = checksum(x)
    bits = x.clone().view(torch.int16)
    bits[1, 7] ^= 1
    changed = checksum(bits.view(dtype))
    swapped = x.clone()
    swapped[2, :2] = x[2, [1, 0]]
    assert (kept == changed).tolist() == [True, False, True]
    assert (kept == checksum(swapped)).tolist() == [True, True, False]


BACKENDS = {"triton_mla": "TritonMLAImpl", "flashmla": "FlashMLAImpl", "flashattn_mla": "FlashAttnMLAImpl"}


@pytest.mark.parametrize("missing", BACKENDS)
def test_every_backend_of_mla_whose_kernels_are_installed_is_watched(monkeypatch, missing):
    made = {name: type(name, (Backend,), {}) for name in BACKENDS.values()}
    for module, name in BACKENDS.items():
        stand_in(monkeypatch, f"vllm.v1.attention.backends.mla.{module}", **{name: made[name]})
    # As a module that raises when it is imported.
    monkeypatch.setitem(sys.modules, f"vllm.v1.attention.backends.mla.{missing}", None)
    watch = Rows()
    spies.attention(watch)
    for layer, name in enumerate(BACKENDS.values()):
        step(made[name](), 8, 3, layer)
    watched = [layer for layer, module in enumerate(BACKENDS) if module != missing]
    assert [*watch.flags] == [(f"layers.{layer}.attention", 8) for layer in watched]


@pytest.fixture(name="runners")
def runners_fixture(monkeypatch):
    """vLLM's two model runners, which get the model that their test gives them when they load it."""

    class Runner:
        def load_model(self, model: object) -> str:
            self.model = model
            return "loaded"

        def get_model(self) -> object:
            return self.model

    made = [type("GPUModelRunner", (Runner,), {}) for _ in range(2)]
    for module, runner in zip(("gpu_model_runner", "gpu.model_runner"), made, strict=True):
        stand_in(monkeypatch, f"vllm.v1.worker.{module}", GPUModelRunner=runner)
    return made


class Returns(torch.nn.Module):
    def __init__(self, *parts: tuple[str, torch.nn.Module], out: object = None) -> None:
        super().__init__()
        self.out = out
        for name, module in parts:
            self.add_module(name, module)

    def forward(self) -> object:
        for module in self.children():
            module()
        return self.out


def test_the_modules_inside_decoder_layers_are_stages_in_order_of_execution(runners):
    bad = torch.ones(8, 2)
    bad[5:] = NAN
    outs = {"mlp": bad, "pair": (bad, None), "none": (), "flat": bad[:, 0], "cube": bad[:, :, None], "no": 3}
    layer = Returns(*((name, Returns(out=out)) for name, out in outs.items()), out=bad)
    blocks = Returns(("0", layer), out=bad)
    inner = Returns(("layers", blocks), ("layer", Returns(out=bad)), ("norm", Returns(out=bad)), out=bad)
    # Layers of something else, such as a draft model's.
    other = Returns(("layers", Returns(("9", Returns(out=bad)))))
    model = Returns(("model", inner), ("draft", other), out=bad)
    for runner in runners:
        watch = Rows()
        spies.stages(watch)
        assert runner().load_model(model) == "loaded"
        assert model() is bad
        kept = {stage: flags.tolist() for (stage, _), flags in watch.flags.items()}
        names = ["layers.0.mlp", "layers.0.pair", "layers.0.cube", "layers.0"]
        assert kept == dict.fromkeys(names, [0] * 5 + [1] * 3)
        assert [*kept] == names


def test_logits_of_both_runners_are_summed_unless_there_are_none(runners):
    class Model:
        def compute_logits(self, hidden: object) -> object:
            return hidden

    watch, logits = Rows(), torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    spies.logits(watch)
    for runner in runners:
        model = Model()
        runner().load_model(model)
        # A rank that is not the last of a pipeline has none.
        assert model.compute_logits(None) is None
        assert model.compute_logits(hidden=logits) is logits
    assert [kept.tolist() for kept in watch.sums] == [sums(logits)] * 2
    watch.sums[:] = [None] * 4095
    for _ in range(2):
        model.compute_logits(logits)
    assert len(watch.sums) == 4096, "a server that runs for days keeps no more"
    watch.clear()
    model.compute_logits(logits)
    assert [kept.tolist() for kept in watch.sums] == [sums(logits)]


def test_every_class_of_router_is_watched_once(monkeypatch):
    package = "vllm.model_executor.layers.fused_moe.router"

    class Router:
        def select_experts(self, hidden_states, router_logits, *, input_ids=None):
            return "weights", router_logits

    def router(module: str, name: str, *bases: type, **members: object) -> type:
        return type(name, bases, {"__module__": f"{package}.{module}", **members})

    base = router("base_router", "Base", select_experts=Router.select_experts)
    own = router("fused_moe_router", "Own", select_experts=Router.select_experts)
    heir = router("fused_moe_router", "Heir", base)
    stand_in(monkeypatch, f"{package}.base_router", Base=base, other=3)
    # A module sees the classes that it imports.
    stand_in(monkeypatch, f"{package}.fused_moe_router", Base=base, Own=own, Heir=heir)
    watch = Rows()
    spies.routing(watch)
    ids = torch.tensor([[0, 1], [2, 2], [3, 3]])
    routers = base(), own(), heir()
    for one in (*routers, *routers):
        assert one.select_experts(None, router_logits=ids) == ("weights", ids)
    assert watch.kinds == {"Base", "Own", "Heir"}
    assert {key: kept.tolist() for key, kept in watch.ids.items()} == {
        (f"router {number}", 3): ids.tolist() for number in range(3)
    }
    assert watch.duplicates(2) == (6, 6)


def test_steps_without_rows_prompts_and_integers_leave_nothing():
    watch = Rows()
    watch.keep("layers.0.ids", torch.zeros(8, 2, dtype=torch.int64))
    for rows in (0, 1, spies.LARGEST, spies.LARGEST + 1):
        watch.keep_ids("router 0", torch.zeros(rows, 2, dtype=torch.int64))
        watch.keep("layers.0.attention", torch.zeros(rows, 2))
    assert [rows for _, rows in watch.ids] == [rows for _, rows in watch.flags] == [1, spies.LARGEST]
    # Only one step has been served since, with one row and one expert.
    watch.clear()
    assert dict(watch.seen()) == {}
    watch.keep_ids("router 1", torch.tensor([[0]]))
    assert (watch.duplicates(1), watch.first_experts(), watch.chosen(0)) == ((0, 0), [1, 1], 1)
    watch.keep("layers.0.mlp", torch.zeros(1, 2))
    assert dict(watch.seen()) == {}, "no decode step was seen"
    watch.keep("layers.0.attention", torch.full((1, 2), NAN))
    assert dict(watch.seen()) == {"layers.0.attention": [1], "layers.0.mlp": [0]}


def test_what_spies_keep_lies_on_the_device_of_what_they_see():
    x = torch.arange(16.0).reshape(8, 2)
    watch = Rows()
    # What is made with no device would be made on another one, and a tensor beside one of that raises.
    with torch.device("meta"):
        watch.keep(f"layers.0.{spies.EXPERTS_INPUT}", x)
        watch.keep_ids("router 0", x.long())
        assert (watch.first_experts(), watch.duplicates(3)) == ([1, 8], (0, 0))
        kept = *watch.flags.values(), *watch.largest.values(), *watch.ids.values(), *watch.repeats.values()
        assert {one.device.type for one in (*kept, checksum(x))} == {"cpu"}
    assert [one.dtype for one in kept] == [torch.int8, torch.float32, torch.int64, torch.int32]


def test_dummy_weights_keep_the_scale_of_their_input(monkeypatch):
    loader = "vllm.model_executor.model_loader"
    modules = [stand_in(monkeypatch, f"{loader}.{name}") for name in ("dummy_loader", "weight_utils")]

    generator, devices = torch.Generator, set()
    monkeypatch.setattr(torch, "Generator", lambda device: devices.add(device) or generator())

    def drawn(*params: torch.Tensor) -> list[torch.Tensor]:
        spies.scaled_weights()
        one, two = (module.initialize_single_dummy_weight for module in modules)
        assert one is two
        # vLLM loads a model with its dtype as the default; the device is that of the weights.
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                for param in params:
                    one(param, -1e-3, high=1e-3, seed=1234)
        finally:
            torch.set_default_dtype(torch.float32)
        return [param.clone() for param in params]

    weights = [torch.zeros(512, 48), torch.zeros(512, 48, dtype=torch.bfloat16)]
    weights.append(torch.zeros(512, 48, dtype=torch.float8_e4m3fn))
    norm, ids = torch.nn.Parameter(torch.zeros(4)), torch.full((2, 2), 7)
    first = drawn(torch.empty(2, 2, device="meta"), *weights, norm, ids)
    assert (first[-2].tolist(), first[-1].tolist()) == ([1.0] * 4, [[7, 7]] * 2)
    for one in (each.float() for each in first[1:4]):
        # Uniform from -0.25 to 0.25, whose variance is 1 / 48.
        assert 0.24 < one.max() <= 0.25
        assert -0.25 <= one.min() < -0.24
        assert abs(float(one.var()) * 48 - 1) < 0.05
    # What was recorded had these.
    again = torch.empty(512, 48).uniform_(-0.25, 0.25, generator=generator().manual_seed(1))
    assert torch.equal(first[1], again)
    assert devices == {torch.device("cpu")}
    # Each has values of its own, and every engine the same.
    assert not torch.allclose(first[1], first[2].float(), atol=0.1)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(first[1:4], drawn(*weights), strict=True))


def test_the_start_has_a_ledger_with_a_phase_each(monkeypatch):
    calls = []

    class Worker:
        model_runner = Space(get_model=lambda: "the model", capture_model=lambda: 77)

    def member(name):
        return lambda self, *args, **kwargs: calls.append(name) or (name, args, kwargs)

    names = "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model"
    for name in ("load_model", *names):
        setattr(Worker, name, member(name))

    class Ledger:
        def __init__(self, model):
            assert model == "the model"

        @contextlib.contextmanager
        def phase(self, name, planned):
            calls.append((name, planned))
            yield
            calls.append(f"end of {name}")

    stand_in(monkeypatch, "vllm.v1.worker.gpu_worker", Worker=Worker)
    monkeypatch.setattr(evidence, "AllocationLedger", Ledger)
    watch = Rows()
    spies.ledger(watch)
    worker = Worker()
    for name in ("load_model", *names):
        assert getattr(worker, name)(3, four=4) == (name, (3,), {"four": 4})
    phases = ("profile", False), ("kv cache", True), ("capture", False)
    each = [(phase, name, f"end of {phase[0]}") for name, phase in zip(names, phases, strict=True)]
    assert calls == ["load_model", *(call for calls_of_one in each for call in calls_of_one)]
    assert watch.graph_bytes is None
    assert (worker.model_runner.capture_model(), watch.graph_bytes) == (77, 77)


def test_lazy_buffers_are_those_of_the_first_layers_and_stay(monkeypatch):
    class Impl(Backend):
        pass

    stand_in(monkeypatch, "vllm.v1.attention.backends.mla.triton_mla", TritonMLAImpl=Impl)
    watch, layers = Rows(), [Impl() for _ in range(3)]
    spies.lazy_buffers(watch)

    def serve() -> list[object]:
        for number, layer in enumerate(layers):
            step(layer, 8, 8, number)
        return [getattr(layer, spies.BUFFER, None) for layer in layers]

    assert serve() == [None] * 3, "nothing happens before the fault is switched on"
    watch.lazy_layers = 2
    one, two, none = serve()
    assert none is None
    assert [buffer.shape for buffer in (one, two)] == [(65536, 2, 4)] * 2
    assert serve()[0] is one
    watch.lazy_layers = 0
    assert serve()[1] is two
