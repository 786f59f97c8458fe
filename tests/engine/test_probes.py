"""What probes tell of an engine, on a made-up one: each number is told by hand."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import torch
from tests.engine.made_engine import NAN, engine_fixture, stand_in, sums  # noqa: F401
from torch.overrides import TorchFunctionMode

from staleproof.engine import memory_probes, probes, router_probes, watch_probes, watching
from staleproof.engine.probes import prompts
from staleproof.engine.session import OPTIONS
from staleproof.evidence import AllocationLedger
from staleproof.evidence.allocations import Usage
from staleproof.evidence.ledger import Phase
from staleproof.vllm import watch_hooks


def tokens(asked):
    return [one["prompt_token_ids"] for one in asked]


def test_prompts_are_drawn_alike_for_a_seed_and_hold_no_token_that_a_probe_plants():
    drawn = tokens(prompts([100_000, 3]))
    assert [len(one) for one in drawn] == [100_000, 3]
    assert drawn == tokens(prompts([100_000, 3], seed=1)) != tokens(prompts([100_000, 3], seed=2))
    assert (min(drawn[0]), max(drawn[0])) == (2, probes.VOCABULARY - 1)


def test_rows_tells_what_the_last_decode_step_of_each_round_wrote(engine, monkeypatch):
    stage = f"layers.1.{probes.EXPERTS_INPUT}"

    def step(live, size):
        engine.watch.keep(stage, torch.arange(1.0, size + 1)[:, None])
        # The first live row and the last padding row are NaN.
        engine.watch.keep("layers.1.mlp", torch.ones(size, 1).index_fill(0, torch.tensor([0, -1]), torch.nan))
        # Each row names two experts; the first live and the last padding row one of them twice.
        ids = torch.tensor([[0, 1]] * size)
        ids[0] = ids[-1] = 3
        engine.watch.keep_ids("router 0", ids)

    engine.llm.step, engine.llm.nan = step, {1}
    one, two = probes.rows(engine, [3, 64], tokens=5)
    asked = [served for served, _ in engine.llm.served]
    assert [len(prompt) for prompt in tokens(asked[0])] == [67, 74, 81]
    # Longer than any step that is kept, and short enough to decode together.
    assert [len(prompt) for prompt in tokens(asked[1])[11:15]] == [144, 151, 68, 75]
    assert engine.llm.served[0][1] == [
        {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    ] * 3  # fmt: skip
    firsts = [prompt[0] for prompt in tokens(asked[0])]
    logits = [torch.tensor([[float(first + n), 1.0] for first in firsts]) for n in range(5)]
    assert one == {
        "live": 3,
        "size": 8,
        "stages": {"layers.0.attention": [0, 5], stage: [0, 0], "layers.1.mlp": [1, 1]},
        "largest": {stage: [3.0, 8.0]},
        "tokens": [[first, number] for number, first in enumerate(firsts)],
        "sums": [sums(each) for each in logits],
        "nan": 2,
        "twice": [5, 5],
    }
    assert (two["live"], two["size"], two["stages"]["layers.0.attention"]) == (64, 64, [0, 0])
    engine.llm.bare = True
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(engine.llm.served)))
    assert [one["nan"] for one in probes.rows(engine, [3, 3])] == [0, 0]
    # What the device wrote is read once it is there.
    assert waits == [3, 4]
    # No padding row: nothing is its largest.
    assert (two["largest"][stage], two["twice"]) == ([64.0, 0.0], [10, 0])


@pytest.mark.parametrize(("deaf", "differ"), [(False, 4), (True, 0)])
def test_the_control_asks_for_one_other_first_token(engine, deaf, differ):
    engine.llm.deaf = deaf
    assert probes.control(engine, tokens=4) == [differ, 4]
    (one,), (other,) = (tokens(asked) for asked, _ in engine.llm.served)
    assert (one[1:], one[0] != other[0], len(one)) == (other[1:], True, 67)
    # As orders ask for it.
    assert probes.control(engine) == [2 * differ, 8]


def test_how_an_engine_started(engine, monkeypatch):
    engine.llm.llm_engine.vllm_config = Space(
        compilation_config=Space(cudagraph_mode="FULL", cudagraph_capture_sizes=None),
        cache_config=Space(block_size=16),
        scheduler_config=Space(async_scheduling=1),
    )
    monkeypatch.setattr(probes.standing, "targets", lambda name: [1] if name != "kv_reuse" else [])
    monkeypatch.setattr(probes, "patches", lambda: ["moe_routing", "kv_reuse", "fp8_scales"])
    monkeypatch.setattr(probes.process, "state", lambda name: (f"{name} on", "why"))
    assert probes.start(engine) == {
        "seconds": 12.3,
        "runner": "types.SimpleNamespace",
        "graphs": "FULL",
        "sizes": [],
        "block_size": 16,
        "async_scheduling": True,
        "patches": {"fp8_scales": "fp8_scales on", "moe_routing": "moe_routing on"},
    }
    engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes = (8, 64)
    assert probes.start(engine)["sizes"] == [8, 64]


def test_spoilt_blocks_of_mla_are_the_first_five_of_each_cache(engine):
    one, two = torch.zeros(4100, 2, 3), torch.zeros(8, 2, 3, dtype=torch.bfloat16)
    for block in (7, 5, 4095, 4096, 4097, 4099):
        one[block, 1, 2] = NAN
    engine.runner.kv_caches = [one, torch.full((2, 2, 2, 2), NAN), two]
    assert probes.spoilt_blocks(engine) == [[5, 7, 4095, 4096, 4097], []]


def test_undrained_ids_are_counted_after_each_part(engine, monkeypatch):
    managers = [Space(new_block_ids=[1]), Space(new_block_ids=[])]
    engine.scheduler.kv_cache_manager = Space(coordinator=Space(single_type_managers=managers))
    engine.llm.step = lambda live, size: managers[1].new_block_ids.append(live)
    monkeypatch.setattr(probes, "resident", iter((100, 110, 120)).__next__)
    told = probes.undrained(engine, requests=6, parts=2)
    assert 0 <= told.pop("seconds") < 60
    crc = 0
    for part in range(2):
        asked = tokens(prompts([16, 17, 18], seed=part))
        crc = zlib.crc32(repr([[one[0], number] for number, one in enumerate(asked)]).encode(), crc)
    assert told == {"requests": [0, 3, 6], "ids": [1, 9, 17], "rss": [100, 110, 120], "tokens": crc}
    assert [parameters[0]["max_tokens"] for _, parameters in engine.llm.served] == [8, 8]
    monkeypatch.setattr(probes, "resident", lambda: 100)
    assert probes.undrained(engine)["requests"] == [0, 250, 500, 750, 1000]
    assert [len(prompt) for prompt in tokens(engine.llm.served[-1][0])[46:50]] == [62, 63, 16, 17]


def test_a_nan_bias_is_put_at_one_expert_after_another_and_taken_back(engine):
    class Router: ...

    model = torch.nn.Module()
    model.register_parameter("gate_e_score_correction_bias", torch.nn.Parameter(torch.arange(9.0)))
    model.register_parameter("other", torch.nn.Parameter(torch.zeros(9)))
    engine.runner.get_model = lambda: model
    bias = model.gate_e_score_correction_bias
    before, seen = bias.detach().clone(), []

    def step(live, size):
        seen.append(bias.isnan().nonzero().flatten().tolist())
        # A kernel that sorts a NaN first at expert 5, and names expert 0 twice for one at 8.
        best = bias.detach().nan_to_num(99.0).topk(2).indices
        ids = torch.tensor([[0, 0]] if seen[-1] == [8] else [best.tolist()])
        engine.watch.kinds.add(Router.__name__)
        engine.watch.keep_ids("router 0", ids.repeat(size, 1))

    engine.llm.step = step
    told = router_probes.nan_bias(engine, live=3)
    assert seen == [[]] * 24 + [[5]] * 24 + [[8]] * 24
    assert torch.equal(bias, before)
    rounds = told["sound"], *told["spoilt"].values()
    assert [one["twice"] for one in rounds] == [[0, 0], [0, 0], [3 * 24, 5 * 24]]
    assert {name: told[name] for name in ("chosen", "first", "routers", "kind", "top_k")} == {
        "chosen": {5: [0, 8], 8: [8, 0]},
        "first": {"sound": [0, 8], 5: [0, 8], 8: [0, 8]},
        "routers": 1,
        "kind": ["Router"],
        "top_k": 2,
    }
    router_probes.nan_bias(engine)
    assert [len(asked) for asked, _ in engine.llm.served] == [3] * 3 + [50] * 3


class OnCpu(TorchFunctionMode):
    """What is made on the GPU is made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {**(kwargs or {})}
        # What is made in another way is another probe's.
        assert func not in (torch.randn, torch.rand, torch.empty) or kwargs.get("device") == "cuda"
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.fixture(name="on_cpu")
def on_cpu_fixture(monkeypatch):
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator({"cuda": "cpu"}[device]))
    with OnCpu():
        yield


def test_the_choice_is_compared_with_the_kernels_past_every_patch(engine, monkeypatch, on_cpu):
    called, shapes, drawn = {}, set(), {}

    def choose(weights, ids, rows, logits, renormalize, bias, factor=1.0):
        called[len(called)] = (renormalize, factor)
        shapes.add((*logits.shape, *ids.shape, *weights.shape, ids.dtype, rows.dtype))
        drawn.setdefault(len(logits), []).append((logits.sum().item(), bias.abs().sum().item()))
        chosen = (logits.sigmoid() + bias).topk(weights.shape[1])
        ids.copy_(chosen.indices)
        weights.copy_(logits.sigmoid().gather(1, chosen.indices))

    def reversed_choice(weights, ids, rows, logits, renormalize, bias):
        choose(weights, ids, rows, logits, renormalize, bias)
        weights.copy_(weights.flip(1))
        ids.copy_(ids.flip(1))

    def grouped(logits, groups, group, top_k, renormalize, factor, bias, kind):
        assert (groups, group, renormalize, factor, kind) == (8, 4, True, 1.0, 1)
        weights = torch.full((len(logits), top_k), 0.5)
        return weights, torch.arange(top_k).expand(len(logits), -1)

    def ours(*args):
        weights, ids = (x.clone() for x in grouped(*args))
        # One other expert in a row, and another weight in one that chooses alike.
        ids[3, 0] = 63
        weights[3], weights[4, 1] = 9.0, 0.75
        return weights, ids

    def kernel(function, count):
        function.default = Space(_schema=Space(arguments=[None] * count))
        return function

    ops = stand_in(monkeypatch, "vllm._custom_ops", grouped_topk=ours)
    ops.topk_sigmoid = ops.topk_softmax = reversed_choice
    kernels = Space(topk_sigmoid=kernel(lambda *a: choose(*a), 6), grouped_topk=grouped)
    kernels.topk_softmax = kernel(lambda *a: choose(*a[:5], -a[5], *a[6:]), 7)
    monkeypatch.setattr(torch.ops, "_moe_C", kernels, raising=False)
    # The number of arguments is that of the kernel, and the wrapper of one release takes as many.
    ops.topk_softmax = lambda *a: reversed_choice(*a[:6])
    told = router_probes.same_choice(engine, tokens=32)
    assert (told["topk_sigmoid"], told["grouped_topk"]) == ([0, 0.0], [1, 0.25])
    rows, error = told["topk_softmax"]
    # With the other sign of the bias nearly every row chooses otherwise; equal rows have equal weights.
    assert 16 < rows <= 32
    assert error == 0.0
    assert set(called.values()) == {(True, 1.0)}
    shapes.clear()
    router_probes.same_choice(engine)
    router_probes.same_choice(engine)
    assert shapes == {(512, 64, 512, 6, 512, 6, torch.int32, torch.int32)}
    assert len({*drawn[512]}) == 1, "each engine is asked of the same logits"


def test_no_row_that_agrees_leaves_no_error_of_a_weight():
    chosen = [[1, 0], [2, 3]], [[0, 2], [3, 1]]
    one, two = (router_probes._sorted(torch.tensor(ids), torch.ones(2, 2)) for ids in chosen)
    assert router_probes._apart(one, two) == [2, 0.0]
    weights = (one[0], one[1] + 0.25)
    assert router_probes._apart(one, weights) == router_probes._apart(weights, one) == [0, 0.25]


def test_quantizers_are_asked_with_and_without_rows_of_nan(engine, monkeypatch, on_cpu):
    entered = []

    def quantized(x, use_per_token_if_dynamic=False):
        assert x.shape in ((3, 2048), (8, 2048))
        scale = x.float().abs().amax(1 if use_per_token_if_dynamic else (0, 1), keepdim=True) / 448
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

    class QuantFP8:
        def __init__(self, static, group_shape):
            assert (static, group_shape, entered) == (False, "a tensor", ["config"])

        def forward_native(self, x):
            x = x.nan_to_num(0.0)
            return quantized(x)

    class Configured:
        def __init__(self, config):
            self.config = config

        def __enter__(self):
            entered.append(self.config)

        def __exit__(self, *error):
            entered.pop()

    quantization = "vllm.model_executor.layers.quantization"
    stand_in(monkeypatch, f"{quantization}.input_quant_fp8", QuantFP8=QuantFP8)
    shapes = Space(PER_TENSOR="a tensor")
    stand_in(monkeypatch, f"{quantization}.utils.quant_utils", GroupShape=shapes)
    stand_in(monkeypatch, "vllm._custom_ops", scaled_fp8_quant=quantized)
    stand_in(monkeypatch, "vllm.config", set_current_vllm_config=Configured)
    engine.llm.llm_engine.vllm_config = "config"
    told = router_probes.quantizers(engine)
    assert router_probes.quantizers(engine) == told
    batch, token, torchs = (
        told[name] for name in ("CUDA, per tensor", "CUDA, per token", "torch, per tensor")
    )
    assert batch[0] == torchs[0] >= token[0] > 0
    assert (batch[1], token[1], torchs[1]) == ("nan", str(token[0]), str(torchs[0]))
    # One NaN scale spoils every value of the sound rows.
    assert (batch[2], token[2], torchs[2]) == (3 * 2048, 0, 0)


@pytest.mark.parametrize("second_runner", [False, True])
def test_another_token_is_planted_in_the_padding_rows_only(engine, second_runner):
    ids, seen = torch.full((64,), 7), []
    weight = torch.nn.Parameter(torch.ones(4, 3))
    named = [("norm", None), ("embed_tokens.weight", weight)]

    class Runner(Space):
        def execute_model(self, output, again=0):
            return output, again

    held = {"input_buffers": Space(input_ids=ids)} if second_runner else {"input_ids": Space(gpu=ids)}
    runner = Runner(**held, get_model=lambda: Space(named_parameters=lambda: named))
    engine.llm.worker.model_runner = runner

    def step(live, size):
        ids[:live] = 7
        output = Space(total_num_scheduled_tokens=live)
        assert runner.execute_model(output, again=3) == (output, 3)
        seen.append((ids[:live].unique().tolist(), ids[live:].unique().tolist()))

    engine.llm.step = step
    told = router_probes.planted(engine, tokens=2)
    assert seen == [([7], [0])] * 4 + [([7], [1])] * 4
    assert weight.tolist() == [[1.0] * 3, [8.0, 0.0, 0.0], [1.0] * 3, [1.0] * 3]
    assert [*told] == ["plain", "spike"]
    assert [[one["live"] for one in rounds] for rounds in told.values()] == [[3, 50]] * 2
    assert "execute_model" not in vars(runner), "the method of the class is back"
    router_probes.planted(engine, live=[3])
    assert engine.llm.served[-1][1][0]["max_tokens"] == 12


def test_what_the_watch_counted_and_what_its_port_says(engine, monkeypatch):
    calls = []
    bad = {("attention", "layers.0"): (5, 0)}
    counts = Space(bad=bad, repeats={"layers.1": (1, 2)}, steps=9, counted=3)
    watch = Space(reading=lambda: calls.append("reading") or counts, copy=lambda: calls.append("copy"))
    memory = Space(unprofiled=lambda: {"a": 1})
    on = Space(watch=watch, blocks=Space(stale={("state", "keys"): 4}), memory=memory)
    monkeypatch.setattr(watch_hooks, "installed", [on])
    sample = watching.Sample("bad_rows", {"stage": "experts", "layer": "layers.1", "rows": "live"}, 2.0)
    monkeypatch.setattr(watching, "fetch", lambda url: [sample] if url == "localhost:9480" else [])
    told = {
        "bad": {"attention, layers.0": [5, 0]},
        "repeats": {"layers.1": [1, 2]},
        "steps": 9,
        "counted": 3,
        "stale_blocks": {"state, keys": 4},
        "unprofiled": {"a": 1},
        "scraped": [["experts", "layers.1", 0, 2]],
    }
    assert watch_probes.watched(engine, 9480) == told
    # What was counted by now is copied before it is read.
    assert calls == ["reading", "copy", "reading"]
    on.blocks = on.memory = None
    assert watch_probes.watched(engine, 9480) == {**told, "stale_blocks": None, "unprofiled": None}
    on.watch = None
    with pytest.raises(AssertionError, match="the watch is off"):
        watch_probes.watched(engine, 9480)


EACH, PROFILED, TOTAL = 4096, 8192, 2**20


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.impl = Space()


class Device:
    """Memory of a device: buffers that layers keep, and steps that take some for a time."""

    def __init__(self, engine, monkeypatch, transient=PROFILED) -> None:
        self.engine, self.limit, self.transient = engine, TOTAL, transient
        self.steps: list[tuple[int, ...]] = []
        self.calls: list[str] = []
        self.model = torch.nn.ModuleList(Layer() for _ in range(4))
        engine.runner.get_model = lambda: self.model
        engine.watch.ledger = AllocationLedger(self.model, usage=self.usage)
        cuda = {
            "synchronize": lambda: self.calls.append("wait"),
            "empty_cache": lambda: self.calls.append("empty"),
            "memory_reserved": lambda: self.used() + 100,
            "mem_get_info": lambda: (TOTAL - 1000 - self.used(), TOTAL),
            "set_per_process_memory_fraction": lambda share: setattr(self, "limit", round(share * TOTAL)),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        engine.llm.generate = self.generate
        with engine.watch.ledger.phase("profile"):
            torch.empty(PROFILED, dtype=torch.uint8)

    def used(self) -> int:
        return sum(
            EACH for layer in self.model if getattr(layer.impl, memory_probes.BUFFER, None) is not None
        )

    def usage(self) -> Usage:
        return Usage(self.used() + 1000, self.used() + 100, self.used(), 100)

    def generate(self, asked, parameters, use_tqdm):
        (step,) = {
            (len(one["prompt_token_ids"]), of.max_tokens) for one, of in zip(asked, parameters, strict=True)
        }
        self.steps.append((self.engine.watch.lazy_layers, len(asked), *step))
        for layer in self.model[: self.engine.watch.lazy_layers]:
            if getattr(layer.impl, memory_probes.BUFFER, None) is None:
                setattr(layer.impl, memory_probes.BUFFER, torch.empty(EACH, dtype=torch.uint8))
        step = self.transient if len(asked[0]["prompt_token_ids"]) > 1000 else 0
        if self.used() + 100 + step > self.limit:
            raise RuntimeError("out of\n memory")


def test_a_death_is_predicted_from_one_buffer_and_then_brought_about(engine, monkeypatch):
    device = Device(engine, monkeypatch)
    told = memory_probes.death(engine)
    owner, sentence = told.pop("owner"), told.pop("sentence")
    assert memory_probes.BUFFER in owner
    assert "4" in owner
    assert sentence.endswith("this will not fit")
    room = PROFILED + int(2.5 * EACH)
    assert told == {
        "predicted": 4 * EACH,
        "taken": 4 * EACH,
        "room": room,
        "healthy": True,
        "fits": False,
        "died": "RuntimeError: out of memory",
    }
    assert device.limit == 100 + room
    assert engine.watch.ledger.budget_bytes == 1000 + room
    # More requests than a graph has rows, and as many tokens as the profile run had.
    small, full = (70, 67, 4), (8, 2040, 4)
    assert sum(full[1:]) <= OPTIONS["max_model_len"]
    layers = (0, small), (1, small), (4, small), (0, full), (1, small), (4, small), (4, full)
    assert device.steps == [(number, *step) for number, step in layers]
    assert device.calls == ["wait", "empty"] * 3


@pytest.mark.parametrize(
    ("transient", "healthy", "died"), [(2 * PROFILED + EACH, False, True), (0, True, False)]
)
def test_a_step_that_dies_without_the_buffers_or_lives_with_them_is_told(
    engine, monkeypatch, transient, healthy, died
):
    Device(engine, monkeypatch, transient)
    told = memory_probes.death(engine)
    assert (told["healthy"], told["died"] is not None) == (healthy, died)


def test_how_an_engine_ended_is_one_line_of_limited_length(engine):
    def dies(engine):
        raise ValueError("a\n b" + 200 * "c")

    assert memory_probes._outcome(engine, dies) == "ValueError: a b" + 157 * "c"
    assert memory_probes._outcome(engine, lambda engine: "lives") is None


def phase(name, before, after, by_owner, transient=7):
    usages = (Usage(**dict(zip(Usage._fields, each, strict=True))) for each in (before, after))
    return Phase(name, False, *usages, transient, by_owner)


def test_the_accounts_of_a_start_are_told_by_phase(engine):
    first = phase("profile", (1000, 500, 300, 100), (1900, 1200, 700, 250), {"model": 350})
    second = phase("capture", (1900, 1200, 700, 250), (2500, 1500, 800, 250), {"model": 350, "cache": 90})
    owner = type("Owner", (Space,), {"__str__": lambda self: self.name})
    owners = [owner(name=f"o{i}", source="a.py:1", phase="profile") for i in range(9)]
    report = Space(phases=(first, second), sentence="it fits", owners=owners)
    engine.watch.ledger, engine.watch.graph_bytes = Space(read=lambda: report), 77
    told = memory_probes.accounts(engine)
    assert told["owners"] == [f"o{i}, a.py:1, first in profile" for i in range(8)]
    assert told["phases"] == {
        "profile": {"device": 900, "owned": 350, "pools": 150, "cached": 150, "outside": 200,
                    "transient": 7, "allocated": 400},
        "capture": {"device": 600, "owned": 90, "pools": 200, "cached": 0, "outside": 300,
                    "transient": 7, "allocated": 100},
    }  # fmt: skip
    figures = ("sentence", "graph_bytes_estimated", "graph_bytes_taken", "kv_bytes")
    assert [told[name] for name in figures] == ["it fits", None, 77, None]
    vars(engine.llm.worker).update(cudagraph_memory_estimate=5, available_kv_cache_memory_bytes=6)
    told = memory_probes.accounts(engine)
    assert (told["graph_bytes_estimated"], told["kv_bytes"]) == (5, 6)


def test_host_memory_is_what_is_resident_and_not_what_is_mapped():
    (said,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")
    ]
    assert abs(probes.resident() - int(said.split()[1]) * 1024) < 2**24
