"""The allocation ledger: whose bytes, how many are to come, and that it changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from staleproof.evidence import ledger as ledgers
from staleproof.evidence.allocations import Usage
from staleproof.graph import capture
from staleproof.ops.clear_empty_rows import clear_empty_rows

KIB, MIB = 2**10, 2**20
LAYERS = 5
# A buffer is 64 x 1024 fp32.
EACH = 256 * KIB

_a_global: dict[str, torch.Tensor] = {}


def new_buffer(device):
    return torch.zeros(64, 1024, device=device)


@dataclass
class Holder:
    """A plain object that holds a tensor, deep down."""

    inner: dict[str, list[torch.Tensor]] = field(default_factory=dict)


def in_a_global(buffer):
    _a_global.setdefault("x", buffer)


# What a layer keeps of a buffer that it allocates.
KEEP = {
    **dict.fromkeys(("attribute", "buffer"), lambda buffer: buffer),
    "list": lambda buffer: [buffer],
    "nested": lambda buffer: {"a": (None, {"b": buffer})},
    "parameter": nn.Parameter,
    "view": lambda buffer: buffer[1:3].t(),
    "object": lambda buffer: Holder({"x": [buffer]}),
    "global": in_a_global,
    "shared": lambda buffer: _a_global.setdefault("x", buffer),
}


class Lazy(nn.Module):
    """Allocates at its first decode; ``keep`` names how it keeps the buffer."""

    def __init__(self, keep, device="cpu"):
        super().__init__()
        self.keep, self.is_new = keep, True
        self.weight = nn.Parameter(torch.full((1024,), 2.0, device=device))
        if keep == "buffer":
            self.register_buffer("out", None, persistent=False)

    def forward(self, x, decode):
        if decode and self.is_new:
            self.is_new, self.out = False, KEEP[self.keep](new_buffer(x.device))
        return x * self.weight


class Tree(nn.Module):
    def __init__(self, keep, device="cpu"):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Lazy(keep, device)}) for _ in range(LAYERS))
        self.odd = Lazy(keep, device)

    def forward(self, x, decode=False, layers=LAYERS):
        for layer in self.layers[:layers]:
            x = layer["attn"](x, decode)
        # A workspace as large as four buffers, in every step.
        return x * new_buffer(x.device).new_zeros(4 * EACH // 4)[0].add(1)


@pytest.fixture(autouse=True)
def _no_global():
    yield
    _a_global.clear()


def profiled(keep, device="cpu", **options):
    model = Tree(keep, device)
    x = torch.ones(1024, device=device)
    ledger = ledgers.AllocationLedger(model, **options)
    with ledger.phase("profile"):
        model(x)
    return model, x, ledger


def begun(model=None, **options):
    """A ledger of a model, or of a small one, whose profile allocates nothing."""
    ledger = ledgers.AllocationLedger(model or nn.Linear(1, 1), **options)
    with ledger.phase("profile"):
        pass
    return ledger


OWNERS = dict.fromkeys(("attribute", "list", "nested", "buffer", "parameter", "view"), "layers.*.attn.out")
OWNERS["object"] = "layers.*.attn.out.inner"


@pytest.mark.parametrize("keep", OWNERS)
def test_one_layer_tells_of_all(keep):
    model, x, ledger = profiled(keep, budget_bytes=3 * MIB)
    with ledger.phase("capture"):
        model(x, decode=True, layers=1)
    report = ledger.read()
    (owner,) = report.surprises
    assert owner.name == OWNERS[keep]
    assert (owner.bytes_each, owner.holders, owner.layers) == (EACH, 1, LAYERS)
    assert (owner.bytes, owner.predicted) == (EACH, LAYERS * EACH)
    assert owner.source.startswith("evidence/test_ledger.py:")
    with ledger.phase("capture"):
        model(x, decode=True)
    later = ledger.read()
    assert later.surprises[0].bytes == owner.predicted
    assert later.headroom == report.headroom
    assert not [o for o in later.owners if o.name == ledgers.UNOWNED]


def test_the_sentence_comes_before_the_crash():
    # Weights, five buffers and the workspace need a little more than 2.25 MiB.
    model, x, ledger = profiled("attribute", budget_bytes=2 * MIB)
    with ledger.phase("capture"):
        model(x, decode=True, layers=1)
    report = ledger.read()
    assert report.sentence == (
        "`layers.*.attn.out`: 256 KiB x 5 layers = 1.25 MiB allocated after profiling; "
        "headroom 744 KiB; this will not fit"
    )
    held = sum(t.nbytes for _, _, t in ledgers.owned_tensors(model))
    assert report.headroom == 2 * MIB - held - 4 * EACH
    assert report.required >= 4 * EACH
    assert report.fits is False
    _, _, roomy = profiled("attribute", budget_bytes=3 * MIB)
    assert roomy.read().fits is True
    assert roomy.read().sentence.startswith("nothing new after profiling; headroom 2.98 MiB")


@pytest.mark.parametrize(
    ("keep", "name"), [("global", f"{__name__}:_a_global"), ("shared", "layers.*.attn.out")]
)
def test_one_buffer_for_all_is_not_multiplied(keep, name):
    model, x, ledger = profiled(keep)
    with ledger.phase("capture"):
        model(x, decode=True)
    (owner,) = ledger.read().surprises
    assert (owner.name, owner.layers, owner.predicted) == (name, 1, EACH)


def test_what_no_attribute_holds_is_told_with_its_line():
    _, _, ledger = profiled("attribute", budget_bytes=3 * MIB)
    before = ledger.read().headroom
    with ledger.phase("serve"):
        stray = torch.tensor([1.0] * 500)
        small = torch.ones(100)
        grown = torch.empty(10)
        grown.resize_(1000)
    owners = {(o.name, o.bytes) for o in ledger.read().surprises}
    assert owners == {(ledgers.UNOWNED, stray.nbytes), (ledgers.UNOWNED, grown.nbytes)}
    assert small.nbytes in {o.bytes for o in ledger.read().owners}
    assert ledger.read().headroom == before - stray.nbytes - small.nbytes - grown.nbytes
    del stray, grown
    assert ledger.read().surprises == ()
    assert ledger.read().headroom == before - small.nbytes


def test_a_planned_phase_counts_and_is_no_surprise():
    model, _, ledger = profiled("attribute", budget_bytes=3 * MIB)
    before = ledger.read()
    with ledger.phase("kv_cache", planned=True):
        model.kv_cache = [torch.empty(7 * EACH, dtype=torch.uint8)]
    report = ledger.read()
    assert report.surprises == ()
    assert [o.name for o in report.owners] == ["kv_cache"]
    assert before.headroom - report.headroom == 7 * EACH
    assert report.fits is False


@pytest.mark.parametrize("decode", [False, True])
def test_the_model_computes_the_same_bits(device, decode):
    model = Tree("attribute", device)
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device)
    plain = model(x, decode)
    ledger = ledgers.AllocationLedger(model)
    with ledger.phase("profile"):
        watched = model(x, decode)
    assert torch.equal(plain.view(torch.int32), watched.view(torch.int32))


def test_nothing_is_hooked_outside_a_phase():
    model, x, ledger = profiled("attribute")
    seen = ledger.read()
    kept = torch.ones(1000)
    model(x, decode=True)
    assert ledger.read() == seen
    with pytest.raises(KeyError), ledger.phase("serve"):
        raise KeyError
    assert _get_current_dispatch_mode() is None
    assert kept.sum() == 1000


def test_it_watches_a_captured_step_with_a_triton_kernel(device):
    model = Tree("attribute", device)
    seq_lens = torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device)
    x = torch.ones(1024, device=device)
    ledger = ledgers.AllocationLedger(model)
    with ledger.phase("profile"):
        model(x)
    out = torch.ones(4, 2, 16, device=device)

    def step():
        model(x, decode=True)
        clear_empty_rows(out, seq_lens)

    with ledger.phase("capture"):
        graph = capture(step, device)
        out.fill_(1.0)
        graph.replay()
    assert out.sum((1, 2)).tolist() == [32.0, 0.0, 32.0, 0.0]
    (owner, *_) = ledger.read().surprises
    assert (owner.name, owner.bytes) == ("layers.*.attn.out", LAYERS * EACH)


@pytest.mark.parametrize(
    ("freed", "kept", "passing", "transient"), [(0, 1, 2, 2), (4, 0, 2, 0), (4, 0, 6, 2), (2, 3, 2, 2)]
)
def test_transient_is_the_peak_above_what_was_there_before_or_is_there_after(freed, kept, passing, transient):
    """In MiB: a phase frees some, keeps some, and needs some in passing; the one before needed more."""
    model = nn.Linear(1, 1)
    ledger = ledgers.AllocationLedger(model)
    with ledger.phase("profile"):
        brief = torch.empty(16 * MIB, dtype=torch.uint8)
        del brief
        model.held = [torch.empty(freed * MIB, dtype=torch.uint8)]
    with ledger.phase("serve"):
        model.held.clear()
        model.held.append(torch.empty(kept * MIB, dtype=torch.uint8))
        brief = torch.empty(passing * MIB, dtype=torch.uint8)
        del brief
    assert ledger.read().phases[1].transient == transient * MIB


def test_a_phase_that_is_entered_again_goes_on():
    """Its start and its largest transient stay; what came between the two counts as its own."""
    used = iter([100, 100, 130, 160])
    ledger = ledgers.AllocationLedger(nn.Linear(1, 1), usage=lambda: Usage(next(used), 0, 0, 0))
    for passing in (3, 1):
        with ledger.phase("profile"):
            brief = torch.empty(passing * MIB, dtype=torch.uint8)
            del brief
    (phase,) = ledger.read().phases
    assert phase.transient == 3 * MIB
    assert (phase.before.used, phase.after.used) == (100, 160)


def test_an_owner_belongs_to_the_phase_that_allocated_first():
    model = nn.Linear(1, 1)
    ledger, model.held = begun(model), []
    made = {
        "kv_cache": lambda: torch.empty(MIB, dtype=torch.uint8),
        **dict.fromkeys(("capture", "serve"), lambda: torch.empty(MIB, dtype=torch.uint8)),
    }
    for name, make in made.items():
        with ledger.phase(name, planned=name == "kv_cache"):
            model.held.append(make())
    (owner,) = ledger.read().owners
    assert (owner.phase, owner.planned, owner.bytes) == ("kv_cache", True, 3 * MIB)
    assert owner.source == f"evidence/test_ledger.py:{made['kv_cache'].__code__.co_firstlineno}"
    assert ledger.read().surprises == ()


def test_headroom_counts_what_the_allocator_can_give_back():
    usage = Usage(used=600, reserved=500, allocated=100, releasable=250)
    report = begun(budget_bytes=1000, usage=lambda: usage).read()
    assert (report.headroom, report.fits) == (1000 - 600 + 250, True)
    (phase,) = report.phases
    assert (phase.pools, phase.outside, phase.after.stuck) == (0, 0, 150)


def test_pools_and_memory_outside_are_what_a_phase_added():
    before, after = Usage(600, 500, 100, 250), Usage(900, 640, 150, 260)
    used = iter([before, before, after, after])
    (phase,) = begun(usage=lambda: next(used)).read().phases
    # 640 - 150 - 260 are stuck instead of 150; 260 lie outside the allocator instead of 100.
    assert (phase.pools, phase.outside) == (80, 160)


def test_a_buffer_and_its_views_count_once():
    model = nn.Linear(1, 1)
    ledger = begun(model)
    with ledger.phase("serve"):
        buffer = torch.empty(MIB, dtype=torch.uint8)
        model.held = [buffer, buffer[5:], buffer.view(2, -1)]
        model.also = buffer[: MIB // 2]
    assert [o.bytes for o in ledger.read().owners] == [MIB]


def test_phases_out_of_order_are_refused():
    model, x, ledger = profiled("attribute")
    other = ledgers.AllocationLedger(model)
    with ledger.phase("capture"):
        model(x)
        for inner in (ledger.phase("serve"), other.phase("profile")):
            with pytest.raises(ValueError, match="phase: expected no phase inside another"):
                inner.__enter__()
    assert ledger.read().phases[-1].name == "capture"
    with pytest.raises(ValueError, match=r"phase: expected \['capture'\] again or a new one"):
        ledger.phase("profile").__enter__()
    with other.phase("serve"):
        model(x)
    for name, said in (("capture", "'capture' before"), ("profile", "'profile' before")):
        with pytest.raises(ValueError, match=said):
            other.phase(name).__enter__()
    late = ledgers.AllocationLedger(model)
    with late.phase("load"):
        model(x)
    with pytest.raises(ValueError, match="phase: expected 'profile' first"):
        late.phase("profile").__enter__()


def test_bad_arguments_are_refused():
    model = Tree("attribute")
    held = sum(t.nbytes for _, _, t in ledgers.owned_tensors(model))
    with pytest.raises(ValueError, match=f"budget_bytes: expected at least the {held} bytes"):
        ledgers.AllocationLedger(model, budget_bytes=held - 1)
    with pytest.raises(ValueError, match=r"budget_bytes: expected .*, got 0"):
        ledgers.AllocationLedger(nn.ReLU(), budget_bytes=0)
    with pytest.raises(ValueError, match=r"module: expected an nn\.Module"):
        ledgers.AllocationLedger([model])
    with pytest.raises(ValueError, match="report: expected at least one phase"):
        ledgers.AllocationLedger(model).read()
    assert ledgers.AllocationLedger(model, budget_bytes=held).budget_bytes == held


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["attribute", "object"])
def test_on_cuda_one_layer_tells_of_all(device, keep):
    model, x, ledger = profiled(keep, device)
    with ledger.phase("capture"):
        model(x, decode=True, layers=1)
    (owner,) = ledger.read().surprises
    assert (owner.name, owner.holders, owner.layers) == (OWNERS[keep], 1, LAYERS)
    assert owner.source.startswith("evidence/test_ledger.py:")
    before = ledgers.cuda_usage()
    with ledger.phase("capture"):
        model(x, decode=True)
    assert owner.bytes + ledgers.cuda_usage().allocated - before.allocated == owner.predicted


@pytest.mark.gpu
def test_on_cuda_memory_the_allocator_does_not_own_is_seen(device):
    import ctypes

    _, _, ledger = profiled("attribute", device)
    runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")
    address = ctypes.c_void_p()
    with ledger.phase("communicators"):
        status = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(256 * MIB))
    assert status == 0
    try:
        report = ledger.read()
        assert report.phases[1].outside == 256 * MIB
        assert "256 MiB outside the caching allocator" in str(report)
    finally:
        runtime.cudaFree(address)


@pytest.mark.gpu
def test_on_cuda_nothing_is_recorded_outside_a_phase(device):
    model, x, ledger = profiled("attribute", device)
    with ledger.phase("serve"):
        model(x)
    recorded = []
    for _ in range(2):
        recorded += (torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()],)
        model(x, decode=True)
    assert len(recorded[0]) == len(recorded[1])


def made_report(budget: int | None) -> ledgers.Report:
    """A profile, and a serving phase with a large surprise, a small one, pools and outside memory."""
    gone = Usage(20 * MIB, 12 * MIB, 10 * MIB, 0)
    later = Usage(60 * MIB, 40 * MIB, 20 * MIB, 5 * MIB)
    phases = (
        ledgers.Phase("profile", False, gone, gone, 8 * MIB, {}),
        ledgers.Phase("serve", False, gone, later, 1 * MIB, {"*.out": 4 * MIB, "table": 2 * MIB}),
    )
    owners = (
        ledgers.Owner("*.out", "mla.py:80", "serve", False, 2 * MIB, holders=2, layers=4, bytes=4 * MIB),
        ledgers.Owner("table", "moe.py:3", "serve", False, 2 * MIB, holders=1, layers=1, bytes=2 * MIB),
        ledgers.Owner("weights", "w.py:1", "profile", False, MIB, holders=1, layers=1, bytes=MIB),
        ledgers.Owner("kv", "kv.py:1", "serve", True, MIB, holders=1, layers=1, bytes=MIB),
        # It will be a block once the second layer has its own.
        ledgers.Owner("512 bytes", "s.py:1", "serve", False, 256, holders=1, layers=2, bytes=256),
        ledgers.Owner("511 bytes", "s.py:1", "serve", False, 511, holders=1, layers=1, bytes=511),
    )
    return ledgers.Report(
        budget, 20 * MIB, phases, owners, None if budget is None else budget - 60 * MIB, 8 * MIB
    )


@pytest.mark.parametrize("budget", [None, 68 * MIB, 68 * MIB - 1])
def test_a_report_in_words_and_as_json(budget):
    report = made_report(budget)
    headroom = {None: "", 68 * MIB: "; headroom 8 MiB; this fits"}.get(
        budget, "; headroom 8 MiB; this will not fit"
    )
    sentence = f"`*.out`: 2 MiB x 4 layers = 8 MiB allocated after profiling{headroom}"
    assert str(report).splitlines() == [
        sentence,
        "also `table`: 2 MiB allocated after profiling",
        "also `512 bytes`: 256 B x 2 layers = 512 B allocated after profiling",
        "serve: 13 MiB in graph pools and fragments",
        "serve: 12 MiB outside the caching allocator",
        *([] if budget is None else ["a step as in profile needs 8 MiB"]),
        "  *.out at mla.py:80, first in serve",
        "  table at moe.py:3, first in serve",
        "  weights at w.py:1, first in profile",
        "  kv at kv.py:1, first in serve",
        "  512 bytes at s.py:1, first in serve",
        "  511 bytes at s.py:1, first in serve",
    ]
    # What is no hundredth of the first phase is not worth a line.
    large = str(replace(report, required=1200 * MIB))
    assert ("13 MiB in graph pools" in large, "outside" in large) == (True, False)
    told = json.loads(report.to_json())
    fits = {None: None, 68 * MIB: True}.get(budget, False)
    assert (told["sentence"], told["fits"], report.fits) == (sentence, fits, fits)
    assert [o["predicted"] for o in told["owners"]] == [8 * MIB, 2 * MIB, MIB, MIB, 512, 511]
    expected = [(0, 0, 20 * MIB), (12 * MIB, 13 * MIB, 20 * MIB)]
    assert [(p["outside"], p["pools"], p["before"]["used"]) for p in told["phases"]] == expected
    assert told["phases"][1]["after"]["releasable"] == 5 * MIB
    assert (told["budget"], told["before"], told["required"]) == (budget, 20 * MIB, 8 * MIB)


def test_the_figure_stacks_owners_and_the_rest_up_to_what_is_in_use():
    (axes,) = made_report(70 * MIB).figure().axes
    owners = [
        ("*.out", 4),
        ("table", 2),
        *((name, 0) for name in ("weights", "kv", "512 bytes", "511 bytes")),
    ]
    # In the second phase 60 MiB are used; 5 of them can be returned.
    stacks = [("before the ledger", 20, 20), *((name, 0, mib) for name, mib in owners)]
    stacks += [("pools, fragments, outside", 0, 29), ("freed again in the phase", 8, 1)]
    foot = [0.0, 0.0]
    for bars, (name, *heights) in zip(axes.containers, stacks, strict=True):
        assert bars.get_label() == name
        assert [(bar.get_y(), bar.get_height()) for bar in bars] == [*zip(foot, heights, strict=True)]
        assert all(bar.get_fill() == (name != "freed again in the phase") for bar in bars)
        foot = [a + b for a, b in zip(foot, heights, strict=True)]
    (budget,) = axes.lines
    assert ({*budget.get_ydata()}, axes.get_ylabel()) == ({70}, "MiB")
    assert not made_report(None).figure().axes[0].lines


def test_weights_that_share_a_storage_count_once_in_what_is_in_use():
    model, weight = nn.Linear(1, 1, bias=False), torch.zeros(1024)
    model.one, model.other = weight, weight[:10]
    report, usage = begun(model).read(), 4096 + 4
    assert (report.before, report.phases[0].after) == (usage, Usage(usage, usage, usage, 0))


def test_of_layers_that_differ_the_largest_buffer_and_the_most_common_kind_are_expected():
    tree = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity(), nn.Tanh()])
    ledger = begun(tree)
    with ledger.phase("serve"):
        for number, rows in ((0, 1), (1, 2), (3, 1)):
            tree[number].out = torch.zeros(rows, EACH // 4)
    (owner,) = ledger.read().surprises
    assert (owner.holders, owner.bytes, owner.bytes_each, owner.layers) == (3, 4 * EACH, 2 * EACH, 3)
    assert owner.predicted == 6 * EACH
