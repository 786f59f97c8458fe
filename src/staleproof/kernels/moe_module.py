"""A reduced build of FlashInfer's fused MoE for Hopper or Blackwell, from a package's own sources.

The module that FlashInfer compiles on first use instantiates every data type and GEMM tile. Few are
enough for the map builder and the finalise step, so this build keeps BF16, FP8 and the tile of the
default, untuned tactic, and compiles in minutes. The sources are copied and narrowed at a few anchor
texts; if an anchor is missing, the build says so and stops. Nothing else is edited: a kernel without
its bounds check is that of a release that has none (:data:`WITHOUT_CHECK`).
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

from staleproof import device
from staleproof.cases import machine
from staleproof.kernels import packages
from staleproof.kernels.moe_sources import (
    ARCHITECTURES,
    BACKEND,
    CHECK,
    EDITS,
    GEMM,
    HOPPER,
    INTERNAL,
    LATER_SOURCES,
    OWN_SOURCES,
    RUNNER,
    SOURCES,
    Architecture,
    Edit,
)

# This variable names a folder for built modules instead of the user's cache: another machine may build them.
FOLDER_VARIABLE = "STALEPROOF_MOE_MODULES"
# Pinned by vLLM 0.20, and the last whose finalise kernel follows any index; 0.6.10 has a bounds check.
WITHOUT_CHECK = "0.6.8.post1"
CHANGED = "the sources of this release are not those that the reduced build was written for"


class ModuleError(RuntimeError):
    """The module cannot be built or run here; the text says why, in one line."""


def architecture() -> Architecture:
    """The architecture of this machine's GPU; without a GPU Hopper's, to compile for another machine.

    Raises:
        ModuleError: the reduced build was written for other GPUs.
    """
    capability = device.machine().capability
    found = HOPPER if capability is None else ARCHITECTURES.get(capability)
    if found is None:
        raise ModuleError(f"needs an SM90 or SM100 GPU (H100, H200, B200, GB200); this is {capability}")
    return found


# The package compiles all runners as one file. Two files take half the time, but both then define the
# non-template functions of its header, hence the linker option.
LINK = ("-shared", "-cudart=shared", "-Xlinker=--allow-multiple-definition")
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
    def checks(self) -> bool:
        """Whether its finalise kernel has a bounds check."""
        return CHECK in self.file(RUNNER).read_text()

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


def of_release(check: bool) -> Package:
    """The package whose finalise kernel has the bounds check, or has none.

    Args:
        check: true for the installed package; false for :data:`WITHOUT_CHECK`, installed or unpacked in
            ``flashinfer_python-0.6.8.post1`` of the cache of :func:`packages.cache`.

    Raises:
        ModuleError: the package is missing, or is another release.
    """
    unpacked = () if check else packages.unpacked("flashinfer-python", WITHOUT_CHECK)
    source = package(next(iter(unpacked), None))
    if source.checks is not check:
        found = f"flashinfer {source.version} has {'a' if source.checks else 'no'} bounds check"
        wanted = "one from 0.6.10 on" if check else f"staleproof moe-module build fetches {WITHOUT_CHECK}"
        raise ModuleError(f"{found}: {wanted}")
    return source


def narrowed(source: Package, of: Architecture = HOPPER) -> dict[str, str]:
    """The files that the build adds or changes, by their path in ``data/csrc``, with their text.

    Raises:
        ModuleError: a file or an anchor is not there.
    """
    files = {**OWN_SOURCES, GEMM: of.gemm}
    for edit in (*EDITS, of.tiles):
        files[edit.file] = _narrow(source, edit)
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


def _target(source: Package, of: Architecture, files: dict[str, str], cache: Path | None = None) -> Path:
    """The path of a package's module, named by version and digest."""
    told = repr((sorted(files.items()), SOURCES, of.flags)).encode()
    name = f"fused_moe_sm{of.number}-{source.version}-{hashlib.sha256(told).hexdigest()[:12]}"
    return (cache or folder()) / f"{name}.so"


def built(source: Package) -> Path:
    """The module that an earlier :func:`build` made of a package.

    Raises:
        ModuleError: its sources changed, it was not built, or not for this GPU.
    """
    of = architecture()
    path = _target(source, of, narrowed(source, of))
    if not path.is_file():
        raise ModuleError(f"flashinfer {source.version}: not built: staleproof moe-module build")
    return path


def build(
    root: Path | None = None,
    *,
    cache: Path | None = None,
    jobs: int | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compile the reduced module for this GPU, unless it exists.

    Args:
        root: folder with an unpacked ``flashinfer/``; by default the installed one and
            :data:`WITHOUT_CHECK`, which is downloaded if it is not there.
        cache: folder the modules go to; see :func:`folder`.
        jobs: compilations at a time; by default one a core.
        say: takes one line of progress.

    Returns:
        The shared libraries. They link neither torch nor the driver, so a machine without a GPU can
        build them for one that has one.

    Raises:
        ModuleError: something is missing, the package's sources changed, or they do not compile.
    """
    if root is not None:
        return [_build(package(root), cache, jobs, say)]
    installed = package()
    unpacked = packages.cache() / f"flashinfer_python-{WITHOUT_CHECK}"
    if installed.checks and not unpacked.is_dir():
        say(f"downloading flashinfer-python {WITHOUT_CHECK} to {unpacked}")
        try:
            packages.fetch(f"flashinfer-python=={WITHOUT_CHECK}", r"flashinfer/.*", unpacked)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ModuleError(f"flashinfer-python {WITHOUT_CHECK} cannot be downloaded: {error}") from error
    sources = {source.version: source for source in (installed, of_release(check=False))}
    return [_build(source, cache, jobs, say) for source in sources.values()]


def _build(source: Package, cache: Path | None, jobs: int | None, say: Callable[[str], None]) -> Path:
    of = architecture()
    files = narrowed(source, of)
    target = _target(source, of, files, cache)
    if target.is_file():
        say(f"built already: {target}")
        return target
    nvcc = machine.tool("nvcc")
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
            _run([str(nvcc), *of.flags, *include, "-c", str(sources / name), "-o", made], name)
            say(f"compiled {name}")
            return made

        pool = ThreadPoolExecutor(jobs or os.cpu_count())
        names = [*SOURCES, *(name for name in LATER_SOURCES if source.file(name).is_file())]
        try:
            objects = list(pool.map(compile_one, names))
        finally:
            # After an error or an interrupt, do not begin the compilations that are still queued.
            pool.shutdown(cancel_futures=True)
        draft = Path(scratch) / target.name
        _run([str(nvcc), *LINK, "-o", str(draft), *objects], target.name)
        _keep(draft, target)
    say(f"built {target} ({target.stat().st_size / 2**20:.1f} MiB)")
    return target


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
