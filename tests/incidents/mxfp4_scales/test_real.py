"""vLLM's own kernel and loaders; skipped where the wheel's package was not fetched."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Space

import environment
import numpy as np
import pytest
import torch

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.case import MissingError, nothing
from staleproof.cases.run import run
from staleproof.contract.cases import audit
from staleproof.contract.contract import BREAKS, HOLDS
from staleproof.incidents.mxfp4_scales import broken, cases, real, scene, whole
from staleproof.incidents.mxfp4_scales.broken import Kernel
from staleproof.kernels import vllm_matmul_ogs
from staleproof.kernels.vllm_sources import UnavailableError

fetched = pytest.mark.skipif(vllm_matmul_ogs.root() is None, reason=f"needs {vllm_matmul_ogs.FETCH}")


@fetched
@pytest.mark.parametrize("release", ["0.16.0", "0.19.1", "0.22.1", "0.25.1"])
def test_the_patch_cures_the_loader_of_a_release(device, release):
    """Off / on / off: 0xff behind the scales; the second answer is right, the others are not."""
    folder = environment.sources(release) / "vllm"
    ended = children.call(real.loader, device, release, str(folder), timeout_s=300)
    assert ended.code == 0, ended.stderr
    assert [said.verdict for _, said in ended.told] == ["wrong, finite", "right", "wrong, finite"]
    assert ended.told[1][1].numbers["changed"] == 0


@fetched
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("groups", [3, 6, 8])
def test_our_index_function_is_the_packages_layout(groups, warps, monkeypatch):
    monkeypatch.syspath_prepend(str(vllm_matmul_ogs.root() / "third_party"))
    from triton_kernels.tensor_details.layout_details.hopper_scale import HopperMXScaleLayout

    scale = torch.randint(0, 256, (2, 300, groups), dtype=torch.uint8)
    turned = scale.transpose(-2, -1)
    theirs = HopperMXScaleLayout(turned.shape, mx_axis=1, num_warps=warps).swizzle_data(turned)
    ours = broken.swizzled(scale, Kernel(warps=warps))
    assert ours.equal(theirs.as_strided((theirs.numel(),), (1,)))
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton_kernels"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("and.b32 $0, $1, 0b1100;", 0x00000008),
        ("shl.b32 b, $1, 4; or.b32 $0, b, $1;", 0xBBFEFFBA),
        ("// bytes 0 and 1, each below a byte of 0\n prmt.b32 $0, $1, 0, 0x5140;", 0x00EF009A),
        ("prmt.b32 $0, $1, 0x11223344, 0x6352;", 0x229A33BC),
        ("mov.b32 a, $1; shr.b32 $0, a, 8;", 0x009ABCEF),
    ],
)
def test_ptx_is_computed(text, result):
    registers = {"$1": np.array([0x9ABCEF9A], dtype=np.uint32)}
    assert int(vllm_matmul_ogs._asm(text, registers)["$0"][0]) == result


def test_a_product_of_two_bf16_is_rounded():
    """1.0078125 * 1.0078125 is 1.015686..., and the nearest bf16 is 1.015625; the other half is 2 * 3."""
    halves = torch.tensor([1.0078125, 2.0]).bfloat16().view(torch.int16).numpy().view(np.uint32)
    factors = torch.tensor([1.0078125, 3.0]).bfloat16().view(torch.int16).numpy().view(np.uint32)
    got = vllm_matmul_ogs._asm("mul.bf16x2 $0, $1, $2;", {"$1": halves, "$2": factors})["$0"]
    assert vllm_matmul_ogs._bf16_halves(got).flatten().tolist() == [1.015625, 6.0]


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vllm_matmul_ogs, "vllm_file", lambda *paths: None)
    why = vllm_matmul_ogs.unavailable_reason("cpu")
    assert why is not None
    assert vllm_matmul_ogs.FETCH in why
    with pytest.raises(UnavailableError, match="no vLLM with third_party/triton_kernels here"):
        vllm_matmul_ogs.MatmulOgs("cpu")


def test_a_gpu_that_is_not_hopper_is_not_asked(monkeypatch):
    """Each question for vLLM's kernel says why; none starts a child."""
    other = replace(devices.machine(), capability="sm_100")
    monkeypatch.setattr(devices, "machine", lambda: other)
    monkeypatch.setattr(children, "call", lambda *args, **kwargs: pytest.fail("a child was started"))
    found = [*run([case for case in cases.TABLE.cases if case.needs is not nothing], "cuda")]
    assert {f.question for f in found} >= {"layer", "first product", "neighbour, whole vLLM", "cost"}
    says = "needs an SM90 GPU (H100, H200); this is sm_100"
    assert {(f.verdict, f.note) for f in found} == {("not run", says)}


def test_an_edit_that_fits_no_line_is_refused(device):
    edit = vllm_matmul_ogs.Edit("matmul_ogs.py", "no such line", "")
    if vllm_matmul_ogs.root() is None:
        pytest.skip(f"needs {vllm_matmul_ogs.FETCH}")
    ended = children.call(vllm_matmul_ogs.MatmulOgs, device, edit, timeout_s=120)
    assert "edit.old: expected text that stands once in matmul_ogs.py, got no such line" in ended.last_line


@pytest.mark.parametrize(
    ("package", "only", "note"),
    [
        ("vllm", "matmul_ogs", "0xff behind scale changes the result"),
        ("wheels", "0.4.7 triton_kernels.matmul", "0xff behind scale changes the result"),
        ("wheels", "0.4.10 triton_kernels.matmul", "ended its process with signal 11"),
    ],
)
def test_a_released_product_depends_on_what_lies_behind_its_scales(device, package, only, note):
    """By a byte 0xff; SGLang's 0.4.10 masks after the load, and a guard mapping still ends the process."""
    found = [*audit([f"staleproof.kernels.{package}"], device, only=only)]
    if package == "vllm" and vllm_matmul_ogs.root() is None:
        pytest.skip(f"needs {vllm_matmul_ogs.FETCH}")
    if not found:
        pytest.skip(f"needs {vllm_matmul_ogs.FETCH.replace('vllm_matmul_ogs', 'mxfp4')}")
    clean, behind = found
    assert (clean.question, clean.verdict) == ("0", HOLDS), clean.note
    assert (behind.verdict, behind.note) == (BREAKS, note)


def test_a_whole_vllm_is_judged_by_its_answers_over_zeros():
    right, other, nan = ([1], -0.5), ([2], -0.5), ([1], float("nan"))
    told = {"owners": {"free": 1}, "harmful": [], "over_zeros": [right] * 2}
    for answers, word, changed in (
        ([right, right], "right", 0),
        ([right, other], "wrong, finite", 1),
        ([other, nan], "NaN", 2),
    ):
        found = cases.served("started", "cuda", {"started": told | {"answers": answers}})
        counted = found.numbers["changed_answers"], found.numbers["answers"]
        assert (found.verdict, counted) == (word, (changed, 2))
    with pytest.raises(MissingError, match="ended with 1: no memory"):
        cases.served("started", "cuda", {"ended": "a child ended with 1: no memory"})


def test_weights_are_drawn_by_their_kind_and_the_experts_are_a_checkpoints():
    experts = {"w13_weight": torch.arange(12, dtype=torch.uint8).view(3, 4)}
    model = torch.nn.Module()
    for name, given in {
        "norm": torch.zeros(4),
        "bias": torch.ones(4),
        "linear": torch.zeros(256, 64),
    }.items():
        model.register_parameter(name, torch.nn.Parameter(given))
    model.w13_weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.uint8), requires_grad=False)
    whole._Engine._draw(Space(experts=experts), model)
    assert (model.norm.tolist(), model.bias.tolist()) == ([1.0] * 4, [0.0] * 4)
    assert float(model.linear.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert model.w13_weight.equal(experts["w13_weight"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_whole_vllm_loads_drawn_weights_and_each_layers_scales_are_found_once(monkeypatch, wrapped):
    made, asked, drawn, generator = [], {}, [], torch.Generator()
    configs = [Space(weight_scale=Space(storage=Space(data=n))) for n in "ab"]
    shared = Space(w13_precision_config=configs[0])
    methods = [None, shared, shared, Space(w13_precision_config=configs[1]), Space()]
    modules = [Space(), *(Space(quant_method=method) for method in methods)]

    def nested(path: str, end: object) -> object:
        for name in reversed(path.split(".")):
            end = Space(**{name: end})
        return end

    class LLM:
        def __init__(self, *, model, **given):
            asked.update(given, config=json.loads(Path(model, "config.json").read_text()))
            loader.DummyModelLoader().load_weights("model", "config")
            worker = nested("model_runner.model", Space(modules=lambda: modules))
            worker = Space(worker=worker) if wrapped else worker
            self.llm_engine = nested("engine_core.engine_core.model_executor.driver_worker", worker)

    def quantized(shape, draw):
        assert draw is generator
        made.append(shape)
        return Space(on=lambda where: Space(weight=f"{where} w", scale=f"{where} s"))

    loader = Space(DummyModelLoader=type("DummyModelLoader", (), {}))
    monkeypatch.setitem(sys.modules, "vllm", Space(LLM=LLM))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.dummy_loader", loader)
    monkeypatch.setattr(torch, "Generator", lambda where: generator)
    monkeypatch.setattr(whole, "quantized", quantized)
    monkeypatch.setattr(
        whole._Engine, "_draw", lambda engine, model: drawn.append((model, {**engine.experts}))
    )
    engine = whole._Engine()
    assert engine.scales == ["a", "b"]
    assert made == [broken.Shape(32, 2 * 2880, 2880), broken.Shape(32, 2880, 2880)]
    experts = {
        f"w{n}_weight{kind}": f"cpu {kind[1:2] or 'w'}" for n in ("13", "2") for kind in ("", "_scale")
    }
    assert drawn == [("model", experts)]
    assert asked["config"] == whole.CONFIG
    assert asked["compilation_config"]["cudagraph_capture_sizes"] == [8, 64, 256]
    named = ("load_format", "moe_backend", "enable_prefix_caching")
    assert [asked[name] for name in named] == ["dummy", "triton", False]


def test_a_whole_vllm_is_looked_at_after_the_start_and_after_each_number_of_requests(monkeypatch):
    happened = []

    class Engine:
        def stage(self, name):
            happened.append((name, os.environ["STALEPROOF_PATCHES"]))

        def serve(self, requests, tokens, **sampling):
            happened.append((requests, tokens, sampling))

    for name in (*whole.ENVIRONMENT, "STALEPROOF_PATCHES"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr(whole, "_Engine", Engine)
    whole.ask()
    sampling = {"temperature": 1.0, "top_p": 0.9}
    rounds = [[(n, 4, sampling), (f"{n} requests sampled", "none")] for n in (8, 64, 256)]
    assert happened == [("started", "none"), *(each for one in rounds for each in one)]
    assert {name: os.environ[name] for name in whole.ENVIRONMENT} == whole.ENVIRONMENT


def test_a_stage_is_asked_before_and_after_zeros_lie_in_free_bytes(monkeypatch):
    """Two layers: behind the first lie free bytes, behind the second those of the KV cache."""
    scales = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    owners = {id(scales[0]): ("free", [1, 0xFF]), id(scales[1]): ("other", [2, 3])}
    memory, told, asked = {}, [], []

    def at_address(address, length):
        return memory.setdefault((address, length), torch.ones(length, dtype=torch.uint8))

    def serve(requests, tokens, **sampling):
        asked.append((requests, tokens, sampling, [int(at.sum()) for at in memory.values()]))
        return [f"answer {len(asked)}"]

    monkeypatch.setattr(whole.real, "behind", lambda data: owners[id(data)])
    monkeypatch.setattr(whole, "at_address", at_address)
    monkeypatch.setattr(whole, "tell", told.append)
    whole._Engine.stage(Space(scales=scales, serve=serve), "started")
    assert asked == [(8, 1, {"temperature": 0.0}, []), (8, 1, {"temperature": 0.0}, [0])]
    assert [*memory] == [(scales[0].data_ptr() + 8, 64)]
    found = {"owners": {"free": 1, "other": 1}, "harmful": [[0, "free", "01ff"]]}
    assert told == [("started", {**found, "answers": ["answer 1"], "over_zeros": ["answer 2"]})]


def test_requests_are_drawn_once_and_answer_with_their_last_tokens_probability(monkeypatch):
    asked = []

    def generate(prompts, sampling, *, use_tqdm):
        asked.append(([p["prompt_token_ids"] for p in prompts], sampling, use_tqdm))
        probabilities = [{7: Space(logprob=-1.0)}, {9: Space(logprob=-2.0)}]
        return [Space(outputs=[Space(token_ids=(7, 9), logprobs=probabilities)])] * 3

    monkeypatch.setitem(sys.modules, "vllm", Space(SamplingParams=dict))
    engine = Space(llm=Space(generate=generate))
    for _ in range(2):
        assert whole._Engine.serve(engine, 3, 2, top_p=0.9) == [([7, 9], -2.0)] * 3
    monkeypatch.undo()
    (prompts, sampling, shown), again = asked
    assert again[0] == prompts
    assert [len(prompt) for prompt in prompts] == [16] * 3
    assert all(2 <= token < 200_000 for prompt in prompts for token in prompt)
    assert sampling == {"max_tokens": 2, "ignore_eos": True, "detokenize": False, "logprobs": 0, "top_p": 0.9}
    assert not shown


@pytest.mark.parametrize(
    ("end", "block", "found"),
    [
        (8, {"size": 64, "state": "inactive"}, ("free", [3] * 32)),
        (8, {"size": 64, "state": "active_allocated"}, ("embedding", [3] * 32)),
        (0, {"size": 64, "state": "active_allocated"}, ("other", [3] * 32)),
        # The block ends where the scales end.
        (8, {"size": 0, "state": "inactive"}, ("end of the segment", [])),
    ],
)
def test_who_is_behind_the_scales(monkeypatch, end, block, found):
    scales = torch.zeros(8, dtype=torch.uint8)
    after = scales.data_ptr() + 8
    before = {"address": scales.data_ptr(), "size": 8, "state": "active_allocated"}
    segments = [{"blocks": [before, {"address": after, **block}]}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    bytes_there = {(after, 32): torch.full((32,), 3, dtype=torch.uint8)}
    monkeypatch.setattr(real, "at_address", lambda *at: bytes_there[at])
    assert real.behind(scales, {scales.data_ptr() + end: "embedding"}) == found


@pytest.mark.parametrize("verdict", [scene.RIGHT, scene.NAN])
def test_marlin_is_judged_with_0xff_behind_its_scales(monkeypatch, verdict):
    a = scene.layer_on("cpu")
    right = scene._experts(a, scene.exact)[0]

    def moe(x, topk_ids, topk_weights, behind):
        hurt = verdict == scene.NAN and bool((behind == 0xFF).all())
        return right * torch.nan if hurt else right

    monkeypatch.setattr(real.scene, "layer_on", lambda device: a)
    monkeypatch.setattr(real.mxfp4, "marlin", lambda *matrices: moe if matrices == (a.w13, a.w2) else None)
    assert real.marlin().verdict == verdict


def test_a_child_answers_once_and_a_scene_says_which_child_ended(monkeypatch):
    ended = iter([(0, ""), (0, ""), (9, "no memory")])
    given = []

    def call(function, *arguments, timeout_s):
        given.append((function, arguments, timeout_s))
        code, said = next(ended)
        return children.Ended([(arguments, "told")] if arguments else ["told"], code, "", said, 1)

    monkeypatch.setattr(children, "call", call)
    assert cases._child(real.cost, "cuda") == "told"
    told = cases._children((real.table, "cpu"), (real.loader, "cuda"))
    assert told == {("cpu",): "told", ("cuda",): "told", "ended": "a child ended with 9: no memory"}
    assert given == [(real.cost, (), 200), (real.table, ("cpu",), 300), (real.loader, ("cuda",), 300)]
    with pytest.raises(MissingError, match="a probe was not asked"):
        cases.answer("a probe", "cuda", {})


def test_the_package_is_asked_without_a_remedy_with_each_edit_alone_and_again(monkeypatch):
    asked = []
    monkeypatch.setattr(cases, "_children", lambda *calls: asked.extend(calls) or {})
    cases._asked("cuda")
    edits = ["layout_pads", "mask_after_load", "mask_load"]
    unedited = ["loader_pads", "nan_to_num", "zero_once", "again"]
    groups = [["none"], *([name] for name in edits), unedited]
    assert asked == [(real.package, "cuda", *group) for group in groups]


@pytest.mark.parametrize("remedy", real.REMEDIES)
def test_the_evidence_says_whether_a_line_of_the_package_was_edited(monkeypatch, remedy):
    monkeypatch.setattr(vllm_matmul_ogs, "version", lambda: "0.22.1")
    what = "one line of it edited" if real.REMEDIES[remedy].edit else "as shipped"
    for probe in (remedy, (remedy, "0xff", 64)):
        assert cases._real(probe).of == f"vLLM 0.22.1 triton_kernels, {what}"
    assert cases._real().of == "vLLM 0.22.1 triton_kernels, as shipped"


def test_a_cost_is_in_milliseconds_with_and_without_the_padding(monkeypatch):
    clock = iter([1.0, 1.002, 5.0, 5.25])
    layer = Space(w13=13, w2=2, x=None, topk_ids=None, topk_weights=None)
    kernel = Space(moe=lambda *given: [each.scale_bytes.numel() for each in given[3:]])
    put = lambda m, matrix, remedy: Space(  # noqa: E731
        scale_bytes=torch.zeros(matrix + 10 * (remedy == "loader_pads"))
    )
    monkeypatch.setattr(real, "MatmulOgs", lambda device: kernel)
    monkeypatch.setattr(scene, "layer_on", lambda device, tokens: layer)
    monkeypatch.setattr(real, "converted", put)
    monkeypatch.setattr(real, "time", Space(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("triton.testing.do_bench", lambda call, return_mode: sum(call()))
    found = real.cost()
    assert found.verdict == "measured"
    assert found.numbers == {
        "none, layer, ms": 15.0,
        "none, loader, ms": pytest.approx(2.0),
        "none, bytes of scales": 15.0,
        "loader_pads, layer, ms": 35.0,
        "loader_pads, loader, ms": pytest.approx(250.0),
        "loader_pads, bytes of scales": 35.0,
    }


@pytest.mark.parametrize("changed", [0, 1, 12])
def test_a_remedy_moves_no_row(changed):
    said = cases._unmoved(lambda *asked: cases.reading(scene.RIGHT, changed=changed))("a remedy", "cpu")
    assert said == (f"0xff behind the scales changes {changed} rows" if changed else None)
