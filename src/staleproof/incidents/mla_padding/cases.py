"""The cases of incident 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from staleproof.cases.case import Fix, Reading, Scene, ablation, each, failed, fix, reading
from staleproof.cases.compare import too_far
from staleproof.cases.finding import REPLICA, Evidence, Grade
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.rows import Fill, Verdict, bad_rows, judge_rows, pad_invariance
from staleproof.incidents.mla_padding import broken, remedies, scene, setups
from staleproof.incidents.mla_padding.correct import wrong
from staleproof.incidents.mla_padding.pictures import ROWS
from staleproof.kernels.adapter import Peer
from staleproof.kernels.mla import peers
from staleproof.kernels.vllm import vllm_fa3
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode

# --- A kernel alone.


def _unavailable(kernel: broken.Kernel, device: str) -> str | None:
    return kernel.unavailable_reason if isinstance(kernel, Peer) else None


def _evidence(kernel: broken.Kernel, where: str = "") -> Evidence:
    return Evidence(Grade.REAL, kernel.name + where) if isinstance(kernel, Peer) else REPLICA


Ask = Callable[[broken.Kernel, str], str | Reading]
LIVE_ROWS_WRONG = "live rows wrong"
# Worst first; if the rows of a batch differ, the worst state counts.
EMPTY_ROW_STATES = (LIVE_ROWS_WRONG, "unwritten", "partly written", "nan", "finite", "zero")


def _call(device: str, rows: int, live: int, tokens: int) -> scene.Call:
    return scene.make_call(device, rows=rows, live=live, tokens=tokens, dtype=scene.compared_dtype(device))


def _over_canaries(kernel: broken.Kernel, call: scene.Call) -> tuple[torch.Tensor, list[str]]:
    """A kernel's output, written over memory full of canaries, and the state of each row."""
    out = plant(call.q.new_empty(*call.q.shape[:-1], scene.KV_LORA_RANK), stage=5)
    given, _ = kernel(*call, softmax_scale=scene.SCALE, out=out)
    if given.data_ptr() == out.data_ptr():
        return given, row_states(given, stage=5)
    return _in_memory_of_its_own(kernel, call)


class _Filled(TorchDispatchMode):
    """Fills every new floating-point tensor that torch leaves uninitialised."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        unwritten = func.overloadpacket.__name__.removeprefix("new_").startswith("empty")
        return made.fill_(self.value) if unwritten and made.is_floating_point() else made


def _in_memory_of_its_own(kernel: broken.Kernel, call: scene.Call) -> tuple[torch.Tensor, list[str]]:
    """The same for a kernel that returns a new tensor: run over memory of NaN, then over memory of ones."""
    outputs = []
    for value in (torch.nan, 1.0):
        with _Filled(value):
            outputs.append(kernel(*call, softmax_scale=scene.SCALE)[0])
    over_nan, over_ones = outputs
    # Elements that equal the fill in both runs were never written.
    kept = (over_nan.isnan() & (over_ones == 1)).reshape(len(over_nan), -1)
    states = row_states(over_nan)
    for row, (some, whole) in enumerate(zip(kept.any(1).tolist(), kept.all(1).tolist(), strict=True)):
        states[row] = "unwritten" if whole else "partly written" if some else states[row]
    return over_ones, states


def empty_row(kernel: broken.Kernel, device: str, rows: int = 8) -> Reading:
    """What a kernel does with the output rows of requests without tokens.

    The output is filled with a canary first. If the canary survives, the row was not written; any other NaN
    was computed by the kernel. If live rows differ from the reference, the empty rows are not judged.
    """
    call = _call(device, rows=rows, live=3, tokens=20)
    out, states = _over_canaries(kernel, call)
    live, padding = sorted({*states[:3]}), sorted({*states[3:]})
    worst = next(state for state in EMPTY_ROW_STATES if state in padding)
    want, _ = reference_decode(call.q.double(), *call[1:], softmax_scale=scene.SCALE)
    # It is not known how often another package rounds to bf16, so allow it twice as often as ours.
    times = 4 if isinstance(kernel, Peer) else 2
    budget = scene.decode_budget(call.q.dtype, tokens=20, times=times)
    far = too_far("live rows", out.view_as(want)[:3], want[:3], budget) or ""
    verdict = LIVE_ROWS_WRONG if far else worst
    return reading(verdict, note=far, padding_rows=" ".join(padding), live_rows=" ".join(live))


def _reads(kernel: broken.Kernel, call: scene.Call, memory: list[torch.Tensor]) -> str:
    """Whether a decode depends on ``memory``: filled with NaN, with zeros, then with other content."""

    def run(fill: Fill | None) -> torch.Tensor:
        for part in memory:
            part.fill_(float("nan")) if fill is None else fill(part)
        return kernel(*call, softmax_scale=scene.SCALE)[0]

    live = call.q.shape[0]
    verdict = judge_rows(run, live)
    if verdict == Verdict.CLEAN and not pad_invariance(run, live):
        return "wrong, finite"
    return verdict


def past_seq_len(kernel: broken.Kernel, device: str) -> str:
    """Whether bytes past ``seq_len`` on a request's last page can change its output."""
    call = _call(device, rows=3, live=3, tokens=84)
    return _reads(kernel, call, [call.kv_cache[page, 84 - 64 :] for page in call.block_table[:, 1].tolist()])


def unused_table_entry(kernel: broken.Kernel, device: str) -> str:
    """Whether a page listed only in an unused entry of the block table can change the output."""
    call = _call(device, rows=3, live=3, tokens=64)
    return _reads(kernel, call, [call.kv_cache[page] for page in call.block_table[:, 1].tolist()])


def _asked(ask: Ask, kernel: broken.Kernel, device: str) -> str | Reading:
    """The answer. If a peer refuses or fails, the reason in one line, so that the others still run."""
    try:
        return ask(kernel, device)
    except Exception as error:
        if not isinstance(kernel, Peer):
            raise
        return failed(error)


KERNELS: dict[str, broken.Kernel] = {
    **broken.KERNELS,
    "mla_decode": mla_decode,
    "vllm_fa3": vllm_fa3(),
    **peers(),
}
# Parts that a kernel splits the keys into: vLLM's takes the number, ours chooses from the shapes. Fewer
# under the interpreter, which is slow.
SPLITS = {"cuda": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 4)}


def empty_row_by_splits(kernel: Callable[[int], broken.Kernel], device: str) -> Reading:
    """The state of an empty row with each number of splits."""
    states = [empty_row(kernel(splits), device, rows=4).verdict for splits in SPLITS[device]]
    worst = next(state for state in EMPTY_ROW_STATES if state in states)
    return reading(worst, splits=list(SPLITS[device]), states=states)


SPLIT_KERNELS: dict[str, Callable[[int], broken.Kernel]] = {
    "mla_decode": lambda splits: partial(mla_decode, num_kv_splits=splits),
    "vllm_triton": lambda splits: replace(peers()["vllm_triton"], num_kv_splits=splits),
}

# Question -> the family of its verdicts, and the function that answers it.
ALONE: dict[str, tuple[str, Ask]] = {
    "empty row": ("empty row", empty_row),
    "past seq_len": ("rows", past_seq_len),
    "unused table entry": ("rows", unused_table_entry),
}
# Expected verdicts of these three questions. Those of vLLM's kernel come from a run of its unmodified file on
# an H200. Other packages' kernels have no expected verdict.
CONTRACT = {
    "empty_row_not_written": ("unwritten", "clean", "clean"),
    "zero_by_zero_written": ("nan", "clean", "clean"),
    "tail_masked_by_multiplication": ("zero", "leaked", "clean"),
    "block_table_not_padded": ("zero", "leaked", "leaked"),
    "mla_decode": ("zero", "clean", "clean"),
    "vllm_triton": ("nan", "clean", "clean"),
}


# --- The reproducer behind vLLM #37442.


# q_len, padding rows, tokens of the one live request.
_CASES = ((1, 127, 512), (4, 127, 512), (1, 1023, 1200))
# Question -> its sizes.
REPRODUCER = {f"1 + {case[1]}, q_len {case[0]}": case for case in _CASES}


def padding_rows(sizes: tuple[int, int, int], fixed: str, device: str) -> Reading:
    """Whether the raw attention output, filled with NaN before, still has NaN in its padding rows.

    ``amax`` over all rows is the number that the reproducer prints.
    """
    q_len, padding, tokens = sizes
    call = scene.make_call(device, rows=1 + padding, live=1, tokens=tokens, q_len=q_len)
    out = plant(call.q.new_empty(*call.q.shape[:-1], scene.KV_LORA_RANK))
    broken.empty_row_not_written(*call, softmax_scale=scene.SCALE, out=out)
    if fixed == "clear_empty_rows":
        clear_empty_rows(out, call.seq_lens)
    verdict = "padding NaN" if bad_rows(out)[1:].any() else "no padding NaN"
    return reading(verdict, amax=float(out.abs().max()), q_len=q_len, padding=padding, tokens=tokens)


# --- Served requests.


@cache
def _service(setup: setups.Setup) -> Scene:
    """The served steps of one setup; two questions use them."""
    return Scene("serve, torch.max", partial(setups.serve, setup, "torch.max"))


def served(setup: setups.Setup, device: str, found: setups.StepVerdicts) -> Reading:
    """The worst verdict of the served steps."""
    return reading(found.verdict, steps=" ".join(found.steps), sick_step=found.steps[setups.SICK_STEP])


def padding_content(setup: setups.Setup, device: str, found: setups.StepVerdicts) -> str:
    """Whether padding content changes live rows."""
    return "ignored" if found.invariant else "decides"


def served_verdict(setup: setups.Setup, device: str, quantiser: str = "torch.max") -> Reading:
    """The worst verdict of steps that are served only for this question."""
    return served(setup, device, setups.serve(setup, quantiser, device))


def _not_served(setup: setups.Setup, device: str) -> str | None:
    why = _unavailable(setup.kernel, device)
    return why or (None if device == "cuda" else "served in bf16, which needs a CUDA device")


_VLLM = KERNELS["vllm_triton"]
SERVED_PEERS = {
    "vllm_triton": setups.Setup(_VLLM, served=(Verdict.LEAKED, Verdict.LEAKED)),
    "vllm_triton_cleared": setups.Setup(_VLLM, setups.ClearEmptyRows, (Verdict.CLEAN, Verdict.CLEAN)),
}


def off_on_off(name: str, setup: setups.Setup, expect: str = FIXED) -> Fix:
    """One setup's kernel without its remedy, with it, and without it again."""
    return fix(name, "rows", off=setup.without_fix, on=setup, ask=served_verdict, wrong=wrong, expect=expect)


@dataclass(frozen=True)
class Ingredients:
    """What a leak needs.

    Attributes:
        padding: the batch has padding rows.
        unwritten: the kernel leaves them unwritten.
        poison: their memory held NaN.
        mixes: the consumer takes one scale from all rows.
    """

    padding: bool = True
    unwritten: bool = True
    poison: bool = True
    mixes: bool = True


def live_count(live: int, device: str) -> str:
    """Verdict of one step of the faulty kernel with ``live`` requests of 16."""
    engine = setups.Setup().engine("torch.max", device, batch=ROWS)
    engine.set_batch(scene.Batch(live))
    return engine.verdict()


def leak(parts: Ingredients, device: str) -> str:
    """Verdict of one step with these ingredients."""
    kernel = broken.empty_row_not_written if parts.unwritten else mla_decode
    quantise = broken.quantise_amax_torch_max if parts.mixes else None
    config = scene.EngineConfig.for_device(device, batch=8)
    engine = scene.Engine(scene.Variant("ablation", broken.NoRemedy(kernel), quantise), config)
    engine.poison(plant if parts.poison else torch.Tensor.zero_)
    engine.set_batch(scene.Batch(1 if parts.padding else config.batch))
    return engine.verdict()


TABLE = Table(
    "mla_padding",
    each(
        "live count",
        "rows",
        {f"{live} of {ROWS} live": live for live in range(1, ROWS + 1)},
        live_count,
        expect=lambda live: Verdict.CLEAN if live == ROWS else Verdict.LEAKED,
    ),
    *(
        each(
            name,
            words,
            KERNELS,
            partial(_asked, ask),
            expect={kernel: verdicts[index] for kernel, verdicts in CONTRACT.items()},
            reason="another package's kernel: nothing is known before it runs",
            needs=_unavailable,
            evidence=_evidence,
        )
        for index, (name, (words, ask)) in enumerate(ALONE.items())
    ),
    # Kernels that must not mislead the question "empty row": live rows are wrong, or ``out`` is not used.
    each(
        "empty row",
        "empty row",
        {"three_times_too_large": setups.too_large(3.0), "ignores_out": setups.ignores_out},
        empty_row,
        expect={"three_times_too_large": LIVE_ROWS_WRONG, "ignores_out": "zero"},
    ),
    *(
        each(
            name,
            "padding NaN",
            ["empty_row_not_written", "clear_empty_rows"],
            partial(padding_rows, sizes),
            expect={"empty_row_not_written": "padding NaN", "clear_empty_rows": "no padding NaN"},
        )
        for name, sizes in REPRODUCER.items()
    ),
    each("served, torch.max", "rows", setups.SETUPS, served, expect=lambda s: s.served[0], scene=_service),
    each(
        "padding content",
        "padding content",
        setups.SETUPS,
        padding_content,
        expect=lambda s: "ignored" if {*s.served} == {Verdict.CLEAN} else "decides",
        scene=_service,
    ),
    each(
        "served, fmax",
        "rows",
        {name: setup for name, setup in setups.SETUPS.items() if setup.quantise is None},
        partial(served_verdict, quantiser="fmax"),
        expect=lambda setup: setup.served[1],
    ),
    each(
        "served, torch.max",
        "rows",
        SERVED_PEERS,
        served_verdict,
        expect=lambda setup: setup.served[0],
        needs=_not_served,
        evidence=lambda setup: _evidence(setup.kernel, ", in our engine"),
    ),
    each(
        "growth after capture",
        "buffer",
        {name: setups.SETUPS[name] for name in remedies.GROWTH},
        remedies.growth_after_capture,
        expect=remedies.GROWTH,
    ),
    each(
        "growth by history",
        "buffer",
        {f"{n} other free blocks": n for n in (0, 1, 8)},
        remedies.growth_by_history,
        expect="overwrites a tenant",
        needs=remedies.needs_an_allocator,
    ),
    each("null block", "rows", remedies.NULL_BLOCKS, remedies.null_block, expect=lambda case: case[2]),
    each("num_decodes", "rows", remedies.DECODES, remedies.num_decodes, expect=lambda case: case[1]),
    each("3-D buffer", "buffer", remedies.BUFFERS, remedies.three_d_buffer, expect=lambda case: case[2]),
    each(
        "empty row, by splits",
        "empty row",
        SPLIT_KERNELS,
        empty_row_by_splits,
        expect={"mla_decode": "zero", "vllm_triton": "nan"},
        needs=lambda kernel, device: _unavailable(kernel(1), device),
        evidence=lambda kernel: _evidence(kernel(1)),
    ),
    ablation(
        Ingredients(),
        "rows",
        without={
            "no padding rows": ({"padding": False}, Verdict.CLEAN),
            "kernel writes every row": ({"unwritten": False}, Verdict.CLEAN),
            "memory held no NaN": ({"poison": False}, Verdict.CLEAN),
            "consumer keeps rows apart": ({"mixes": False}, Verdict.PAD_ONLY),
        },
        ask=leak,
        expect=Verdict.LEAKED,
    ),
    *(off_on_off(name, setup) for name, setup in setups.SETUPS.items() if setup.fix),
    # The merged remedy, tested in the same way.
    off_on_off("zeros_once_per_layer", setups.SETUPS["zeros_once_per_layer"], NOT_FIXED),
    # Wrong remedies that nobody merged. They show that the test does not call a wrong remedy fixed.
    *(off_on_off(name, setup, expect) for name, (setup, expect) in setups.WRONG_REMEDIES.items()),
)
