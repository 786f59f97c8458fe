"""Whether a fix of incident 5 computes the right thing: the detectors look for NaN, or for duplicates."""

from __future__ import annotations

import torch

from staleproof.harness.compare import other_bits, too_far
from staleproof.incidents.scale_padding import broken, ids, null_block
from staleproof.incidents.scale_padding.scene import IN_KERNEL, LIVE, multiply, product_on, step_of
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.reference import nvfp4 as reference

# e4m3 keeps 4 bits: an element is off by up to a sixteenth.
FP8_BUDGET = 2**-4
TOKENS, EXPERTS, TOP_K = 20_000, 128, 8


def wrong_product(path_name: str, allocation: str, device: str) -> str | None:
    """What is wrong with an NVFP4 product, or with what our quantiser writes, or ``None``."""
    a, path = product_on(device), broken.PATHS[path_name]
    packed, scales = reference.quantize_nvfp4(a.x, a.factor, swizzled=path.row_tile is not None)
    want = multiply(a, packed, scales, path)
    got = step_of(path_name, allocation, device)(None)
    # The same packed values and scales go through the same product.
    found = other_bits("product, live rows", got[:LIVE], want[:LIVE])
    if found is None and allocation == IN_KERNEL:
        mine = quantize_nvfp4(a.x, a.factor, swizzled=path.row_tile is not None)
        found = other_bits("packed values", mine[0], packed) or other_bits("scales", mine[1], scales)
    return found


def wrong_draw(simulator: ids.Simulator, device: str) -> str | None:
    """What is wrong with simulated routing, or ``None``: experts in range, weights of 1, none favoured."""
    weights, chosen = simulator(TOKENS, EXPERTS, TOP_K)
    if not bool(((chosen >= 0) & (chosen < EXPERTS)).all()):
        return "ids out of range"
    share = TOP_K / EXPERTS
    drawn = torch.bincount(chosen.flatten().long(), minlength=EXPERTS).double()
    spread = (TOKENS * share * (1 - share)) ** 0.5
    if float((drawn - TOKENS * share).abs().max()) > 6 * spread:
        return "some experts are drawn too often"
    return too_far("weights of a token", weights.sum(1), torch.ones(TOKENS), 2**-20)


def wrong_row_scale(name: str, device: str) -> str | None:
    """What is wrong with a quantiser of one scale a token, or ``None``."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(6, 64, generator=generator).to(device)
    values, scales = broken.PER_TOKEN[name](x)
    found = too_far("scales", scales, x.abs().amax(1) / 448, 2**-20)
    return found or too_far("rows", values.float() * scales[:, None], x, FP8_BUDGET)


def wrong_write(device: str) -> str | None:
    """What is wrong with a write of keys and values by slot: -1 writes nothing, a slot its own row."""
    cache = torch.zeros(4, null_block.BLOCK_SIZE, null_block.HEAD, device=device)
    hidden = torch.ones(2, null_block.HEAD, device=device)
    null_block.write_kv(cache, hidden, torch.tensor([-1, null_block.BLOCK_SIZE + 1], device=device))
    want = torch.zeros_like(cache)
    want[1, 1] = 1
    return other_bits("the cache", cache, want)
