"""Ranks agree on the rows of each step, and count what their padding contains."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from staleproof import child
from staleproof.child import ChildError
from staleproof.graph import padded_size
from staleproof.incidents.moe_routing import ranks
from staleproof.incidents.moe_routing.origin import Request, Scheduler, Setting
from staleproof.incidents.moe_routing.ranks import Passes

SHORT = Setting(requests=13)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on a busy machine: a second thread would only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("allocator", ["pool", "torch"])
def test_one_rank_pads_to_captured_sizes(device, monkeypatch, allocator):
    load = [Request(600, 3), *(Request(n, 2 + n) for n in range(1, 12))]
    monkeypatch.setattr(ranks, "trace", lambda count: load[:count])
    seen = ranks.serve_trace(replace(SHORT, allocator=allocator), device)
    tokens = [*iter(Scheduler(load).step, 0)]
    sizes = [padded_size(n) if n <= 512 else 0 for n in tokens]
    assert seen.sizes == sizes
    padding = [size - n for size, n in zip(sizes, tokens, strict=True) if size > n]
    counts = seen.counts
    assert (counts["passes"], counts["padded"]) == (len(tokens), len(padding))
    assert counts["padding_rows"] == sum(padding)
    assert counts["live_bad"] == counts["idle"] == 0


def test_bad_numbers_are_counted_and_passes_that_have_some(monkeypatch):
    model = SimpleNamespace(forward=lambda step, tokens: torch.tensor([3, 2, 4]))
    monkeypatch.setattr(ranks, "Model", lambda *given: model)
    counts = ranks.serve_trace(SHORT, "cpu").counts
    passes = counts["passes"]
    assert [counts[name] for name in ("nan_numbers", "inf_numbers")] == [3 * passes, 2 * passes]
    assert [counts[name] for name in ("with_nan", "with_inf", "live_bad")] == [passes] * 3


@pytest.mark.parametrize(
    ("tokens", "graphs", "step"),
    [(511, True, (512, 512, True)), (512, True, (512, 512, True)), (513, True, (513, 513, False)),
     (512, False, (512, 512, False)), (0, True, None)],
)  # fmt: skip
def test_a_step_up_to_the_largest_captured_size_runs_as_a_graph(tokens, graphs, step):
    assert ranks.agree(tokens, replace(SHORT, graphs=graphs), "cpu") == step


def test_ranks_that_ran_other_sizes_are_not_added_up():
    none = dict.fromkeys(ranks.COUNTS, 0)
    assert ranks.add([Passes([8, 4], none | {"padded": n}) for n in (1, 2)]).counts["padded"] == 3
    with pytest.raises(ChildError, match="different sizes"):
        ranks.add([Passes([8, 4], none), Passes([8, 8], none)])


def test_slow_ranks_are_ended():
    with pytest.raises(ChildError, match="no answer within 0 s"):
        ranks.serve_ranks([SHORT], "cpu", timeout_s=0.05)


def test_a_rank_that_fails_says_why():
    with pytest.raises(ChildError, match=r"rank 0 ended with 1: .*nowhere"):
        ranks.serve_ranks([SHORT], "nowhere")


@pytest.mark.parametrize(
    ("device", "count", "happens", "served_on"),
    [
        ("cpu", 1, [], "cpu"),
        ("cpu", 2, [("gloo", "meeting", 1, 2), "end"], "cpu"),
        ("cuda", 1, [("current", "cuda:1")], "cuda:1"),
        ("cuda", 2, [("current", "cuda:1"), ("nccl", "meeting", 1, 2), "end"], "cuda:1"),
    ],
)
def test_a_rank_meets_the_others_on_its_own_device(monkeypatch, device, count, happens, served_on):
    found, served = [], []

    def met(backend, *, init_method, rank, world_size):
        found.append((backend, init_method, rank, world_size))

    def serve(setting, where, rank):
        served.append((setting, where, rank))
        return setting.requests

    for name, stub in (
        ("init_process_group", met),
        ("is_initialized", lambda: any(len(one) == 4 for one in found)),
        ("destroy_process_group", lambda: found.append("end")),
    ):
        monkeypatch.setattr(ranks.dist, name, stub)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(("current", device)))
    monkeypatch.setattr(ranks, "serve_trace", serve)
    monkeypatch.setattr(ranks, "_multiply_in_float32", lambda: None)
    settings = [replace(SHORT, ranks=count, requests=n) for n in (5, 6)]
    assert ranks._serve_as_rank(1, "meeting", settings, device) == [5, 6]
    assert (found, served) == (happens, [(one, served_on, 1) for one in settings])


def test_rank_on_a_cpu_multiplies_bfloat16_about_as_fast_as_float32(monkeypatch):
    # A hundred times as long without AVX-512, if it is left to torch.
    monkeypatch.syspath_prepend(Path(__file__).parent)
    multiply = importlib.import_module("multiply")
    env = {"TRITON_INTERPRET": "1", "ATEN_CPU_CAPABILITY": "avx2"}
    times, right = child.call(multiply.products, timeout_s=60, env=env).answer()
    assert times < 20
    assert all(right)
