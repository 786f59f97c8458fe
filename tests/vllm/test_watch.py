"""The watch: what it counts, what it logs, what it does with bad settings, and that nothing waits for it."""

from __future__ import annotations

import logging
import types

import pytest
import torch

from staleproof.evidence.repeats import count_repeats
from staleproof.vllm import hooks, plugin, standing, watch_hooks
from staleproof.vllm.sources import PatchError
from staleproof.vllm.watch import Settings, Watch, settings
from staleproof.vllm.watch_hooks import Hooks

NAN = torch.nan
ON = {"STALEPROOF_WATCH": "1"}


def counted(watch: Watch) -> dict[tuple[str, str], tuple[int, int]]:
    watch.copy()
    return dict(watch.reading().bad)


def rows_with(*bad: int, rows: int = 8, columns: int = 16) -> torch.Tensor:
    x = torch.ones(rows, columns)
    x[list(bad)] = NAN
    return x


def test_padding_and_live_rows_are_counted_apart_over_steps():
    watch = Watch(Settings(), "cpu")
    for live in (3, 8, 3):
        watch.begin_step(live)
        watch.observe("attention", "layers.0", rows_with(0, 3, 7))
        watch.observe("experts", "layers.0", rows_with())
    assert counted(watch) == {("attention", "layers.0"): (4, 5), ("experts", "layers.0"): (0, 0)}


def test_warm_up_is_forgotten():
    watch = Watch(Settings(), "cpu")
    watch.begin_step(8)
    watch.observe("attention", "layers.0", rows_with(1, 2))
    watch.reset()
    watch.begin_step(8)
    watch.observe("attention", "layers.0", rows_with(5))
    assert counted(watch) == {("attention", "layers.0"): (0, 1)}
    assert watch.latest.steps == 1


def test_only_chosen_stages_and_layers_are_counted():
    watch = Watch(Settings(stages=("attention",), layers=4), "cpu")
    watch.begin_step(8)
    for number in range(8):
        watch.observe("attention", f"layers.{number}", rows_with(0))
        watch.observe("router", f"layers.{number}", rows_with(0))
    assert [layer for _, layer in counted(watch)] == ["layers.0", "layers.4"]


def test_rows_that_name_an_expert_twice():
    watch = Watch(Settings(), "cpu")
    watch.begin_step(2)
    watch.observe_ids("layers.1", torch.tensor([[0, 1], [4, 4], [5, 5], [6, 7]]))
    watch.copy()
    assert watch.reading().repeats == {"layers.1": (1, 1)}


@pytest.mark.parametrize("top_k", [1, 3, 8, 32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_repeats_are_those_of_a_plain_count(top_k, dtype):
    draw = torch.Generator().manual_seed(top_k)
    ids = torch.randint(-1, 40, (67, top_k), generator=draw).to(dtype)
    live = torch.arange(67) < 40
    counts = torch.zeros(2, dtype=torch.int64)
    count_repeats(ids, live, counts)
    twice = [len({i for i in row if i >= 0}) < sum(i >= 0 for i in row) for row in ids.tolist()]
    assert counts.tolist() == [sum(twice[40:]), sum(twice[:40])]


def test_the_first_live_row_is_logged_once_with_its_request(caplog):
    watch = Watch(Settings(), "cpu")
    with caplog.at_level(logging.WARNING, hooks.logger.name):
        for bad in ((6,), (2,), (0, 1)):
            watch.begin_step(3)
            watch.name_requests(["a", "b", "c"])
            watch.observe("attention", "layers.1", rows_with(*bad))
            counted(watch)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "staleproof: first live row with NaN or Inf: step 2, attention of layers.1, row 2, request c"
    ]


def test_a_copy_that_has_not_arrived_is_not_read_and_not_waited_for():
    watch = Watch(Settings(), "cpu")
    watch._arrived = types.SimpleNamespace(query=lambda: False, record=lambda: None)
    watch.begin_step(8)
    watch.observe("attention", "layers.0", rows_with(1))
    watch.copy()
    assert watch.reading().bad == {}
    watch._arrived.query = lambda: True
    watch.begin_step(8)
    assert watch.latest.bad == {("attention", "layers.0"): (0, 1)}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"STALEPROOF_WATCH_STAGES": "attention,logits"}, "STAGES: expected some of .*, got logits"),
        ({"STALEPROOF_WATCH_STAGES": ","}, "STAGES: expected some of attention, router, experts, got none"),
        ({"STALEPROOF_WATCH_LAYERS": "0"}, "LAYERS: expected 1 to .*, got '0'"),
        ({"STALEPROOF_WATCH_PORT": "http"}, "PORT: expected 1 to 65535, got 'http'"),
    ],
)
def test_bad_settings_are_one_line_and_the_server_starts(monkeypatch, caplog, variables, said):
    with pytest.raises(PatchError, match=said):
        settings({**ON, **variables})
    for name, value in {**ON, **variables}.items():
        monkeypatch.setenv(name, value)
    hooks._warned.clear()
    with caplog.at_level(logging.WARNING, hooks.logger.name):
        watch_hooks.install()
    assert len(caplog.records) == 1
    assert not watch_hooks.installed


def test_it_is_off_by_default(monkeypatch):
    monkeypatch.delenv("STALEPROOF_WATCH", raising=False)
    watch_hooks.install()
    assert not watch_hooks.installed


def scheduled(*tokens: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(total_num_scheduled_tokens=sum(tokens), num_scheduled_tokens=tokens)


def test_the_hooks_name_layer_stage_and_rows():
    on = Hooks(Settings())
    worker = types.SimpleNamespace(device="cpu")
    assert on.loaded("model", (worker,), {}) == "model"
    runner = types.SimpleNamespace(input_batch=types.SimpleNamespace(req_ids=["a", "b"]))
    on.step((runner, scheduled(1, 1)), {})
    on.batch((runner,), {"scheduler_output": scheduled(1, 1)})
    layer = types.SimpleNamespace(layer_name="model.layers.3.self_attn.attn")
    result = rows_with(5).view(8, 2, 8), None
    assert on.mla(result, (None, None, None, None, layer), {}) is result
    moe = types.SimpleNamespace(layer_name="model.layers.3.mlp.experts")
    on.enter_experts((moe,), {})
    on.router((rows_with(0, columns=2), torch.tensor([[1, 1]] * 8)), (None,), {})
    on.experts((None, rows_with(0, 7)), (moe,), {})
    assert on.watch is not None
    assert counted(on.watch) == {
        ("attention", "layers.3"): (1, 0),
        ("router", "layers.3"): (0, 1),
        ("experts", "layers.3"): (1, 1),
    }
    assert on.watch.latest.repeats == {"layers.3": (6, 2)}


def test_a_dummy_run_is_no_step():
    on = Hooks(Settings())
    on.loaded(None, (types.SimpleNamespace(device="cpu"),), {})
    on.step((None, scheduled(4)), {"dummy_run": True})
    assert on.watch is not None
    assert on.watch.steps == 0


def test_the_engine_survives_an_exception_in_the_watch(tmp_path, monkeypatch, caplog):
    """vLLM's function runs, the watch steps back, one line says why."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/toy.py").write_text("def step(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fails(result, args, kwargs):
        raise RuntimeError("no memory for counters")

    hooks.wrap("watch", hooks.Target("vllm.toy", "step", ("x",), after=fails))
    try:
        from vllm.toy import step

        with caplog.at_level(logging.WARNING, hooks.logger.name):
            assert [step(1), step(2)] == [2, 3]
        assert standing.stepped_back["watch"].startswith("finishing a call of step failed")
        assert sum("no memory for counters" in record.getMessage() for record in caplog.records) == 1
    finally:
        watch_hooks.remove()


@pytest.mark.parametrize("patches", ["all", "none", "no_such_patch"])
def test_the_watch_comes_after_the_patches_whatever_they_say(monkeypatch, patches):
    """A hook that is added later sees what an earlier one returns."""
    order = []
    monkeypatch.setenv(plugin.VARIABLE, patches)
    monkeypatch.setattr(plugin, "installed", lambda: ("0.22.1", None))
    monkeypatch.setattr(plugin, "decisions", lambda *_: order.append("patches") or [])
    monkeypatch.setattr(plugin.process, "watch", lambda *_: None)
    monkeypatch.setattr(watch_hooks, "install", lambda: order.append("watch"))
    plugin.register()
    assert order == (["patches", "watch"] if patches == "all" else ["watch"])
