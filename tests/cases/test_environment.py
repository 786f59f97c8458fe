"""What a machine can run, and which combinations of packages fail."""

import subprocess
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import torch

from staleproof import machine
from staleproof.device import TRITON_MISSING, Provenance


def test_every_capability_says_its_version_or_what_is_skipped():
    found = machine.capabilities()
    assert len({one.name for one in found}) == len(found) > 6
    assert all(one.detail and "\n" not in one.detail for one in found)


def test_a_program_is_found_on_the_path_or_in_the_toolkits_folder(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/no-such-tool").touch()
    assert machine.tool("no-such-tool") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert machine.tool("no-such-tool") == tmp_path / "bin/no-such-tool"
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(tmp_path / name))
    (tmp_path / "no-such-tool").touch()
    assert machine.tool("no-such-tool") == tmp_path / "no-such-tool"


NAMES = ["Triton kernels", "timings", "CUDA graphs", "nvcc", "compute-sanitizer", "FlashInfer kernels"]
NAMES += ["SM100 kernels", "vLLM Triton MLA", "NCCL, two GPUs"]
FULL = {
    "triton": "3.6.0", "name": "NVIDIA B200", "capability": "sm_100", "memory_gib": 179, "driver": "570.1",
    "flashinfer": "0.7.2", "vllm": "0.22.1", "measured": True, "cuda": True, "tools": True, "source": True,
    "gpus": 2, "nccl": True,
}  # fmt: skip
HAS = [
    "3.6.0, compiled", "NVIDIA B200, sm_100, 179 GiB, driver 570.1", "CUDA 13.0", "13.0", "13.0", "0.7.2",
    "sm_100", "vllm 0.22.1", "2 GPUs",
]  # fmt: skip
BARE = FULL | {
    "triton": None, "capability": None, "flashinfer": None, "vllm": None, "measured": False, "cuda": False,
    "tools": False, "source": False, "nccl": False,
}  # fmt: skip
LACKS = [
    TRITON_MISSING,
    "no CUDA GPU: values only, no timing is printed",
    "no CUDA GPU: a captured step is a recorded list of launches over the same static tensors",
    "not found: no inline CUDA is compiled",
    "no CUDA GPU: skipped",
    'not installed: pip install -e ".[flashinfer]"',
    "no CUDA GPU: CUTLASS MLA and trtllm-gen MLA need SM100 or SM103",
    "vllm is not installed: its kernel is not run",
    "0 GPUs, torch has no NCCL: skipped",
]
# A machine, and its answers that are not those of the first: available or not, and the detail.
MACHINES = [
    (FULL, {}),
    (BARE, {name: (False, detail) for name, detail in zip(NAMES, LACKS, strict=True)}),
    (FULL | {"measured": False, "capability": "sm_90"}, {
        "Triton kernels": (True, "3.6.0, through the CPU interpreter"),
        "timings": (False, LACKS[1].replace("no CUDA GPU", "the CPU was chosen")),
        "CUDA graphs": (False, LACKS[2].replace("no CUDA GPU", "the CPU was chosen")),
        "compute-sanitizer": (False, "the CPU was chosen: skipped"),
        "FlashInfer kernels": (False, "the CPU was chosen: only the signatures of 0.7.2 are checked"),
        "SM100 kernels": (False, LACKS[6].replace("no CUDA GPU", "sm_90")),
        "NCCL, two GPUs": (False, "0 GPUs: skipped"),
    }),
    (FULL | {"tools": False, "source": False, "gpus": 1, "flashinfer": None}, {
        "nvcc": (False, LACKS[3]),
        "compute-sanitizer": (False, "not found: memcheck and racecheck are skipped"),
        "FlashInfer kernels": (False, LACKS[5]),
        "vLLM Triton MLA": (False, "vllm 0.22.1 has no Triton MLA at a known place"),
        "NCCL, two GPUs": (False, "1 GPU: skipped"),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("has", "other"), MACHINES)
def test_what_a_machine_can_run_and_what_it_skips_and_why(monkeypatch, has, other):
    now = Space(**has)
    for name, value in {
        "provenance": Provenance.MEASURED if now.measured else Provenance.INTERPRETED,
        "has_cuda": now.cuda,
        "has_triton": now.triton is not None,
        "is_sm100": now.capability == "sm_100",
        "machine": now,
    }.items():
        monkeypatch.setattr(machine.device, name, lambda value=value: value)
    monkeypatch.setattr(machine, "tool", lambda name: Path(name) if now.tools else None)
    monkeypatch.setattr(machine, "_version", lambda tool: "13.0" if tool else "")
    monkeypatch.setattr(machine, "vllm_file", lambda *names: Path("here") if now.source else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: now.gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: now.nccl)
    wanted = {name: (True, detail) for name, detail in zip(NAMES, HAS, strict=True)} | other
    assert {one.name: (one.available, one.detail) for one in machine.capabilities()} == wanted


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.48", "13.0"),
        ("NVIDIA Compute Sanitizer\nVersion 2025.3.0.0 (build 1)", "2025.3.0.0"),
        ("a tool, version 12.9", "12.9"),
        ("nothing of it", "version unknown"),
        (OSError("no such file"), "version unknown"),
        (subprocess.TimeoutExpired("nvcc", 20), "version unknown"),
    ],
)
def test_the_version_of_a_program_is_what_it_says(monkeypatch, said, version):
    def run(command, **given):
        assert command == [Path("nvcc"), "--version"]
        if isinstance(said, Exception):
            raise said
        return Space(stdout=said)

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine._version(Path("nvcc")) == version
    assert machine._version(None) == ""


def test_each_package_a_result_depends_on_has_its_version_or_none(monkeypatch):
    monkeypatch.setattr(machine.device, "version_of", {"torch": "2.11.0", "vllm": "0.22.1"}.get)
    assert machine.packages() == dict.fromkeys(machine.PACKAGES) | {"torch": "2.11.0", "vllm": "0.22.1"}
