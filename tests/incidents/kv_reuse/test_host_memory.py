"""The list of new ids: what it costs, and who sees it."""

from __future__ import annotations

from staleproof.incidents.kv_reuse.host_memory import host_memory


def test_the_list_costs_a_reference_a_block():
    blocks = 160_000
    kept = host_memory(blocks, taken=False, frozen=True)
    assert kept.kept == blocks
    assert 8 <= kept.list_bytes / blocks < 10
    assert abs(kept.traced_bytes / kept.list_bytes - 1) < 0.05
    assert kept.tracemalloc_sees
    assert not kept.gc_sees
    taken = host_memory(blocks, taken=True, frozen=True)
    assert (taken.kept, taken.list_bytes < 200, taken.traced_bytes < 10_000) == (0, True, True)
