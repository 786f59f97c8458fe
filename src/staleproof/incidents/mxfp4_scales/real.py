"""vLLM's own kernel and loader on this incident's layer.

Each function that takes a device runs in a child process: the package is imported for good, and a read past a
mapping ends the process.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from staleproof.cases.children import tell
from staleproof.incidents.mxfp4_scales import broken, scene
from staleproof.incidents.mxfp4_scales.broken import Matrix, Shape
from staleproof.incidents.mxfp4_scales.remedies import REMEDIES, Remedy
from staleproof.incidents.mxfp4_scales.scene import GPT_OSS, NAN, RIGHT, SMALL, Layer, Size, behind
from staleproof.kernels import vllm_sources
from staleproof.kernels.vllm_matmul_ogs import SAMPLER, MatmulOgs, Operand

# Batches of the layer on a GPU. The first token goes to the last expert in each.
TOKENS = (1, 8, 64, 512, 4096)
# K of the first product that reads nothing past the end, beside the size that does.
CONTROLS = {"cpu": (128, 256), "cuda": (2944, 3072)}
CRASH = "illegal memory access"
# Remedies that leave the package as it is, and so share one process.
LOADED = tuple(name for name, remedy in REMEDIES.items() if remedy.edit is None)
EDITED = tuple(name for name, remedy in REMEDIES.items() if remedy.edit is not None)


def size_on(device: str) -> Size:
    """gpt-oss-20b's layer on a GPU, and a small one where kernels are interpreted."""
    return SMALL if device == "cpu" else GPT_OSS


def converted(m: MatmulOgs, matrix: Matrix, how: Remedy, swizzle: Any = None) -> Operand:
    """Convert a checkpoint's matrix with vLLM's loader; ``swizzle`` is another loader."""
    scale = matrix.scale
    if how.pads:
        scale = functional.pad(scale, (0, -scale.shape[-1] % 4))
    return m.operand(matrix.weight, scale, swizzle)


def asked_layer(m: MatmulOgs, a: Layer, how: Remedy, bytes_behind: str, swizzle: Any = None) -> scene.Judged:
    """The layer with bytes behind the scales of both projections."""
    operands = [converted(m, matrix, how, swizzle) for matrix in (a.w13, a.w2)]

    def run(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return m.moe(a.x, a.topk_ids, a.topk_weights, *(each.in_slab(behind(name)) for each in operands))

    clean, _ = run("0x00")
    out, inner = run(bytes_behind)
    return scene.judged(a, (out.nan_to_num() if how.filters else out, inner), clean)


def asked_product(m: MatmulOgs, x: torch.Tensor, matrix: Matrix, put: Operand) -> scene.Judged:
    """The first product alone: its worst error beside the reference, and the columns that hold NaN."""
    y = m.product(x, put).float()
    bad = ~y.isfinite()
    worst = 0.0
    for expert in range(len(y)):
        right = x.float() @ broken.dequantized(Matrix(matrix.weight[expert], matrix.scale[expert])).T
        error = torch.where(bad[expert], 0, (y[expert] - right).abs() / right.abs().max())
        worst = max(worst, float(error.max()))
    columns = bad.any(1).any(0).nonzero().flatten().tolist()
    numbers = {
        "worst_error_where_finite": worst,
        "nan": int(bad.sum()),
        "experts_with_nan": bad.any(2).any(1).nonzero().flatten().tolist(),
        "columns_with_nan": columns,
    }
    word = NAN if columns else RIGHT if worst < scene.BUDGET else scene.WRONG
    return scene.Judged(word, numbers)


def dirty_pad_group(m: MatmulOgs, how: Remedy) -> scene.Judged:
    """An odd number of groups, with 0xff in the group that the layout adds: what of the product changes?

    The values' own mask is wrong for such a K (it is no multiple of 64), so the comparison is with zeros
    in the same group.
    """
    matrix, x, memory = scene.odd_groups(how)
    put = converted(m, matrix.on(m.device), how)
    got = []
    for pad in memory:
        data = pad.to(m.device).as_strided(put.scale_bytes.shape, put.scale_bytes.stride())
        got.append(m.product(x.to(m.device), put.with_scale(data)).float())
    return scene.judged_pad(*got)


def package(device: str, *remedies: str) -> None:
    """Child: ask the package with these remedies, which need the same edit of it."""
    m = MatmulOgs(device, REMEDIES[remedies[0]].edit)
    size = size_on(device)
    for name in remedies:
        how = REMEDIES[name]
        batches = TOKENS if device == "cuda" and name in ("none", "loader_pads") else (scene.TOKENS,)
        for tokens in batches:
            a = scene.layer_on(device, size, tokens)
            for fill in ("0x00", "0xff"):
                key = f"layer, {tokens} tokens" if len(batches) > 1 else "layer"
                tell((name, f"{key}, {fill}", asked_layer(m, a, how, fill)))
        tell((name, "dirty pad group", dirty_pad_group(m, how)))
    if "none" in remedies:
        for key, judged in _table(m, size):
            tell(("none", key, judged))


def _table(m: MatmulOgs, size: Size) -> Iterator[tuple[str, scene.Judged]]:
    """The first product over all contents of the memory behind, off / on / off, and the controls."""
    generator = torch.Generator(m.device).manual_seed(1)
    shape = Shape(size.experts, 2 * size.inter, size.hidden)
    for k in (size.hidden, *CONTROLS[m.device]):
        matrix = scene.checkpoint(shape._replace(k=k), generator)
        x = torch.randn(16, k, generator=generator, device=m.device).bfloat16()
        off, on = (converted(m, matrix, REMEDIES[name]) for name in ("none", "loader_pads"))
        for name in scene.BEHIND if k == size.hidden else ("0x00", "0xff"):
            asked = [asked_product(m, x, matrix, put.in_slab(behind(name))) for put in (off, on, off)]
            numbers = {f"{key}_on": value for key, value in asked[1].numbers.items()}
            numbers |= {"words": [each.word for each in asked], **asked[0].numbers}
            yield f"product, K {k}, {name}", scene.Judged(asked[0].word, numbers)


def load_time(device: str) -> dict[str, float]:
    """Child: milliseconds of the first product with scales as shipped and padded, and of the loader."""
    m, size, found = MatmulOgs(device), size_on(device), {}
    a = scene.layer_on(device, size, 64)
    for name in ("none", "loader_pads"):
        how = REMEDIES[name]
        operands = [converted(m, matrix, how) for matrix in (a.w13, a.w2)]
        from triton.testing import do_bench

        found[f"{name}, layer of 64 tokens, ms"] = float(
            do_bench(lambda put=operands: m.moe(a.x, a.topk_ids, a.topk_weights, *put), return_mode="median")
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        converted(m, a.w13, how)
        torch.cuda.synchronize()
        found[f"{name}, loader, ms"] = 1e3 * (time.perf_counter() - start)
        found[f"{name}, bytes of scales"] = sum(each.scale_bytes.numel() for each in operands)
    return found


class Raw:
    """Device memory at an address, for ``torch.as_tensor``."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _mapped(count: int) -> torch.Tensor:
    """(count,) uint8 that ends where a mapping of its own ends: one byte more is no memory."""
    from cuda.bindings import driver

    def done(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")
        return result[1] if len(result) > 1 else None

    at = torch.cuda.current_device()
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = at
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    page = done(driver.cuMemGetAllocationGranularity(wanted, minimum))
    size = -(-count // page) * page
    # Reserved beyond the end, so that nothing else is mapped there.
    address = done(driver.cuMemAddressReserve(size + 8 * page, 0, 0, 0))
    done(driver.cuMemMap(address, size, 0, done(driver.cuMemCreate(size, wanted, 0)), 0))
    access = driver.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    done(driver.cuMemSetAccess(address, size, [access], 1))
    return torch.as_tensor(Raw(int(address) + size - count, count), device="cuda")


def guarded(remedy: str) -> str:
    """Child: gpt-oss' first product with its scales at the end of a mapping.

    Returns:
        ``"right"``; a read past the end does not return.
    """
    how = REMEDIES[remedy]
    m = MatmulOgs("cuda", how.edit)
    a = scene.layer_on("cuda", GPT_OSS)
    put = converted(m, a.w13, how)
    data = put.scale_bytes
    memory = _mapped(data.numel()).as_strided(data.shape, data.stride())
    memory.copy_(data)
    judged = asked_product(m, a.x, a.w13, put.with_scale(memory))
    torch.cuda.synchronize()
    return judged.word


# Of gpt-oss-20b, beside the experts: layers, vocabulary, and what a server of vLLM 0.22.1 would reserve here.
LAYERS, VOCABULARY, PROFILED_TOKENS, PROFILED_REQUESTS = 24, 201_088, 8192, 256
KV_BYTES = 256 * 2**20


def _behind_each(operands: list[Operand]) -> list[tuple[str, bool]]:
    """Of each tensor of scales: the state of the block right behind it, and whether its bytes hold 0xff."""
    blocks = {}
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        for block in segment["blocks"]:
            blocks[at] = block["state"]
            at += block["size"]
    found = []
    for operand in operands:
        data = operand.scale_bytes
        end = data.data_ptr() + data.numel()
        state = blocks.get(end, "none")
        harmful = state != "none" and bool((torch.as_tensor(Raw(end, 32), device="cuda") == 0xFF).any())
        found.append((state, harmful))
    return found


def neighbour(device: str) -> None:
    """Child: load 24 layers as vLLM does, then allocate as it does, and look behind the scales at each stage.

    Nothing is placed by hand. The loader and the sampler are vLLM's; the order is that of its model runner:
    empty parameters, the checkpoint, the conversion of each layer, a profile run with a sampler, KV caches,
    and steps in which some requests sample with top-p. At each stage vLLM's kernel computes every layer.
    """
    m, size = MatmulOgs(device), size_on(device)
    with vllm_sources.executed(m.root, SAMPLER):
        apply = importlib.import_module(SAMPLER).apply_top_k_top_p_pytorch
    generator = torch.Generator(device).manual_seed(0)
    shapes = (Shape(size.experts, 2 * size.inter, size.hidden), Shape(size.experts, size.hidden, size.inter))
    a = scene.layer_on(device, size, 64)

    def parameters(shape: Shape) -> Matrix:
        empty = torch.zeros(shape.experts, shape.n, shape.k // 2, dtype=torch.uint8, device=device)
        return Matrix(empty, empty.new_zeros(shape.experts, shape.n, shape.k // broken.GROUP))

    embedding = torch.zeros(VOCABULARY, size.hidden, dtype=torch.bfloat16, device=device)
    layers = [[parameters(shape) for shape in shapes] for _ in range(LAYERS)]
    for each in layers:
        for matrix, source in zip(each, (a.w13, a.w2), strict=True):
            for into, of in zip(matrix, source, strict=True):
                into.copy_(of)
    converted_layers: list[list[Operand]] = []
    for i in range(LAYERS):
        converted_layers.append([converted(m, matrix, REMEDIES["none"]) for matrix in layers[i]])
        # As the loader: the parameters are replaced layer by layer.
        layers[i] = []
    padded = [converted(m, matrix, REMEDIES["loader_pads"]) for matrix in (a.w13, a.w2)]
    clean, _ = m.moe(a.x, a.topk_ids, a.topk_weights, *padded)
    del padded

    def stage(name: str) -> None:
        behind_w13 = _behind_each([each[0] for each in converted_layers])
        words = [
            scene.judged(a, m.moe(a.x, a.topk_ids, a.topk_weights, *each), clean).word
            for each in converted_layers
        ]
        states = [state for state, _ in behind_w13]
        tell(
            (
                name,
                {
                    "layers": LAYERS,
                    "free_block_behind": states.count("inactive"),
                    "owned_block_behind": states.count("active_allocated"),
                    "segment_ends": states.count("none"),
                    "with_0xff_behind": sum(harmful for _, harmful in behind_w13),
                    "wrong_layers": sum(word != RIGHT for word in words),
                    "words": sorted({*words}),
                },
            )
        )

    def sample(requests: int) -> None:
        hidden = torch.rand(requests, size.hidden, dtype=torch.bfloat16, device=device, generator=generator)
        logits = (hidden @ embedding.T).float()
        logits += torch.randn(logits.shape, device=device, generator=generator)
        apply(logits, None, torch.full((requests,), 0.9, device=device)).softmax(-1, dtype=torch.float32)

    stage("loaded")
    big = scene.layer_on(device, size, PROFILED_TOKENS)
    m.moe(big.x, big.topk_ids, big.topk_weights, *converted_layers[0])
    del big
    sample(PROFILED_REQUESTS)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stage("profiled")
    caches = [torch.zeros(KV_BYTES, dtype=torch.int8, device=device) for _ in range(LAYERS)]
    stage("KV cache")
    for requests in (1, 2, 3, 8, 64):
        sample(requests)
        stage(f"after a step of {requests} requests with top-p")
    del caches


def loaders(device: str, folders: dict[str, str]) -> None:
    """Child: the layer with each release's loader, off / on / off with the patch; 0xff lies behind.

    Args:
        device: where it runs.
        folders: release -> its folder ``vllm``.
    """
    from pathlib import Path

    from staleproof.vllm.plugin import patches

    m, patch = MatmulOgs(device), patches()["mxfp4_scale_tail"]
    a = scene.layer_on(device, size_on(device))
    for release, folder in folders.items():
        said = []
        for applied in (False, True, False):
            if applied:
                patch.apply(release)
            try:
                said.append(asked_layer(m, a, REMEDIES["none"], "0xff", m.loader(Path(folder))))
            finally:
                patch.revert()
        tell((release, said))
