"""Whether a fix of incident 5 computes the right thing: the detectors look for NaN, or for duplicates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from staleproof.cases.compare import other_bits, too_far
from staleproof.evidence.rows import pad_invariance
from staleproof.incidents.scale_padding import broken, ids, null_block
from staleproof.incidents.scale_padding.scene import IN_KERNEL, LIVE, multiply, product_on, step_of
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.nvfp4_layout import swizzle
from staleproof.ops.reference import nvfp4 as reference

# A share of a row's largest magnitude: e4m3 keeps 4 bits, so an element is off by up to a sixteenth.
FP8_BUDGET = 2**-4
TOKENS, EXPERTS, TOP_K = 20_000, 128, 8


def wrong_product(path_name: str, allocation: str, device: str) -> str | None:
    """What is wrong with an NVFP4 product, or with what our quantiser writes, or ``None``.

    The product must have the bits of the reference's, whatever the memory of the scales contained.
    Our quantiser must write the reference's bytes, padding included, over poisoned memory.
    """
    a, path = product_on(device), broken.PATHS[path_name]
    packed, scales = reference.quantize_nvfp4(a.x, a.factor, swizzled=False)
    if path.row_tile is not None:
        tiles = swizzle(scales.view(torch.uint8), row_tile=path.row_tile)
        scales = tiles.view(torch.float8_e4m3fn)
    want = multiply(a, packed, scales, path)
    step = step_of(path_name, allocation, device)
    found = other_bits("product, live rows", step(None)[:LIVE], want[:LIVE])
    if found is None and (changed := pad_invariance(step, LIVE).changed):
        found = f"product, live rows: they change with {' '.join(changed)} in the padding of scales"
    if found is None and allocation == IN_KERNEL:
        mine = torch.empty_like(packed), torch.empty_like(scales)
        for memory in mine:
            # NaN in e4m3.
            memory.view(torch.uint8).fill_(0x7F)
        quantize_nvfp4(a.x, a.factor, swizzled=path.row_tile is not None, out=mine)
        found = other_bits("packed values", mine[0], packed) or other_bits("scales", mine[1], scales)
    return found


def wrong_draw(simulator: ids.Simulator, device: str) -> str | None:
    """What is wrong with simulated routing, or ``None``.

    Ids must be int32, in range and distinct, no expert favoured, and the weights of a token equal with
    sum 1.
    """
    weights, chosen = simulator(TOKENS, EXPERTS, TOP_K)
    if chosen.dtype != torch.int32:
        return f"ids are {chosen.dtype}"
    if not bool(((chosen >= 0) & (chosen < EXPERTS)).all()):
        return "ids out of range"
    if bool(ids.experts_twice(chosen).any()):
        return "an expert twice"
    share = TOP_K / EXPERTS
    drawn = torch.bincount(chosen.flatten().long(), minlength=EXPERTS).double()
    # Each expert is in a token or not, so its count is binomial: six deviations are two in a billion.
    spread = (TOKENS * share * (1 - share)) ** 0.5
    if float((drawn - TOKENS * share).abs().max()) > 6 * spread:
        return "some experts are drawn too often"
    return too_far("weights", weights, torch.full_like(weights, 1 / TOP_K), 2**-20)


def wrong_row_scale(name: str, device: str) -> str | None:
    """What is wrong with a quantiser of one scale a token, or ``None``: quiet rows beside loud ones."""
    generator = torch.Generator().manual_seed(6)
    loudness = torch.tensor([1.0, 100.0, 0.01, 1.0, 30.0, 0.1])[:, None]
    x = (torch.randn(6, 64, generator=generator) * loudness).to(device)
    values, scales = broken.PER_TOKEN[name](x)
    rows = values.float() * scales[:, None]
    for row, (got, want) in enumerate(zip(rows, x, strict=True)):
        amax = want.abs().amax()
        found = too_far(f"scale of row {row}", scales[row], amax / 448, 2**-20)
        if found := found or too_far(f"row {row}", got, want, FP8_BUDGET):
            return found
    return None


def wrong_ids(
    reader: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    routed: tuple[torch.Tensor, torch.Tensor],
) -> str | None:
    """Whether the weights and ids that arrive are those that were sent, ``routed``."""
    weights, right = routed
    chosen, read_weights = reader(right, weights)
    return other_bits("ids", chosen, right) or too_far("weights", read_weights, weights, 2**-8)


def wrong_write(device: str) -> str | None:
    """What is wrong with a write of keys and values by slot: -1 writes nothing, a slot its own row."""
    cache = torch.zeros(4, null_block.BLOCK_SIZE, null_block.HEAD, device=device)
    hidden = torch.arange(1.0, 4.0, device=device)[:, None].expand(3, null_block.HEAD)
    slots = torch.tensor([null_block.BLOCK_SIZE + 1, -1, 0], device=device)
    null_block.write_kv(cache, hidden, slots)
    want = torch.zeros_like(cache)
    want[1, 1], want[0, 0] = 1, 3
    return other_bits("the cache", cache, want)
