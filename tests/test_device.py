"""Which device a process takes, what it says of the machine, and what it says is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from staleproof import device
from staleproof.device import DeviceError, Machine, MissingExtraError, Provenance

# As it is before tests/conftest.py notes who asks.
select = device.select.__globals__["_select"]


@pytest.fixture
def process(monkeypatch):
    """A process of its own: whether torch sees a GPU, ``TRITON_INTERPRET``, whether kernels are loaded."""

    def made(has_cuda: bool = False, interpret: str | None = None, loaded: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        if interpret is not None:
            monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.delitem(sys.modules, "staleproof._kernels_loaded", raising=False)
        if loaded:
            monkeypatch.setitem(sys.modules, "staleproof._kernels_loaded", sys)

    return made


@pytest.mark.parametrize(
    ("asked", "has_cuda", "interpret", "taken"),
    [
        (None, False, None, "cpu"),
        (None, True, None, "cuda"),
        ("auto", True, "1", "cpu"),
        ("auto", True, "0", "cuda"),
        ("cpu", True, "0", "cpu"),
        ("cuda", True, "1", "cuda"),
    ],
)
def test_the_device_is_the_one_asked_for_or_the_best(process, asked, has_cuda, interpret, taken):
    process(has_cuda, interpret)
    assert select(asked) == taken
    assert device.interpreting() == (taken == "cpu")
    assert device.provenance() == ("INTERPRETED" if taken == "cpu" else "MEASURED")
    assert select(taken) == taken


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_after_the_first_kernel_the_device_stays(process, interpret):
    process(True, interpret, loaded=True)
    same, other = ("cpu", "cuda") if interpret == "1" else ("cuda", "cpu")
    assert select(same) == select() == same
    with pytest.raises(DeviceError, match=f"^device: {other} was asked for, but this process loaded"):
        select(other)
    assert device.interpreting() == (interpret == "1")


def test_a_device_that_is_not_there_is_refused(process):
    process(False, "0")
    with pytest.raises(
        DeviceError, match=r"^device: cuda was asked for, but torch sees no CUDA device here$"
    ):
        select("cuda")
    with pytest.raises(DeviceError, match=r"^device: expected cpu, cuda or auto, got 'tpu'$"):
        select("tpu")
    assert device.provenance() is Provenance.INTERPRETED


def test_the_machine_of_a_gpu_is_what_torch_says_of_it(process, monkeypatch):
    process(True, "0")
    properties = SimpleNamespace(name="NVIDIA B200", major=10, minor=0, total_memory=int(178.36 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: properties}.get)
    ended: list[int] = []
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.95",
        nvmlShutdown=lambda: ended.append(1),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(
        device, "version_of", {"triton": "3.6", "flashinfer-python": "0.6", "vllm": "0.22"}.get
    )
    device._machine.cache_clear()
    try:
        python, here = sys.version.split()[0], torch.__version__
        named = "NVIDIA B200", "cuda", "sm_100", 178.4, "580.95", python, here, "3.6", "0.6", "0.22"
        assert device.machine() == Machine(*named)
        assert (device.machine().slug, ended) == ("nvidia-b200", [1])
        assert device.is_sm100()
        assert device.needs_sm90() == "needs an SM90 GPU (H100, H200); this is sm_100"
        device._machine.cache_clear()
        properties.minor = 3
        assert (device.machine().capability, device.is_sm100()) == ("sm_103", True)
        device._machine.cache_clear()
        properties.major, properties.minor, driver.nvmlSystemGetDriverVersion = 9, 0, lambda: 1 / 0
        assert (device.machine().capability, device.machine().driver) == ("sm_90", None)
        assert (device.is_sm100(), device.needs_sm90()) == (False, None)
        process(True, "1")
        here = device.machine().as_dict()
        assert here["name"].startswith("CPU ")
        assert [here[name] for name in ("kind", "capability", "memory_gib", "driver")] == ["cpu", *[None] * 3]
        assert not device.is_sm100()
    finally:
        device._machine.cache_clear()


@pytest.mark.parametrize(
    ("there", "python", "cubin", "unchecked", "said"),
    [
        (False, None, None, "", "flashinfer-python is not installed"),
        (True, "0.6.18", "0.6.18", "", None),
        (True, "0.6.18", "0.6.13", "1", None),
        (
            *(True, "0.6.18", "0.6.13", ""),
            "flashinfer-python 0.6.18 refuses to be imported beside flashinfer-cubin 0.6.13",
        ),
    ],
)
def test_why_flashinfer_cannot_be_imported(monkeypatch, there, python, cubin, unchecked, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(device, "version_of", {"flashinfer-python": python, "flashinfer-cubin": cubin}.get)
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", unchecked)
    assert device.flashinfer_missing() == said


def test_what_is_missing_of_an_extra_is_named_and_nothing_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    device.need_workbook("json", "this")
    with pytest.raises(MissingExtraError) as error:
        device.need_workbook("this", "no_such_package", "nor_this")
    # It would print the Zen of Python.
    assert "this" not in sys.modules
    said = 'not installed: no_such_package, nor_this; run: pip install -e ".[workbook]"'
    assert str(error.value) == said


def test_without_triton_a_kernel_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(device, "has_triton", lambda: False)
    with pytest.raises(ImportError) as error:
        device.load_triton()
    assert str(error.value) == device.TRITON_MISSING


def test_a_version_is_the_installed_one():
    assert device.version_of("torch") == importlib.metadata.version("torch")
    assert device.has_triton() == (importlib.util.find_spec("triton") is not None)


def test_a_kernel_that_comes_first_chooses_the_device_unless_somebody_did(monkeypatch):
    pytest.importorskip("triton")
    asked = []
    monkeypatch.setitem(sys.modules, "staleproof._kernels_loaded", None)
    monkeypatch.setattr(device, "select", lambda: asked.append("chosen"))
    for given, wanted in (("0", []), (None, ["chosen"])):
        if given is None:
            monkeypatch.delenv("TRITON_INTERPRET")
        else:
            monkeypatch.setenv("TRITON_INTERPRET", given)
        device.load_triton()
        assert asked == wanted


def test_0_over_0_in_the_interpreter_is_no_warning_and_elsewhere_one():
    pytest.importorskip("triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.load_triton()
        warnings.warn_explicit(
            "invalid value", RuntimeWarning, "x.py", 1, module="triton.runtime.interpreter"
        )
        with pytest.raises(RuntimeWarning):
            warnings.warn_explicit("invalid value", RuntimeWarning, "x.py", 1, module="numpy")
