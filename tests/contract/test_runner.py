"""What surrounds a probe, and the audit: an answer for each kernel and clause, whatever a kernel does."""

from __future__ import annotations

import ctypes
import functools
import inspect
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from staleproof import audit
from staleproof import child as children
from staleproof.audit import SIZES, Subject, load_module
from staleproof.contract import runner, scenes
from staleproof.contract.contract import (
    BREAKS,
    HOLDS,
    NOT_RUN,
    NOT_TESTED,
    UNDEFINED,
    breaks,
    holds,
    not_run,
    not_tested,
)

HERE = Path(__file__).parent


def test_memory_that_needs_a_gradient_is_filled_too():
    # Inductor allocates such leaves while it compiles.
    with scenes.dirty_memory(7.0):
        leaf = torch.empty(3, requires_grad=True)
    assert leaf.tolist() == [7.0, 7.0, 7.0]
    assert leaf.requires_grad


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
    "nothing": (lambda x, y: 0, "holds", ""),
    "one": (lambda x, y: _all(x, 255), "breaks", "0xff behind x changes the result"),
    "each": (
        lambda x, y: _all(x, 255) + 2 * _all(y, 255), "breaks", "0xff behind x, y changes the result",
    ),
    "both": (
        lambda x, y: _all(x, 255) * _all(y, 255), "breaks",
        "0xff behind the operands together changes the result",
    ),
    # Incident 6 reads 64 bytes behind the last scales; whole tiles may be larger.
    "4096 bytes": (
        lambda x, y: _behind(y)[4095:4096].eq(255).any(), "breaks", "0xff behind y changes the result",
    ),
    "noise": (
        lambda x, y: len(set(_behind(y).tolist())) > 2, "breaks", "noise behind y changes the result",
    ),
    "written": (lambda x, y: _write(y, 7), "breaks", "writes behind y"),
    "in place": (
        lambda x, y: x.add_(_all(y, 255)) is None, "breaks", "0xff behind y changes the result",
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
    assert [said.verdict, said.note] == wanted
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


INTERPRETED = """
import torch
import triton
import triton.language as tl

@triton.jit
def misspelt(x):
    tl.store(x, no_such_name)

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
    ("kernel", "verdict", "note"),
    [
        ("misspelt", BREAKS, "raises NameError: name 'no_such_name' is not defined"),
        ("no_operation", BREAKS, "raises AttributeError: module 'triton.language' has no attribute 'expp'"),
        # What the interpreter lacks, or may lack.
        ("no_method", NOT_RUN, f"{GAP}AttributeError("),
        ("inside", NOT_RUN, f"{GAP}NameError("),
    ],
)
def test_misspelt_name_breaks_and_gap_of_the_interpreter_is_not_run(tmp_path, kernel, verdict, note):
    runner.devices.load_triton()
    (tmp_path / "kernels.py").write_text(INTERPRETED)
    launch = getattr(load_module(str(tmp_path / "kernels.py")), kernel)
    answer, _ = runner.ask_one(lambda device: launch[(1,)](torch.ones(1)), "cpu")
    assert answer.verdict == verdict
    assert answer.note.startswith(note)


def _raised(error: BaseException):
    def probe(device):
        raise error

    return runner.ask_one(probe, "cpu")


@pytest.mark.parametrize(
    ("error", "note", "alive"),
    [
        (ValueError("one\n  and two"), "raises ValueError: one and two", True),
        (
            AssertionError("Torch not compiled with CUDA enabled"),
            'Torch not compiled with CUDA enabled; say needs="cuda" if the kernel needs a GPU',
            True,
        ),
        (
            RuntimeError("CUDA error: device-side assert\nSearch for `cudaErrorAssert' in https://docs"),
            "raises RuntimeError: CUDA error: device-side assert",
            False,
        ),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access"),
            "raises RuntimeError: Triton Error [CUDA]: an illegal memory access",
            False,
        ),
    ],
)
def test_error_of_a_kernel_is_a_break_in_one_line(error, note, alive):
    answer, goes_on = _raised(error)
    assert (answer.verdict, goes_on) == (BREAKS, alive)
    assert answer.note.endswith(note)


@pytest.mark.parametrize(
    ("kind", "clause", "settings", "note"),
    [
        (
            "rows",
            "0",
            {"reference": lambda x: 1 / 0},
            "reference: raises ZeroDivisionError: division by zero",
        ),
        (
            "rows",
            "0",
            {"reference": lambda x: 2 * x / (x > -1)},
            "reference: expected finite numbers for finite x, got -inf in row 0 of result 0",
        ),
        (
            "routing",
            "0",
            {"reference": lambda logits, top_k: (logits.topk(top_k)[0] * torch.nan, logits.topk(top_k)[1])},
            "reference: expected finite weights for finite logits, got nan in row 0 of result 0",
        ),
        ("rows", "0", {"reference": lambda x: None}, "reference: expected a tensor or several, got NoneType"),
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
    ],
)
def test_a_setting_that_does_not_work_is_not_the_kernels_fault(kind, clause, settings, note):
    def route(router_logits, top_k):
        return router_logits.softmax(-1).topk(top_k)

    call = route if kind == "routing" else lambda x: 2 * x
    subject = Subject("k", kind, call, settings)
    said, _ = runner.ask_one(runner.probes_of(subject)[clause], "cpu")
    assert said == not_tested(f"wrong setting: {note}")
    unasked = runner._complete(subject, {"0": said})[subject.clauses[-1]]
    assert unasked == not_run("not asked: wrong setting")


def doubles(x):
    x.mul_(2)


def test_kernel_that_works_in_place_may_return_nothing():
    settings = {"in_place": True, "reference": lambda x: 2 * x}
    for call in (doubles, functools.partial(doubles)):
        probes = runner.probes_of(Subject("k", "rows", call, settings))
        assert {clause: probe("cpu") for clause, probe in probes.items()} == dict.fromkeys("0RWO", holds())


def test_documented_break_is_undefined():
    subject = Subject("x", "rows", print, documented={"R": "scales are of the whole tensor"})
    found = runner.judged(breaks("NaN"), subject, "R")
    assert (found.verdict, found.note) == (UNDEFINED, "NaN; documented: scales are of the whole tensor")
    assert runner.judged(breaks("NaN"), subject, "W").verdict == BREAKS


@pytest.mark.parametrize(
    ("needs", "capability", "reason"),
    [
        ("", None, ""),
        ("cpu", "sm_90", "runs on CPU tensors only"),
        ("cuda", None, "needs a CUDA GPU"),
        ("sm90", "sm_100", "needs an SM90 GPU (H100, H200); this is sm_100"),
        ("sm100", "sm_90", "needs an SM100 GPU (B200, GB200); this is sm_90"),
        # A B300 runs what a B200 runs.
        ("sm100", "sm_103", ""),
    ],
)
def test_kernel_for_another_machine_names_what_it_needs(monkeypatch, needs, capability, reason):
    machine = replace(runner.devices.machine(), capability=capability)
    monkeypatch.setattr(runner.devices, "machine", lambda: machine)
    assert runner.unavailable_reason(Subject("x", "rows", print, needs=needs)) == reason


# --- The audit

MISDEEDS = {
    # Without what the kernel before it has printed.
    ("leaves", "0"): "ended its process with 3",
    ("raises", "0"): "raises RuntimeError: no such configuration",
    ("hangs", "0"): "no answer within 5 s",
    ("ends its process", "R"): "ended its process with signal 6",
    ("wrong shape", "0"): "returns shape (1, 2), expected (3, 2, 32)",
    ("writes past its output", "0"): "writes outside out",
    ("another dtype", "0"): "raises AssertionError: expected float8",
}


# One test: the kernels are audited together, once.
def test_each_misdeed_is_an_answer_and_the_audit_goes_on(device, tmp_path):
    found = [*runner.audit([str(HERE / "bad_kernels.py")], device, limit_s=5.0, scripts=tmp_path)]
    by_name = {(one.kernel, one.clause): one for one in found}
    assert {key: one.note for key, one in by_name.items() if one.verdict == BREAKS} == MISDEEDS
    assert [by_name["right", clause].verdict for clause in "0RWO"] == [HOLDS] * 4
    # A process that ends does not take the next clause with it.
    assert [by_name["ends its process", clause].verdict for clause in "0W"] == [HOLDS] * 2
    # A kernel that is wrong on clean input is asked nothing more.
    for clause in "RW":
        unasked = by_name["raises", clause]
        assert (unasked.verdict, unasked.note) == (NOT_RUN, "not asked: wrong on clean input")
    # What raises and what ends its process have a reproducer too.
    shown = {key for key, one in by_name.items() if one.script}
    assert shown >= {("raises", "0"), ("ends its process", "R"), ("another dtype", "0")}
    assert (tmp_path / "ends_its_process_R.pt").is_file()


def test_module_that_does_not_import_or_registers_nothing_is_an_answer(tmp_path, device):
    texts = {
        "broken.py": "def load():\n    import no_such_module\nload()\n",
        "misnamed.py": "from staleproof import audit\naudit.rows(hiden=3)(print)\n",
        "leaves.py": "import os\nos._exit(3)\n",
        "nothing.py": "",
    }
    modules = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        modules.append(str(tmp_path / name))
    found = {Path(one.kernel).name: one for one in runner.audit(modules, device)}
    assert {one.verdict for one in found.values()} == {NOT_TESTED}
    assert found["broken.py"].note == (
        f"does not import: ModuleNotFoundError: No module named 'no_such_module' ({modules[0]}, line 2)"
    )
    assert found["misnamed.py"].note.startswith("wrong setting: hiden: expected a size of rows")
    assert found["misnamed.py"].note.endswith(f" ({modules[1]}, line 2); no kernel of this module was tested")
    assert found["leaves.py"].note == "does not import: ended with 3: no output"
    assert found["nothing.py"].note == "registers no kernel"


@pytest.mark.parametrize(
    ("modules", "more", "message"),
    [
        (["nosuch.py"], {}, "modules: nosuch.py: expected a Python file or a module, and none is there"),
        ("staleproof.contract.examples", {}, r"modules: expected names or files, such as .* got 'stale"),
        (["typing"], {"limit_s": 0}, "limit_s: expected seconds, more than 0, got 0"),
        (["typing"], {"limit_s": -1}, "limit_s: expected seconds, more than 0, got -1"),
        (["typing"], {"limit_s": "9"}, "limit_s: expected seconds, more than 0, got '9'"),
    ],
)
def test_a_wrong_argument_of_the_audit_is_refused_at_once(modules, more, message):
    with pytest.raises(ValueError, match=message):
        runner.audit(modules, "cpu", **more)


def test_two_modules_with_a_kernel_of_one_name_are_refused(tmp_path, device):
    text = "from staleproof import audit\n@audit.rows(reference=lambda x: x)\ndef k(x): return x + 0\n"
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="modules: expected another name for each kernel, got 'k' in"):
        [*runner.audit([str(tmp_path / "one.py"), str(tmp_path / "two.py")], device)]


def test_kernel_that_cannot_run_here_is_not_run(tmp_path, monkeypatch, device):
    (tmp_path / "mine.py").write_text("from staleproof import audit\naudit.rows()(lambda x: x)\n")
    monkeypatch.setattr(runner, "unavailable_reason", lambda subject: "needs an SM100 GPU")
    (tmp_path / "mine.py").write_text("from staleproof import audit\n@audit.rows()\ndef k(x): return x\n")
    found = [*runner.audit([str(tmp_path / "mine.py")], device)]
    assert {(one.clause, one.verdict, one.note) for one in found} == {
        (clause, NOT_RUN, "needs an SM100 GPU") for clause in "0RWO"
    }


def test_a_decorator_shows_its_arguments():
    shown = {kind: inspect.signature(getattr(audit, kind)).parameters for kind in SIZES}
    assert shown["rows"]["hidden"].default == 64
    for kind, names in SIZES.items():
        assert {*names, "name", "needs", "documented", "skip", "given"} == {*shown[kind]}
        told = inspect.getdoc(getattr(audit, kind))
        assert [name for name in shown[kind] if f"{name}: " not in told] == []


NO_COUNTS = (
    *("layout", "dtype", "q_len", "prepared", "planned", "empty_lse", "grouped", "padding_id", "in_place"),
    *("reference", "inverse", "make"),
)
BY_CLAUSE = 'expected a text for each clause, such as {"R": "why"}, got'


@pytest.mark.parametrize(
    ("decorator", "expected"),
    [
        ("rows(hidden='three')", "hidden of k: expected a positive integer, got 'three'"),
        ("rows(hidden=-3)", "hidden of k: expected a positive integer, got -3"),
        ("rows(live_rows=6)", "live_rows of k: expected 1 to 5 of 6 rows, so that one is padding, got 6"),
        ("rows(in_place=1)", "in_place of k: expected True or False, got 1"),
        ("routing(grouped=3)", "grouped of k: expected True or False, got 3"),
        ("routing(padding_id='no')", "padding_id of k: expected an integer, got 'no'"),
        ("routing(experts=4, top_k=9)", "top_k of k: expected at most 4 experts, got 9"),
        ("routing(grouped=True, top_k=9)", "top_k of k: expected at most 8 experts in 2 of 4 groups, got 9"),
        *(
            (
                f"routing(grouped=True, experts={experts})",
                f"experts of k: expected a multiple of 4, from 8, with grouped=True, got {experts}",
            )
            for experts in (4, 10)
        ),
        ("attention(empty_lse='no')", "empty_lse of k: expected a number, got 'no'"),
        ("attention(layout='mla', kv_heads=2)", "kv_heads of k: expected 1 with layout mla, got 2"),
        ("attention(layout='mla', head_dim=64)", "value_dim of k: expected at most head_dim=64, got 512"),
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
        (
            "rows(given=['fa2'])",
            """given: expected arguments by name, such as {"backend": "fa2"}, got ['fa2']""",
        ),
        ("rows(given={'bogus': 2})", "given: expected arguments of k, got bogus"),
        ("attention(layout='pagd')", "layout of k: expected paged or mla, got 'pagd'"),
        ("attention(q_len=-1)", "q_len of k: expected an integer of 0 or more, got -1"),
        ("attention(heads=3, kv_heads=2)", "heads of k: expected a multiple of kv_heads=2, got 3"),
    ],
)
def test_a_wrong_argument_of_a_decorator_is_refused_before_anything_runs(tmp_path, decorator, expected):
    text = f"from staleproof import audit\n@audit.{decorator}\ndef k(*given): return given[0]\n"
    (tmp_path / "one.py").write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        runner.listed(str(tmp_path / "one.py"))


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


def test_audit_here_gives_the_answers_of_audit():
    from staleproof.contract import examples

    kernels = (examples.masked_by_weight, examples.masked_by_selection, examples.fp8_per_tensor)
    here = [one for kernel in kernels for one in runner.audit_here(kernel, "cpu")]
    there = [*runner.audit([examples.__name__], "cpu")]
    assert here == [one for one in there if one.kernel in {each.kernel for each in here}]
    with pytest.raises(ValueError, match=r"kernel: expected a function under a decorator .* got print"):
        runner.audit_here(print, "cpu")
