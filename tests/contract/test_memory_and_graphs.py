"""What a probe does around a kernel: memory that it fills, and launches that it records."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import sys
import types
import weakref

import pytest
import torch

from staleproof.cases import children
from staleproof.contract import attention_probes, runner, scenes
from staleproof.contract.contract import Verdict
from staleproof.kernels.subject import Subject


def test_memory_that_needs_a_gradient_is_filled_too():
    # Inductor allocates such leaves while it compiles.
    with scenes.dirty_memory(7.0):
        leaf = torch.empty(3, requires_grad=True)
    assert leaf.tolist() == [7.0, 7.0, 7.0]
    assert leaf.requires_grad


def read_behind(byte: int) -> int:
    """In a child: the byte so far behind an operand that ends where its mapping ends."""
    operand = scenes._guarded(torch.arange(5))
    return ctypes.string_at(operand.data_ptr() + operand.nbytes + byte, 1)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="guards need Linux")
def test_a_read_behind_a_guarded_operand_ends_the_process():
    assert children.call(read_behind, -8, timeout_s=100).answer() == 4
    assert children.call(read_behind, 0, timeout_s=100).code == -signal.SIGSEGV


class _Graph:
    def replay(self):
        pass


def test_the_inputs_of_a_recorded_launch_live_as_long_as_the_recording(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    made = torch.zeros(4)
    alive = weakref.ref(made)

    def launch(made=made):
        return made + 1, None

    replay, note = attention_probes._captured(attention_probes.Kernel(print), launch)
    assert note == ""
    del made, launch
    gc.collect()
    assert alive() is not None
    replay()


def _outcome(error: BaseException, package: str = "kernels"):
    def probe(device):
        raise error

    return runner._answer(probe, Subject("k", "rows", print, package=package), "cpu")[0]


def test_a_library_that_does_not_load_is_not_run_with_the_words_of_the_loader():
    error = OSError("Could not load this library: /site/deep_gemm/_C.so")
    error.__cause__ = OSError("undefined symbol: c10")
    outcome = _outcome(error)
    assert (outcome.verdict, outcome.note) == (
        Verdict.NOT_RUN,
        "its library does not load here: OSError: undefined symbol: c10",
    )
    assert _outcome(error, package="").verdict is Verdict.BREAKS
    assert _outcome(OSError("no space left")).verdict is Verdict.BREAKS


def test_a_file_that_the_package_lacks_is_not_run_and_its_folder_is_not_told():
    error = FileNotFoundError(2, "No such file or directory", "/home/somebody/kernels/config.jinja")
    outcome = _outcome(error)
    assert (outcome.verdict, outcome.note) == (Verdict.NOT_RUN, "a file of it is not here: config.jinja")
    assert _outcome(error, package="").verdict is Verdict.BREAKS


def test_a_module_that_was_not_compiled_is_not_run():
    error = type("MissingJITCacheError", (RuntimeError,), {})("JIT compilation is disabled")
    assert _outcome(error).verdict is Verdict.NOT_RUN
    error.spec = types.SimpleNamespace(name="topk")
    outcome = _outcome(error)
    assert (outcome.verdict, outcome.note) == (
        Verdict.NOT_RUN,
        "its compiled module topk is not here; nvcc compiles it at a call without FLASHINFER_DISABLE_JIT",
    )


@pytest.mark.parametrize(
    "said",
    [
        "Ninja build failed. Ninja output:\n1 error",
        "Could not find nvcc and default cuda_home='/usr' doesn't exist",
    ],
)
def test_a_module_that_cannot_be_compiled_is_not_run(said):
    outcome = _outcome(RuntimeError(said))
    assert outcome.verdict is Verdict.NOT_RUN
    assert outcome.note.startswith(f"a module of it could not be compiled here: RuntimeError: {said[:12]}")
    assert _outcome(RuntimeError(said), package="").verdict is Verdict.BREAKS


def test_the_advice_of_a_device_error_is_left_out():
    text = (
        "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/"
    )
    outcome = _outcome(RuntimeError(text))
    assert outcome.note == "raises RuntimeError: CUDA error: device-side assert triggered"


def test_our_own_operations_are_found_in_a_checkout_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(runner.packages.devices, "version_of", lambda package: None)
    subject = Subject("mla_decode", "attention", print, package="staleproof")
    (release,) = runner.packages.releases(subject)
    assert (release.version, release.folder) == ("checkout", None)
    assert runner.packages.releases(Subject("x", "rows", print, package="no-such-kernels")) == []


def test_a_module_from_another_release_ends_the_questions_of_its_subject(monkeypatch, device):
    monkeypatch.setattr(
        runner.packages, "imported_elsewhere", lambda subject, release: "from another release"
    )
    told = []
    monkeypatch.setattr(runner.children, "tell", told.append)
    monkeypatch.setattr(runner, "faulthandler", types.SimpleNamespace(
        dump_traceback_later=lambda *args, **kwargs: None, cancel_dump_traceback_later=lambda: None
    ))  # fmt: skip
    module = "staleproof.kernels.torch"
    runner.ask(module, [("rms_norm", ["0", "R", "W"])], runner.packages.Release("1"), device, 9.0)
    assert [(clause, outcome and outcome.verdict) for _, clause, outcome, _ in told] == [
        ("0", None),
        ("0", Verdict.NOT_RUN),
    ]
