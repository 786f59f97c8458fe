"""What each part that :mod:`bundle` packs holds, and the folder that it is unpacked to on the GPU machine."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "vllm"))

import compiled
import environment
from device_code import images, reduce

FLASHINFER = "flashinfer-python==0.6.18.post1"
# Its finalise kernel has no bounds check (staleproof.kernels.moe_module.WITHOUT_CHECK).
OLD_FLASHINFER = "flashinfer-python==0.6.8.post1"
OLD_VLLM = "0.19.1"
# Where vLLM's own pins stop the import of another package, or several releases answer.
PINS = {
    "0.22.1": ("compressed-tensors==0.15.0.1", "humming-kernels==0.1.2", "xgrammar==0.2.8"),
    "0.26.0": ("compressed-tensors==0.17.0", "humming-kernels==0.1.10", "xgrammar==0.2.8"),
}
# Says what a folder was made from.
MARK = "made-from"
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)


class Wheels(NamedTuple):
    """Wheels that are unpacked to one folder.

    Attributes:
        wanted: what pip is asked for; a name that ends in ``.txt`` is a list of such beside this file.
        to: folder below the part's own.
        only: patterns of files; ``*`` stands for folders too.
        without: patterns of files that are left out of these.
    """

    wanted: tuple[str, ...]
    to: str = ""
    only: tuple[str, ...] = ("*",)
    without: tuple[str, ...] = ()


class Order(NamedTuple):
    """What was asked for: the GPU machine, and where things are kept until everything is done."""

    kept: Path
    gpu: int = 90
    python: str = "3.12"
    ptx: bool = True


class Part(NamedTuple):
    """One folder that travels by itself.

    Attributes:
        wheels: what is unpacked.
        env: variables to set on the GPU machine; ``SITE`` is the folder it was unpacked to there, and
            ``PYTHONPATH`` grows by the value.
        kernels: by library, a pattern of the kernels whose device code is kept; in others all is.
        ptx: whether the driver may compile kernels there that have no machine code; ``None``: as ordered.
        more: adds what is in no wheel.
        compiles: whether modules are compiled here.
        given: what ``more`` depends on.
    """

    wheels: tuple[Wheels, ...]
    env: Mapping[str, str]
    kernels: Mapping[str, str] = {}
    ptx: bool | None = False
    more: Callable[[Order, Path], None] | None = None
    compiles: bool = False
    given: tuple[object, ...] = ()


def once(folder: Path, told: object, make: Callable[[Path], None]) -> Path:
    """Make a folder whole or not at all, unless it is there and was made from the same things."""
    digest = hashlib.sha256(repr(told).encode()).hexdigest()
    mark = folder / MARK
    if not mark.is_file() or mark.read_text() != digest:
        draft = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        make(draft)
        (draft / MARK).write_text(digest)
        shutil.rmtree(folder, ignore_errors=True)
        draft.replace(folder)
        print(f"{folder}: done", flush=True)
    return folder


def fetch(folder: Path, python: str, *wanted: str) -> None:
    """Download wheels for another machine: Linux on x86-64, this Python."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, "-d", str(folder), *wanted]
    subprocess.run(command, check=True)


def listed(wanted: str) -> list[str]:
    """What pip is asked for: one wheel, or the lines of a list."""
    if not wanted.endswith(".txt"):
        return [wanted]
    lines = Path(__file__).with_name(wanted).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _wheels(order: Order, wanted: str) -> list[Path]:
    asked = listed(wanted)
    folder = order.kept / "wheels" / wanted.replace("==", "-").removesuffix(".txt")
    once(folder, (order.python, asked), lambda draft: fetch(draft, order.python, *asked))
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path, only: tuple[str, ...] = ("*",), without: tuple[str, ...] = ()) -> None:
    """Unpack the files of a wheel that the patterns name."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if any(fnmatch(name, p) for p in only) and not any(fnmatch(name, p) for p in without):
                archive.extract(name, folder)


def make(part: Part, order: Order, site: Path) -> None:
    """Make the folder as it will be on the GPU machine."""
    for wheels in part.wheels:
        folder = site / wheels.to
        folder.mkdir(parents=True, exist_ok=True)
        for wanted in wheels.wanted:
            for wheel in _wheels(order, wanted):
                unpack(wheel, folder, wheels.only, wheels.without)
    for path in site.rglob("*.so"):
        if any(images(path.read_bytes())):
            _reduce(part, order, path, site)
    if part.more is not None:
        part.more(order, site)


def _reduce(part: Part, order: Order, path: Path, site: Path) -> None:
    pattern = part.kernels.get(path.name.partition(".")[0])
    wanted = re.compile(pattern).search if pattern else None
    if wanted is not None:
        _unpackers(order)
    ptx = order.ptx if part.ptx is None else part.ptx
    size, left = reduce(path, order.gpu, ptx, wanted)
    told = [f"{count / 2**20:.0f} MiB" for count in (size, left)]
    print(f"{path.relative_to(site)}: {told[0]}, of which {told[1]} are needed there", flush=True)


def _unpackers(order: Order) -> None:
    """Let this process read compressed device code."""
    folder = once(order.kept / "unpackers", UNPACKERS, lambda draft: compiled.install(draft, *UNPACKERS))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _own_plugin(order: Order, site: Path) -> None:
    """This checkout, for the entry point that vLLM finds it by."""
    folder = order.kept / "plugin"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        unpack(wheel, site)


def _old_sources(order: Order, site: Path) -> None:
    unpacked = environment.sources(OLD_VLLM)
    for name in ("vllm", f"vllm-{OLD_VLLM}.dist-info", "requirements"):
        ignored = shutil.ignore_patterns("__pycache__", "static")
        shutil.copytree(unpacked / name, site / OLD_VLLM / name, ignore=ignored)


def _flashinfer(order: Order, release: str = FLASHINFER) -> tuple[Path, Path]:
    """The unpacked FlashInfer to compile from, and the compiler."""
    folder = order.kept / release.replace("==", "-")
    once(folder, release, lambda draft: unpack(_wheels(order, release)[0], draft))
    told = (compiled.TOOLKIT, compiled.TVM_FFI, compiled.NINJA)
    return folder, once(order.kept / "toolkit", told, compiled.toolkit)


def _modules(order: Order, site: Path) -> None:
    flashinfer, toolkit = _flashinfer(order)
    for name, module in compiled.MODULES.items():
        told = (FLASHINFER, compiled.TOOLKIT, compiled.TVM_FFI, module)
        build = compiled.build(name, flashinfer, toolkit, order.kept / "workspace")
        folder = once(order.kept / "modules" / name, told, build)
        for library in folder.glob("*/*.so"):
            target = site / "flashinfer" / "data" / "aot" / library.parent.name
            target.mkdir(parents=True)
            shutil.copy(library, target)


def _moe(order: Order, site: Path) -> None:
    (site / "moe").mkdir()
    for release in (FLASHINFER, OLD_FLASHINFER):
        flashinfer, toolkit = _flashinfer(order, release)
        told = (release, compiled.TOOLKIT, compiled.TVM_FFI, compiled.moe_recipe())
        kept = order.kept / "modules" / f"moe-{release.partition('==')[2]}"
        for library in once(kept, told, compiled.build_moe(flashinfer, toolkit)).glob("*.so"):
            shutil.copy(library, site / "moe")


UNPACKERS = ("zstandard==0.25.0", "lz4==4.4.5")
# What no question calls: the other front end, its pages, and kernels that are compiled at run time.
_NOT_CALLED = ("*/vllm-rs", "*/third_party/deep_gemm/*", "*/_vllm_fa2_C*", "*/entrypoints/*/static/*")
# What FlashInfer compiles other modules from.
_HEADERS = tuple(f"flashinfer/data/{name}/*" for name in ("cutlass", "cccl", "spdlog"))
_EXAMPLES = tuple(f"flashinfer/data/cutlass/{name}/*" for name in ("examples", "python", "test"))
_FLASHMLA = ("vllm/_flashmla_*C.abi3.so", "*.dist-info/METADATA")
# The kernels of vLLM that the audit's subjects call (src/staleproof/kernels/vllm.py).
_AUDITED = (
    "merge_attn_states|topk_?[gG]ating|moe_align|moe_sum|moeSoftmax|moeSigmoid|grouped_topk|single_group_topk"
    "|scaled_fp8|absmax|segmented_max|rms_norm_kernel|rms_norm_dynamic|fused_add_rms|reshape_and_cache"
    "|concat_and_cache_mla_kernel|per_token_group_quant|group_idx|topk_with_k|count_and_sort|align_block"
)
_AUDITED_LIBRARIES = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch")
_AUDITED_FILES = (
    *("*.py", "*/METADATA", "vllm/_flashmla_*C.abi3.so", "vllm/vllm_flash_attn/*.so"),
    *(f"vllm/{name}.abi3.so" for name in _AUDITED_LIBRARIES),
)
_NOT_AUDITED = ("*/third_party/deep_gemm/*", "*/third_party/fmha_sm100/*", "*/third_party/tml_fa4/*")
_AUDIT_ENV = {
    "PYTHONPATH": "SITE/site",
    "STALEPROOF_AUDIT_PACKAGES": "SITE/cache",
    "FLASHINFER_WORKSPACE_BASE": "SITE",
}


def _cached(wanted: str, **patterns: tuple[str, ...]) -> Wheels:
    """A package as ``staleproof.kernels.packages`` looks for it."""
    return Wheels((wanted,), f"cache/{wanted.replace('-', '_').replace('==', '-')}", **patterns)


def engine(version: str, serve: bool = False) -> Part:
    """A vLLM for ``staleproof engine``, and what ``vllm serve`` imports besides."""
    lists = ("engine.txt", "serve.txt") if serve else ("engine.txt",)
    wanted = (f"vllm=={version}", *PINS[version], *lists)
    wheels = Wheels(wanted, without=(*_NOT_CALLED, "mistral_common/data/*"))
    return Part((wheels,), {"PYTHONPATH": "SITE"}, ptx=None, more=_own_plugin)


# In the order in which they are made: downloads first, and then from the shortest compilation to the longest.
PARTS = {
    "engine": engine("0.22.1"),
    "vllm": Part(
        (
            Wheels(
                ("vllm==0.20.2",),
                "0.20.2",
                without=(*_NOT_CALLED, "vllm/_flashmla_*", "vllm/_C_stable*", "*/RECORD"),
            ),
            Wheels(("vllm==0.22.1",), "flashmla", only=_FLASHMLA),
        ),
        {
            "PYTHONPATH": "SITE/0.20.2",
            "STALEPROOF_VLLM_CACHE": "SITE",
            "STALEPROOF_VLLM_MOE_SO": "SITE/0.20.2/vllm/_moe_C.abi3.so",
            "STALEPROOF_VLLM_C_SO": "SITE/0.20.2/vllm/_C.abi3.so",
            "STALEPROOF_FLASHMLA_SO": "SITE/flashmla/vllm/_flashmla_C.abi3.so",
        },
        more=_old_sources,
        given=(OLD_VLLM,),
    ),
    "audit-vllm": Part(
        (
            *(
                _cached(f"vllm=={version}", only=_AUDITED_FILES, without=_NOT_AUDITED)
                for version in ("0.20.2", "0.22.1", "0.33.0")
            ),
            Wheels(("audit.txt",), "site"),
        ),
        _AUDIT_ENV,
        kernels={
            **dict.fromkeys(_AUDITED_LIBRARIES, _AUDITED),
            # Its machine code is older than Hopper: this is PTX.
            "_vllm_fa2_C": "splitkv.*traitsILi64E.*bfloat16",
            # Pages, bfloat16, heads of 64, no cap of the logits; and what is called beside it.
            "_vllm_fa3_C": "Li64ENS_10bfloat16_tEfNS_4arch4Sm90ELb[01]ELb[01]ELb0ELb[01]ELb1E"
            "|FlashAttnFwdCombine|EmptyKernel",
        },
        ptx=True,
    ),
    "audit-rest": Part(
        (
            _cached(FLASHINFER, without=(*_EXAMPLES, "*/RECORD")),
            _cached("flashinfer-python==0.7.2.post1", without=(*_EXAMPLES, "*/RECORD")),
            _cached("sglang==0.5.23", without=("sglang/srt/rust_extensions/*", "sglang/multimodal_gen/*")),
            *map(_cached, ("fla-core==0.6.0", "liger-kernel==0.8.5")),
            *map(_cached, ("sgl-flash-mla==1.0.0", "sgl-deep-gemm==0.2.2")),
        ),
        _AUDIT_ENV,
    ),
    # Two more routers for benchmarks/topk.py: the one before vLLM #39391, with the CUDA runtime that it was
    # linked to, and SGLang's.
    "routers": Part(
        (
            Wheels((f"vllm=={OLD_VLLM}",), "old", only=("vllm/_moe_C.abi3.so",)),
            Wheels(("nvidia-cuda-runtime-cu12==12.9.79",), "old", only=("*/libcudart.so.12",)),
            _cached("sglang==0.5.23", only=("sglang/kernels/ops/moe/moe_fused_gate.py", "*/METADATA")),
        ),
        {
            "STALEPROOF_VLLM_OLD_MOE_SO": "SITE/old/vllm/_moe_C.abi3.so",
            "STALEPROOF_AUDIT_PACKAGES": "SITE/cache",
        },
        kernels={
            "_moe_C": "topk_?[gG]ating|moeSoftmax|moeSigmoid|moeTopK|grouped_topk|group_idx|topk_with_k"
        },
    ),
    "flashinfer": Part(
        (Wheels((FLASHINFER, compiled.TVM_FFI), without=(*_HEADERS, "*/RECORD")),),
        {"PYTHONPATH": "SITE", "FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_WORKSPACE_BASE": "SITE"},
        more=_modules,
        compiles=True,
        given=(compiled.TOOLKIT, compiled.MODULES),
    ),
    "moe": Part(
        (
            Wheels((FLASHINFER,), "fi", without=("flashinfer/data/*/*", "*/RECORD")),
            _cached(OLD_FLASHINFER, without=(*_HEADERS, "*/RECORD")),
            _cached(f"vllm=={OLD_VLLM}", only=("*.py", "*/METADATA", "vllm/_moe_C.abi3.so")),
            # What its library links.
            Wheels(("nvidia-cuda-runtime-cu12==12.9.79",), "cuda12", only=("*/libcudart.so.12",)),
        ),
        {
            "STALEPROOF_MOE_MODULES": "SITE/moe",
            "STALEPROOF_FLASHINFER": "SITE/fi",
            "STALEPROOF_AUDIT_PACKAGES": "SITE/cache",
            "LD_LIBRARY_PATH": "SITE/cuda12/nvidia/cuda_runtime/lib",
        },
        kernels={"_moe_C": "topk_?[gG]ating|moeSoftmax"},
        more=_moe,
        compiles=True,
        given=(compiled.TOOLKIT, compiled.TVM_FFI, compiled.moe_recipe()),
    ),
}
# What is asked for by one name.
GROUPS = {"findings": ("vllm", "flashinfer", "moe"), "audit": ("audit-vllm", "audit-rest")}
