"""Real vLLM without a GPU: its sources, and what they import, in folders outside the checkout.

vLLM's source distribution is pure Python as it stands: unpacked, with its metadata beside it, it is
importable. Its dependencies go into a folder of their own with pinned versions; torch, Triton and
numpy are this environment's. Nothing is installed into this environment.

    python tests/vllm/environment.py [VERSION ...]     fetch now what tests and notebooks read

:func:`sources` fetches a release that is not there, or skips the test that asks for it: no test needs
another one to have fetched it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
# Reading the metadata of a vLLM source distribution runs its setup.py, which imports these.
TOOLS = ("setuptools>=77,<81", "setuptools_scm", "wheel", "packaging", "setuptools_rust")
# The releases that the tests import whole, of which each patch is needed in one, and all of which tests and
# notebooks read single files.
TESTED = ("0.19.1", "0.22.1", "0.33.0")
READ = ("0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.22.1", "0.24.0", "0.26.0", "0.33.0")
# Further releases for the tests, e.g. STALEPROOF_VLLM=0.20.2,0.32.0: one of your choice at each change.
# STALEPROOF_VLLM=all are all of the table, before a patch's probe or range is changed: 4 GB.
FURTHER = tuple(filter(None, os.environ.get("STALEPROOF_VLLM", "").split(",")))
if FURTHER == ("all",):
    TABLE = HERE.parents[1] / "src/staleproof/vllm/versions.json"
    FURTHER = tuple(json.loads(TABLE.read_text("utf-8"))["releases"])
# Of 250 MB a release: the package, and what the probes and their tests read.
KEPT = re.compile(
    r"[^/]+/(vllm/.*|PKG-INFO|requirements/cuda\.txt|csrc/(libtorch_stable/)?"
    r"(moe/(topk_soft.*|moe_ops\.h)|core/cuda_compat\.h|cub_helpers\.h|torch_utils\.h"
    r"|quantization/fp4/(activation_)?nvfp4_quant.*))"
)
# Of a wheel of SGLang: its merge of ranks, and the registry of its plugins.
SGLANG = "0.5.23"
SGLANG_KEPT = re.compile(
    r"sglang/(kernels/ops/attention/dcp_kernels|srt/layers/dcp/comm|srt/plugins/hook_registry)\.py"
)
# In every release. One that was unpacked before this file was kept is fetched again.
FUSED_QUANT = "activation_nvfp4_quant_fusion_kernels.cu"


def also(*releases: str) -> list[str]:
    """These releases, and those of ``STALEPROOF_VLLM``."""
    # Otherwise a test would fetch one by itself, half a minute of it, at the first run of a machine.
    assert {*releases} <= {*READ}, f"READ lacks a release of {releases}"
    return [*dict.fromkeys((*releases, *FURTHER))]


class UnavailableError(unittest.SkipTest):
    """A download failed; the text is pip's last line. A test that asks for it is skipped."""


def cache() -> Path:
    """Where everything is kept."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staleproof/vllm"
    return Path(os.environ.get("STALEPROOF_VLLM_CACHE", default))


# Why the first download of this process failed: no other is waited for.
_failed: list[str] = []


def _pip(*arguments: str, **environment: str) -> None:
    if _failed:
        raise UnavailableError(_failed[0])
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--retries", "1", "--timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["pip failed"])[-1]
        _failed.append(f"vLLM cannot be fetched: {reason}")
        raise UnavailableError(_failed[0])


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process at a time makes a folder; the others wait for it."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _installed(name: str, *arguments: str) -> Path:
    """A folder of packages, installed whole or not at all."""
    digest = hashlib.sha256(repr(arguments).encode()).hexdigest()[:8]
    folder = cache() / f"{name}-{sys.implementation.cache_tag}-{digest}"
    with _alone(name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache()) as work:
                _pip("install", "--target", f"{work}/packages", *arguments)
                os.replace(f"{work}/packages", folder)
    return folder


def packages() -> Path:
    """The folder with what vLLM imports."""
    pins = [line for line in REQUIREMENTS.read_text().split("\n") if line and line[0] != "#"]
    return _installed("packages", "--no-deps", *pins)


def sources(version: str) -> Path:
    """The unpacked source distribution of one release, importable as it lies.

    Raises:
        UnavailableError: it cannot be fetched.
    """
    folder = cache() / version
    if is_whole(version):
        return folder
    tools = _installed("tools", *TOOLS)
    with _alone(version), tempfile.TemporaryDirectory(dir=cache()) as work:
        if is_whole(version):
            return folder
        # Without the first, setup.py looks for CUDA; without the second, it names the version anew;
        # with isolation, pip would fetch another torch.
        options = "--no-binary vllm --no-deps --no-build-isolation --no-cache-dir -d"
        _pip(
            *("download", f"vllm=={version}", *options.split(), work),
            VLLM_TARGET_DEVICE="empty",
            VLLM_VERSION_OVERRIDE=version,
            PYTHONPATH=str(tools),
        )
        unpacked = Path(work) / "unpacked"
        with tarfile.open(Path(work) / f"vllm-{version}.tar.gz") as archive:
            kept = [member for member in archive if KEPT.fullmatch(member.name)]
            for member in kept:
                member.name = member.name.partition("/")[2]
            archive.extractall(unpacked, members=kept, filter="data")
        metadata = unpacked / f"vllm-{version}.dist-info"
        metadata.mkdir()
        os.replace(unpacked / "PKG-INFO", metadata / "METADATA")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unpacked, folder)
    return folder


def sglang() -> Path:
    """The folder ``sglang`` of a release, with the files that are read of it.

    Raises:
        UnavailableError: it cannot be fetched.
    """
    folder = cache() / f"sglang-{SGLANG}"
    with _alone("sglang"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache()) as work:
                _pip("download", f"sglang=={SGLANG}", "--no-deps", "--only-binary=:all:", "-d", work)
                with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
                    names = [name for name in wheel.namelist() if SGLANG_KEPT.fullmatch(name)]
                    wheel.extractall(f"{work}/unpacked", names)
                os.replace(f"{work}/unpacked", folder)
    return folder / "sglang"


def patched(version: str, folder: Path, *diffs: str, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Put a release's package into a folder, with these diffs applied: links, and copies of changed files.

    Args:
        version: of vLLM.
        folder: to put it in.
        diffs: as ``git apply`` takes them.
        only: of their files those that fit one of these patterns; all by default.

    Returns:
        The environment of a process that imports it.
    """
    released = sources(version)
    changed = {released / name for name in re.findall(r"^--- a/(\S+)", "".join(diffs), re.MULTILINE)}

    def copied(file: str, copy: str) -> None:
        (shutil.copy if Path(file) in changed else os.symlink)(file, copy)

    shutil.copytree(released / "vllm", folder / "vllm", copy_function=copied)
    apply(folder, *diffs, options=[f"--include={pattern}" for pattern in only])
    found = variables(version)
    return found | {"PYTHONPATH": os.pathsep.join([str(folder), found["PYTHONPATH"]])}


def apply(folder: Path, *diffs: str, options: Sequence[str] = ()) -> None:
    """Apply diffs to a folder's files."""
    # git leaves files outside a repository's own folder alone.
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for diff in diffs:
        subprocess.run(["git", "apply", *options, "-"], cwd=folder, input=diff, text=True, check=True)


def is_whole(version: str) -> bool:
    """Say whether a release is there, with all that :data:`KEPT` names."""
    return any((cache() / version / "csrc").rglob(FUSED_QUANT))


def pinned_flashinfer(folder: Path) -> str:
    """The FlashInfer that a release asks for."""
    match = re.search(r"flashinfer-python==(\S+)", (folder / "requirements/cuda.txt").read_text())
    assert match, folder
    return match[1]


def variables(version: str) -> dict[str, str]:
    """The environment of a process that imports this vLLM."""
    # This checkout first, because the installed staleproof may be another one.
    folders = [HERE.parents[1] / "src", sources(version), packages()]
    return shared_variables() | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        # Each release keeps in its own what it found out about a model, in a process that imports vLLM
        # again. The file is named after the model alone: releases would overwrite each other's.
        "VLLM_CACHE_ROOT": str(cache() / "vllm-cache" / version),
    }


def shared_variables() -> dict[str, str]:
    """The part of it that is the same for all releases."""
    return os.environ | {
        "TRITON_INTERPRET": "1",
        # Set but empty: otherwise vLLM finds no driver and swaps Triton for a placeholder.
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # vLLM's files lie in our own cache: compiling them anew takes a third of a process that imports them.
        "PYTHONDONTWRITEBYTECODE": "",
    }


def fetch(releases: Sequence[str]) -> str | None:
    """Fetch these releases and what they import, two at a time, unless they are there.

    Returns:
        What is still not there, and why, in one line; ``None`` if everything is.
    """
    missing = [release for release in releases if not is_whole(release)]
    if missing:
        # Measured on two cores: 8 s and 56 MB a release, and once 40 s and 310 MB.
        print(f"fetching vLLM {', '.join(missing)} into {cache()}, once: a minute or two", flush=True)
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(sources, name) for name in missing}
        started["what vLLM imports"] = pool.submit(packages)
        started[f"SGLang {SGLANG}"] = pool.submit(sglang)
    failed = {name: one.exception() for name, one in started.items() if one.exception()}
    for error in failed.values():
        if not isinstance(error, UnavailableError):
            raise error
    return f"without {', '.join(failed)}: {next(iter(failed.values()))}" if failed else None


if __name__ == "__main__":
    if absent := fetch(sys.argv[1:] or also(*READ)):
        sys.exit(f"{absent}; what needs it is skipped")
