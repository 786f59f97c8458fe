"""The probes of attention: one function a clause, each ``(kernel, shape, device) -> Answer``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from staleproof.check import bound
from staleproof.contract import reproducer
from staleproof.contract.contract import BREAKS, Answer, breaks, holds, not_run
from staleproof.contract.reproducer import Example, keep
from staleproof.contract.scenes import (
    HELD,
    Call,
    Shape,
    behind_operands,
    dirty_memory,
    far_lse,
    far_row,
    hold,
    make_call,
    reference,
)
from staleproof.evidence.canary import bits
from staleproof.evidence.compare import rounding
from staleproof.evidence.rows import FILLS, Fill, same_bits

NAN = float("nan")
# With pages of 16 tokens: a page and part of another, part of one, and a whole one.
LENGTHS = (19, 5, 16)
WITH_EMPTY = (19, 0, 5, 0)
# A request of some tiles; more requests than a tile has rows, each of another length. Both fill the table.
LONG, MANY = (144,), tuple(range(1, 34))
# Finite content that no masking may let through: far from N(0, 1), and small enough for fp16.
GARBAGE = 1e4
STALE = (Fill("NaN", lambda x: x.fill_(NAN)), Fill("finite garbage", lambda x: x.fill_(GARBAGE)))


class WrongResultError(Exception):
    """A kernel is wrong on clean input; the text says how."""


@dataclass(frozen=True)
class Kernel:
    """An attention kernel under audit.

    Attributes:
        call: the function.
        prepared: whether it returns a launch.
        planned: whether that launch holds for the lengths only that it was made with.
        empty_lse: its documented lse of an empty row.
    """

    call: Callable[..., Any]
    prepared: bool = False
    planned: bool = False
    empty_lse: float = float("-inf")


Result = tuple[torch.Tensor, torch.Tensor | None]


def launcher(kernel: Kernel, call: Call, arguments: dict[str, Any] | None = None) -> Callable[[], Result]:
    """What launches the kernel on these tensors, again and again."""
    arguments = bound(kernel.call, call.arguments()) if arguments is None else arguments
    keep(arguments)
    returns_launch = kernel.prepared or kernel.planned
    launch = kernel.call(**arguments) if returns_launch else partial(kernel.call, **arguments)

    def run() -> Result:
        keep(arguments)
        return _result(launch(), call, arguments)

    return run


def _result(returned: Any, call: Call, arguments: dict[str, Any]) -> Result:
    pair = (*returned, None)[:2] if isinstance(returned, tuple | list) else (returned, None)
    out, lse = (arguments.get(name) if x is None else x for name, x in zip(("out", "lse"), pair, strict=True))
    if not isinstance(out, torch.Tensor):
        raise WrongResultError(f"returns {type(out).__name__}, expected a tensor or a pair of them")
    wanted = tuple(call.out.shape)
    if call.shape.q_len and out.ndim == 4:
        out = out.flatten(0, 1)
    if tuple(out.shape) != wanted:
        raise WrongResultError(f"returns shape {tuple(out.shape)}, expected {wanted}")
    if isinstance(lse, torch.Tensor):
        if lse.numel() != call.lse.numel():
            raise WrongResultError(
                f"returns lse of shape {tuple(lse.shape)}, expected {tuple(call.lse.shape)}"
            )
        return out, lse.reshape(call.lse.shape)
    return out, None


def run(kernel: Kernel, call: Call, fill: float = NAN) -> Result:
    """Launch once, over memory that holds ``fill``; the result is copied."""
    hold(call.out, fill)
    hold(call.lse, fill)
    with dirty_memory(fill):
        out, lse = launcher(kernel, call)()
    return out.clone(), None if lse is None else lse.clone()


def scaled(shape: Shape, lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of as many whole pages, where a page has more than 16 tokens, and as many tokens more.

    >>> scaled(Shape(page_size=64), (19, 5, 16)), scaled(Shape(), (19, 5, 16))
    ((67, 5, 64), (19, 5, 16))
    """
    return tuple(n // 16 * max(shape.page_size, 16) + n % 16 for n in lengths)


def _tolerance(call: Call) -> float:
    # Twice what a kernel rounds that scales q and k in its dtype. fp32 goes through an approximate exp, on a
    # GPU also through TF32: 10 bits of mantissa.
    return max(rounding(call.q.dtype, 8), 5e-3 if call.q.is_cuda else 2e-4)


def wrong_rows(result: Result, call: Call) -> str:
    """One line about the first live row that is not the reference, or ``""``."""
    expected, expected_lse = reference(call)
    idle = ~call.live().cpu()
    expected[idle], expected_lse[idle] = NAN, NAN
    wrong = far_row(result[0], expected, _tolerance(call))
    return wrong or ("" if result[1] is None else far_lse(result[1], expected_lse, _tolerance(call)))


def _right(call: Call, wrong: str = "") -> Example | None:
    """The last call, whose live rows should be the reference's: of lse, if what is wrong names it."""
    which = int(wrong.startswith("lse"))
    expected = reference(call)[which].to(call.q.device)
    return reproducer.right(expected, result=which, rows=call.live(), tolerance=_tolerance(call))


def _same(
    clean: Example | None, base: Result, which: str, rows: torch.Tensor | None = None
) -> Example | None:
    """The last call, in which the result of this name should have the bits of a call with clean memory."""
    result = ("out", "lse").index(which)
    found = base[result]
    return None if found is None else reproducer.same(clean, found, result=result, rows=rows)


def clean_input(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """0: the reference on clean input, and nothing written outside ``out``; also of one long request, of many
    with another scale, and finite for large scores."""
    call = make_call(shape, scaled(shape, LENGTHS), device)
    # The margins are part of the buffers; their content must survive.
    call.guards[-1][0], call.guards[-1][-1] = GARBAGE, GARBAGE
    inputs = call.q, *call.guards[:-1], call.block_table, call.seq_lens, call.query_start_loc
    before = [bits(x).clone() for x in inputs]
    try:
        result = run(kernel, call)
    except WrongResultError as error:
        return breaks(str(error))
    if wrong := wrong_rows(result, call):
        return breaks(wrong, _right(call, wrong))
    if not all(torch.equal(a, bits(x)) for a, x in zip(before, inputs, strict=True)):
        return breaks("writes to its inputs")
    margins = call.guards[-1][[0, -1]]
    if not bool((margins == margins.new_full((), GARBAGE)).all()):
        return breaks("writes outside out")
    named = bound(kernel.call, call.arguments())
    for name, got in zip(("out", "lse"), result, strict=True):
        if name in named and got is not None and not bool(same_bits(getattr(call, name), got).all()):
            return breaks(f"its argument {name} does not hold what it returns")
    for fill in HELD[1:]:
        if wrong := wrong_rows(run(kernel, call, fill), call):
            note = f"{wrong}: depends on what the memory held, here {fill:g}"
            return breaks(note, reproducer.over(_right(call, wrong), fill))
    for lengths in (LONG, MANY):
        more = make_call(shape, scaled(shape, lengths), device, seed=len(lengths))
        more.block_table = more.block_table[:, :-1].contiguous()
        if "softmax_scale" in named:
            more.softmax_scale /= len(lengths) ** 0.5
        if wrong := wrong_rows(run(kernel, more), more):
            sizes = f"requests: {len(lengths)}, tokens: up to {max(more.seq_lens.tolist())}"
            return breaks(f"{wrong}; {sizes}", _right(more, wrong))
    call.q.mul_(64)
    if not all(bool(part.isfinite().all()) for part in run(kernel, call) if part is not None):
        return breaks("not finite where q is 64 times as large")
    return holds()


def changed(now: Result, base: Result, rows: torch.Tensor | slice = slice(None)) -> str:
    """Which result has other bits in these rows: ``out``, ``lse``, or ``""``."""
    for name, a, b in zip(("out", "lse"), now, base, strict=True):
        if a is not None and b is not None and not bool(same_bits(a, b)[rows].all()):
            return name
    return ""


def _empty_row(rows: Sequence[torch.Tensor]) -> str:
    """What a row that should be zeros is, over each of :data:`HELD`."""
    if all(bool((row == 0).all()) for row in rows):
        return ""
    if all(bool(row.isnan().any()) for row in rows):
        return "NaN is written"
    kept = (same_bits(row, hold(torch.empty_like(row), fill)) for row, fill in zip(rows, HELD, strict=True))
    if all(bool(same.all()) for same in kept):
        return "not written: it keeps what the memory held"
    if not all(bool(same_bits(rows[0], row).all()) for row in rows):
        return "depends on what the memory held"
    return f"{rows[0][rows[0] != 0][0]:.4g}, expected 0"


def empty_rows(kernel: Kernel, shape: Shape, device: str, *, q_len: int = 1) -> Answer:
    """E: rows of empty requests after a launch in which they were live."""
    busy, idle = (9 + q_len, 18, 5 + q_len, 7), tuple(n and n + q_len for n in scaled(shape, WITH_EMPTY))
    q_lens = [q_len] * 4
    run(kernel, make_call(shape, busy, device, q_lens=q_lens, seed=1))
    for lengths in (idle, (0, 0, 0, 0)):
        call = make_call(shape, lengths, device, q_lens=q_lens)
        found = [run(kernel, call, fill) for fill in HELD]
        for fill, result in zip(HELD, found, strict=True):
            if not (wrong := wrong_rows(result, call)):
                continue
            shown = _right(call, wrong)
            last = make_call(shape, sorted(lengths, reverse=True), device, q_lens=q_lens)
            right = not wrong_rows(run(kernel, last, fill), last)
            padded = "; with empty requests last it is right" if right else ""
            between = f"an empty request between live ones, seq_lens {list(lengths)}: {wrong}{padded}"
            if result is not found[0]:
                between += f"; it depends on what the memory held, here {fill:g}"
                shown = reproducer.over(shown, fill)
            return breaks(between, shown)
        for row in (~call.live()).nonzero().flatten().tolist():
            empty = torch.arange(len(call.q), device=call.q.device) == row
            where = f"row {row}, of an empty request (seq_lens {list(lengths)})"
            if what := _empty_row([out[row] for out, _ in found]):
                shown = reproducer.right(torch.zeros_like(call.out), rows=empty)
                if what.startswith("depends"):
                    fills = zip(HELD, found, strict=True)
                    shown = reproducer.over(
                        shown, next(fill for fill, (out, _) in fills if (out[row] != 0).any())
                    )
                return breaks(f"{where}: {what}", shown)
            for _, lse in found:
                if lse is not None and (off := lse[row] != kernel.empty_lse).any():
                    wanted = torch.full_like(lse, kernel.empty_lse)
                    note = f"{where}: lse is {lse[row][off][0]:.4g}, expected {kernel.empty_lse:.4g}"
                    return breaks(note, reproducer.right(wanted, result=1, rows=empty))
    return holds("" if found[0][1] is not None else "no lse asked for")


def _stale_places(call: Call) -> dict[str, list[torch.Tensor]]:
    """Memory that no live row may read, by place."""
    k, v = call.k_cache, call.v_cache
    caches = {"": k} if call.shape.layout == "mla" else {"K of ": k, "V of ": v}
    used = [(request, n % call.shape.page_size) for request, n in enumerate(call.seq_lens.tolist())]
    places = {
        f"{name}the last page's tail": [cache[call.pages(request)[-1], end:] for request, end in used if end]
        for name, cache in caches.items()
    }
    whole = [buffer[part] for part in (slice(2), slice(-3, None)) for buffer in call.guards[:-1]]
    return places | {"the null page": [k[0], v[0]], "pages past the end": whole}


def stale_tail(kernel: Kernel, shape: Shape, device: str, *, q_len: int = 1) -> Answer:
    """T: whatever lies at or past seq_len, live rows keep their bits."""
    make = partial(make_call, shape, scaled(shape, LENGTHS), device, q_lens=[q_len] * len(LENGTHS))
    base, clean = run(kernel, make()), reproducer.last()
    live = make().live()
    found: list[str] = []
    shown = None
    for place in _stale_places(make()):
        for fill in STALE:
            call = make()
            for memory in _stale_places(call)[place]:
                fill(memory)
            now = run(kernel, call)
            if which := changed(now, base, live):
                part = now[0] if which == "out" else now[1]
                what = "NaN" if part is not None and bool(part[live].isnan().any()) else "other bits"
                what += "" if which == "out" else " in lse"
                shown = shown if found else _same(clean, base, which, live)
                found.append(f"{fill.name} in {place} gives {what}")
    return breaks("; ".join(found), shown) if found else holds()


def table_past_the_need(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """B: entries past the need hold -1, an id past the end, or a far one. Guard pages hold NaN."""
    lengths = scaled(shape, LENGTHS)
    base, clean = run(kernel, make_call(shape, lengths, device)), reproducer.last()
    call = make_call(shape, lengths, device)
    for buffer in call.guards[:-1]:
        buffer[[0, 1, -2, -1]] = NAN
    need = (call.seq_lens + shape.page_size - 1) // shape.page_size
    past = torch.arange(call.block_table.shape[1], device=device) >= need[:, None]
    # The far id comes last: where it is followed, the process may end.
    for page in (-1, call.k_cache.shape[0], 2**24):
        call.block_table[past] = page
        if which := changed(run(kernel, call), base):
            note = f"follows the entry {page} past the last page" + (" into lse" if which == "lse" else "")
            return breaks(note, _same(clean, base, which))
    return holds()


def other_rows(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """R: with other content in every other row and in its pages, a live row keeps its bits. A row's own NaN
    stays one."""
    lengths = scaled(shape, (19, 0, 5, 16))
    base, clean = run(kernel, make_call(shape, lengths, device)), reproducer.last()
    for fill in FILLS[0], FILLS[2], FILLS[3]:
        for kept in ((0,), (2, 3)):
            call = make_call(shape, lengths, device)
            for request in set(range(4)) - set(kept):
                fill(call.q[call.rows(request)])
                for page in call.pages(request):
                    fill(call.k_cache[page])
                    fill(call.v_cache[page])
            now = run(kernel, call)
            for request in kept:
                if which := changed(now, base, call.rows(request)):
                    what = f"row {request}" + (" of lse" if which == "lse" else "")
                    rows = torch.zeros_like(call.live())
                    rows[call.rows(request)] = True
                    shown = _same(clean, base, which, rows)
                    return breaks(f"{fill.name} in another row changes {what}", shown)
            for request in {0, 2, 3} - set(kept) if fill is FILLS[0] else ():
                if not bool(now[0][call.rows(request)].isnan().any()):
                    hidden = f"the NaN of request {request} is hidden, its own row holds numbers"
                    return breaks(f"{hidden}; seq_lens {call.seq_lens.tolist()}")
    return holds()


def _captured(kernel: Kernel, launch: Callable[[], Result], on_gpu: bool) -> tuple[Callable[[], Result], str]:
    """A replay of the captured launch on CUDA; elsewhere the launch itself, and a note that says so."""
    # Asks where the kernel runs, not whether there is a GPU: a graph records nothing of a kernel on the CPU.
    if not on_gpu:
        return launch, "launched again; capture in a CUDA graph was not tried, so a host sync would not show"
    if kernel.planned:
        return launch, "launched again with a new plan, not captured"
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = launch()
    except RuntimeError:
        # It asks the device something on the way, which a graph cannot hold.
        torch.cuda.synchronize()
        return launch, "launched again: a graph cannot hold it"

    def replay() -> Result:
        # Its inputs live as long as the launch, and the graph reads them by their addresses.
        assert launch is not None
        graph.replay()
        return result

    return replay, ""


def _kept_empty(kernel: Kernel, call: Call, now: Result) -> str:
    """What is wrong with the empty rows of a replay, if they are right with a new tensor of lengths."""
    fresh = replace(call, seq_lens=call.seq_lens.clone(), out=call.out.clone(), lse=call.lse.clone())
    empty = ~call.live()
    out, lse = run(kernel, fresh)
    if not empty.any() or not bool((out[empty] == 0).all()):
        return ""  # E says so.
    if not bool((now[0][empty] == 0).all()):
        return "the row of an empty request is not 0, as it is for a new tensor of lengths"
    if lse is None or now[1] is None or not bool((lse[empty] == kernel.empty_lse).all()):
        return ""
    kept = now[1][empty]
    off = kept[kept != kernel.empty_lse]
    return f"lse of an empty request is {off[0]:.4g}" if len(off) else ""


def replays(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """N: one set of buffers; the live count falls and rises between replays, and other inputs change too."""
    full, one, others = (scaled(shape, n) for n in ((19, 5, 16, 9), (19, 0, 0, 0), (0, 5, 16, 0)))
    starts = torch.tensor([[0, 2, 3, 4, 6], [0, 1, 3, 5, 6]], device=device)
    call = make_call(shape, full, device, q_lens=starts[0].diff().tolist() if shape.q_len == 0 else None)
    launch, note = _captured(kernel, launcher(kernel, call), call.q.is_cuda)
    for number, lengths in enumerate((full, one, full, others, full)):
        call.seq_lens.copy_(torch.tensor(lengths))
        # A launch that was prepared may keep the table.
        for memory in (call.q, call.block_table)[: 2 - kernel.prepared] if number else ():
            memory.copy_(memory.flip(0))
        for cache in call.guards[:-1]:
            cache.neg_()
        if shape.q_len == 0:
            call.query_start_loc.copy_(starts[number % 2])
        if kernel.planned:
            # Its documentation asks for a plan whenever lengths change.
            launch = launcher(kernel, call)
        call.out.fill_(NAN)
        call.lse.fill_(NAN)
        out, lse = launch()
        now = out.clone(), None if lse is None else lse.clone()
        if wrong := wrong_rows(now, call) or _kept_empty(kernel, call, now):
            return breaks(f"replayed with seq_lens {list(lengths)}: {wrong}", _right(call, wrong))
    return holds(note)


def spare_rows(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """U: rows of q and out past the last of ``query_start_loc``."""
    if shape.q_len != 0:
        return not_run("takes one row a request, not cu_seqlens")
    make = partial(make_call, shape, scaled(shape, LENGTHS), device, q_lens=(3, 1, 2))
    base = run(kernel, make())
    live = len(base[0])
    for fill in FILLS[:3]:
        call = make(spare_rows=3)
        call.q[:live] = make().q
        fill(call.q[live:])
        for held in HELD:
            out, lse = run(kernel, call, held)
            spare = torch.arange(len(out), device=out.device) >= live
            if changed((out[:live], None if lse is None else lse[:live]), base):
                by = f"{fill.name} in q past the end" if held is HELD[0] else "what the memory held"
                return breaks(f"{by} changes a live row")
            if "out" in bound(kernel.call, call.arguments()):
                kept = hold(torch.empty_like(out), held)
                if not bool(same_bits(out, kept)[live:].all()):
                    shown = reproducer.right(kept, rows=spare)
                    return breaks("writes rows of out past the end", shown)
            elif not bool((out[live:] == 0).all()):
                note = "rows past the end hold what the memory held"
                return breaks(note, reproducer.right(torch.zeros_like(out), rows=spare))
    return holds()


def several_query_tokens(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """Q: clean input, stale tails and empty requests with 2 query tokens each, and clean input with some."""
    if shape.q_len == 1:
        return not_run("takes one query token a request")
    for q_lens in ((2, 2, 2), (3, 1, 2))[: 1 if shape.q_len else 2]:
        call = make_call(shape, scaled(shape, LENGTHS), device, q_lens=q_lens)
        if wrong := wrong_rows(run(kernel, call), call):
            return breaks(wrong, _right(call, wrong))
    for clause, probe in (("T", stale_tail), ("E", empty_rows)):
        found = probe(kernel, shape, device, q_len=2)
        # A failure that also occurs with one query token belongs to the other clause.
        if found.verdict == BREAKS and probe(kernel, shape, device).verdict != BREAKS:
            return replace(found, note=f"{clause} with 2 query tokens: {found.note}")
    return holds()


def trace_of_a_launch(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """L: the same bits before and after a longer launch full of NaN."""
    call = make_call(shape, scaled(shape, LENGTHS), device)
    base = run(kernel, call)
    # The same lengths first: a kept buffer is found again by its shape.
    for lengths in (LENGTHS, (50, 40, 33, 20, 5)):
        bad = make_call(shape, scaled(shape, lengths), device)
        for x in (bad.q, bad.k_cache, bad.v_cache):
            x.fill_(NAN)
        run(kernel, bad)
        if changed(run(kernel, call), base):
            return breaks("a launch full of NaN changes the next one")
    return holds()


def kept_addresses(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """A: an earlier result stays as it is, new tensors are used, and a graph survives a larger call."""
    call = make_call(shape, scaled(shape, LENGTHS), device)
    captured, note = _captured(kernel, launcher(kernel, call), call.q.is_cuda)
    first = captured()
    base = first[0].clone(), None if first[1] is None else first[1].clone()
    other = make_call(shape, scaled(shape, LENGTHS), device, seed=3)
    second = launcher(kernel, other)()
    if wrong := wrong_rows(second, other):
        return breaks(f"new tensors of the same shape: {wrong}", _right(other, wrong))
    if changed(first, base):
        return breaks("the next call overwrites the result of this one")
    larger = make_call(shape, scaled(shape, (50, 40, 33, 20, 5)), device, seed=4)
    launcher(kernel, larger)()
    del other, second, larger
    gc.collect()
    if device == "cuda":
        # What the larger call gave back is handed out again, with other content.
        junk = [torch.full((2**size,), NAN, device=device) for size in range(8, 22)]
        del junk
    call.out.fill_(NAN)
    if changed(captured(), base):
        return breaks("a launch recorded before a larger call gives other bits after it")
    return holds(note)


def behind(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """O: with each operand at the end of its memory, the bytes behind it change no bit."""
    call = make_call(shape, scaled(shape, LENGTHS), device)

    def results(placed: dict[str, Any]) -> list[torch.Tensor]:
        with dirty_memory(NAN):
            return [x.clone() for x in launcher(kernel, call, placed)() if x is not None]

    return behind_operands(results, bound(kernel.call, call.arguments()))


PROBES: dict[str, Callable[[Kernel, Shape, str], Answer]] = {
    "0": clean_input,
    "E": empty_rows,
    "T": stale_tail,
    "B": table_past_the_need,
    "R": other_rows,
    "N": replays,
    "U": spare_rows,
    "Q": several_query_tokens,
    "L": trace_of_a_launch,
    "A": kept_addresses,
    "O": behind,
}
