"""The watch's hooks on vLLM's own files: every release of the table as text, three of them executed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace as Space

import environment
import pytest
import torch
import warm
from made_up import planted

from staleproof.vllm import releases, watch_hooks
from staleproof.vllm.sources import PatchError, Sources, numbers
from staleproof.vllm.watch import OLDEST, Settings
from staleproof.vllm.watch_hooks import Hooks

KNOWN = [name for name in releases.table() if numbers(name) >= numbers(OLDEST)]


def missing(version: str, name: str) -> list[str]:
    """The functions that a release does not have, if the watch takes it for the release ``name``."""
    found = []
    for target in Hooks(Settings(), name).targets():
        try:
            target.check(Sources(environment.sources(version) / "vllm"))
        except PatchError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("version", [v for v in environment.also(*environment.READ) if v in KNOWN])
def test_a_release_has_every_function_that_is_watched(version):
    assert missing(version, version) == []


@pytest.mark.parametrize(("version", "other"), [("0.19.1", "0.20.0"), ("0.26.0", "0.22.1")])
def test_a_function_that_moved_would_be_noticed(version, other):
    assert missing(version, other)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.22.1", "0.26.0", "0.33.0"])
def test_on_vllms_own_files(version):
    said = warm.answer(warm.released(version, str(Path(__file__).with_name("real_watch.py"))))
    # The kernels of FlashAttention's MLA are not installed on a CPU, and its module is not imported.
    assert {place for place, state in said["states"].items() if state != "in place"} <= {
        "vllm.v1.attention.backends.mla.flashattn_mla:FlashAttnMLAImpl.forward_mqa"
    }
    # The real kernel leaves rows 3 and 5 unwritten, of which three are live.
    assert said["counted"] == [2, 0]
    # vLLM's own mask, where a release has one: only row 5 is padding.
    assert said["masked"] == ([2, 0] if version == "0.22.1" else [1, 1])
    assert said["unwritten mask"] == [2, 0]
    zeroing, none = said["blocks"]["True"], said["blocks"]["False"]
    assert {*zeroing} == {"steps"}, "vLLM zeroes every block of a hybrid model before it is read"
    assert none["state, attention"] > 5


@pytest.mark.parametrize(
    ("version", "said", "stands"),
    [
        ("0.19.1", "no watch: vLLM 0.19.1 is too old: the watch knows 0.20.0 to ", False),
        ("1.4.0", "watch on vLLM 1.4.0: it knows 0.20.0 to ", True),
        (OLDEST, None, True),
        (KNOWN[-1], None, True),
    ],
)
def test_a_vllm_too_old_or_new_is_one_line(monkeypatch, caplog, version, said, stands):
    monkeypatch.setenv("STALEPROOF_WATCH", "1")
    try:
        watch_hooks.install(version)
        assert len(caplog.messages) == (said is not None)
        assert all(line.startswith(f"staleproof: {said}") for line in caplog.messages)
        assert bool(watch_hooks.installed) == stands
    finally:
        watch_hooks.remove()


def test_whatever_stops_the_watch_stops_no_server(monkeypatch, caplog):
    monkeypatch.setattr(watch_hooks, "read_settings", planted)
    watch_hooks.install(OLDEST)
    assert caplog.messages == ["staleproof: no watch: RuntimeError: planted"]


def test_a_step_is_counted_down_only_if_the_scheduler_says_nothing_new():
    on, asked = Hooks(Settings()), []
    on.watch, on._requests = Space(left=9), 2
    execute = on.stepping(
        lambda args, kwargs: asked.append(args[1]), lambda runner, output, *rest, **more: output
    )

    def step(tokens: int = 2, cached: dict[str, object] | None = None, **changes: object) -> int:
        """How often the watch was asked."""
        of_cached = {"resumed_req_ids": set(), "new_block_ids": [None, None]} | (cached or {})
        output = {
            "total_num_scheduled_tokens": tokens,
            "scheduled_new_reqs": [],
            "finished_req_ids": set(),
            "scheduled_cached_reqs": Space(**of_cached),
        }
        asked.clear()
        given = Space(**output | changes)
        assert execute("runner", given, None) is given
        return len(asked)

    assert [step(), step()] == [0, 0]
    assert on.watch.left == 7
    assert step(tokens=3) == 1
    assert step(scheduled_new_reqs=["c"]) == 1
    assert step(finished_req_ids={"a"}) == 1
    assert step(preempted_req_ids={"a"}) == 1
    assert step(new_block_ids_to_zero=[4]) == 1
    assert step(cached={"resumed_req_ids": {"a"}}) == 1
    assert step(cached={"new_block_ids": [None, ([7],)]}) == 1
    assert step(cached={"new_block_ids": [None] * 3}) == 1
    # What is not as expected is left to the function that contains a failure of the watch.
    assert step(scheduled_cached_reqs=None) == 1
    execute("runner", Space(), None, dummy_run=True)
    assert len(asked) == 2
    assert on.watch.left == 7
    on.watch.left = 0
    assert step() == 1
    on.watch = None
    assert step() == 1


def test_a_step_is_the_same_only_if_nobody_came_went_or_was_set_aside():
    on, begun = Hooks(Settings()), []
    on.watch = Space(latest=None, left=0, begin_step=lambda tokens, same: begun.append(same))

    def step(*names: str, each: int = 1, resumed: tuple[str, ...] = (), **changes: object) -> None:
        output = {
            "total_num_scheduled_tokens": each * len(names),
            "num_scheduled_tokens": dict.fromkeys(names, each),
            "scheduled_new_reqs": [],
            "scheduled_cached_reqs": Space(resumed_req_ids=set(resumed)),
            "finished_req_ids": set(),
            "preempted_req_ids": None,
        }
        on.step((None, Space(**output | changes)), {})

    step("a", "b")
    step("a", "b")
    step("a", "b", "c")
    step("a", "b", "d", finished_req_ids={"c"})
    step("a", "b", "e", scheduled_new_reqs=["e"])
    step("a", "b", "f", resumed=("f",))
    step("a", "b", "g", preempted_req_ids={"f"})
    step("a", "b", "g")
    assert begun == [False, True, False, False, False, False, False, True]
    # Prompts, or drafts: as many tokens need not be the same requests' any more.
    step("a", "b", "g", each=4)
    step("a", "b", "g", each=4)
    assert begun[8:] == [False, False]


def test_what_runs_around_a_workers_start_and_its_steps():
    """Phases reach the memory's ledger, and a reading that arrives has it look again."""
    on, phases, looked = Hooks(Settings()), [], []
    with on.starting("profile", (), {}), on.capturing((), {}):
        pass
    phase = lambda name: nullcontext(phases.append(name))  # noqa: E731
    on.memory = Space(phase=phase, ready=lambda: phases.append("ready"), unprofiled=lambda: looked.append(1))
    for target in on.targets():
        if target.around is not None:
            with target.around((), {}):
                phases.append(target.name.rpartition(".")[2])
    assert phases == [
        *("profile", "determine_available_memory", "kv cache", "initialize_from_config"),
        # A GPU's worker, and a CPU's.
        *("capture", "compile_or_warm_up_model", "ready") * 2,
    ]
    latest = [1]
    on.watch = Space(latest=1, left=0, begin_step=lambda *_: setattr(on.watch, "latest", latest[0]))
    output = Space(total_num_scheduled_tokens=2, num_scheduled_tokens={"a": 2})
    for arrives, times in ((1, 0), (2, 1), (2, 1)):
        latest[0] = arrives
        on.step((None,), {"scheduler_output": output})
        assert len(looked) == times
    on.memory, latest[0] = None, 3
    on.step((None, output), {})
    assert on.watch.latest == 3


def test_the_hooks_without_a_watch_change_no_result_and_with_one_find_layer_and_rows():
    on, seen = Hooks(Settings()), []
    layer, result = Space(layer_name="l"), (torch.zeros(2, 3, 4, 5), torch.zeros(2))
    calls = [
        (on.attention, result[0], (None, layer)),
        (on.mla, result, (None, None, None, None, layer)),
        (on.mla, (result[0][0], None), (None, None, None, None, layer)),
        (on.router, result, (None,)),
        (on.experts, result, (None,)),
    ]
    for watch in (None, Space(observe=lambda *given: seen.append(given))):
        on.watch, on.layer = watch, "l"
        for hook, given, args in calls:
            assert hook(given, args, {}) is given
    assert [(stage, name, tuple(x.shape)) for stage, name, x, *_ in seen] == [
        *(("attention", "l", (2, 3, 4, 5)), ("attention", "l", (6, 4, 5)), ("attention", "l", (3, 4, 5))),
        *(("router", "l", (2, 3, 4, 5)), ("experts", "l", (2,))),
    ]
    assert seen[3][3] is result[1]
    seen.clear()
    # A router that runs outside of any layer's experts.
    fresh = Hooks(Settings())
    fresh.watch = on.watch
    fresh.router(result, (None,), {})
    assert seen.pop()[1] == ""
    on.attention(result[0], (None,), {"layer": layer})
    on.mla(result, (None,), {"layer": layer})
    assert [name for _, name, _ in seen] == ["l", "l"]


@pytest.mark.parametrize(("left", "named"), [(0, [(["a"], {"a": 1})]), (3, [])])
def test_a_batch_is_named_but_while_equal_steps_are_counted_down(left, named):
    on, seen = Hooks(Settings()), []
    result = Space(req_ids=["a"])
    output = Space(num_scheduled_tokens={"a": 1})
    assert on.batch_v2(result, (None, output), {}) is result
    on.watch = Space(left=left, name_requests=lambda *given: seen.append(given))
    assert on.batch_v2(result, (None, output), {}) is result
    assert seen == named


@pytest.mark.parametrize(
    ("stages", "modules"),
    [
        (("blocks",), set()),
        (("attention",), {"attention"}),
        (("router",), {"moe_runner", "router"}),
        (("experts",), {"moe_runner"}),
        (("published",), {"core"}),
    ],
)
def test_only_functions_of_the_chosen_stages_are_wrapped(stages, modules):
    every = {target.place for target in Hooks(Settings(("blocks",))).targets()}
    found = {target.module for target in Hooks(Settings(stages)).targets() if target.place not in every}
    parts = {"attention", "moe_runner", "router", "core"}
    assert all(parts & {*module.split(".")} for module in found)
    assert {part for module in found for part in [*module.split(".")][::-1] if part in parts} == modules
