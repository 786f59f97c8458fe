"""A load on a pool: what a remedy makes of it, whose bits a request read, and where it first goes bad."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.kv_reuse import broken, scene
from staleproof.incidents.kv_reuse.hybrid import Zeroing, serve
from staleproof.incidents.kv_reuse.scene import Scene, ZeroNewBlocks, brief, judge, tenancies, trace_of


def test_the_log_suspects_every_corrupted_request_and_none_once_all_is_zeroed(device):
    scene_ = Scene(device)
    seen = judge(scene_)
    log = tenancies(scene_, seen.served)
    assert seen.corrupted
    for request in seen.corrupted:
        suspects = log.explain(request)
        assert suspects, request
        assert suspects[0].kind == "stale"
    direct = [s for r in seen.corrupted for s in log.explain(r) if not s.via]
    assert {"fp32"} <= {s.written_as for s in direct}
    assert {s.read_as for s in direct} == {"e4m3"}
    zeroed = tenancies(scene_, judge(scene_, ZeroNewBlocks).served)
    assert all(zeroed.explain(request) == [] for request in trace_of(scene_).finished)
    wiped = judge(scene_, partial(broken.Fill, pick=broken.freed))
    log = tenancies(scene_, wiped.served)
    for request in wiped.corrupted:
        assert {s.kind for s in log.explain(request)} == {"wiped"}
    # Without prefix caching nobody needs the blocks of a request that has ended.
    alone = brief(device)
    served = judge(alone, partial(broken.Fill, pick=broken.freed)).served
    assert any(served.zeroed)
    log = tenancies(alone, served)
    assert all(log.explain(request) == [] for request in trace_of(alone).finished)


def test_the_first_attention_layer_heals_and_what_was_written_back_does_not(device):
    seen = scene.history(Scene(device, prefix_caching=False))
    assert seen.stages == ["0.mamba", "0.attention", "1.mamba", "1.attention"]
    assert seen.first_bad is not None
    assert seen.first_bad[1] == "0.attention"
    assert all(row[0] for row in seen.finite)
    assert seen.finite[-1] == [True, True, False, False]
    with pytest.raises(ValueError, match="scene: expected one in which a corrupted request"):
        scene.history(Scene(device, "masked_loads", prefix_caching=False, steps=120))


@pytest.mark.parametrize(
    ("first", "second", "shown"), [("100", "101", 8), ("010", "100", 7), ("111", "001", 8)]
)
def test_the_history_is_of_a_request_that_is_finite_again_in_its_last_step(monkeypatch, first, second, shown):
    columns = [[flag == "1" for flag in flags] for flags in (first, second)]
    flags = torch.tensor(columns).T
    trace = SimpleNamespace(finished=[7, 9, 8], owners=torch.tensor([[7, 8]] * 3))
    served = SimpleNamespace(finite={"0.mamba": torch.ones_like(flags), "0.attention": flags})
    monkeypatch.setattr(scene, "trace_of", lambda asked: trace)
    monkeypatch.setattr(scene, "judge", lambda asked: SimpleNamespace(corrupted={7, 8}))
    monkeypatch.setattr(scene, "serve", lambda *given, watch: served)
    seen = scene.history(SimpleNamespace(model=lambda: None, buffers=lambda: None))
    assert (seen.request, seen.steps, seen.stages) == (shown, [0, 1, 2], ["0.mamba", "0.attention"])
    assert seen.finite == [[True, flag] for flag in columns[shown - 7]]


def test_the_hosts_lead_is_a_queue_on_the_cpu():
    scene_ = brief("cpu")
    order = []

    class Watched(Zeroing):
        def submit(self, step):
            order.append("submit")
            return None

        def run(self, ticket):
            order.append("run")
            return ()

    serve(trace_of(scene_), scene_.model(), scene_.buffers(), Watched(), ahead=2)
    assert order[:5] == ["submit", "submit", "submit", "run", "submit"]
    assert order[-2:] == ["run", "run"]
    with pytest.raises(ValueError, match="ahead: expected at least 0 steps, got -1"):
        serve(trace_of(scene_), scene_.model(), scene_.buffers(), ahead=-1)
