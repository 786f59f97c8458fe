"""vLLM's MXFP4 product, ``matmul_ogs`` of the package ``triton_kernels`` in its wheel.

The source distribution lacks that package, so it comes from an installed vLLM, or from the wheel::

    python -m staleproof.kernels.vllm_matmul_ogs

downloads the wheel (261 MB) and keeps what is needed of it, below 1 MB, in ``~/.cache/staleproof``.

On a Hopper GPU the package runs as shipped. Elsewhere Triton's interpreter runs the same source: it reports a
Hopper GPU, and :func:`teach` adds the features that the kernel needs and the interpreter lacks. No line of
the package is edited, except the one that a remedy changes (:class:`Edit`). Loading changes the interpreter
of this process permanently, so do it in a child process.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from staleproof import device as devices
from staleproof.check import require
from staleproof.kernels import packages, vllm_sources
from staleproof.vllm.sources import file_of, vllm_file

VERSION = "0.22.1"
PACKAGE = "third_party/triton_kernels"
LOADER = "vllm.model_executor.layers.quantization.utils.mxfp4_utils"
SAMPLER = "vllm.v1.sample.ops.topk_topp_sampler"
FETCH = "python -m staleproof.kernels.vllm_matmul_ogs"
# gpt-oss: gate * sigmoid(ALPHA * gate) * (up + 1), both clamped to LIMIT.
ALPHA, LIMIT = 1.702, 7.0


class Edit(NamedTuple):
    """One line of the package that a remedy changes: ``old`` occurs once in the package's ``file``."""

    file: str
    old: str
    new: str


def cache() -> Path:
    """The folder ``vllm`` that :func:`fetch` makes."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return home / "staleproof/triton_kernels" / VERSION / "vllm"


def root() -> Path | None:
    """The folder ``vllm`` with the package in it: fetched, or of an installed vLLM; ``None`` without one."""
    if (cache() / PACKAGE).is_dir():
        return cache()
    found = vllm_file(f"{PACKAGE}/matmul_ogs.py")
    return None if found is None else found.parents[2]


def version() -> str | None:
    """The vLLM that :func:`root` belongs to."""
    return VERSION if root() == cache() else devices.version_of("vllm")


def fetch() -> Path:
    """Download the wheel and keep the package, the loader, and the sampler.

    Raises:
        subprocess.CalledProcessError: pip could not download it.
    """
    files = "|".join(re.escape(file_of(module)) for module in (LOADER, SAMPLER))
    packages.fetch(f"vllm=={VERSION}", rf"vllm/({PACKAGE}/.*\.py|{files})", cache().parent)
    return cache()


def unavailable_reason(device: str) -> str | None:
    """Why the product cannot run on this device, in one line, or ``None``.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    if not devices.has_triton():
        return devices.TRITON_MISSING
    if device == "cuda" and (why := devices.needs_sm90()):
        return why
    if root() is None:
        return f"no vLLM with {PACKAGE} here; {FETCH} fetches it"
    return None


def _asm(text: str, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute a block of PTX on arrays of 32-bit registers: the eight instructions that the kernel uses.

    >>> _asm("shl.b32 $0, $1, 4;", {"$1": np.array([0x2], dtype=np.uint32)})["$0"].tolist()
    [32]
    """
    registers = dict(arguments)

    def value(word: str) -> Any:
        return registers[word] if word in registers else np.uint32(int(word, 0))

    def prmt(a: Any, b: Any, selector: Any) -> Any:
        # Byte i of the result is byte (selector's digit i) of b:a.
        both = [(x >> np.uint32(8 * i)) & np.uint32(0xFF) for x in (a, b) for i in range(4)]
        digits = [(int(selector) >> 4 * i) & 7 for i in range(4)]
        return sum((both[digit] << np.uint32(8 * i) for i, digit in enumerate(digits)), np.uint32(0))

    def mul(a: Any, b: Any) -> Any:
        product = _bf16_halves(np.asarray(a)) * _bf16_halves(np.asarray(b))
        return _bf16_bits(product).view(np.uint32)[..., 0]

    operations: dict[str, Callable[..., Any]] = {
        "mov.b32": lambda a: a,
        "and.b32": np.bitwise_and,
        "or.b32": np.bitwise_or,
        "shl.b32": np.left_shift,
        "shr.b32": np.right_shift,
        "prmt.b32": prmt,
        "mul.bf16x2": mul,
    }
    for line in re.sub(r"//.*", "", text).replace("{", "").replace("}", "").split(";"):
        words = line.replace(",", " ").split()
        if words and words[0] != ".reg":
            registers[words[1]] = operations[words[0]](*map(value, words[2:]))
    return registers


def _bf16_halves(registers: np.ndarray) -> np.ndarray:
    """The two bf16 of each 32-bit register as float32, low half first, (..., 2)."""
    return _float32(np.ascontiguousarray(registers, dtype=np.uint32)[..., None].view(np.uint16))


def _float32(bits: np.ndarray) -> np.ndarray:
    """The bf16 of these bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bf16, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def teach() -> None:
    """Add to Triton's interpreter, in this process, what ``_matmul_ogs`` needs and the interpreter lacks.

    - It stores bf16 as uint16 and multiplies these integers, and it truncates float32 to bf16. Here bf16 is
      multiplied in float32, and rounded to the nearest.
    - A mask combined with a scalar condition becomes int32, which its loads refuse. Here it stays bool.
    - It refuses inline assembly. Here :func:`_asm` computes it.
    - It has no number of warps. Here the number is 8, which vLLM's loader passes from 0.19.0 on.
    - Below Triton 3.8, ``tl.minimum`` and ``tl.maximum`` keep a NaN, where compiled code drops it
      (``fmin``, ``fmax``). Here they drop it in all releases.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    binary, dot, truncate = builder.binary_op, builder.create_dot, builder.create_fp_trunc

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar is not tl.bfloat16:
            result = binary(self, lhs, rhs, op)
            if np.bool_ in (lhs.data.dtype, rhs.data.dtype):
                result.data = result.data.astype(np.bool_)
            return result
        return handle(_bf16_bits(op(_float32(lhs.data), _float32(rhs.data))), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar is tl.bfloat16:
            a, b = (handle(_float32(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, d, *options)

    def create_inline_asm(
        self: Any, text: str, constraints: str, values: Any, kinds: Any, is_pure: bool, pack: int
    ) -> Any:
        outputs, each = constraints.count("=r"), pack // 2
        words = [np.ascontiguousarray(value.data).view(np.uint32) for value in values]
        registers = _asm(text, {f"${outputs + i}": word for i, word in enumerate(words)})
        # A register holds two elements of a result, the first in its low half.
        halves = [
            np.stack([registers[f"${i + j}"] for j in range(each)], -1) for i in range(0, outputs, each)
        ]
        shape = values[0].data.shape
        results = [handle(pair.view(np.uint16).reshape(shape), tl.bfloat16) for pair in halves]
        return types.SimpleNamespace(get_result=results.__getitem__)

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) == (tl.float32, tl.bfloat16):
            return handle(_bf16_bits(source.data), tl.bfloat16)
        return truncate(self, source, kind)

    builder.binary_op, builder.create_dot, builder.create_fp_trunc = binary_op, create_dot, create_fp_trunc
    builder.create_inline_asm = create_inline_asm
    builder.create_minnumf = lambda self, lhs, rhs: binary(self, lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: binary(self, lhs, rhs, np.fmax)
    tl.extra.cuda.num_warps = lambda *args, **kwargs: 8


def launcher(kernel: Any, activation: Any, epilogue: Any, tensor: Any) -> Any:
    """``kernel[grid](...)`` for the interpreter, which takes the activation as an argument.

    In compiled kernels the package inserts the activation into the source, so callers do not pass it.

    Args:
        kernel: of the package, interpreted.
        activation, epilogue: the package's ``FnSpecs``.
        tensor: the package's ``Tensor``, whose data the kernel gets.
    """
    names = [*inspect.signature(kernel.fn).parameters]
    at, count = names.index("ACTIVATION_FN"), len(activation.fn_arg_names)

    def launch(grid: Any, *args: Any, **kwargs: Any) -> None:
        filled = [activation.fn, args[at : at + count], args[at + count], epilogue.fn, ()]
        given = [*args[:at], *filled, *args[at + count + 1 :]]
        plain = [x.data if isinstance(x, tensor) else x for x in given]
        kernel[grid](*plain, **{name: x for name, x in kwargs.items() if name in names})

    class Launcher:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launch(grid, *args, **kwargs)

    return Launcher()


class _Driver:
    """Answers like Triton's driver on an H200."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        return torch.cpu


def be_hopper() -> None:
    """Make this process report an H200 as its GPU."""
    from triton.runtime import driver

    driver.set_active(_Driver())
    sizes = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.get_device_properties = lambda *args: sizes  # type: ignore[assignment]


@dataclass(frozen=True)
class Operand:
    """Weights as vLLM's loader converts them, in the package's types: values, global scale, block scales."""

    weight: Any
    flex: Any
    scale: Any

    @property
    def scale_bytes(self) -> torch.Tensor:
        """The swizzled scales as bytes, (experts, 32 * groups, n / 32), K innermost in memory."""
        return self.scale.storage.data

    @property
    def flat(self) -> torch.Tensor:
        """The same bytes in the order of memory, (bytes,)."""
        return self.scale_bytes.as_strided((self.scale_bytes.numel(),), (1,))

    def with_scale(self, data: torch.Tensor) -> Operand:
        """The same weights with scales in other memory, of the same shape and strides."""
        old = self.scale
        storage = type(old.storage)(data, old.storage.layout)
        return Operand(self.weight, self.flex, type(old)(storage, dtype=old.dtype, shape=[*old.shape]))

    def over(self, memory: torch.Tensor) -> Operand:
        """The same weights with the scales that this memory holds, (bytes,) uint8, from its start on."""
        old = self.scale_bytes
        return self.with_scale(memory.to(old.device).as_strided(old.shape, old.stride()))

    def in_slab(self, behind: torch.Tensor) -> Operand:
        """The same weights with these bytes, (n,) uint8, right after the last scale."""
        return self.over(torch.cat([self.flat, behind.to(self.flat.device)]))


class MatmulOgs:
    """The package, imported in this process.

    Args:
        device: ``"cpu"`` (interpreted) or ``"cuda"``.
        edit: a line to change in a copy of the package; ``None`` runs it as shipped.

    Raises:
        vllm_sources.UnavailableError: it cannot run here; the message says why.
    """

    def __init__(self, device: str, edit: Edit | None = None) -> None:
        why, found = unavailable_reason(device), root()
        if why is not None or found is None:
            raise vllm_sources.UnavailableError(why)
        self.device, self.root = device, found
        if device == "cpu":
            be_hopper()
            teach()
        sys.path.insert(
            0, str(self._copied(edit) if edit else found / PACKAGE).removesuffix("/triton_kernels")
        )
        self.ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
        self.routing = importlib.import_module("triton_kernels.routing")
        self.layout = importlib.import_module("triton_kernels.tensor_details.layout")
        self.swiglu = importlib.import_module("triton_kernels.swiglu").swiglu_fn
        if device == "cpu":
            details: Any = importlib.import_module("triton_kernels.matmul_ogs_details._matmul_ogs")
            # Compiled code reads this constexpr as its value; the interpreter needs a plain number.
            details.MXFP_BLOCK_SIZE = 32
            vars(self.ogs)["get_kernels"] = self._interpreted
        with self.loader(found) as module:
            self.swizzle = module._swizzle_mxfp4

    def _copied(self, edit: Edit) -> Path:
        copy = Path(tempfile.mkdtemp(prefix="triton_kernels_")) / "triton_kernels"
        atexit.register(shutil.rmtree, copy.parent, ignore_errors=True)
        shutil.copytree(self.root / PACKAGE, copy)
        text = (copy / edit.file).read_text()
        require(text.count(edit.old) == 1, "edit.old", f"text that stands once in {edit.file}", edit.old)
        (copy / edit.file).write_text(text.replace(edit.old, edit.new))
        return copy

    def _interpreted(self, epilogue: Any, activation: Any) -> types.SimpleNamespace:
        """``get_kernels`` for the interpreter."""
        given = activation, epilogue, self.ogs.Tensor
        names = "_matmul_ogs", "_reduce_grouped"
        return types.SimpleNamespace(**{name: launcher(getattr(self.ogs, name), *given) for name in names})

    @contextmanager
    def loader(self, folder: Path) -> Iterator[types.ModuleType]:
        """``mxfp4_utils`` of a vLLM, inside a ``with``; its ``_swizzle_mxfp4`` runs as on Hopper.

        Args:
            folder: the folder ``vllm``.
        """
        # The module names two operators at its end, which nothing here calls.
        operators = types.SimpleNamespace(dequant_mxfp4=None, quant_dequant_mxfp4=None)
        with vllm_sources.executed(folder, LOADER), patch.object(torch.ops, "vllm", operators, create=True):
            platform = importlib.import_module("vllm.platforms").current_platform
            platform.is_device_capability = lambda capability: capability == 90
            yield importlib.import_module(LOADER)

    def operand(self, weight: torch.Tensor, scale: torch.Tensor, swizzle: Any = None) -> Operand:
        """Convert a checkpoint's weights as vLLM's loader does.

        Args:
            weight: (experts, n, k / 2) uint8, two FP4 each.
            scale: (experts, n, groups) uint8, E8M0, one for 32 values.
            swizzle: another release's loader.
        """
        return Operand(*(swizzle or self.swizzle)(weight, scale, 8))

    def _config(self, operand: Operand) -> Any:
        flex = self.ogs.FlexCtx(rhs_data=operand.flex)
        return self.ogs.PrecisionConfig(weight_scale=operand.scale, flex_ctx=flex)

    def moe(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: Operand, w2: Operand
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two products of gpt-oss' experts, called as ``triton_kernel_fused_experts`` of 0.22.1 does.

        Args:
            x: (tokens, hidden) bf16.
            topk_ids: (tokens, top_k) int64.
            topk_weights: (tokens, top_k) fp32.
            w13: gate and up, interleaved: n = 2 * intermediate, k = hidden.
            w2: n = hidden, k = intermediate.

        Returns:
            (tokens, hidden) and, sorted by expert, (tokens * top_k, intermediate), both bf16.
        """
        routing, gather, scatter = self.routed(topk_ids, topk_weights, int(w13.weight.shape[0]))
        activation = self.ogs.FusedActivation(
            self.ogs.FnSpecs("swiglu", self.swiglu, ("alpha", "limit")), (ALPHA, LIMIT), 2
        )
        inner = self.ogs.matmul_ogs(
            x,
            w13.weight,
            None,
            routing,
            gather_indx=gather,
            precision_config=self._config(w13),
            fused_activation=activation,
        )
        inner = inner.view(topk_ids.numel(), -1)
        out = self.ogs.matmul_ogs(
            inner,
            w2.weight,
            None,
            routing,
            scatter_indx=scatter,
            precision_config=self._config(w2),
            gammas=routing.gate_scal,
        )
        return out.view(x.shape), inner

    def product(self, x: torch.Tensor, operand: Operand) -> torch.Tensor:
        """Every row of ``x`` times each expert's weights.

        Args:
            x: (rows, k) bf16.

        Returns:
            (experts, rows, n) bf16.
        """
        experts, rows = int(operand.weight.shape[0]), x.shape[0]
        ids = torch.arange(experts, device=x.device).expand(rows, experts)
        routing, gather, _ = self.routed(ids, torch.ones(ids.shape, device=x.device), experts)
        config = self._config(operand)
        y = self.ogs.matmul_ogs(x, operand.weight, None, routing, gather_indx=gather, precision_config=config)
        return y.view(experts, rows, -1)

    def routed(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int
    ) -> tuple[Any, Any, Any]:
        """The package's description of a routing: data, gather and scatter indices."""
        flat = topk_ids.flatten()
        order = torch.argsort(flat, stable=True)
        back = torch.argsort(order, stable=True).int()
        counts = torch.bincount(flat, minlength=experts).int()
        data = self.routing.compute_expt_data_torch(counts, experts, flat.numel())
        weights = topk_weights.flatten()[order]
        of = self.routing.RoutingData(weights, counts, experts, topk_ids.shape[1], data)
        gather = self.routing.GatherIndx(src_indx=order.int(), dst_indx=back)
        return of, gather, self.routing.ScatterIndx(src_indx=back, dst_indx=order.int())


if __name__ == "__main__":
    print(fetch())
