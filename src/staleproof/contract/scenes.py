"""The inputs of the probes, by the names that kernels use for them, and the right results.

A kernel under audit is a function. It is called with the arguments that it names: a probe makes all
of them, and passes those that its signature asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from staleproof.audit import LAYOUTS, MLA
from staleproof.check import fail
from staleproof.contract import reproducer
from staleproof.contract.contract import Answer, breaks, holds
from staleproof.evidence.canary import bits
from staleproof.evidence.compare import too_far
from staleproof.kernels.mapping import mapped

# What new memory is asked with. A NaN passes through sums and products, also those by 0; a maximum, a minimum
# or a clamp drops it, or takes it for a bound, and these pass a number that is further out on their side.
HELD = (float("nan"), 1e30, -1e30)
NULL_PAGE = 0
# Pages before and after the cache, so that an id of -1 or one past the end reads memory we own.
GUARD = 2


@dataclass(frozen=True)
class Shape:
    """What an attention kernel is built for.

    Attributes:
        layout: ``paged``: K and V in pages; ``mla``: one latent in pages, V is its beginning.
        heads, kv_heads, head_dim, value_dim: sizes; value_dim is head_dim by default.
        page_size: tokens a page.
        dtype: of q and the cache, e.g. ``float16``; float32 on a CPU and bfloat16 on a GPU by default.
        q_len: query tokens a request at most; 0 stands for any number, by ``query_start_loc``.
    """

    layout: str = "paged"
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    value_dim: int = 0
    page_size: int = 16
    dtype: str = ""
    q_len: int = 1

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            fail("layout", "paged or mla", self.layout)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)


# What the decorator of an attention kernel takes beside its shape: how it is launched, and what it documents.
LAUNCH = ("prepared", "planned", "empty_lse")


def attention_shape(given: Mapping[str, Any]) -> Shape:
    """The shape among what a kernel's decorator was given."""
    sizes = {name: value for name, value in given.items() if name not in LAUNCH}
    usual = MLA if sizes.get("layout") == "mla" else {}
    return Shape(**usual | sizes)


def usual_dtype(device: str, name: str = "") -> torch.dtype:
    """The dtype of that name, or the one that kernels are asked with on a device."""
    found: torch.dtype = getattr(torch, name or ("float32" if device == "cpu" else "bfloat16"))
    return found


@dataclass
class Call:
    """One attention call; the tensors may be edited in place.

    Attributes:
        shape: what it was made for.
        q: (tokens, heads, head_dim).
        k_cache: (pages, page_size, kv_heads, head_dim), between guard pages.
        v_cache: the same with value_dim; in layout ``mla`` the beginning of ``k_cache``.
        block_table: (batch, max_pages) int32; entries past the need name the null page.
        seq_lens: (batch,) int32, all query tokens counted.
        query_start_loc: (batch + 1,) int32.
        out, lse: (tokens, heads, value_dim) and (tokens, heads) float32.
        softmax_scale: of the scores.
        guards: the buffers around the cache and ``out``.
    """

    shape: Shape
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    guards: list[torch.Tensor] = field(default_factory=list)

    @property
    def max_seq_len(self) -> int:
        """Longest request that the block table has room for."""
        return self.block_table.shape[1] * self.shape.page_size

    def rows(self, request: int) -> slice:
        """The rows of q of one request."""
        start, end = self.query_start_loc[request : request + 2].tolist()
        return slice(start, end)

    def live(self) -> torch.Tensor:
        """(tokens,) bool: rows of requests that are not empty."""
        mask = torch.zeros(len(self.q), dtype=torch.bool, device=self.q.device)
        for request, length in enumerate(self.seq_lens.tolist()):
            mask[self.rows(request)] = length > 0
        return mask

    def pages(self, request: int) -> list[int]:
        """The pages that a request needs."""
        need = -(-int(self.seq_lens[request]) // self.shape.page_size)
        return self.block_table[request, :need].tolist()

    def arguments(self) -> dict[str, Any]:
        """Everything that a kernel may name."""
        longest = int(self.query_start_loc.diff().max())
        given = {
            name: getattr(self, name)
            for name in ("q", "block_table", "seq_lens", "query_start_loc", "out", "lse", "softmax_scale")
        }
        given |= {"max_seq_len": self.max_seq_len, "page_size": self.shape.page_size, "max_q_len": longest}
        if self.shape.q_len != 0 and longest > 1:
            for name in ("q", "out", "lse"):
                given[name] = given[name].unflatten(0, (len(self.seq_lens), longest))
        if self.shape.layout == "mla":
            return given | {"kv_cache": self.k_cache[:, :, 0], "kv_lora_rank": self.shape.value_dim}
        return given | {"k_cache": self.k_cache, "v_cache": self.v_cache}


def make_call(
    shape: Shape,
    seq_lens: Sequence[int],
    device: str,
    *,
    q_lens: Sequence[int] | None = None,
    spare_rows: int = 0,
    seed: int = 0,
) -> Call:
    """A call with random live content, and zeros in all memory that no request may read.

    Args:
        shape: of the kernel.
        seq_lens: tokens of each request; 0 makes it empty.
        device: where.
        q_lens: query tokens of each request; 1 each by default.
        spare_rows: rows of q and out past the last of ``query_start_loc``.
        seed: of the content.

    >>> call = make_call(Shape(), [20, 0], "cpu")
    >>> call.block_table.tolist(), call.pages(0)
    ([[2, 1, 0], [0, 0, 0]], [2, 1])
    """
    size, batch = shape.page_size, len(seq_lens)
    dtype = usual_dtype(device, shape.dtype)
    generator = torch.Generator().manual_seed(seed)

    def random(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(device, dtype)

    needs = [-(-length // size) for length in seq_lens]
    # One entry past the longest request, and page 0 for nobody.
    table = torch.full((batch, max(needs, default=0) + 1), NULL_PAGE, dtype=torch.int32)
    # Backwards, so that nobody finds a page behind the one before.
    pages, free = 1 + sum(needs) + 1, [*range(1, 1 + sum(needs))]
    zeros = partial(torch.zeros, device=device, dtype=dtype)
    widths = (shape.head_dim, shape.value_dim)[: 1 if shape.layout == "mla" else 2]
    buffers = [zeros(pages + 2 * GUARD, size, shape.kv_heads, width) for width in widths]
    caches = [buffer[GUARD:-GUARD] for buffer in buffers]
    for request, (length, need) in enumerate(zip(seq_lens, needs, strict=True)):
        own = [free.pop() for _ in range(need)]
        table[request, :need] = torch.tensor(own)
        for cache in caches:
            content = random(length, shape.kv_heads, cache.shape[-1])
            padded = torch.cat([content, content.new_zeros(need * size - length, *content.shape[1:])])
            cache[own] = padded.unflatten(0, (need, size))
    starts = torch.tensor([0, *(q_lens or [1] * batch)]).cumsum(0).int()
    tokens = int(starts[-1]) + spare_rows
    around = zeros(tokens + 2, shape.heads, shape.value_dim)
    return Call(
        shape,
        random(tokens, shape.heads, shape.head_dim),
        caches[0],
        caches[-1][..., : shape.value_dim],
        table.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        starts.to(device),
        around[1:-1],
        torch.zeros(tokens, shape.heads, device=device),
        shape.head_dim**-0.5,
        [*buffers, around],
    )


def reference(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The right result in float64, on the CPU: (tokens, heads, value_dim) and (tokens, heads)."""
    groups = call.shape.heads // call.shape.kv_heads
    out = torch.zeros(*call.out.shape, dtype=torch.float64)
    lse = torch.full(call.lse.shape, float("-inf"), dtype=torch.float64)
    for request, length in enumerate(call.seq_lens.tolist()):
        pages, rows = call.pages(request), call.rows(request)
        if not pages:
            continue
        k, v = (
            cache[pages].flatten(0, 1)[:length].cpu().double().repeat_interleave(groups, 1)
            for cache in (call.k_cache, call.v_cache)
        )
        q = call.q[rows].cpu().double()
        scores = torch.einsum("qhd,khd->qhk", q, k) * call.softmax_scale
        # Causal among the query tokens, which are the last of the request.
        last = torch.arange(len(q)) + length - len(q)
        scores = scores.masked_fill(torch.arange(length) > last[:, None, None], float("-inf"))
        out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
        lse[rows] = scores.logsumexp(-1)
    return out, lse


def far_row(found: torch.Tensor, expected: torch.Tensor, budget: float) -> str:
    """One line about the first row that is off by more than this share of it, or ``""``.

    Rows where NaN or an infinity is expected are not compared.
    """
    found, expected = found.cpu().double(), expected.cpu().double()
    for row, (got, want) in enumerate(zip(found, expected, strict=True)):
        if bool(want.isfinite().all()) and too_far("", got.flatten(), want.flatten(), budget):
            return f"row {row} is off by {(got - want).abs().max():.3g}"
    return ""


def far_lse(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """One line about the first lse that is not as expected, or ``""``; any is right where NaN is expected."""
    found, expected = found.cpu().double(), expected.cpu()
    close = torch.isclose(found, expected, rtol=tolerance, atol=tolerance)
    for row, head in (~close & ~expected.isnan()).nonzero()[:1].tolist():
        return f"lse of row {row} is {found[row, head]:.4g}, expected {expected[row, head]:.4g}"
    return ""


def hold(x: torch.Tensor, fill: float) -> torch.Tensor:
    """Fill memory with what a last tenant may have left.

    Args:
        x: the memory.
        fill: for floating tensors, as far as their dtype goes. Bytes and integers get a number of their own
            for NaN, for a small, a large and a large negative one.

    Returns:
        ``x``.
    """
    # Compilers allocate leaves that need a gradient, which may not be written in place.
    memory, small = x.detach(), abs(fill) < 1e4
    byte, whole = (0x7F, 0x7F7F) if fill != fill else (1, 1) if small else (0x7B, 0x7B7B)
    if x.dtype == torch.bool:
        memory.fill_(not fill < 0)
    elif x.element_size() == 1:
        # The first bit of fp8 and int8 is their sign; 0x7B is a large number of either fp8.
        memory.view(torch.uint8).fill_(byte | (0x80 if fill < 0 else 0))
    elif x.is_floating_point():
        largest = torch.finfo(x.dtype).max
        memory.fill_(max(min(fill, largest), -largest))
    else:
        memory.fill_(-whole if fill < 0 and x.dtype.is_signed else whole)
    return x


@contextmanager
def dirty_memory(fill: float) -> Iterator[None]:
    """Fill what Python code gets from ``torch.empty`` and its siblings, as a last tenant would have.

    Args:
        fill: as for :func:`hold`.
    """

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            return hold(make(*args, **kwargs), fill)

        return call

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # Compiled code allocates where this cannot reach: what the allocator hands out next is dirty.
        blocks = [torch.full((2**size // 4,), fill, device="cuda") for size in range(9, 26) for _ in range(4)]
        del blocks
    compiled = "torch._dynamo" in sys.modules
    makers: dict[str, Any] = {
        name: filled(getattr(torch, name)) for name in ("empty", "empty_like", "empty_strided")
    }
    new_empty = filled(torch.Tensor.new_empty)
    try:
        with mock.patch.multiple(torch, **makers), mock.patch.object(torch.Tensor, "new_empty", new_empty):
            yield
    finally:
        if not compiled and "torch._dynamo" in sys.modules:
            # Imported in here, torch.compile has listed these functions as torch's, and would know no other.
            torch._dynamo.trace_rules.clear_lru_cache()


# Value of the bytes after an operand; None: random bytes.
BEHIND: dict[str, int | None] = {"0x00": 0, "0xff": 255, "noise": None}
TAIL_BYTES = 4096


def _placed(x: torch.Tensor, behind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``x`` at the end of its memory, and the bytes behind it."""
    slab = torch.randint(256, (x.nbytes + TAIL_BYTES,), generator=torch.Generator().manual_seed(0))
    slab = slab.to(x.device, torch.uint8)
    if (value := BEHIND[behind]) is not None:
        slab[x.nbytes :] = value
    copy = slab[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())
    return copy.copy_(x), slab[x.nbytes :]


def _placeable(known: Mapping[str, Any]) -> list[str]:
    """The names of tensors whose elements fill their memory, in any order of the axes."""

    def fills(x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or not x.numel():
            return False
        steps = zip(x.shape, x.stride(), strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps) == x.numel()

    return [name for name, x in known.items() if fills(x)]


def zeros_behind(known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with each operand at the end of its memory, and zeros behind it."""
    return {**known, **{name: _placed(known[name], "0x00")[0] for name in _placeable(known)}}


def _guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` whose end is that of its mapping: a read behind it ends the process."""
    if x.device.type == "cuda" and x.nbytes % 16:
        return x  # A copy would not be aligned as compiled kernels expect.
    memory = mapped(x.nbytes, x.device.type)
    return memory.view(x.dtype).as_strided(x.shape, x.stride()).copy_(x)


def behind_operands(
    run: Callable[[dict[str, Any]], Sequence[torch.Tensor]], known: Mapping[str, Any]
) -> Answer:
    """O: with each operand at the end of its memory, the bytes after it change no result and do not change.

    On Linux each operand is then placed at the end of a mapping, where a read past its end ends the process.

    Args:
        run: launches on these arguments, and returns copies of the results.
        known: the arguments; tensors that fill their memory are placed, the others stay as they are.

    >>> x = torch.ones(4)
    >>> print(behind_operands(lambda known: [known["x"] + 1], {"x": x}).verdict)
    holds
    """
    names = _placeable(known)

    def results(behind: Mapping[str, str]) -> tuple[list[torch.Tensor], str]:
        made = {name: _placed(known[name], behind[name]) for name in names}
        before = {name: tail.clone() for name, (_, tail) in made.items()}
        copies = {name: copy for name, (copy, _) in made.items()}
        found = [*run({**known, **copies}), *(copy.clone() for copy in copies.values())]
        written = [name for name, (_, tail) in made.items() if not torch.equal(tail, before[name])]
        return found, written[0] if written else ""

    base: list[torch.Tensor] = []
    clean = None
    for fill in BEHIND:
        found, written = results(dict.fromkeys(names, fill))
        if written:
            return breaks(f"writes behind {written}")
        if same_results(base or found, found):
            base, clean = found, clean if base else reproducer.last()
            continue
        pairs = enumerate(zip(base, found, strict=True))
        number = next(number for number, (a, b) in pairs if not same_results([a], [b]))
        shown = reproducer.same(clean, base[number], result=number)
        alone = dict.fromkeys(names, "0x00")
        by = [name for name in names if not same_results(base, results({**alone, name: fill})[0])]
        note = f"{fill} behind {', '.join(by) or 'the operands together'} changes the result"
        return breaks(note, shown)
    if sys.platform != "linux":
        return holds("no guard mapping: needs Linux")
    try:
        guarded = {name: _guarded(known[name]) for name in names}
    except ImportError as error:
        return holds(f"no guard mapping: {error}")
    run({**known, **guarded})
    return holds()


def same_results(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two calls have given the same bits."""
    return all(torch.equal(bits(x.contiguous()), bits(y.contiguous())) for x, y in zip(a, b, strict=True))
