"""Poison and contain by themselves; a whole vLLM has both in ``tests/whole/test_canary.py``."""

from __future__ import annotations

import logging
from types import SimpleNamespace as Space

import environment
import numpy as np
import pytest
import torch

from staleproof.vllm import contain, kv_memory, live, plugin, poison, process, releases
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Sources, numbers
from staleproof.vllm.standing import registry

NAN = float("nan")
FIRST = poison.PATCH.versions[0][0]
KNOWN = [version for version in releases.table() if numbers(version) >= numbers(FIRST)]


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch):
    monkeypatch.setattr(poison, "settings", poison.Settings())
    yield
    for module in plugin.ON_REQUEST:
        registry.forget(module.NAME)


@pytest.mark.parametrize("patch", [contain.PATCH, poison.PATCH], ids=lambda patch: patch.name)
@pytest.mark.parametrize("version", [v for v in environment.also(*environment.READ) if v in KNOWN])
def test_release_has_every_hooked_function(version: str, patch: Patch):
    sources = Sources(environment.sources(version) / "vllm")
    assert patch.is_needed(sources).needed
    patch.check(version, sources)


# --- At the start.

POISON, VALUE, CONTAIN = poison.VARIABLE, poison.VALUE, contain.VARIABLE
EXPECTED = f"{POISON}: expected kv or keys, and perhaps ,over-zeroing, got "
BAD = [
    ({POISON: "weights"}, f"{EXPECTED}'weights'"),
    ({POISON: "over-zeroing"}, f"{EXPECTED}'over-zeroing'"),
    ({POISON: "kv", VALUE: "x"}, f"{VALUE}: expected a number or nan, got 'x'"),
    ({POISON: "kv"}, "vllm/v1/worker/gpu_model_runner.py is not there"),
    ({CONTAIN: "yes"}, f"{CONTAIN}: expected 1 or 0, got 'yes'"),
    ({CONTAIN: "1", contain.RAISES: "1"}, f"{contain.RAISES}=1 stops the engine at the first NaN"),
    ({CONTAIN: "1"}, "vllm/v1/core/sched/scheduler.py is not there"),
]


@pytest.mark.parametrize(("given", "why"), BAD)
def test_what_cannot_be_is_one_line_and_required_stops_vllm(installed, monkeypatch, caplog, given, why):
    name = poison.NAME if POISON in given else contain.NAME
    installed("0.33.0", {})
    for variable, value in {"STALEPROOF_PATCHES": "none", **given}.items():
        monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING, "vllm.staleproof"):
        plugin.register()
    assert [line for line in caplog.messages if "refused" in line] == [
        f"staleproof: {name} is refused: {why}"
    ]
    assert live.health()["patches"][name][0] == process.REFUSED
    monkeypatch.setenv("STALEPROOF_REQUIRE", name)
    with pytest.raises(process.RequirementError, match=f"{name} is refused"):
        plugin.register()


def test_required_and_not_asked_for_stops_vllm(installed, monkeypatch):
    installed("0.33.0", {})
    monkeypatch.setenv("STALEPROOF_PATCHES", "none")
    monkeypatch.setenv("STALEPROOF_REQUIRE", "contain")
    with pytest.raises(process.RequirementError, match="contain is off"):
        plugin.register()


# --- Memory.


def runner(*caches: torch.Tensor, blocks: int, dtype: str = "auto", device: str = "cuda") -> Space:
    """A model runner with one group a cache."""
    spec = type("FullAttentionSpec", (), {"block_size": 4})()
    groups = [Space(kv_cache_spec=spec, layer_names=[f"l{at}"]) for at in range(len(caches))]
    layers = {f"l{at}": Space(kv_cache=cache) for at, cache in enumerate(caches)}
    config = Space(
        compilation_config=Space(static_forward_context=layers), cache_config=Space(cache_dtype=dtype)
    )
    held = Space(kv_cache_groups=groups, num_blocks=blocks)
    return Space(vllm_config=config, kv_cache_config=held, device=Space(type=device))


# Shape of a cache of 6 blocks, how the numbers of block 4 are found, and of its keys.
LAYOUTS = [
    ((2, 6, 4, 2, 8), lambda x: x[:, 4], lambda x: x[0, 4]),
    ((6, 2, 4, 2, 8), lambda x: x[4], lambda x: x[4, 0]),
    ((12, 2, 2, 2, 8), lambda x: x[8:10], lambda x: x[8:10, 0]),
    ((6, 4, 9), lambda x: x[4], None),
    ((6, 2, 4, 16), lambda x: x[4], lambda x: x[4].view(2, 8, 8)[:, :4]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("shape", "block", "keys"), LAYOUTS, ids=[str(shape) for shape, _, _ in LAYOUTS])
def test_one_block_is_filled_in_its_own_group(shape, block, keys, dtype):
    for part, only in ((block, False), (keys, True)):
        if part is not None:
            cache, other = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
            kv_memory.fill(runner(cache, other, blocks=6), [[4], []], NAN, keys=only)
            bad = cache == 255 if dtype == torch.uint8 else cache.isnan()
            assert part(bad).all()
            assert bad.sum() == part(bad).numel()
            assert (other == 1).all()


@pytest.mark.parametrize(("shape", "keys"), [((7, 7, 4), False), ((6, 4, 9), True)])
def test_cache_of_an_unknown_layout_is_refused(shape, keys, caplog):
    poison.settings.keys = keys
    poison._begin(None, (runner(torch.ones(shape), blocks=6),), {})
    assert "is of no known layout" in registry.reason("poison")
    # Contain has to zero whole blocks.
    contain._allocated(None, (runner(torch.ones(shape), blocks=6, device="cpu"),), {})
    assert ("is of no known layout" in (registry.reason("contain") or "")) is not keys


@pytest.mark.parametrize(
    ("dtype", "value", "why"), [("int8_per_token_head", NAN, "no NaN"), ("fp8_ds_mla", 3.0, "mixes")]
)
def test_cache_format_without_the_value_refuses_poison(dtype, value, why):
    poison.settings.value = value
    poison._begin(None, (runner(torch.ones(6, 4, 9), blocks=6, dtype=dtype),), {})
    assert why in registry.reason("poison")


# --- Poison.


def plan(new=(), more=(), resumed=(), **fields):
    """A scheduler's plan; a request is (name, blocks of its one group, computed tokens)."""
    cached = [*more, *resumed]
    return Space(
        scheduled_new_reqs=[Space(req_id=n, block_ids=(ids,), num_computed_tokens=c) for n, ids, c in new],
        scheduled_cached_reqs=Space(
            req_ids=[name for name, *_ in cached],
            new_block_ids=[(ids,) for _, ids, _ in cached],
            num_computed_tokens=[computed for *_, computed in cached],
            resumed_req_ids={name for name, *_ in resumed},
        ),
        total_num_scheduled_tokens=1,
        **fields,
    )


def kind(pool=None, **tables):
    spec = type("FullAttentionSpec", (), {})()
    blocks = {name: [Space(block_id=one, is_null=one == 0) for one in ids] for name, ids in tables.items()}
    return Space(
        kv_cache_spec=spec,
        kv_cache_group_id=0,
        block_size=4,
        block_pool=pool or Space(),
        req_to_blocks=blocks,
    )


def scheduler(manager, **fields):
    """A scheduler as far as it is looked at."""
    coordinator = Space(single_type_managers=[manager])
    held = Space(coordinator=coordinator, block_pool=manager.block_pool, evict_blocks=lambda ids: None)
    return Space(kv_cache_manager=held, connector=None, **fields)


@pytest.mark.parametrize(("connector", "filled"), [(None, [3, 5, 6, 8, 9]), ("nixl", [3, 5, 6, 8])])
def test_blocks_that_nobody_wrote_are_filled_and_no_others(connector, filled):
    manager = kind()
    one = scheduler(manager)
    one.connector = connector
    poison._record([Space(block_id=77)], (manager,), {})  # of a schedule that was never finished
    poison._clear((one,), {})
    # Block 4 is the copy of a partial hit; 9 was left by a request that was taken out of the plan.
    poison._record([Space(block_id=block) for block in (3, 4, 5, 6, 8, 9)], (manager,), {})
    given = plan(
        new=[("a", [1, 4, 5], 6), ("b", [2, 3], 4)], more=[("c", [6], 99)], resumed=[("d", [7, 8], 4)]
    )
    assert poison._plan(given, (one,), {}) is given
    assert getattr(given, poison.NEW) == [filled]


@pytest.mark.parametrize(("over", "bad"), [(False, [3]), (True, [2, 3])])
def test_blocks_that_vllm_zeroes_are_filled_only_if_asked(over, bad):
    cache = torch.zeros(6, 4, 9)
    poison.settings.over_zeroing = over
    given = Space(new_block_ids_to_zero=[2], **{poison.NEW: [[2, 3]]})
    poison._fill(None, (runner(cache, blocks=6), given), {})
    assert cache.isnan().flatten(1).any(1).nonzero().flatten().tolist() == bad
    assert poison.settings.blocks == len(bad)


# --- Contain.

ROWS = torch.tensor([[0.0, 1.0], [NAN, 1.0], [float("-inf"), 0.0], [1.0, float("inf")]])
NAMES = ["a", "b", "c", "d"]


class Later:
    """An output that is read later."""

    def __init__(self):
        self.output = Space(req_ids=NAMES)

    def get_output(self):
        return self.output


@pytest.mark.parametrize("result", [Space(req_ids=NAMES), Later()], ids=["now", "later"])
@pytest.mark.parametrize(("drafts", "bad"), [(None, ["b", "d"]), ([1, 0, 0], ["a", "c"])])
def test_flags_of_a_step_reach_its_output(result, drafts, bad, device):
    rows, worker = ROWS.to(device), Space(input_batch=Space(req_ids=NAMES[: len(drafts) if drafts else 4]))
    meta = drafts and Space(num_draft_tokens=drafts)
    contain._look((worker, rows, meta), {})
    got = contain._attach(result, (worker,), {})
    output = got.get_output() if isinstance(got, Later) else got
    assert getattr(output, contain.BAD)[0] == bad
    # The next step has no flags of this one.
    assert contain._attach(Space(), (worker,), {}) == Space()


@pytest.mark.gpu
def test_flags_do_not_wait_for_what_runs_behind_the_sampler():
    worker = Space(input_batch=Space(req_ids=NAMES))
    contain._look((worker, ROWS.to("cuda"), None), {})
    # The step's tokens have come; behind them a draft model runs, for example.
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    output = contain._attach(Later(), (worker,), {}).get_output()
    assert not torch.cuda.current_stream().query()
    assert getattr(output, contain.BAD)[0] == ["b", "d"]


@pytest.mark.gpu
def test_flags_wait_for_their_own_kernel():
    worker = Space(input_batch=Space(req_ids=NAMES))
    # The memory of flags that were read is used again.
    for rows, bad in ((ROWS, ["b", "d"]), (torch.zeros(4, 2), []), (ROWS, ["b", "d"])):
        logits = rows.to("cuda")
        torch.cuda._sleep(10**8)
        contain._look((worker, logits, None), {})
        output = contain._attach(Later(), (worker,), {}).get_output()
        assert getattr(output, contain.BAD, ([], ""))[0] == bad


def test_flags_of_the_second_runner_and_a_sampler_that_leaves_none(device):
    rows, worker = ROWS.to(device), Space()
    batch = Space(req_ids=["a", "b"], cu_num_logits_np=np.array([0, 3, 4]))
    contain._look_v2((None, rows, batch), {})
    contain._sampled_v2(None, (worker, None, batch), {})
    assert getattr(contain._attach(Space(), (worker,), {}), contain.BAD)[0] == ["a", "b"]
    contain._sampled_v2(None, (worker, None, batch), {})
    assert "the sampler is not vLLM's own" in registry.reason("contain")


def test_connector_and_unknown_scheduler_refuse_contain():
    class Scheduler:
        __module__ = "vllm.v1.core.sched.scheduler"
        connector = "nixl"
        kv_cache_manager = Space(block_pool=Space(blocks=[0, 1, 2]))

    contain._begin(None, (Scheduler(),), {})
    assert registry.reason("contain").startswith("a KV connector is configured")
    registry.forget("contain")
    contain._begin(None, (Space(),), {})
    assert "not vLLM's own" in registry.reason("contain")


def request(name, **fields):
    class Status:
        FINISHED_ERROR = "error"

    return Space(request_id=name, status=Status(), is_finished=lambda: False, **fields)


def test_only_blocks_that_the_request_wrote_leave_the_cache_and_are_zeroed():
    evicted, ended = [], []
    manager = kind(a=[1, 2, 3], b=[1, 4])
    one = scheduler(manager, requests={"a": request("a"), "b": request("b"), "p": request("p")})
    one.kv_cache_manager.evict_blocks = lambda ids: evicted.extend(sorted(ids))
    one.finish_requests = lambda names, status: ended.append((names, status))
    # Each hit block 1, which a request wrote that has gone. p was preempted while its step was computed.
    manager.req_to_blocks["p"] = [Space(block_id=7, is_null=False)]
    contain._planned(plan(new=[("a", [1, 2, 3], 4), ("b", [1, 4], 4), ("p", [7], 0)]), (one,), {})
    contain._preempted((one, one.requests["p"]), {})
    del manager.req_to_blocks["p"]
    contain._end((one, Space(), Space(**{contain.BAD: (["a", "p", "gone"], "")})), {})
    assert evicted == [2, 3, 7]
    assert ended == [(["a", "p"], "error")]
    # Block 3 is given out first, to a request that hits block 1; block 2 later, and only once.
    for ids, zeroed in (([1, 3, 5], [3]), ([1, 2], [2]), ([1, 2, 3], [])):
        given = contain._planned(plan(new=[("b", ids, 4)]), (one,), {})
        assert getattr(given, contain.DIRTY) == [zeroed]
    cache = torch.full((8, 4, 9), NAN)
    contain._zero(None, (runner(cache, blocks=8), Space(**{contain.DIRTY: [[3]]})), {})
    assert (cache[3] == 0).all()
    assert cache.isnan().flatten(1).all(1).sum() == 7
