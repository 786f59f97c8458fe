"""vLLM's own scheduler, executed from its source files: the fault, the patch and the watch.

Releases that are not in the cache of ``tests/vllm/environment.py`` are skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from staleproof.incidents.published_unwritten import real
from staleproof.incidents.published_unwritten.cases import SERVER, Server, sizes
from staleproof.incidents.published_unwritten.scene import WRITTEN, Arrival, burst, one_victim, serve
from staleproof.vllm import hooks, standing, watch_published
from staleproof.vllm.patches import published_unwritten
from staleproof.vllm.plugin import patches
from staleproof.vllm.releases import table

NEWEST = "0.33.0"
# One of the rounds in which it shows, with both schedulers.
BAD_SEED = 14
PATCH = patches()["unpublish"]


@contextlib.contextmanager
def loaded(version: str, *, patched: bool = False) -> Iterator[None]:
    if real.package(version) is None:
        pytest.skip(f"the source of vLLM {version} is not here")
    with Server(version, patched=patched).loaded():
        yield


@contextlib.contextmanager
def watching() -> Iterator[watch_published.Published]:
    watch = watch_published.Published()
    hooks.wrap("watch", *watch.targets())
    try:
        yield watch
    finally:
        hooks.unwrap("watch")
        standing.forget("watch")


@pytest.mark.parametrize("version", table())
def test_every_release_has_the_fault_and_loses_it_with_the_patch(version):
    """One of the 64 sizes: a pool that the victim's chunk fills to the last block."""
    assert table()[version]["unpublish"]["needed"]
    assert PATCH.applies_to(version)
    runs = []
    for patched in (False, True, False):
        with loaded(version, patched=patched):
            engine = real.Real(24)
            runs.append(serve(engine, one_victim()))
            assert engine.preempted
        assert not standing.stepped_back
    off, on, again = runs
    assert len(off.reads) == len(again.reads) == 32
    assert (on.verdict, on.reads) == (WRITTEN, [])
    # What was written stays a hit: 32 tokens less, which nobody wrote.
    assert off.tokens - on.tokens == 32


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_watch_names_both_requests_and_counts_as_the_truth_does(asynchronous, caplog):
    with loaded(NEWEST), watching() as watch:
        blocks, load = burst(BAD_SEED)
        reads = serve(real.Real(blocks, asynchronous=asynchronous, **SERVER), load).reads
    assert reads
    assert watch.blocks.hits == len({(read.step, read.reader, read.block) for read in reads})
    assert watch.blocks.published
    (line,) = [r.getMessage() for r in caplog.records if "unwritten" in r.getMessage()]
    assert "victim reads block" in line
    assert "published by itself and written by nobody" in line
    counts = {family.name: family.samples[0].value for family in watch.collect()}
    assert counts == {
        "staleproof_published_unwritten_blocks": watch.blocks.published,
        "staleproof_unwritten_hits": watch.blocks.hits,
    }


def test_beside_a_connector_the_patch_steps_back_in_one_line(caplog):
    try:
        for _ in range(2):
            published_unwritten._take_back((SimpleNamespace(connector=object()), None), {})
        assert [*standing.stepped_back] == ["unpublish"]
    finally:
        standing.forget("unpublish")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "a KV connector is configured, vLLM's own code runs" in line


def test_a_patch_that_forgets_a_block_is_not_called_fixed(monkeypatch):
    with loaded(NEWEST):
        pass
    monkeypatch.setattr(published_unwritten, "_unwritten", lambda *args: set())
    assert sizes(Server(NEWEST, patched=True), "cpu").verdict != WRITTEN


# --- Property: below a hit, every slot holds the prefix. Pools are drawn exactly full, or nearly: uniform
# draws miss the fault.


EDGES = [31, 32, 47, 48]


class Manager(RuleBasedStateMachine):
    """The real scheduler and manager under adds, steps and aborts; the worker writes what each step plans."""

    version, patched = NEWEST, False

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(loaded(self.version, patched=self.patched))
        self.names = 0

    @initialize(
        chunk=st.sampled_from([32, 48, 64]),
        chunks=st.integers(3, 4),
        more=st.integers(3, 4),
        lead=st.integers(1, 2),
        tokens=st.sampled_from(EDGES),
        asynchronous=st.booleans(),
    )
    def start(self, chunk: int, chunks: int, more: int, lead: int, tokens: int, asynchronous: bool) -> None:
        """A pool for so many chunks, a few blocks more, and the null block; a chat that ends a block soon."""
        blocks = chunk * chunks // real.BLOCK + more + 1
        self.engine = real.Real(blocks, threshold=chunk, budget=256, asynchronous=asynchronous)
        self.add("small", 0, 9, 30, 0)
        self.add("victim", 1, chunk * chunks + 8, 2, 10)
        self.step(lead)
        self.add("chat", 2, tokens, 6, 0)

    def add(self, kind: str, family: int, tokens: int, reply: int, priority: int) -> None:
        room = (len(self.engine.scheduler.kv_cache_manager.block_pool.blocks) - 2) * real.BLOCK
        prompt = [100 * family + i % 90 for i in range(min(tokens, room - reply))]
        self.engine.add(Arrival(f"{kind}{self.names}", prompt, reply, priority))
        self.names += 1

    @rule(
        tokens=st.sampled_from([14, 15, 16, 30, 31, 32]), reply=st.integers(2, 12), family=st.integers(2, 4)
    )
    def chat(self, tokens: int, reply: int, family: int) -> None:
        self.add("chat", family, tokens, reply, 0)

    @rule(tokens=st.integers(60, 200), priority=st.sampled_from([5, 10]))
    def same_document(self, tokens: int, priority: int) -> None:
        self.add("document", 1, tokens, 2, priority)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.running():
                self.engine.step()

    @rule(steps=st.integers(1, 6))
    def serve(self, steps: int) -> None:
        self.step(steps)

    @rule(last=st.booleans())
    def abort(self, last: bool) -> None:
        names = sorted(self.engine.running())
        if names:
            from importlib import import_module

            status = import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
            self.engine.scheduler.finish_requests(names[-1 if last else 0], status)

    @invariant()
    def every_slot_below_a_hit_holds_its_prefix(self) -> None:
        if hasattr(self, "engine"):
            assert not self.engine.memory.reads, self.engine.memory.reads[:3]

    def teardown(self) -> None:
        """Let what is there come to its end: a withdrawn request resumes many steps later."""
        with self.stack:
            if hasattr(self, "engine"):
                self.step(40)
            self.every_slot_below_a_hit_holds_its_prefix()


FEW = settings(
    max_examples=40,
    stateful_step_count=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)


def test_a_search_finds_the_fault_by_itself():
    with pytest.raises(AssertionError, match="Read"):
        run_state_machine_as_test(Manager, settings=FEW)


def test_a_search_finds_nothing_with_the_patch():
    run_state_machine_as_test(type("Patched", (Manager,), {"patched": True}), settings=FEW)
