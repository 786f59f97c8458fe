"""vLLM's own kernel and loader on this incident's layer.

Everything that uses the device runs in a child process, because the package cannot be unloaded, and a read
past a mapping ends the process.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from staleproof.cases.case import Reading, reading
from staleproof.cases.children import tell
from staleproof.cases.mapping import at_address, mapped
from staleproof.incidents.mxfp4_scales import broken, scene
from staleproof.incidents.mxfp4_scales.broken import Matrix, Shape
from staleproof.incidents.mxfp4_scales.remedies import REMEDIES
from staleproof.incidents.mxfp4_scales.scene import NAN, RIGHT, WRONG, Layer, bytes_of
from staleproof.kernels import mxfp4, vllm_sources
from staleproof.kernels.vllm_matmul_ogs import SAMPLER, MatmulOgs, Operand, version
from staleproof.vllm.patches.mxfp4_scales import PATCHES

# Batch sizes of the layer on a GPU, with these remedies. Otherwise only the first batch size is used.
BATCHED, BATCHES = ("none", "loader_pads"), (scene.TOKENS, 1, 8, 64, 512, 4096)
# Values of K for which the product reads nothing past the end.
CONTROLS = {"cpu": (128, 256), "cuda": (2944, 3072)}
# Remedies that change which scales are read or used. The other two do not change the kernel's reads.
READERS = [name for name in REMEDIES if name not in ("nan_to_num", "zero_once")]
# One more run without a remedy, after the others.
AGAIN = "again"


def converted(m: MatmulOgs, matrix: Matrix, remedy: str = "none", swizzle: Any = None) -> Operand:
    """A checkpoint's matrix as vLLM's loader converts it; ``swizzle`` is the loader of another release."""
    scale = matrix.scale
    if REMEDIES[remedy].pads:
        scale = functional.pad(scale, (0, -scale.shape[-1] % 4))
    return m.operand(matrix.weight, scale, swizzle)


def runner(m: MatmulOgs, a: Layer, remedy: str = "none", swizzle: Any = None) -> scene.Run:
    """A function that computes the layer with given bytes after the scales of both projections."""
    w13, w2 = (converted(m, matrix, remedy, swizzle) for matrix in (a.w13, a.w2))
    return lambda a, behind: m.moe(a.x, a.topk_ids, a.topk_weights, w13.in_slab(behind), w2.in_slab(behind))


def product(m: MatmulOgs, x: torch.Tensor, matrix: Matrix, put: Operand) -> Reading:
    """The first product alone: its worst error, and where it has NaN."""
    y, worst = m.product(x, put).float(), 0.0
    bad = ~y.isfinite()
    for expert in range(len(y)):
        right = scene.exact(x, matrix, expert)
        error = torch.where(bad[expert], 0, (y[expert] - right).abs() / right.abs().max())
        worst = max(worst, float(error.max()))
    where = [bad.flatten(1).any(1), bad.flatten(0, 1).any(0)]
    experts, columns = (each.nonzero().flatten().tolist() for each in where)
    word = NAN if experts else RIGHT if worst < scene.BUDGET else WRONG
    return reading(word, worst_where_finite=worst, experts_with_nan=experts, columns_with_nan=columns)


def package(device: str, *remedies: str) -> None:
    """Child: run the package with these remedies, which must all edit the same line of it, or none.

    Args:
        device: where it runs.
        remedies: names in :data:`REMEDIES`; ``"again"`` is one more run without a remedy.
    """
    m = MatmulOgs(device, REMEDIES[remedies[0]].edit)
    for label in remedies:
        remedy = "none" if label == AGAIN else label
        for tokens in BATCHES if device == "cuda" and label in BATCHED else BATCHES[:1]:
            a = scene.layer_on(device, tokens=tokens)
            said = scene.judged(a, runner(m, a, remedy), filters=REMEDIES[remedy].filters)
            for fill, one in zip(scene.FILLS, said, strict=True):
                tell(((label, fill, tokens), one))
        if label not in READERS:
            continue

        def odd(x: torch.Tensor, matrix: Matrix, memory: torch.Tensor, remedy: str = remedy) -> torch.Tensor:
            put = converted(m, matrix.on(device), remedy)
            return m.product(x.to(device), put.over(memory))

        tell(((label, "odd groups"), scene.odd_groups(remedy, odd)))


def table(device: str) -> None:
    """Child: the first product with each content after the scales, and with sizes that read nothing there.

    It also checks that our index function puts each scale where the package's layout does.
    """
    m, size = MatmulOgs(device), scene.SIZES[device]
    generator = torch.Generator(device).manual_seed(1)
    for control, k in enumerate((size.hidden, *CONTROLS[device])):
        matrix = mxfp4.quantized(Shape(size.experts, 2 * size.inter, k), generator)
        x = torch.randn(16, k, generator=generator, device=device).bfloat16()
        put = converted(m, matrix)
        fills = {f"control {control}": "0xff"} if control else {name: name for name in scene.BEHIND}
        for name, fill in fills.items():
            tell((("first product", name), product(m, x, matrix, put.in_slab(bytes_of(fill)))))
        if not control:
            same = broken.swizzled(matrix.scale.cpu()).equal(put.flat.cpu())
            tell(("layout", reading("same bytes" if same else "differ", bytes=put.flat.numel())))


def cost() -> Reading:
    """Child: milliseconds of a layer of 64 tokens and of its loader, and bytes of its scales."""
    from triton.testing import do_bench

    m, found = MatmulOgs("cuda"), {}
    a = scene.layer_on("cuda", tokens=64)
    for remedy in ("none", "loader_pads"):
        put = [converted(m, matrix, remedy) for matrix in (a.w13, a.w2)]
        call = lambda put=put: m.moe(a.x, a.topk_ids, a.topk_weights, *put)  # noqa: E731
        found[f"{remedy}, layer, ms"] = float(do_bench(call, return_mode="median"))
        torch.cuda.synchronize()
        start = time.perf_counter()
        converted(m, a.w13, remedy)
        torch.cuda.synchronize()
        found[f"{remedy}, loader, ms"] = 1e3 * (time.perf_counter() - start)
        found[f"{remedy}, bytes of scales"] = float(sum(each.scale_bytes.numel() for each in put))
    return Reading("measured", found)


def loader(device: str, release: str | None = None, folder: str | None = None) -> None:
    """Child: the layer with a loader, off / on / off with the patch, and 0xff after the scales.

    Args:
        device: where it runs.
        release, folder: of another vLLM whose loader to use; by default the package's own.
    """
    m, (patch,), a = MatmulOgs(device), PATCHES, scene.layer_on(device)
    with m.loader(Path(folder or m.root)) as module:
        for turn, applied in enumerate((False, True, False)):
            if applied:
                patch.apply(release or str(version()))
            tell((turn, scene.judged(a, runner(m, a, swizzle=module._swizzle_mxfp4))[1]))
            patch.revert()


def guarded(remedy: str) -> Reading:
    """Child: gpt-oss' first product, with its scales at the end of a mapping. A read past it is fatal."""
    m, a = MatmulOgs("cuda", REMEDIES[remedy].edit), scene.layer_on("cuda")
    put = converted(m, a.w13, remedy)
    memory = mapped(put.flat.numel(), "cuda")
    memory.copy_(put.flat)
    return product(m, a.x, a.w13, put.over(memory))


def watch() -> Reading:
    """Child: what a monitor of the output of gpt-oss' layer with 512 tokens could see."""
    m, a = MatmulOgs("cuda"), scene.layer_on("cuda", tokens=512)
    return scene.watched(a, runner(m, a))


def marlin() -> Reading:
    """Child: gpt-oss' layer with the Marlin kernel of an installed vLLM and 0xff after its scales."""
    a = scene.layer_on("cuda")
    moe = mxfp4.marlin(a.w13, a.w2)
    return scene.judged(a, lambda a, behind: (moe(a.x, a.topk_ids, a.topk_weights, behind), a.x))[1]


# Sizes of gpt-oss-20b apart from the experts: layers, vocabulary, and what a server of vLLM 0.22.1 reserves.
LAYERS, VOCABULARY, PROFILED_TOKENS, PROFILED_REQUESTS = 24, 201_088, 8192, 256
KV_BYTES, STEPS = 256 * 2**20, (1, 2, 3, 8, 64)


def behind(scales: torch.Tensor, owners: Mapping[int, str] | None = None) -> tuple[str, list[int]]:
    """The owner of the block right after the scales, and the first 32 bytes there.

    Args:
        scales: as bytes.
        owners: address -> name.
    """
    end = scales.data_ptr() + scales.numel()
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["address"] <= end < block["address"] + block["size"]:
                owner = "free" if block["state"] == "inactive" else (owners or {}).get(end, "other")
                return owner, at_address(end, 32).tolist()
    return "end of the segment", []


def neighbour(device: str) -> None:
    """Child: load 24 layers and allocate as vLLM does, and inspect the bytes after the scales at each stage.

    Nothing is placed by hand. The loader and the sampler are vLLM's. The order is that of its model runner:
    parameters of the checkpoint, the conversion of each layer, a profile run with a sampler, KV caches, and
    steps in which some requests sample with top-p. At each stage vLLM's kernel computes two tokens in every
    layer; the result is compared with that of padded scales.
    """
    m = MatmulOgs(device)
    with vllm_sources.executed(m.root, SAMPLER):
        filtered = importlib.import_module(SAMPLER).apply_top_k_top_p_pytorch
    a = scene.layer_on(device, tokens=2)
    # Both tokens go to the last experts.
    x, ids, weights = a.x, a.topk_ids[:1].repeat(2, 1), a.topk_weights
    source = a.w13.on("cpu"), a.w2.on("cpu")
    clean, _ = m.moe(x, ids, weights, *(converted(m, each, "loader_pads") for each in (a.w13, a.w2)))
    del a
    torch.cuda.empty_cache()
    embedding = torch.zeros(VOCABULARY, x.shape[1], dtype=torch.bfloat16, device=device)
    parameters = [[each.on(device) for each in source] for _ in range(LAYERS)]
    layers, kept = [], []
    while parameters:
        # The loader drops a layer's weights once they are converted, and keeps its scales.
        kept += [each.scale for each in parameters[0]]
        layers.append([converted(m, each) for each in parameters.pop(0)])
    owners = {each.data_ptr(): "unconverted scales" for each in kept} | {embedding.data_ptr(): "embedding"}
    owners |= {put.scale_bytes.data_ptr(): "scales" for layer in layers for put in layer}
    owners |= {put.weight.storage.data.data_ptr(): "weights" for layer in layers for put in layer}

    def stage(name: str) -> None:
        found = [behind(w13.scale_bytes, owners) for w13, _ in layers]
        outs = [m.moe(x, ids, weights, *layer)[0] for layer in layers]
        wrong = [number for number, out in enumerate(outs) if not out.equal(clean)]
        nan = not all(out.isfinite().all() for out in outs)
        said = reading(
            NAN if nan else WRONG if wrong else RIGHT,
            layers=len(layers),
            owners=dict(Counter(owner for owner, _ in found)),
            wrong_layers=wrong,
            harmful=[[i, owner, bytes(at[:16]).hex()] for i, (owner, at) in enumerate(found) if 0xFF in at],
        )
        tell((name, said))

    def sample(requests: int) -> None:
        hidden = torch.rand(requests, x.shape[1], dtype=torch.bfloat16, device=device)
        logits = (hidden @ embedding.T).float()
        logits += torch.randn_like(logits)
        filtered(logits, None, torch.full((requests,), 0.9, device=device)).softmax(-1)

    stage("loaded")
    many = torch.arange(PROFILED_TOKENS, device=device) % 2
    m.moe(x[many], ids[many], weights[many], *layers[0])
    sample(PROFILED_REQUESTS)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stage("profiled")
    caches = [torch.zeros(KV_BYTES, dtype=torch.int8, device=device) for _ in range(LAYERS)]
    stage("KV caches")
    for requests in STEPS:
        sample(requests)
        stage(f"{requests} requests sampled")
    del caches
