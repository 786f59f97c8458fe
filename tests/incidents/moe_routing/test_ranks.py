"""Ranks agree on the rows of each step, and count what their padding contains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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


@pytest.mark.parametrize(
    ("tokens", "graphs", "step"),
    [(511, True, (512, 512, True)), (513, True, (513, 513, False)), (512, False, (512, 512, False)),
     (0, True, None)],
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
