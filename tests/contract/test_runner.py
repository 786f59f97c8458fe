"""What surrounds a probe: memory that it fills, launches that it records, and whose an error is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
import signal
import sys
import threading
import types
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from staleproof.cases import children
from staleproof.cases.case import Reading, absent
from staleproof.contract import attention_probes, runner, scenes, scripts
from staleproof.contract.contract import BREAKS, NO_REFERENCE, UNDEFINED, breaks, holds
from staleproof.kernels.subject import KINDS, SIZES, Subject, load_module
from staleproof.kernels.vllm_sources import UnavailableError

NOT_RUN = "not run"
RELEASE = runner.packages.Release("1.0", Path("/site"))


def test_memory_that_needs_a_gradient_is_filled_too():
    # Inductor allocates such leaves while it compiles.
    with scenes.dirty_memory(7.0):
        leaf = torch.empty(3, requires_grad=True)
    assert leaf.tolist() == [7.0, 7.0, 7.0]
    assert leaf.requires_grad


@pytest.mark.parametrize(("available", "initialized"), [(False, False), (True, False), (True, True)])
def test_what_an_allocator_of_cuda_hands_out_next_is_dirty_too(monkeypatch, available, initialized):
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch, "full", lambda size, fill, device: made.append((size, fill, device)))
    with scenes.dirty_memory(7.0):
        pass
    wanted = [((2**size // 4,), 7.0, "cuda") for size in range(9, 26) for _ in range(4)]
    assert made == (wanted if initialized else [])


def compiled_after_an_audit() -> list[float]:
    """In a child, whose first use of torch.compile is in memory that is filled."""
    assert "torch._dynamo" not in sys.modules
    with scenes.dirty_memory(7.0):
        __import__("torch._dynamo")
    return torch.compile(lambda: torch.empty(2).fill_(1.0), backend="eager", fullgraph=True)().tolist()


def test_what_is_compiled_after_an_audit_finds_torchs_own_functions():
    assert children.call(compiled_after_an_audit, timeout_s=60).answer() == [1.0, 1.0]


def read_behind(byte: int) -> int:
    """In a child: the byte so far behind an operand that ends where its mapping ends."""
    operand = scenes._guarded(torch.arange(5))
    return ctypes.string_at(operand.data_ptr() + operand.nbytes + byte, 1)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="guards need Linux")
def test_a_read_behind_a_guarded_operand_ends_the_process():
    assert children.call(read_behind, -8, timeout_s=100).answer() == 4
    assert children.call(read_behind, 0, timeout_s=100).code == -signal.SIGSEGV


def _behind(x: torch.Tensor) -> torch.Tensor:
    """The bytes behind an operand that a probe has placed; none behind another."""
    held = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    return held[x.nbytes :] if len(held) == x.nbytes + scenes.TAIL_BYTES else held[:0]


def _all(x, byte):
    return bool((_behind(x) == byte).all()) and len(_behind(x)) > 0


def _write(x, byte):
    _behind(x)[-1:] = byte


BEHIND = {
    "nothing": (lambda x, y: 0, "holds", "", []),
    "one": (lambda x, y: _all(x, 255), "breaks", "0xff behind x changes the result", ["behind", "0xff", "x"]),
    "each": (
        lambda x, y: _all(x, 255) + 2 * _all(y, 255), "breaks", "0xff behind x, y changes the result",
        ["behind", "0xff", "x"],
    ),
    "both": (
        lambda x, y: _all(x, 255) * _all(y, 255), "breaks",
        "0xff behind the operands together changes the result", ["behind", "0xff"],
    ),
    # Incident 6 reads 64 bytes behind the last scales; whole tiles may be larger.
    "4096 bytes": (
        lambda x, y: _behind(y)[4095:4096].eq(255).any(), "breaks", "0xff behind y changes the result",
        ["behind", "0xff", "y"],
    ),
    "noise": (
        lambda x, y: len(set(_behind(y).tolist())) > 2, "breaks", "noise behind y changes the result",
        ["behind", "noise", "y"],
    ),
    "written": (lambda x, y: _write(y, 7), "breaks", "writes behind y", ["behind", "0x00", "y"]),
    # Over zeros nobody sees it.
    "zeros": (lambda x, y: _write(y, 0), "breaks", "writes behind y", ["behind", "0xff", "y"]),
    "in place": (
        lambda x, y: x.add_(_all(y, 255)) is None, "breaks", "0xff behind y changes the result",
        ["behind", "0xff", "y"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_what_lies_behind_operands_and_decides_the_result_is_named(name):
    of, *wanted = BEHIND[name]
    # Parts of a larger tensor, and what is no tensor, are handed on as they are.
    given = {"x": torch.ones(3, 5).T, "y": torch.arange(4), "part": torch.ones(4)[::2], "no": torch.ones(0)}
    asked = []

    def kernel(known):
        asked.append(known)
        return [torch.tensor(float(of(known["x"], known["y"]) or 0))]

    said = scenes.behind_operands(kernel, given | {"k": 3})
    assert [said.verdict, said.note, said.numbers.get("case", [])] == wanted
    for known in asked:
        assert all(
            known[name] is same for name, same in (("part", given["part"]), ("no", given["no"]), ("k", 3))
        )
        assert known["x"].stride() == (1, 5)
        assert torch.equal(known["y"], given["y"])
    # At last the operands end where their mappings end.
    assert (len(_behind(asked[-1]["x"])) == 0) == (name == "nothing" and sys.platform == "linux")


@pytest.mark.parametrize(("platform", "why"), [("darwin", "needs Linux"), ("linux", "No module 'cuda'")])
def test_operands_without_a_guard_say_so(monkeypatch, platform, why):
    def absent(x):
        raise ImportError(why)

    monkeypatch.setattr(scenes.sys, "platform", platform)
    monkeypatch.setattr(scenes, "_guarded", absent)
    said = scenes.behind_operands(lambda known: [known["x"] + 1], {"x": torch.ones(4)})
    assert (said.verdict, said.note) == ("holds", f"no guard mapping: {why}")


def test_operands_have_zeros_behind_them():
    given = {"x": torch.ones(3, 5).T, "part": torch.ones(4)[::2], "k": 3}
    found = scenes.zeros_behind(given)
    assert found["part"] is given["part"]
    assert found["k"] == 3
    assert torch.equal(found["x"], given["x"])
    assert _all(found["x"], 0)


@pytest.mark.parametrize(
    ("on_gpu", "planned", "fails", "said", "captured"),
    [
        (False, False, False, "launched again, not captured", False),
        (True, True, False, "launched again, not captured", False),
        (True, False, True, "launched again: a graph cannot hold it", False),
        (True, False, False, "", True),
    ],
)
def test_a_launch_is_captured_where_a_graph_can_hold_it(monkeypatch, on_gpu, planned, fails, said, captured):
    """What it launches on lives as long as its replay."""
    done: list[str] = []

    @contextlib.contextmanager
    def graph(graph):
        yield
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    recorded = types.SimpleNamespace(replay=lambda: done.append("replay"))
    fakes = {"synchronize": lambda: done.append("waits"), "CUDAGraph": lambda: recorded, "graph": graph}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    operand = torch.zeros(4)
    alive = weakref.ref(operand)

    def launch(operand=operand):
        done.append("launch")
        return "result"

    kernel = attention_probes.Kernel(print, planned=planned)
    replay, note = attention_probes._captured(kernel, launch, on_gpu)
    del operand, launch
    gc.collect()
    assert alive() is not None
    before = len(done)
    assert (replay(), note, done[before:]) == ("result", said, ["replay" if captured else "launch"])
    tried = ["launch", "waits", "launch", *(["waits"] if fails else [])]
    assert done[:before] == (tried if captured or fails else [])


@pytest.mark.parametrize(
    ("count", "device", "moved"), [(24, "cuda", False), (32, "cuda", True), (24, "cpu", True)]
)
def test_an_operand_of_a_gpu_is_guarded_where_it_begins_at_16_bytes(monkeypatch, count, device, moved):
    asked = []
    monkeypatch.setattr(
        scenes, "mapped", lambda *given: asked.append(given) or torch.zeros(count, dtype=torch.uint8)
    )
    x = types.SimpleNamespace(
        device=types.SimpleNamespace(type=device), nbytes=count, dtype=torch.uint8, shape=(count,)
    )
    x.stride = lambda: (1,)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda memory, given: ("a copy of", given))
    assert scenes._guarded(x) == (("a copy of", x) if moved else x)
    assert asked == ([(count, device)] if moved else [])


def test_a_kernel_is_imported_from_its_folder_unless_that_is_installed(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kernels.py").write_text("def one(x): ...\n")
    one = load_module(str(tmp_path / "mine/kernels.py")).one
    path, *lines = scripts._import(one)
    assert path == f"import sys; sys.path.insert(0, {str(tmp_path / 'mine')!r})"
    assert lines == ["from kernels import one", scripts._FIRST]
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/__init__.py").write_text("def two(x): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    path, line, _ = scripts._import(load_module("whole").two)
    assert (path, line) == (f"import sys; sys.path.insert(0, {str(tmp_path)!r})", "from whole import two")
    assert scripts._import(torch.nn.functional.softmax)[0] == "from torch.nn.functional import softmax"
    assert scripts._import(runner.answers)[0] == "from staleproof.contract.runner import answers"


ENDS = {
    "quiet": children.Ended([], 0, "", "", 9.0),
    "shown": children.Ended([], 1, "", "\nAssertionError: expected 0, got 1\n", 9.0),
    "no package": children.Ended([], 1, "", "ModuleNotFoundError: No module named 'vllm'\n", 9.0),
    "no name": children.Ended([], 1, "", "ImportError: cannot import name 'decode'\n", 9.0),
    "other": children.Ended([], 1, "", "ValueError: an ImportError: of another\n", 9.0),
}


@pytest.mark.parametrize(
    ("package", "ends", "wanted"),
    [
        ("vllm", ["shown"], "# 0\npass\n"),
        ("vllm", ["quiet", "other", "shown"], "# 2\npass\n"),
        ("vllm", ["quiet", "no package"], "# 1 Not run where it was made.\npass\n"),
        ("vllm", ["no name", "shown"], "# 0 Not run where it was made.\npass\n"),
        ("vllm", ["quiet"], ""),
        ("vllm", [], ""),
        ("", ["no package"], ""),
        ("staleproof", ["shown"], "# 0\npass\n"),
    ],
)
def test_the_first_script_that_shows_a_break_is_kept(monkeypatch, package, ends, wanted):
    asked, left = [], [ENDS[end] for end in ends]
    monkeypatch.setattr(scripts.children, "call", lambda *a, **given: asked.append((a, given)) or left.pop(0))
    texts = [f"# {number}\npass\n" for number in range(len(ends))]
    said = scripts.tried(breaks("NaN"), texts, Subject("k", "rows", print, package=package), RELEASE, 9.0)
    wrong = "" if package else f"; its script fails: {ENDS['no package'].last_line}"
    assert said == replace(breaks(f"NaN{wrong}"), script=wanted)
    ours = [] if package == "vllm" else [str(Path(runner.__file__).parents[2])]
    assert asked == [
        ((scripts.run_alone, text, ["/site", *ours]), {"timeout_s": 69.0})
        for text in texts[: len(ends) - len(left)]
    ]


def _decode(q, kv_cache, seq_lens, softmax_scale):
    return q


@pytest.mark.parametrize("needs", ["", "cpu", "cuda", "sm90", "sm100"])
@pytest.mark.parametrize("launch", [None, "prepared", "planned"])
def test_a_script_asks_on_the_device_and_launches_as_the_kernel_is_called(needs, launch):
    shape = {"layout": "mla"} | ({launch: True} if launch else {})
    subject = Subject("k", "attention", _decode, shape, package="torch", needs=needs)
    text = scripts.counterexample(subject, RELEASE, "E", ("empty",))
    call = "_decode(q=q, kv_cache=kv_cache, seq_lens=seq_lens, softmax_scale=softmax_scale)"
    assert call in text
    assert (call + "()" in text) is bool(launch)
    always = needs in ("cuda", "sm90", "sm100")
    assert ('\ndevice = "cuda"\n' in text) is always
    assert ("torch.cuda.is_available()" in text) is not always
    assert "softmax_scale = 0.041667\n" in text


ALONE = """
import importlib.machinery, inspect, os, sys
import extra
# A folder of these tests, which nobody named.
assert importlib.machinery.PathFinder.find_spec("warm") is None
assert "lambda" in inspect.getsource(lambda: 0)
assert __name__ == "__main__" and os.listdir() == ["counterexample.py"], os.listdir()
assert "TRITON_INTERPRET" not in os.environ
assert sys.path[0] == os.path.dirname(extra.__file__)
raise SystemExit(7)
"""


def test_a_script_runs_as_the_main_program_of_a_folder_of_its_own(tmp_path):
    (tmp_path / "extra.py").touch()
    # It chooses its device itself.
    env = {"TRITON_INTERPRET": "1"}
    ended = children.call(scripts.run_alone, ALONE, [str(tmp_path)], timeout_s=60, env=env)
    assert (ended.code, ended.stderr) == (7, "")


def test_the_probes_of_a_subject_get_how_it_is_launched_and_its_sizes():
    given = {"prepared": True, "empty_lse": 0.0, "heads": 4, "layout": "mla"}
    probes = runner.probes_of(Subject("k", "attention", _decode, given))
    kernel = attention_probes.Kernel(_decode, prepared=True, empty_lse=0.0)
    shape = scenes.Shape(layout="mla", heads=4, head_dim=576, value_dim=512)
    assert {probe.args for probe in probes.values()} == {(kernel, shape)}
    assert [*probes] == [*KINDS["attention"]]
    probes = runner.probes_of(Subject("k", "rows", _decode, {"hidden": 24}))
    assert [probe.args for probe in probes.values()] == [(_decode, {"hidden": 24})] * 4
    assert {*probes} == {*KINDS["rows"]}


COMPILED = "nvcc compiles it at a call without FLASHINFER_DISABLE_JIT"
LIBRARY = OSError("Could not load this library: /site/deep_gemm/_C.so")
LIBRARY.__cause__ = OSError("undefined symbol: c10")
UNCOMPILED = type("MissingJITCacheError", (RuntimeError,), {})
NAMED = UNCOMPILED("JIT compilation is disabled")
NAMED.spec = types.SimpleNamespace(name="topk")


def named(what: str, error: Exception) -> tuple[Exception, str]:
    """An error, and what is said of it in one line."""
    return error, f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"


# Of a package -> what a finding says then; of the user's own kernels they are breaks.
NOT_THE_KERNELS = {
    "library": (LIBRARY, "its library does not load here: OSError: undefined symbol: c10"),
    # Its folder is not told.
    "file": (
        FileNotFoundError(2, "No such file or directory", "/home/somebody/kernels/config.jinja"),
        "a file of it is not here: config.jinja",
    ),
    "module": named("does not import here", ModuleNotFoundError("No module named 'orjson'")),
    "files": named("does not import here", UnavailableError("vLLM has no such file")),
    **{
        text: named("its calls do not fit this release", TypeError(f"f() {text}"))
        for text in ("got an unexpected keyword x", "missing 1 argument", "takes 2", "got multiple values")
    },
    "ninja": named("a module of it could not be compiled here", RuntimeError("Ninja build failed:\n1 error")),
    "nvcc": named("a module of it could not be compiled here", RuntimeError("Could not find nvcc and")),
}
NOBODYS = {
    "interpreter": (
        type("InterpreterError", (Exception,), {})("no such operation"),
        "Triton's interpreter cannot run it: no such operation",
    ),
    "uncompiled": (UNCOMPILED("disabled"), f"its compiled module is not here; {COMPILED}"),
    "uncompiled, named": (NAMED, f"its compiled module topk is not here; {COMPILED}"),
}


def _answer(error: BaseException, package: str):
    def probe(device):
        raise error

    return runner.answer(probe, Subject("k", "rows", print, package=package), "cpu")


@pytest.mark.parametrize("name", [*NOT_THE_KERNELS, *NOBODYS])
def test_an_error_that_is_not_the_kernels_is_not_run_and_says_why(name):
    error, note = (NOT_THE_KERNELS | NOBODYS)[name]
    said, goes_on = _answer(error, "kernels")
    assert (said.verdict, said.note, goes_on) == (NOT_RUN, note, True)
    # What a kernel of the user's lacks is its own fault; what a machine lacks is nobody's.
    assert _answer(error, "")[0].verdict == (NOT_RUN if name in NOBODYS else BREAKS)


@pytest.mark.parametrize(
    "error", [OSError("no space left"), TypeError("can only concatenate str"), AssertionError("wrong")]
)
def test_any_other_error_is_a_break(error):
    said, goes_on = _answer(error, "kernels")
    assert (said.verdict, said.note) == (BREAKS, f"raises {type(error).__name__}: {error}")
    assert goes_on


@pytest.mark.parametrize(
    ("package", "hint"), [("", '; say needs="cuda" if the kernel needs a GPU'), ("kernels", "")]
)
def test_a_kernel_that_needs_a_gpu_is_told_how_to_say_so(package, hint):
    error = AssertionError("Torch not compiled with CUDA enabled")
    assert _answer(error, package)[0].note == f"raises AssertionError: {error}{hint}"


INTERPRETED = """
import torch
import triton
import triton.language as tl

@triton.jit
def misspelt(x):
    tl.store(x, no_such_name)

@triton.jit
def calls(x):
    misspelt(x)

@triton.jit
def no_operation(x):
    tl.store(x, tl.expp(tl.load(x)))

@triton.jit
def no_method(x):
    tl.store(x, tl.load(x).no_such_method())

def make(around):
    @triton.jit
    def inside(x):
        tl.store(x, around)
    return inside

inside = make(2.0)
"""
GAP = "Triton's interpreter cannot run it: "


@pytest.mark.skipif(not runner.devices.interpreting(), reason="asks Triton's interpreter")
@pytest.mark.parametrize(
    ("kernel", "package", "verdict", "note"),
    [
        ("misspelt", "", BREAKS, "raises NameError: name 'no_such_name' is not defined"),
        ("calls", "", BREAKS, "raises NameError: name 'no_such_name' is not defined"),
        (
            "no_operation",
            "",
            BREAKS,
            "raises AttributeError: module 'triton.language' has no attribute 'expp'",
        ),
        ("misspelt", "kernels", NOT_RUN, f"{GAP}NameError("),
        # What the interpreter lacks, or may lack.
        ("no_method", "", NOT_RUN, f"{GAP}AttributeError("),
        ("inside", "", NOT_RUN, f"{GAP}NameError("),
    ],
)
def test_a_misspelt_name_is_the_kernels_own_fault(tmp_path, kernel, package, verdict, note):
    runner.devices.load_triton()
    (tmp_path / "kernels.py").write_text(INTERPRETED)
    launch = getattr(load_module(str(tmp_path / "kernels.py")), kernel)
    subject = Subject("k", "rows", print, package=package)
    said, _ = runner.answer(lambda device: launch[(1,)](torch.ones(1)), subject, "cpu")
    assert said.verdict == verdict
    assert said.note.startswith(note)


@pytest.mark.parametrize(
    ("kind", "clause", "settings", "note"),
    [
        (
            "rows",
            "0",
            {"reference": lambda x: 1 / 0},
            "reference: raises ZeroDivisionError: division by zero",
        ),
        ("rows", "0", {"reference": lambda x: None}, "reference: expected a tensor or several, got NoneType"),
        (
            "rows",
            "R",
            {"reference": lambda x: 1 / 0},
            "reference: raises ZeroDivisionError: division by zero",
        ),
        ("rows", "0", {"inverse": lambda x: ()}, "inverse: expected a tensor or several, got nothing"),
        (
            "routing",
            "0",
            {"reference": lambda logits, top_k: logits.topk(2)},
            "reference: expected weights and ids of shape (6, 4), got (6, 2), (6, 2)",
        ),
        (
            "operands",
            "0",
            {"make": lambda device: [1]},
            "make: expected a dict of arguments by name, got list",
        ),
        ("operands", "O", {"make": lambda device: {"y": 1}}, "make: the kernel needs x; known: y"),
        ("operands", "0", {"make": lambda device: 1 / 0}, "make: raises ZeroDivisionError: division by zero"),
    ],
)
def test_a_setting_that_does_not_work_is_not_the_kernels_fault(kind, clause, settings, note):
    def route(router_logits, top_k):
        return router_logits.softmax(-1).topk(top_k)

    call = route if kind == "routing" else lambda x: 2 * x
    subject = Subject("k", kind, call, settings)
    said, _ = runner.answer(runner.probes_of(subject)[clause], subject, "cpu")
    assert said == breaks(f"wrong setting: {note}")
    unasked = runner._complete(subject, {"0": said})[subject.clauses[-1]]
    assert unasked == absent("not asked: wrong setting")


def test_an_error_of_the_device_that_shows_in_a_reference_may_be_the_kernels():
    def reference(x):
        raise RuntimeError("CUDA error: an illegal memory access")

    subject = Subject("k", "rows", lambda x: 2 * x, {"reference": reference})
    said, goes_on = runner.answer(runner.probes_of(subject)["0"], subject, "cpu")
    assert (said, goes_on) == (breaks("raises RuntimeError: CUDA error: an illegal memory access"), False)


@pytest.mark.parametrize(("stderr", "wanted"), [("of another\n{}\n", ""), ("{}\nits own\n", ": its own")])
def test_what_a_kernel_printed_is_told_of_no_other(stderr, wanted):
    ended = children.Ended([], 0, "", stderr.format(runner._BEGINS), 9.0)
    assert runner._ended(ended, 5.0) == f"ended its process with 0{wanted}"


def doubles(x):
    x.mul_(2)


def test_a_kernel_that_works_in_place_may_return_nothing():
    settings = {"in_place": True, "reference": lambda x: 2 * x}
    for call in (doubles, functools.partial(doubles)):
        subject = Subject("k", "rows", call, settings)
        probes = runner.probes_of(subject)
        assert {clause: probe("cpu") for clause, probe in probes.items()} == dict.fromkeys("0RWO", holds())
    lines = [scripts._FIRST, *scripts._source(subject), "got = doubles(x=torch.ones(2)).tolist()"]
    names = {"torch": torch}
    exec("\n".join(lines), names)
    assert names["got"] == [2.0, 2.0]


def test_of_a_long_error_the_beginning_is_told_in_one_line():
    said, _ = _answer(ValueError("one\n  and two, " + 50 * "three, "), "kernels")
    assert said.note == f"raises ValueError: {('one and two, ' + 50 * 'three, ')[:160]}"


@pytest.mark.parametrize(
    "text", ["CUDA error: device-side assert triggered", "Triton Error [CUDA]: an illegal memory access"]
)
def test_an_error_of_the_device_ends_the_process_and_torchs_advice_is_left_out(text):
    advice = "\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/"
    assert _answer(RuntimeError(text + advice), "kernels") == (breaks(f"raises RuntimeError: {text}"), False)


def test_what_a_documentation_leaves_to_the_caller_is_undefined():
    subject = Subject("x", "rows", print, documented={"R": "scales are of the whole tensor"})
    release = runner.packages.Release("")
    found = runner.judged(breaks("NaN", "rows", "nan"), subject, release, "R")
    assert found.verdict == UNDEFINED
    assert found.note == "NaN; documented: scales are of the whole tensor"
    assert runner.judged(breaks("NaN"), subject, release, "W").verdict == BREAKS


@pytest.mark.parametrize("clause", ["0", "R"])
@pytest.mark.parametrize("said", [holds("a note"), absent("no nvcc"), breaks("row 1", "clean")])
def test_a_wrong_result_beside_another_torch_is_no_break_of_the_kernel(monkeypatch, clause, said):
    subject = Subject("x", "rows", print, package="kernels", documented={"0": "sizes"})
    monkeypatch.setattr(runner.packages, "other_torch", lambda subject, release: f"{release.version} of it")
    found = runner.judged(said, subject, runner.packages.Release("1.0"), clause)
    is_theirs = clause == "0" and said.verdict == BREAKS
    assert found == (absent("1.0 of it; what came: row 1") if is_theirs else said)
    monkeypatch.setattr(runner.packages, "other_torch", lambda subject, release: "")
    assert runner.judged(said, replace(subject, documented={}), RELEASE, clause) == said


def test_our_own_operations_are_found_in_a_checkout_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(runner.packages.devices, "version_of", lambda package: None)
    subject = Subject("mla_decode", "attention", print, package="staleproof")
    (release,) = runner.packages.releases(subject)
    assert (release.version, release.folder) == ("checkout", None)


K = Subject("k", "rows", print, package="kernels", skip={"W": "asked elsewhere"}, documented={"O": "theirs"})
OK, BAD = holds(), breaks("row 1", "rows", "nan")
SHOWN, LEFT = replace(BAD, script="a script"), replace(BAD, verdict=UNDEFINED)
ABORTED = breaks("ended its process with signal 6")
UNASKED = absent("not asked: wrong on clean input")


def _asked(*clauses):
    """What a child tells of clauses that hold."""
    return [row for clause in clauses for row in (("k", clause, None, ()), ("k", clause, OK, ()))]


@pytest.mark.parametrize(
    ("ends", "asked", "found"),
    [
        ([(_asked("0", "R", "O"), 0)], ["0RO"], {"0": OK, "R": OK, "O": OK}),
        # A break with a script of its case, or with one that was made before.
        (
            [([*_asked("0"), ("k", "R", None, ()), ("k", "R", BAD, ()), ("k", "R", BAD, ("text",)),
               *_asked("O")], 0)],
            ["0RO"], {"0": OK, "R": SHOWN, "O": OK},
        ),
        # What its documentation leaves to the caller is shown as well.
        (
            [([*_asked("0"), ("k", "R", None, ("text",)), ("k", "R", LEFT, ()), *_asked("O")], 0)],
            ["0RO"], {"0": OK, "R": replace(LEFT, script="a script"), "O": OK},
        ),
        # The process ends at a clause, and another goes on with the next.
        (
            [([*_asked("0"), ("k", "R", None, ("text",))], -6), (_asked("O"), 0)],
            ["0RO", "O"], {"0": OK, "R": replace(ABORTED, script="a script"), "O": OK},
        ),
        # Also where its documentation leaves that to the caller.
        (
            [([*_asked("0", "R"), ("k", "O", None, ())], -6)],
            ["0RO"], {"0": OK, "R": OK, "O": Reading(UNDEFINED, note=f"{ABORTED.note}; documented: theirs")},
        ),
        # Clause 0 breaks, and nothing more is asked.
        *(
            ([([("k", "0", None, ()), ("k", "0", bad, ())], 0)], ["0RO"],
             {"0": bad, "R": UNASKED, "O": UNASKED})
            for bad in (BAD, LEFT)
        ),
        ([([], 1)], ["0RO"], {"0": breaks("does not load: ended its process with 1: ImportError: x"),
                              "R": UNASKED, "O": UNASKED}),
        ([([], None)], ["0RO"], {"0": breaks("does not load: no answer within 90 s"),
                                 "R": UNASKED, "O": UNASKED}),
        (
            [([*_asked("0"), ("k", "R", None, ())], None), (_asked("O"), 0)],
            ["0RO", "O"], {"0": OK, "R": breaks("no answer within 5 s"), "O": OK},
        ),
        ([([("k", "0", None, ()), ("k", "0", absent("no nvcc"), ())], 0)], ["0RO"],
         {"0": absent("no nvcc"), "R": absent("no nvcc"), "O": absent("no nvcc")}),
    ],
)  # fmt: skip
def test_a_subject_is_asked_until_each_clause_has_an_answer(monkeypatch, ends, asked, found):
    left, calls = [*ends], []

    def call(function, module, questions, release, device, limit_s, timeout_s):
        ((name, clauses),) = questions
        calls.append("".join(clauses))
        assert (function, module, name, release, device, limit_s) == (
            runner.ask, "a.module", "k", RELEASE, "cpu", 5.0,
        )  # fmt: skip
        assert timeout_s == 90.0 + 5.0 * len(clauses)
        told, code = left.pop(0)
        return children.Ended(told, code, "", "ImportError: x\n", timeout_s)

    def tried(said, texts, subject, release, limit_s):
        assert (subject, release, limit_s) == (K, RELEASE, 5.0)
        return replace(said, script="a script") if texts == ("text",) else said

    monkeypatch.setattr(runner.children, "call", call)
    monkeypatch.setattr(runner.scripts, "tried", tried)
    answers = runner.answers("a.module", [K], RELEASE, "cpu", 5.0)
    assert answers == {"k": found | {"W": absent("asked elsewhere")}}
    assert calls == asked


def test_no_process_is_started_for_what_was_stopped(monkeypatch):
    monkeypatch.setattr(runner.children, "call", pytest.fail)
    stop = threading.Event()
    stop.set()
    ended = absent("not asked: ended before")
    assert runner.answers("m", [replace(K, asked=("0", "W"))], RELEASE, "cpu", stop=stop) == {
        "k": {"0": ended, "W": absent("asked elsewhere")}
    }
    # Nor one for a script.
    stop.clear()
    told = [*_asked("0"), ("k", "R", BAD, ("text",))]
    monkeypatch.setattr(
        runner.children, "call", lambda *a, **given: stop.set() or children.Ended(told, 0, "", "", 1.0)
    )
    monkeypatch.setattr(runner.scripts, "tried", pytest.fail)
    assert runner.answers("m", [K], RELEASE, "cpu", stop=stop)["k"]["R"] == BAD


@pytest.mark.parametrize(
    ("answers", "told", "exits"),
    [
        ([OK, BAD, OK], [("0", OK, ()), ("R", BAD, ()), ("R", BAD, ("case R",)), ("O", OK, ())], False),
        ([breaks("in /site/k.py"), OK, OK], [("0", breaks("in k.py"), ())], False),
        ([OK, (breaks("CUDA error"), False), OK], [("0", OK, ()), ("R", breaks("CUDA error"), ())], True),
        ([absent(NO_REFERENCE), OK, OK], [("0", absent(NO_REFERENCE), ()), ("R", OK, ()), ("O", OK, ())],
         False),
        # What was imported is of another release.
        ([OK, OK, OK], [("0", absent("from /another"), ())], False),
    ],
)  # fmt: skip
def test_a_child_tells_each_answer_at_once_and_then_with_its_script(monkeypatch, answers, told, exits):
    said, left, limits = [], [*answers], []

    class Exit(Exception):
        pass

    def leave(code):
        raise Exit

    def counterexamples(subject, release, clause, case=()):
        return (f"case {clause}",) if case else (f"before {clause}",)

    def answer(probe, subject, device):
        one = left.pop(0)
        return one if isinstance(one, tuple) else (one, True)

    monkeypatch.setattr(runner, "subjects_of", lambda module: [K])
    monkeypatch.setattr(runner, "load_module", lambda module: None)
    monkeypatch.setattr(runner.devices, "select", lambda device: device)
    monkeypatch.setattr(runner.packages, "make_importable", lambda subjects, release: None)
    elsewhere = "from /another" if "from /another" in str(told) else None
    monkeypatch.setattr(runner.packages, "imported_elsewhere", lambda subject, release: elsewhere)
    monkeypatch.setattr(runner.packages, "other_torch", lambda subject, release: None)
    monkeypatch.setattr(runner.scripts, "counterexamples", counterexamples)
    monkeypatch.setattr(runner, "answer", answer)
    monkeypatch.setattr(runner.children, "tell", said.append)
    monkeypatch.setattr(runner.os, "_exit", leave)
    monkeypatch.setattr(torch, "set_num_threads", limits.append)
    monkeypatch.setattr(runner.faulthandler, "dump_traceback_later", lambda s, exit: limits.append((s, exit)))
    monkeypatch.setattr(runner.faulthandler, "cancel_dump_traceback_later", lambda: limits.append("off"))
    with pytest.raises(Exit) if exits else contextlib.nullcontext():
        runner.ask("a.module", [("k", ["0", "R", "O"])], RELEASE, "cpu", 5.0)
    clauses = list(dict.fromkeys(clause for clause, *_ in told))
    wanted = []
    for clause in clauses:
        wanted += [("k", clause, None, (f"before {clause}",))]
        wanted += [("k", *row) for row in told if row[0] == clause]
    assert said == wanted
    assert limits == [1] + [(5.0, True), "off"] * len(clauses)


NO_COUNTS = (
    *("layout", "dtype", "q_len", "prepared", "planned", "empty_lse", "grouped", "padding_id", "in_place"),
    *("reference", "inverse", "make", "pad_slot", "pad_index"),
)
BY_CLAUSE = 'expected a text for each clause, such as {"R": "why"}, got'


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        ("rows(hidden='three')", "hidden of k: expected a positive integer, got 'three'"),
        ("rows(hidden=-3)", "hidden of k: expected a positive integer, got -3"),
        ("rows(live_rows=True)", "live_rows of k: expected a positive integer, got True"),
        (
            "rows(dtype='float99')",
            "dtype of k: expected a dtype of torch by name, such as float16, got 'float99'",
        ),
        *(
            (f"{kind}({name}=0)", f"{name} of k: expected a positive integer, got 0")
            for kind, sizes in SIZES.items()
            for name in sizes
            if name not in NO_COUNTS
        ),
        *(
            (f"{kind}({name}=3)", f"{name} of k: expected a function, got 3")
            for kind, name in (("rows", "reference"), ("rows", "inverse"), ("operands", "make"))
        ),
        ("rows", "rows: expected @audit.rows(), with parentheses, got @audit.rows"),
        ("rows(name=3)", "name: expected a text, got 3"),
        ("rows(skip=['R'])", f"skip: {BY_CLAUSE} ['R']"),
        ("rows(skip={'R': 3})", f"skip: {BY_CLAUSE} {{'R': 3}}"),
        ("rows(documented='no')", f"documented: {BY_CLAUSE} 'no'"),
        ("rows(documented={'0': 'it is slow'})", "documented of k: expected clauses other than 0, got 0"),
        (
            "rows(documented={'R': ' '})",
            "documented of k: expected what the documentation says about R, got ' '",
        ),
        ("rows(package='torch', versions='2.0')", "versions: expected a tuple of texts, got '2.0'"),
        (
            "rows(given=['fa2'])",
            """given: expected arguments by name, such as {"backend": "fa2"}, got ['fa2']""",
        ),
        ("rows(given={'bogus': 2})", "given: expected arguments of k, got bogus"),
        ("attention(layout='pagd')", "layout of k: expected paged or mla or gathered, got 'pagd'"),
        ("attention(q_len=-1)", "q_len of k: expected an integer of 0 or more, got -1"),
        ("attention(heads=3, kv_heads=2)", "heads of k: expected a multiple of kv_heads=2, got 3"),
    ],
)
def test_a_wrong_argument_of_a_decorator_is_refused_before_anything_runs(tmp_path, decorator, expected):
    text = f"from staleproof import audit\n@audit.{decorator}\ndef k(*given): return given[0]\n"
    (tmp_path / "one.py").write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        runner.listed(str(tmp_path / "one.py"))


def test_what_a_decorator_accepts_stays(tmp_path):
    given = "name='one', skip={'W': 'why'}, documented={'R': 'one scale'}, versions=['2.0'], given={'by': 2}"
    text = f"from staleproof import audit\n@audit.rows({given}, package='torch')\ndef k(x, by): return x\n"
    (tmp_path / "one.py").write_text(text)
    (one,) = runner.listed(str(tmp_path / "one.py"))
    assert (one.name, one.skip, one.documented) == ("one", {"W": "why"}, {"R": "one scale"})


def test_two_kernels_of_one_name_are_refused(tmp_path):
    # Otherwise the second would be audited as the first.
    (tmp_path / "two.py").write_text(
        "from staleproof import audit\n"
        "def make(by):\n"
        "    @audit.rows(reference=lambda x: 2 * x)\n"
        "    def kernel(x):\n"
        "        return by * x\n"
        "    return kernel\n"
        "right, again, wrong = make(2), None, make(3)\n"
        "again = right\n"
    )
    with pytest.raises(ValueError, match="name: expected another for each kernel, got 'kernel'"):
        runner.listed(str(tmp_path / "two.py"))
    text = (tmp_path / "two.py").read_text()
    (tmp_path / "one.py").write_text(text.replace("make(3)", "None"))
    assert [one.name for one in runner.listed(str(tmp_path / "one.py"))] == ["kernel"]
