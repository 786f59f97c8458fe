"""A reduced build of FlashInfer's fused MoE for Hopper, from a package's own sources.

The module that FlashInfer compiles on first use instantiates every data type and GEMM tile. One of
each is enough for the map builder and the finalise step, so this build keeps BF16 and the tile of the
default, untuned tactic, and compiles in minutes. The sources are copied and narrowed at a few anchor
texts; if an anchor is missing, the build says so and stops.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from staleproof.harness import environment

# Names a folder for built modules, in place of the user's cache: they can be built on another machine.
FOLDER_VARIABLE = "STALEPROOF_MOE_MODULES"
BACKEND = "fused_moe/cutlass_backend/"
INTERNAL = "nv_internal/tensorrt_llm/kernels/"
MOE_GEMM = INTERNAL + "cutlass_kernels/moe_gemm/"
CHANGED = "the sources of this release are not those that the reduced build was written for"


class ModuleError(RuntimeError):
    """The module cannot be built or run here; the text says why, in one line."""


@dataclass(frozen=True)
class Edit:
    """One change to a source file.

    Attributes:
        file: below the package's ``data/csrc``.
        why: what is left out, in words.
        start: where the change begins; this text occurs once in the file.
        until: the change ends before the next occurrence of this, or with ``start`` if ``None``.
        text: the replacement.
    """

    file: str
    why: str
    start: str
    until: str | None
    text: str


RUNNER = BACKEND + "cutlass_fused_moe_kernels.cuh"
UNCHECKED_RUNNER = BACKEND + "cutlass_fused_moe_kernels_without_check.cuh"
EDITS = (
    Edit(
        BACKEND + "flashinfer_cutlass_fused_moe_binding.cu",
        "data types other than BF16",
        "mInnerDimMultiplier = 1;",
        "if (!mKernelRunner) {",
        """mInnerDimMultiplier = 1;
    if (mActivationDtype == dl_bfloat16 && mWeightDtype == dl_bfloat16) {
      using Bf16Runner = kernels::CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;
      mKernelRunner = std::make_shared<Bf16Runner>();
    }
    """,
    ),
    Edit(
        MOE_GEMM + "moe_gemm_template_dispatch.h",
        "the grouped GEMMs of Ampere",
        "// dispatch for quant op type",
        "} else {",
        'TLLM_THROW("left out of the reduced build");\n  ',
    ),
    Edit(
        MOE_GEMM + "moe_gemm_template_dispatch_tma_ws.h",
        "tiles other than the default tactic's",
        "constexpr int cta_n = get<1>(CTAShape{});",
        None,
        """constexpr int cta_n = get<1>(CTAShape{});
  if constexpr (cta_m != 128 || cta_n != 16 || get<0>(ClusterShape{}) != 1 ||
                get<1>(ClusterShape{}) != 1) {
    return false;
  }""",
    ),
)
WITHOUT_CHECK = Edit(
    RUNNER,
    "the bounds check of the finalise kernel",
    "expanded_permuted_row < 0 || expanded_permuted_row >= expanded_rows",
    None,
    "false",
)
_RUNNER_SOURCE = """#include "{}"
#include "moe_kernels.h"
namespace tensorrt_llm::kernels::cutlass_kernels {{
template class CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;
}}
"""
# These replace the package's instantiations.
OWN_SOURCES = {
    "ours/runner.cu": _RUNNER_SOURCE.format(Path(RUNNER).name),
    "ours/gemm.cu": """#include "moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"
namespace tensorrt_llm::kernels::cutlass_kernels_oss {
#define ONE_TILE(FUSION, SWAP)                                                                   \\
  INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16,   \\
                                            void, EpilogueOpDefault, FUSION, 128, 16, 64, 1, 1, \\
                                            1, false, false, false, SWAP)
ONE_TILE(NONE, false);
ONE_TILE(NONE, true);
ONE_TILE(FINALIZE, false);
ONE_TILE(FINALIZE, true);
}
""",
    "ours/deep_gemm.cu": """#include <tvm/ffi/extra/module.h>
// DeepGEMM is left out; the Python entry tells every module where its headers are.
void no_deep_gemm(tvm::ffi::Array<tvm::ffi::String>) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_deepgemm_jit_include_dirs, no_deep_gemm);
""",
}
UNCHECKED = "ours/unchecked_runner.cu"
SOURCES = (
    *OWN_SOURCES,
    BACKEND + "flashinfer_cutlass_fused_moe_binding.cu",
    MOE_GEMM + "moe_gemm_kernels_bf16_bf16.cu",
    MOE_GEMM + "moe_gemm_tma_warp_specialized_input.cu",
    MOE_GEMM + "moe_gemm_mixed_utils.cu",
    INTERNAL + "cutlass_kernels/cutlass_heuristic.cpp",
    INTERNAL + "lora/lora.cpp",
    INTERNAL + "preQuantScaleKernel.cu",
    "nv_internal/cpp/common/envUtils.cpp",
    "nv_internal/cpp/common/logger.cpp",
    "nv_internal/cpp/common/memoryUtils.cu",
    "nv_internal/cpp/common/stringUtils.cpp",
    "nv_internal/cpp/common/tllmException.cpp",
)
FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-w",
    "-Xcompiler=-fPIC",
    "-use_fast_math",
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xfatbin=-compress-all",
    "-DENABLE_BF16",
    "-DENABLE_FP8",
    "-DUSING_OSS_CUTLASS_MOE_GEMM",
    "-DCOMPILE_HOPPER_TMA_GEMMS",
    "-DCOMPILE_HOPPER_TMA_GROUPED_GEMMS",
    "-DCUTLASS_ENABLE_GDC_FOR_SM90=1",
    "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-DFLASHINFER_ENABLE_FP8_E8M0",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
)
# Headers that a bare toolkit lacks, and the wheel that brings each.
HEADERS = {"cublasLt.h": "nvidia-cublas", "curand_kernel.h": "nvidia-curand"}


@dataclass(frozen=True)
class Package:
    """A FlashInfer package on disk.

    Attributes:
        root: the folder that holds ``flashinfer/``.
        version: of ``flashinfer-python``.
    """

    root: Path
    version: str

    @property
    def data(self) -> Path:
        """The folder of the sources that it compiles on first use."""
        return self.root / "flashinfer" / "data"

    def file(self, name: str) -> Path:
        """One of its sources, by its path in ``data/csrc``."""
        return self.data / "csrc" / name


def package(root: Path | None = None) -> Package:
    """The installed FlashInfer, or the one unpacked in ``root``; it is not imported.

    Raises:
        ModuleError: there is none.
    """
    if root is None:
        spec = importlib.util.find_spec("flashinfer")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleError('flashinfer is not installed: pip install -e ".[flashinfer]"')
        root = Path(spec.submodule_search_locations[0]).parent
    try:
        about = (root / "flashinfer" / "_build_meta.py").read_text()
    except OSError as error:
        raise ModuleError(f"{root}: no flashinfer package is unpacked here") from error
    found = re.search(r'__version__ = "([^"]+)"', about)
    return Package(root, found.group(1) if found else "unknown")


def narrowed(source: Package) -> dict[str, str]:
    """The files that the build adds or changes, by their path in ``data/csrc``, with their text.

    Raises:
        ModuleError: a file or an anchor is not there.
    """
    files = dict(OWN_SOURCES)
    for edit in EDITS:
        files[edit.file] = _narrow(source, edit)
    files[UNCHECKED_RUNNER] = _narrow(source, WITHOUT_CHECK)
    files[UNCHECKED] = _RUNNER_SOURCE.format(Path(UNCHECKED_RUNNER).name)
    for name in SOURCES:
        if name not in files and not source.file(name).is_file():
            raise ModuleError(f"flashinfer {source.version}: {name}: {CHANGED}")
    return files


def _narrow(source: Package, edit: Edit) -> str:
    changed = ModuleError(f"flashinfer {source.version}: {edit.file}: cannot leave out {edit.why}: {CHANGED}")
    try:
        text = source.file(edit.file).read_text()
    except OSError as error:
        raise changed from error
    before, anchor, after = text.partition(edit.start)
    if not anchor or edit.start in after:
        raise changed
    if edit.until is not None:
        _, end, rest = after.partition(edit.until)
        if not end:
            raise changed
        after = end + rest
    return before + edit.text + after


def folder() -> Path:
    """The folder of built modules: ``$STALEPROOF_MOE_MODULES``, or one in the user's cache."""
    given = os.environ.get(FOLDER_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "staleproof" / "moe"


def _targets(source: Package, files: dict[str, str], cache: Path | None = None) -> dict[bool, Path]:
    """The paths of the modules with and without the bounds check, named by version and digest."""
    told = repr((sorted(files.items()), SOURCES, FLAGS)).encode()
    name = f"fused_moe_sm90-{source.version}-{hashlib.sha256(told).hexdigest()[:12]}"
    shipped = (cache or folder()) / f"{name}.so"
    return {True: shipped, False: shipped.with_name(f"{name}-without-check.so")}


def built(root: Path | None = None, *, check: bool = True) -> Path:
    """The module that an earlier :func:`build` made.

    Args:
        root: folder with an unpacked ``flashinfer/``; the installed one by default.
        check: whether the finalise kernel has its bounds check.

    Raises:
        ModuleError: there is no package, its sources changed, or it was not built.
    """
    source = package(root)
    path = _targets(source, narrowed(source))[check]
    if not path.is_file():
        raise ModuleError("not built: staleproof moe-module build (needs nvcc, and minutes)")
    return path


def build(
    root: Path | None = None,
    *,
    cache: Path | None = None,
    jobs: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[bool, Path]:
    """Compile the reduced module, with and without its bounds check, unless it was built already.

    Args:
        root: folder with an unpacked ``flashinfer/``; the installed one by default.
        cache: folder the modules go to; see :func:`folder`.
        jobs: compilations at a time; by default one a core.
        say: takes one line of progress.

    Returns:
        The shared libraries, by whether they have the check. They link neither torch nor the
        driver, so a machine without a GPU can build them for one that has one.

    Raises:
        ModuleError: something is missing, the package's sources changed, or they do not compile.
    """
    source = package(root)
    files = narrowed(source)
    targets = _targets(source, files, cache)
    if all(path.is_file() for path in targets.values()):
        say(f"built already: {targets[False].parent}")
        return targets
    nvcc = environment.tool("nvcc")
    if nvcc is None:
        raise ModuleError("nvcc was not found on PATH, in $CUDA_HOME or in /usr/local/cuda")
    with tempfile.TemporaryDirectory(prefix="staleproof-moe-") as scratch:
        sources = Path(scratch) / "csrc"
        shutil.copytree(source.data / "csrc", sources)
        for name, text in files.items():
            (sources / name).parent.mkdir(exist_ok=True)
            (sources / name).write_text(text)
        include = _include(source, sources)
        _require_headers(nvcc, include)

        def compile_one(name: str) -> str:
            made = str(Path(scratch) / f"{Path(name).stem}.o")
            _run([str(nvcc), *FLAGS, *include, "-c", str(sources / name), "-o", made], name)
            say(f"compiled {name}")
            return made

        names = [*SOURCES, UNCHECKED]
        pool = ThreadPoolExecutor(jobs or os.cpu_count())
        try:
            objects = dict(zip(names, pool.map(compile_one, names), strict=True))
        finally:
            # After an error or an interrupt, do not begin the compilations that are still queued.
            pool.shutdown(cancel_futures=True)
        for check, target in targets.items():
            left_out = UNCHECKED if check else "ours/runner.cu"
            linked = [made for name, made in objects.items() if name != left_out]
            draft = Path(scratch) / target.name
            _run([str(nvcc), "-shared", "-cudart=shared", "-o", str(draft), *linked], target.name)
            _keep(draft, target)
            say(f"built {target} ({target.stat().st_size / 2**20:.1f} MiB)")
    return targets


def _keep(draft: Path, target: Path) -> None:
    """Copy to a ``.part`` file and rename, so that an interrupted copy never counts as a module."""
    part = target.with_suffix(".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(draft, part)
        part.replace(target)
    except OSError as error:
        raise ModuleError(f"{target}: cannot be written: {error.strerror}") from error


def _include(source: Package, sources: Path) -> list[str]:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleError("apache-tvm-ffi is not installed: pip install apache-tvm-ffi")
    kernels, data = sources / INTERNAL, source.data
    nvidia = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (nvidia and nvidia.submodule_search_locations) or ()]
    own = [
        sources / BACKEND,
        sources / "nv_internal",
        sources / "nv_internal/include",
        sources / "nv_internal/tensorrt_llm/cutlass_extensions/include",
        kernels / "cutlass_kernels/include",
        kernels / "cutlass_kernels",
        *(data / "cccl" / name for name in ("cub", "libcudacxx/include", "thrust")),
    ]
    system = [
        Path(spec.submodule_search_locations[0]) / "include",
        data / "include",
        sources,
        data / "cutlass/include",
        data / "cutlass/tools/util/include",
        data / "spdlog/include",
        # Last, so that a toolkit's own headers come first.
        *(place for wheel in wheels for place in sorted(wheel.glob("*/include"))),
    ]
    return [
        *(f"-I{place}" for place in own if place.is_dir()),
        *(f"-isystem={place}" for place in system if place.is_dir()),
    ]


def _require_headers(nvcc: Path, include: Sequence[str]) -> None:
    for header, wheel in HEADERS.items():
        done = subprocess.run(
            [str(nvcc), "-x", "cu", "-E", *include, "-"],
            input=f"#if !__has_include(<{header}>)\n#error\n#endif\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ModuleError(f"{header} was not found by nvcc: pip install {wheel}")


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).splitlines()
        errors = [line for line in said if "error" in line.lower()] or said[-1:]
        first = errors[0].strip() if errors else f"exit code {done.returncode}"
        raise ModuleError(f"{what} does not compile: {first}")
