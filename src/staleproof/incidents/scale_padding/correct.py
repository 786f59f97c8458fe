"""Whether a fix of incident 5 computes the right thing: the detectors look for NaN, or for duplicates."""

from __future__ import annotations

from dataclasses import replace

import torch

from staleproof.evidence.compare import other_bits, rounding, too_far
from staleproof.evidence.rows import pad_invariance
from staleproof.incidents.scale_padding import broken, ids, null_block
from staleproof.incidents.scale_padding.scene import IN_KERNEL, LIVE, Product, multiply, product_on, step_of
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.nvfp4_layout import swizzle
from staleproof.ops.reference import nvfp4 as reference

SICK = 1
TOKENS = 20_000
# Experts, and how many of them a token gets.
DRAWN = ((128, 8), (64, 6))


def wrong_product(path_name: str, allocation: str, device: str) -> str | None:
    """What is wrong with an NVFP4 product, or with what our quantiser writes, or ``None``.

    The product must have the bits of the reference, whatever the memory of the scales contained. One of its
    rows is NaN and must stay NaN. Our quantiser must write the reference's bytes, padding included, over
    poisoned memory, even for more rows than a tile has.
    """
    healthy, tile = product_on(device), broken.PATHS[path_name]
    a = replace(healthy, x=healthy.x.clone())
    a.x[SICK] = torch.nan
    packed, scales = reference.quantize_nvfp4(a.x, a.factor, swizzled=False)
    if tile is not None:
        scales = swizzle(scales.view(torch.uint8), row_tile=tile).view(torch.float8_e4m3fn)
    want = multiply(a, packed, scales, tile)
    step = step_of(path_name, allocation, a)
    found = other_bits("product, live rows", step(None)[:LIVE], want[:LIVE])
    if found is None and (changed := pad_invariance(step, LIVE).changed):
        found = f"product, live rows: they change with {' '.join(changed)} in the padding of scales"
    if found is None and allocation == IN_KERNEL:
        both = (a, product_on(device, m=130, n=144))
        found = next(filter(None, (_wrong_bytes(each, tile is not None) for each in both)), None)
    return found


def _wrong_bytes(a: Product, swizzled: bool) -> str | None:
    """Compare our quantiser with the reference, over poisoned memory."""
    want = reference.quantize_nvfp4(a.x, a.factor, swizzled=swizzled)
    ours = torch.empty_like(want[0]), torch.empty_like(want[1])
    for memory in ours:
        # NaN in e4m3.
        memory.view(torch.uint8).fill_(0x7F)
    quantize_nvfp4(a.x, a.factor, swizzled=swizzled, out=ours)
    names = (f"{what} of {len(a.x)} rows" for what in ("packed values", "scales"))
    return next(filter(None, map(other_bits, names, ours, want)), None)


def wrong_draw(simulator: ids.Simulator, device: str) -> str | None:
    """What is wrong with simulated routing, or ``None``.

    Ids must be int32, in range and distinct. No expert and no pair of experts may be favoured, tokens must be
    independent, and another seed must give other ids. The weights of a token must be equal with sum 1.
    """
    return next(filter(None, (_wrong_draw(simulator, *sizes) for sizes in DRAWN)), None)


def _wrong_draw(simulator: ids.Simulator, experts: int, top_k: int) -> str | None:
    weights, chosen = simulator(TOKENS, experts, top_k)
    if chosen.dtype != torch.int32:
        return f"ids are {chosen.dtype}"
    if not bool(((chosen >= 0) & (chosen < experts)).all()):
        return "ids out of range"
    if bool(ids.experts_twice(chosen).any()):
        return "an expert twice"
    # (tokens, experts): 1 if a token has the expert. has.T @ has counts the tokens with both experts.
    has = torch.zeros(TOKENS, experts, dtype=torch.float32).scatter_(1, chosen.long(), 1.0)
    pairs = (has.T @ has).double()
    both = top_k * (top_k - 1) / (experts * (experts - 1))
    apart = ~torch.eye(experts, dtype=torch.bool)
    for what, counts, share in (
        ("experts", pairs.diagonal(), top_k / experts),
        ("pairs of experts", pairs[apart], both),
    ):
        # Each count is binomial, so six standard deviations have a probability of two in a billion.
        spread = (TOKENS * share * (1 - share)) ** 0.5
        off = (counts - TOKENS * share) / spread
        if float(off.abs().max()) > 6:
            return f"some {what} are drawn too often"
        # The squares have mean 1 and variance 2; a pair occurs twice among them.
        if abs(float((off**2).mean()) - 1) > 6 * (4 / len(off)) ** 0.5:
            return f"{what} are drawn more evenly, or more in clumps, than tokens that know nothing of others"
    if torch.equal(simulator(TOKENS, experts, top_k, seed=1)[1], chosen):
        return "another seed gives the same ids"
    return too_far("weights", weights, torch.full_like(weights, 1 / top_k), 2**-20)


def wrong_row_scale(name: str, device: str) -> str | None:
    """What is wrong with a quantiser with one scale per token, or ``None``: small rows next to large ones.

    Each row's scale must depend on that row only, and its numbers must be the nearest fp8 numbers with that
    scale, even with other rows in a second call, and for more and wider rows.
    """
    generator = torch.Generator().manual_seed(6)
    # An odd number of rows: the last one has no neighbour.
    loudness = torch.tensor([1.0, 100.0, 0.01, 1.0, 30.0, 0.1, 3.0])[:, None]
    x = (torch.randn(7, 64, generator=generator) * loudness).to(device)
    calls = (x, x.flip(0), x.repeat(3, 3))
    return next(filter(None, (_wrong_rows(name, rows) for rows in calls)), None)


def _wrong_rows(name: str, x: torch.Tensor) -> str | None:
    values, scales = broken.PER_TOKEN[name](x)
    for row, (got, want) in enumerate(zip(scales, x.abs().amax(1) / 448, strict=True)):
        if found := too_far(f"scale of row {row}", got, want, 2**-20):
            return found
    nearest = (x * (1 / scales)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return other_bits("values", values, nearest)


def wrong_ids(reader: ids.Reader, device: str) -> str | None:
    """What is wrong with the weights and ids that a kernel reads, or ``None`` if they are the right ones.

    Ids are more than a byte wide, and no two weights of a token are equal.
    """
    sizes = ((64, 512, 4), (96, 512, 10))
    return next(filter(None, (_wrong_ids(reader, device, *each) for each in sizes)), None)


def _wrong_ids(reader: ids.Reader, device: str, tokens: int, experts: int, top_k: int) -> str | None:
    _, right = ids.simulate_routing(tokens, experts, top_k, device=device)
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(3))
    weights = noise.softmax(1).to(device)
    chosen, read_weights = reader(right, weights)
    if chosen.dtype != right.dtype:
        return f"ids are {chosen.dtype}"
    # The packed form holds weights in bfloat16.
    shares = (read_weights / weights).flatten()
    return other_bits("ids", chosen, right) or too_far(
        "weights", shares, torch.ones_like(shares), rounding(torch.bfloat16)
    )


def wrong_write(number: int, device: str, ranks: null_block.Ranks) -> str | None:
    """What is wrong with a write of keys and values by slot, or ``None``.

    In this repetition the idle rank's dummy batch must write no block. A batch with requests writes each row
    to its slot.
    """
    if written := ranks[1][number].written:
        return f"the dummy batch writes the blocks {list(written)}"
    cache = torch.zeros(4, null_block.BLOCK_SIZE, null_block.HEAD, device=device)
    hidden = torch.arange(1.0, 4.0, device=device)[:, None].expand(3, null_block.HEAD)
    slots = torch.tensor([null_block.BLOCK_SIZE + 1, -1, 0], device=device)
    null_block.write_kv(cache, hidden, slots)
    want = torch.zeros_like(cache)
    want[1, 1], want[0, 0] = 1, 3
    return other_bits("the cache", cache, want)
