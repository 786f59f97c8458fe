"""What a machine can run, and what is skipped there and why."""

import subprocess
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
import torch

from staleproof import machine
from staleproof.device import TRITON_MISSING, Provenance


def test_each_capability_has_its_version_or_the_reason_why_it_is_skipped():
    found = machine.capabilities()
    assert len({one.name for one in found}) == len(found) > 6
    assert all(one.detail and "\n" not in one.detail for one in found)


def test_machine_without_gpu_triton_and_tools_skips_everything_with_a_reason(monkeypatch):
    bare = Space(name="CPU", triton=None, capability=None, flashinfer=None, vllm=None, memory_gib=None)
    bare.driver = None
    answers = {"machine": bare, "provenance": Provenance.INTERPRETED}
    for name in ("has_cuda", "has_triton", "is_sm100"):
        answers[name] = False
    for name, value in answers.items():
        monkeypatch.setattr(machine.device, name, lambda value=value: value)
    monkeypatch.setattr(machine, "tool", lambda name: None)
    monkeypatch.setattr(machine, "vllm_file", lambda *names: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = {one.name: one.detail for one in machine.capabilities() if not one.available}
    assert found.keys() == {one.name for one in machine.capabilities()}
    assert found["Triton kernels"] == TRITON_MISSING
    assert found["timings"] == "no CUDA GPU: values only, no timing is printed"
    assert found["vLLM Triton MLA"] == "vllm is not installed: its kernel is not run"


def test_program_is_found_on_the_path_or_in_the_toolkits_folder(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/no-such-tool").touch()
    assert machine.tool("no-such-tool") is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert machine.tool("no-such-tool") == tmp_path / "bin/no-such-tool"
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(tmp_path / name))
    (tmp_path / "no-such-tool").touch()
    assert machine.tool("no-such-tool") == tmp_path / "no-such-tool"


def test_commit_is_empty_without_a_checkout_and_marks_changed_files(monkeypatch, tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    machine.commit.cache_clear()
    monkeypatch.setattr(machine, "root", lambda: None)
    assert machine.commit() == ""
    machine.commit.cache_clear()
    monkeypatch.setattr(machine, "root", lambda: tmp_path)
    (tmp_path / "a").write_text("1")
    git("init", "-q")
    git("add", "a")
    git("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "first")
    clean = machine.commit()
    machine.commit.cache_clear()
    (tmp_path / "a").write_text("2")
    assert (len(clean), machine.commit()) == (8, f"{clean}-dirty")
    machine.commit.cache_clear()


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("Cuda compilation tools, release 13.0, V13.0.48", "13.0"),
        ("NVIDIA Compute Sanitizer\nVersion 2025.3.0.0 (build 1)", "2025.3.0.0"),
        (OSError("no such file"), "version unknown"),
    ],
)
def test_version_of_a_program_is_read_from_its_output(monkeypatch, output, version):
    def run(command, **given):
        if isinstance(output, Exception):
            raise output
        return Space(stdout=output)

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine._version(Path("nvcc")) == version
