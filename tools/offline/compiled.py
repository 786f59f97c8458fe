"""FlashInfer's modules and its reduced fused MoE, compiled here in place of the GPU machine.

The compiler comes from wheels: a machine with pip and a C++ compiler is enough. One process compiles at a
time, at low priority. Each module is kept when it is done, and of the next one what ninja had finished.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    # Headers only.
    "nvidia-cublas==13.1.0.3",
    "nvidia-curand==10.4.0.35",
    "nvidia-cuda-profiler-api==13.0.85",
    "nvidia-nvtx==13.0.85",
)
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
NINJA = "ninja==1.13.2"
HALF_A_GIGABYTE = ("libcublas*", "libnvblas*", "libcurand*")
CAPABILITY = 90


class Module(NamedTuple):
    """How FlashInfer names a module: a function of ``flashinfer.jit`` and its arguments."""

    maker: str
    arguments: tuple[Any, ...] = ()


BF16, I32 = "torch.bfloat16", "torch.int32"
PREFILL = (BF16, BF16, BF16, I32, 64, 64, 0, False, False, False)
# The quickest first: they took 64, 114, 186, 505, 873 and 1150 seconds, beside other work.
MODULES = {
    "mla-fa3": Module("gen_batch_mla_module", ("fa3", BF16, BF16, BF16, I32, 512, 64, False)),
    "mla-fa2": Module("gen_batch_mla_module", ("fa2", BF16, BF16, BF16, I32, 512, 64, False)),
    "fp4": Module("fp4_quantization.gen_fp4_quantization_sm90_module"),
    "prefill-fa3": Module("gen_batch_prefill_module", ("fa3", *PREFILL)),
    "prefill-fa2": Module("gen_batch_prefill_module", ("fa2", *PREFILL)),
    "top-k": Module("topk.gen_topk_module"),
}


def install(folder: Path, *wanted: str) -> None:
    """Install wheels to a folder, for this machine and this Python."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *wanted], check=True)


def toolkit(folder: Path) -> None:
    """Install the compiler, ninja and tvm-ffi's headers."""
    install(folder, *TOOLKIT, TVM_FFI, NINJA)
    home = cuda_home(folder)
    for pattern in HALF_A_GIGABYTE:
        for path in (home / "lib").glob(pattern):
            path.unlink()
    # What a linker looks for; a wheel has neither the links nor the driver's stub.
    (home / "lib64").symlink_to("lib")
    for path in [*(home / "lib").glob("libcudart.so.*")]:
        (home / "lib" / "libcudart.so").symlink_to(path.name)
    stubs = home / "lib" / "stubs"
    stubs.mkdir()
    command = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull]
    subprocess.run([*command, "-o", str(stubs / "libcuda.so")], check=True)


def cuda_home(toolkit: Path) -> Path:
    """Where the wheels of CUDA 13 put the toolkit."""
    return toolkit / "nvidia" / "cu13"


def build(name: str, flashinfer: Path, toolkit: Path, workspace: Path) -> Callable[[Path], None]:
    """What compiles one of :data:`MODULES` into a folder, from an unpacked FlashInfer."""

    def into(folder: Path) -> None:
        command = [sys.executable, str(Path(__file__)), name, str(folder)]
        _compile(command, toolkit, flashinfer, FLASHINFER_WORKSPACE_BASE=str(workspace))

    return into


def moe_recipe() -> str:
    """What the reduced build changes in FlashInfer's sources; its modules are named by a digest of that."""
    return (ROOT / "src/staleproof/kernels/moe_sources.py").read_text()


def build_moe(flashinfer: Path, toolkit: Path) -> Callable[[Path], None]:
    """What compiles the reduced fused MoE into a folder, with and without its bounds check."""

    def into(folder: Path) -> None:
        command = [sys.executable, "-m", "staleproof", "moe-module", "build", "--jobs", "1"]
        command += ["--package-root", str(flashinfer), "--cache", str(folder)]
        _compile(command, toolkit, ROOT / "src")

    return into


def _compile(command: list[str], toolkit: Path, sources: Path, **environment: str) -> None:
    home = cuda_home(toolkit)
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, (sources, toolkit))),
        "PATH": os.pathsep.join((str(home / "bin"), str(toolkit / "bin"), os.environ["PATH"])),
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "MAX_JOBS": "1",
    }
    # Whatever this machine has set, these modules are compiled.
    inherited = {name: value for name, value in os.environ.items() if name != "FLASHINFER_DISABLE_JIT"}
    subprocess.run(["nice", "-n", "15", *command], check=True, env=inherited | environment)


def _build_here(name: str, folder: Path) -> None:
    """In a process that imports the FlashInfer to compile from."""
    import torch

    module = MODULES[name]
    jit, _, maker = f"flashinfer.jit.{module.maker}".rpartition(".")
    given = [getattr(torch, a[6:]) if str(a).startswith("torch.") else a for a in module.arguments]
    spec = getattr(importlib.import_module(jit), maker)(*given)
    spec.build()
    target = folder / spec.name / f"{spec.name}.so"
    target.parent.mkdir()
    shutil.copy(spec.jit_library_path, target)
    subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile one module with the FlashInfer on PYTHONPATH.")
    parser.add_argument("name", choices=[*MODULES])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    _build_here(given.name, given.folder)
