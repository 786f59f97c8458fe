"""The watch: what it counts, what it logs, what it does with bad settings, and that nothing waits for it."""

from __future__ import annotations

from types import SimpleNamespace as Space

import pytest
import torch
from tests.made import arrived

from staleproof import device as devices
from staleproof.vllm import plugin, watch_hooks
from staleproof.vllm import watch as watches
from staleproof.vllm.sources import PatchError
from staleproof.vllm.watch import SPAN, Settings, Watch, settings
from staleproof.vllm.watch_blocks import ATTENTION, Blocks
from staleproof.vllm.watch_hooks import Hooks

DEVICE = devices.select()


@pytest.fixture(autouse=True)
def _tensors_are_where_kernels_run(device):
    with torch.device(device):
        yield


NAN = torch.nan
ON = {"STALEPROOF_WATCH": "1"}


@pytest.fixture(name="watch")
def watch_fixture():
    return Watch(Settings(), DEVICE)


def step(watch: Watch, rows: torch.Tensor, live: int, **given: bool) -> None:
    """A step of so many live rows, one of whose layers has these rows."""
    watch.begin_step(live, **given)
    watch.observe("attention", "layers.0", rows)


def counted(watch: Watch) -> dict[tuple[str, str], tuple[int, int]]:
    return dict(arrived(watch).bad)


def rows_with(*bad: int, rows: int = 8, columns: int = 16) -> torch.Tensor:
    x = torch.ones(rows, columns)
    x[list(bad)] = NAN
    return x


def test_padding_and_live_rows_are_counted_apart_over_steps(watch):
    for live in (3, 8, 3):
        step(watch, rows_with(0, 3, 7), live)
        watch.observe("experts", "layers.0", rows_with())
    assert counted(watch) == {("attention", "layers.0"): (4, 5), ("experts", "layers.0"): (0, 0)}
    assert watch.latest.runs == {("attention", "layers.0"): 3, ("experts", "layers.0"): 3}


def test_warm_up_is_forgotten(watch, caplog):
    step(watch, rows_with(1, 2), 8)
    arrived(watch)
    watch.reset()
    caplog.clear()
    step(watch, rows_with(5), 8)
    assert counted(watch) == {("attention", "layers.0"): (0, 1)}
    assert watch.latest.steps == 1
    assert "first live row with NaN or Inf: step 1, attention of layers.0, row 5" in caplog.text


def test_only_chosen_stages_and_layers_are_counted():
    watch = Watch(Settings(stages=("attention",), layers=4), DEVICE)
    watch.begin_step(8)
    for number in range(8):
        watch.observe("attention", f"layers.{number}", rows_with(0))
        watch.observe("router", f"layers.{number}", rows_with(0))
    watch.observe("attention", "of no number", rows_with(0))
    assert [layer for _, layer in counted(watch)] == ["layers.0", "layers.4", "of no number"]


def test_stages_beyond_the_slots_of_the_board_are_left_out(watch, monkeypatch):
    """A model with more layers than the board has slots is watched as far as the slots go."""
    monkeypatch.setattr("staleproof.evidence.board.SLOTS", 2)
    watch.begin_step(8)
    for number in range(4):
        watch.observe("attention", f"layers.{number}", rows_with(0))
    assert counted(watch) == {("attention", "layers.0"): (0, 1), ("attention", "layers.1"): (0, 1)}


def test_rows_that_name_an_expert_twice(watch):
    watch.begin_step(2)
    watch.observe("router", "layers.1", torch.ones(4, 2), torch.tensor([[0, 1], [4, 4], [5, 5], [6, 7]]))
    assert arrived(watch).repeats == {"layers.1": (1, 1)}


def test_the_first_row_of_each_kind_is_logged_once_with_its_request(watch, caplog):
    tokens = dict.fromkeys("abc", 1)
    for bad in ((6,), (2,), (0, 1)):
        watch.begin_step(3)
        watch.name_requests(["a", "b", "c"], tokens)
        watch.observe("attention", "layers.1", rows_with(*bad))
        counted(watch)
    assert caplog.messages == [
        (
            "staleproof: first padding row with NaN or Inf: step 1, attention of layers.1, row 6, "
            "computed, no canary, batch a, b, c"
        ),
        (
            "staleproof: first live row with NaN or Inf: step 2, attention of layers.1, row 2, "
            "computed, no canary, request c of batch a, b, c"
        ),
    ]


def test_first_live_row_names_the_blocks_it_read_and_who_wrote_them(watch, caplog):
    blocks = Blocks([ATTENTION], [4])
    blocks.step(new=[("a", [[1, 2]], 0, 8)], number=1)
    # b hits a's first block, and gets its second one anew.
    blocks.step(new=[("b", [[1, 2]], 4, 2)], ended=["a"], number=2)
    watch.read_by = blocks.owners.read_by
    for bad in ((), (1,), (1,)):
        watch.begin_step(2)
        watch.name_requests(["b"], {"b": 2})
        watch.observe("attention", "layers.1", rows_with(*bad))
    assert watch.first_live() == ", first bad: attention of layers.1 in step 2 (b)"
    assert caplog.messages[-1].endswith("; it read blocks 1 of a (step 1); 2 of itself (steps 2 to now)")
    assert [len(part.blocks) for part in watch.bad_blocks] == [1, 1]
    # Only what comes later is news then.
    assert watch.first_live() == ""
    watch.observe("experts", "layers.2", rows_with(0))
    assert watch.first_live() == ", first bad: experts of layers.2 in step 3 (b)"


@pytest.mark.parametrize(("requests", "more"), [(8, ""), (12, " and 4 more")])
def test_a_row_of_a_prompt_is_named_after_the_prompts_request(watch, caplog, requests, more):
    watch.begin_step(8)
    watch.name_requests([f"r{i}" for i in range(requests)], {"r0": 1, "r1": 6, "r2": 1})
    watch.observe("attention", "layers.1", rows_with(6))
    counted(watch)
    assert caplog.messages[0].endswith(f"request r1 of batch r0, r1, r2, r3, r4, r5, r6, r7{more}")


def test_what_has_no_rows_is_left_out_and_the_watch_goes_on(watch):
    watch.begin_step(3)
    for x in (None, torch.zeros(0, 16), torch.full((8,), NAN), rows_with(1)):
        watch.observe("attention", "layers.0", x)
    assert counted(watch) == {("attention", "layers.0"): (0, 1)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_canary_is_told_from_a_computed_nan(watch, caplog, dtype):
    from staleproof.evidence.canary import plant

    x = torch.ones(4, 16, dtype=dtype)
    plant(x[3:], stage=5)
    x[0, 1], x[1, 1], x[2, 1] = NAN, -NAN, torch.inf
    step(watch, x, 3)
    assert counted(watch) == {("attention", "layers.0"): (1, 3)}
    assert watch.latest.canaries == {("attention", "layers.0"): (1, 0)}
    assert "row 3, canary: nobody wrote it" in caplog.messages[0]
    assert "row 0, computed, no canary" in caplog.messages[1]


def test_one_step_in_n_is_counted_and_says_so():
    watch = Watch(Settings(steps=4), DEVICE)
    for _ in range(10):
        step(watch, rows_with(1, 2), 8)
        assert watch.left == 0, "a step that is left out would be counted"
    assert counted(watch) == {("attention", "layers.0"): (0, 6)}  # steps 1, 5 and 9
    assert watch.latest.runs == {("attention", "layers.0"): 3}
    assert (watch.latest.steps, watch.latest.counted) == (10, 3)


def told(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """What the device is told from here on: number of the step, live rows, counted."""
    found = []
    begin = watch.board.begin

    def noted(step: int, live: int, counted: bool) -> None:
        found.append((step, live, counted))
        begin(step, live, counted)

    monkeypatch.setattr(watch.board, "begin", noted)
    return found


def test_equal_steps_are_counted_exactly_though_the_device_is_told_of_few(watch, monkeypatch, caplog):
    watch._due = float("inf")  # the counts are copied at the end, whatever this machine does meanwhile
    words = told(watch, monkeypatch)
    for number in range(1, 41):
        watch.begin_step(8, same=number != 5)
        watch.name_requests([f"r{number}"], {f"r{number}": 8})
        watch.observe("attention", "layers.0", rows_with(*([2, 9] if number in (7, 38) else []), rows=10))
    counts = counted(watch)
    assert counts == {("attention", "layers.0"): (2, 2)}
    # The first step, another batch, and so many steps after that.
    assert [step for step, _, _ in words] == [1, 5, 5 + SPAN]
    assert watch.latest.steps == watch.latest.counted == 40
    # The row was bad in step 7: what is known is the batch, and first and last step that it ran in.
    assert caplog.messages[1] == (
        f"staleproof: first live row with NaN or Inf: step 5 to {4 + SPAN}, attention of layers.0, row 2, "
        "computed, no canary, request r5 of batch r5"
    )


def test_another_number_of_tokens_is_told_whatever_the_caller_says(watch, monkeypatch):
    words = told(watch, monkeypatch)
    for tokens in (8, 8, 3, 3):
        watch.begin_step(tokens, same=True)
    assert [live for _, live, _ in words] == [8, 3]
    # Nobody's rows lie between two equal steps.
    watch.pause()
    watch.begin_step(3, same=True)
    assert [counts for _, _, counts in words] == [True, True, False, True]


def test_graphs_of_a_step_that_is_not_counted_count_nothing(monkeypatch):
    """A replay launches what was captured; the number on the device says whether it counts."""
    watch = Watch(Settings(steps=2), DEVICE)
    watch.capturing = lambda: True
    captured, count = [], watch.board.count
    monkeypatch.setattr(watch.board, "count", lambda *given: captured.append(count(*given)))
    for _ in range(4):
        step(watch, rows_with(1), 8)
    assert counted(watch) == {("attention", "layers.0"): (0, 2)}
    assert len(captured) == 4


def test_a_dummy_batch_between_two_steps_is_not_counted(watch):
    watch.capturing = lambda: True
    step(watch, rows_with(1), 8)
    watch.pause()
    watch.observe("attention", "layers.0", rows_with(1, 2, 3))
    step(watch, rows_with(1), 8)
    assert counted(watch) == {("attention", "layers.0"): (0, 2)}


def test_vllms_own_mask_of_padding_rows_comes_first():
    masks = {8: torch.tensor([True, False] * 4), 4: None}
    watch = Watch(Settings(), DEVICE, masks.get)
    watch.begin_step(3)
    watch.observe("experts", "layers.0", rows_with(2, 3, rows=4))
    assert counted(watch) == {("experts", "layers.0"): (1, 1)}
    watch.observe("attention", "layers.0", rows_with(0, 2, 3))
    assert counted(watch)["attention", "layers.0"] == (2, 1)


def test_a_copy_that_has_not_arrived_is_not_read_and_not_waited_for(watch):
    watch._arrived = Space(query=lambda: False, record=lambda: None)
    step(watch, rows_with(1), 8)
    watch.copy()
    assert watch.reading().bad == {}
    watch.begin_step(8, same=True)
    assert watch.left == 0, "the next step looks again"
    watch._arrived.query = lambda: True
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    watch.begin_step(8)
    assert watch.latest.bad == {("attention", "layers.0"): (0, 1)}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("STAGES", "attention,logits", "some of .*, got logits"),
        ("STAGES", ",", "some of attention, router, experts, blocks, memory, published, got none"),
        ("LAYERS", "0", "1 to .*, got '0'"),
        ("STEPS", "1000000", "1 to 999999, got '1000000'"),
        ("PORT", "http", "1 to 65535, got 'http'"),
    ],
)
def test_bad_settings_are_one_line_and_the_server_starts(monkeypatch, caplog, name, value, said):
    variables = ON | {f"STALEPROOF_WATCH_{name}": value}
    with pytest.raises(PatchError, match=f"{name}: expected {said}"):
        settings(variables)
    for variable, given in variables.items():
        monkeypatch.setenv(variable, given)
    watch_hooks.install("0.22.1")
    assert len(caplog.records) == 1
    assert not watch_hooks.installed


def test_it_is_off_by_default(monkeypatch):
    monkeypatch.delenv("STALEPROOF_WATCH", raising=False)
    watch_hooks.install()
    assert not watch_hooks.installed


def scheduled(*tokens: int) -> Space:
    return Space(
        total_num_scheduled_tokens=sum(tokens), num_scheduled_tokens=dict(zip("abc", tokens, strict=False))
    )


def test_a_dummy_batch_before_the_first_step_leaves_the_kernels_to_be_captured(watch, monkeypatch):
    words = told(watch, monkeypatch)
    watch.pause()
    assert (words, watch.counting) == ([], True)


def test_the_watch_of_a_server_asks_vllm_for_its_mask_of_padding(monkeypatch):
    asked = []
    monkeypatch.setattr(watch_hooks, "padding_mask", lambda rows: asked.append(rows))
    on = Hooks(Settings())
    on.loaded(None, (Space(device=DEVICE),), {})
    assert on.watch is not None
    on.watch.observe("attention", "layers.0", torch.zeros(4, 8))
    assert asked == [4]


def test_a_dummy_run_is_no_step(monkeypatch):
    on = Hooks(Settings())
    on.loaded(None, (Space(device=DEVICE),), {})
    assert on.watch is not None
    on.step((None, scheduled(4)), {"dummy_run": True})
    assert on.watch.steps == 0
    on.step((None, scheduled(4)), {"dummy_run": False})
    words = told(on.watch, monkeypatch)
    on.step((None, scheduled(4)), {"dummy_run": True})
    assert (on.watch.steps, words) == (1, [(1, 0, False)])


@pytest.mark.parametrize("patches", ["all", "none", "no_such_patch"])
def test_the_watch_comes_after_the_patches_whatever_they_say(monkeypatch, patches):
    """A hook that is added later sees what an earlier one returns."""
    order = []
    monkeypatch.setenv(plugin.VARIABLE, patches)
    monkeypatch.setenv("STALEPROOF_WATCH", "1")
    monkeypatch.setattr(plugin, "installed", lambda: ("0.22.1", None))
    monkeypatch.setattr(plugin, "decisions", lambda *_: order.append("patches") or [])
    monkeypatch.setattr(plugin.process, "watch", lambda *_: None)
    monkeypatch.setattr(watch_hooks, "install", lambda: order.append("watch"))
    plugin.register()
    assert order == (["patches", "watch"] if patches == "all" else ["watch"])


def test_the_step_of_a_bad_row_is_no_later_than_the_counts_that_show_it(watch, caplog):
    watch._due = float("inf")
    for _ in range(3):
        step(watch, rows_with(1), 8, same=True)
    watch.copy()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    watch.begin_step(8, same=True)
    assert "step 1 to 3, attention" in caplog.messages[0]


def test_the_oldest_steps_are_forgotten_and_a_reset_forgets_all(watch):
    assert (watch.steps, watch.counted, watch.left, watch.latest.steps, watch.latest.counted) == (0,) * 5
    for _ in range(watches.REMEMBERED + 5):
        watch.begin_step(2)
        watch.name_requests(["a", "b"], {"a": 1, "b": 1})
    assert len(watch._spans) == len(watch._recent) == watches.REMEMBERED
    assert watch._who(watch.steps, 1) == ", request b of batch a, b"
    assert watch._who(watch.steps, 2) == ", batch a, b"
    assert watch._who(1, 1) == ""
    last = watch.steps
    watch.reset()
    assert (watch._who(last, 1), watch.steps, watch.counted, watch.left) == ("", 0, 0, 0)


def test_equal_steps_that_are_counted_down_count_as_steps(watch, monkeypatch):
    watch._due = float("inf")
    watch.begin_step(8)
    watch.begin_step(8, same=True)
    assert (watch.steps, watch.counted, watch.left) == (2, 2, SPAN - 2)
    watch.left -= 5
    assert (watch.steps, watch.counted) == (7, 7)
    words = told(watch, monkeypatch)
    watch.pause()
    watch.pause()
    assert words == [(7, 0, False)]
    assert (watch.steps, watch.counted, watch.left) == (7, 7, 0)
