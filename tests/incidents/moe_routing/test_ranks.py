"""Ranks agree on the rows of each step, and count what their padding contains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from staleproof.cases.children import ChildError
from staleproof.incidents.moe_routing import origin, ranks
from staleproof.incidents.moe_routing.origin import Request, Scheduler, Setting
from staleproof.incidents.moe_routing.ranks import Counts

SHORT = Setting(requests=24)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices on a busy machine: a second thread would only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def steps(requests: list[Request]) -> list[int]:
    scheduler = Scheduler(requests)
    return [*iter(scheduler.step, 0)]


@pytest.mark.parametrize("allocator", ["pool", "torch"])
def test_one_rank_pads_to_captured_sizes(device: str, allocator: str) -> None:
    setting = replace(SHORT, allocator=allocator)
    seen = ranks.serve_trace(setting, device)
    tokens = steps(origin.trace(SHORT.requests))
    sizes = [origin.replayed_size(n) or 0 for n in tokens]
    assert seen.sizes == sizes
    padding = [size - n for size, n in zip(sizes, tokens, strict=True) if size > n]
    assert (seen.passes, seen.padded) == (len(tokens), len(padding))
    assert seen.padding_rows == sum(padding)
    assert seen.mean_padding == sum(padding) / len(padding)
    assert seen.live_bad == seen.idle == 0


@pytest.fixture(scope="module")
def two_ranks() -> list[Counts]:
    settings = [replace(SHORT, ranks=2, expert_parallel=dep) for dep in (False, True)]
    return ranks.serve_ranks(settings, "cpu")


def test_two_ranks_run_the_size_that_the_larger_needs(two_ranks: list[Counts]) -> None:
    by_rank = [steps(origin.trace(SHORT.requests)[rank::2]) for rank in range(2)]
    length = max(map(len, by_rank))
    for tokens in by_rank:
        tokens += [0] * (length - len(tokens))
    sizes = []
    for pair in zip(*by_rank, strict=True):
        wanted = [origin.replayed_size(max(n, 1)) for n in pair]
        sizes.append(0 if None in wanted else max(wanted))
    assert 0 in sizes
    pads = [
        size - n
        for size, pair in zip(sizes, zip(*by_rank, strict=True), strict=True)
        for n in pair
        if size > n
    ]
    for seen in two_ranks:
        assert seen.sizes == sizes
        assert (seen.passes, seen.padded, seen.padding_rows) == (2 * length, len(pads), sum(pads))
        # An idle rank pads its whole batch; without a graph it runs one dummy row.
        assert seen.idle == sum(tokens.count(0) for tokens in by_rank) > 0


def test_busy_ranks_have_nan_in_padding_and_idle_ones_zeros(two_ranks: list[Counts]) -> None:
    for seen in two_ranks:
        busy = seen.padded - seen.idle
        assert 0.9 * busy < seen.with_nan <= busy
        # What one rank's padding holds does not reach another rank's requests.
        assert seen.live_bad == 0


def test_ranks_that_ran_other_sizes_are_not_added_up() -> None:
    assert ranks.add([Counts(padded=1, sizes=[8, 4]), Counts(padded=2, sizes=[8, 4])]).padded == 3
    with pytest.raises(ChildError, match="different sizes"):
        ranks.add([Counts(sizes=[8, 4]), Counts(sizes=[8, 8])])


def test_slow_ranks_are_ended() -> None:
    with pytest.raises(ChildError, match="no answer within 0 s"):
        ranks.serve_ranks([SHORT], "cpu", timeout_s=0.05)


def test_a_rank_that_fails_says_why() -> None:
    with pytest.raises(ChildError, match=r"rank 0 ended with 1 and said: .*nowhere"):
        ranks.serve_ranks([SHORT], "nowhere")


def test_settings_of_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"settings: expected 1 ranks each, got \[1, 2\]"):
        ranks.serve_ranks([SHORT, replace(SHORT, ranks=2)], "cpu")
