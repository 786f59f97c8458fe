"""Hooks on a made-up package ``vllm``: installed at its import, removed again, errors contained.

Calls that a hook does not know, reloaded modules, and what others ask of our loader.
"""

import importlib
import importlib.util
import logging
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
from made_up import imported, patch, planted

from staleproof.vllm import arguments, hooks
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import PatchError, Sources

MODULE = "vllm.ops"
TEXT = """
imported = True


def double(x, y=0):
    return 2 * x + y


class Impl:
    def run(self, x):
        self.runs = getattr(self, "runs", 0) + 1
        if x < 0:
            raise KeyError("vLLM's own")
        return x


class Own(Impl):
    pass


def local(x, y=0, extra=0):
    return 2 * x + y + extra
"""


@pytest.fixture(name="package")
def package_fixture(made_up):
    """A vllm whose ``ops`` nobody has imported yet."""
    return made_up({"ops": TEXT})


_patch = partial(patch, versions=(("1.0.0", "1.2.0"), ("2.0.0", "2.0.0")))


def test_a_patch_is_for_its_releases_and_has_the_targets_of_each():
    patch = _patch(Target("vllm.a", "f", ()), Target("vllm.a", "g", (), versions=("1.1.0", "2.0.0")))
    assert [patch.applies_to(v) for v in ("0.9.9", "1.2.0", "1.2.1", "2.0.0")] == [False, True, False, True]
    assert [t.name for t in patch.targets_for("1.0.5")] == ["f"]
    assert [t.name for t in patch.targets_for("1.1.0")] == ["f", "g"]


@pytest.mark.parametrize("needs", [False, True])
def test_a_patch_whose_kernels_need_triton_is_refused_without_it(package, monkeypatch, needs):
    patch = replace(_patch(_double(after=lambda r, a, k: r)), triton=needs)
    patch.check("1.0.0", Sources(package))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    refused = pytest.raises(PatchError, match="its kernels need Triton")
    with refused if needs else nullcontext():
        patch.check("1.0.0", Sources(package))


def test_a_patch_is_refused_if_one_of_its_functions_is_not_as_expected(package):
    known, gone = Target(MODULE, "double", ("x",)), Target(MODULE, "gone", ())
    _patch(known, replace(gone, versions=("2.0.0", "2.0.0"))).check("1.0.0", Sources(package))
    with pytest.raises(PatchError, match="has no gone"):
        _patch(known, gone).check("1.0.0", Sources(package))


def _waits_and_fails():
    with _patch(Target("vllm.a", "f", ())).applied("1.1.0"):
        assert [hook.target.name for hook in hooks._watched["vllm.a"]] == ["f"]
        raise KeyError


def test_a_patch_is_reverted_after_an_error():
    with pytest.raises(KeyError):
        _waits_and_fails()
    assert not hooks._watched


def _double(**hooks):
    return Target(MODULE, "double", ("x", "y"), **hooks)


def _ops():
    return imported("ops")


def test_a_patch_waits_for_the_import(package):
    with _patch(_double(after=lambda r, a, k: r + 100)).applied("1.0.0"):
        assert MODULE not in sys.modules
        ops = _ops()
        assert ops.double(1) == 102
        # The module is as it would have been: its own loader, its own name.
        assert type(ops.__loader__).__name__ == "SourceFileLoader"
        assert type(ops.__spec__.loader).__name__ == "SourceFileLoader"
        assert ops.double.__name__ == "double"
    assert ops.double(1) == 2


def test_a_patch_of_an_imported_module_is_in_place_at_once(package):
    ops = _ops()
    own = ops.double
    patch = _patch(_double(before=lambda a, k: ((a[0] + 1, *a[1:]), k)))
    patch.apply("1.0.0")
    once = ops.double
    patch.apply("1.0.0")
    assert ops.double is once
    assert hooks.checked("p") == {"vllm.ops:double": "in place"}
    assert ops.double(1, y=5) == 9
    patch.revert()
    assert ops.double is own
    patch.revert()


def test_a_patch_that_is_applied_again_while_its_module_is_imported_waits_for_the_end(
    made_up, monkeypatch, caplog
):
    made_up({"ops": f"import sys\nsys.staleproof_again()\n{TEXT}"})
    patch = _patch(_double(after=lambda r, a, k: r + 1, vital=True))
    monkeypatch.setattr(sys, "staleproof_again", lambda: patch.apply("1.0.0"), raising=False)
    with patch.applied("1.0.0"):
        assert _ops().double(1) == 3
    assert not caplog.messages


@pytest.mark.parametrize("imported", [True, False])
def test_two_patches_share_a_function_and_leave_in_any_order(package, imported):
    one = _patch(_double(after=lambda r, a, k: r + 1), name="one")
    ten = _patch(_double(after=lambda r, a, k: r * 10), name="ten")
    if imported:
        _ops()
    one.apply("1.0.0")
    ten.apply("1.0.0")
    assert not imported or _ops().double(1) == 30
    one.revert()
    assert _ops().double(1) == 20
    ten.revert()
    assert _ops().double(1) == 2


def test_instead_may_leave_a_call_to_vllm(package):
    """None is a result like any other: vLLM's routing operations return it."""
    hook = _double(instead=lambda a, k: {1: "ours", 2: None}.get(a[0], NotImplemented))
    with _patch(hook).applied("1.0.0"):
        assert [_ops().double(x) for x in (1, 2, 3)] == ["ours", None, 6]


def test_after_is_given_what_the_caller_gave(package):
    seen = []
    hook = _double(
        before=lambda a, k: ((a[0] + 1, *a[1:]), {"y": 7}), after=lambda *a: seen.append(a) or a[0]
    )
    with _patch(hook).applied("1.0.0"):
        assert _ops().double(1, y=5) == 11
    assert seen == [(11, (1,), {"y": 5})]


@pytest.mark.parametrize(
    ("hook", "error"),
    [*((hook, RuntimeError) for hook in ("around", "leaving", "before", "instead")), ("after", SystemExit)],
)
def test_a_failing_hook_is_one_line_and_vllms_answer(package, caplog, hook, error):
    def fails(*args):
        raise error("planted")

    @contextmanager
    def leaving(args, kwargs):
        yield
        fails()

    hooked = {"around": leaving} if hook == "leaving" else {hook: fails}
    with _patch(_double(**hooked)).applied("1.0.0"):
        ops = _ops()
        assert [ops.double(1, y=2), ops.double(2)] == [4, 4]
    (line,) = caplog.records
    # VLLM_LOGGING_LEVEL=ERROR hides warnings.
    assert line.levelno == logging.ERROR
    assert "p: " in line.getMessage()
    assert f"vLLM's own code runs: {error.__name__}: planted" in line.getMessage()


def test_vllms_own_exception_is_vllms(package):
    entered = []

    @contextmanager
    def around(args, kwargs):
        entered.append("in")
        try:
            yield
        finally:
            entered.append("out")

    others = {"before": lambda a, k: None, "after": lambda r, a, k: r}
    target = Target(MODULE, "Impl.run", ("self", "x"), around=around, **others)
    with _patch(target).applied("1.0.0"):
        impl = _ops().Impl()
        with pytest.raises(KeyError, match="vLLM's own"):
            impl.run(-1)
        # Once, not again without the patch.
        assert impl.runs == 1
        assert entered == ["in", "out"]


@pytest.mark.parametrize(
    "hook", [{"after": lambda r, a, k: -r}, {"swap": lambda own: lambda x: -own(x)}], ids=["hook", "exchange"]
)
def test_another_packages_wrapper_is_left_alone_unless_asked(package, caplog, hook):
    ops = _ops()
    own = ops.double
    patch = _patch(_double(**hook))
    # Also where ours has been before theirs.
    with patch.applied("1.0.0"):
        pass
    theirs = ops.double = lambda x: own(x) + 0.5
    patch.apply("1.0.0")
    assert ops.double is theirs
    assert "p leaves double alone: double was wrapped by" in caplog.text
    assert "STALEPROOF_PATCHES=+p" in caplog.text
    patch.apply("1.0.0", force=True)
    assert ops.double(1) == -2.5
    patch.revert()
    assert ops.double is theirs


def test_a_wrapper_over_ours_is_not_torn_off(package, caplog):
    ops = _ops()
    patch = _patch(_double(after=lambda r, a, k: -r))
    patch.apply("1.0.0")
    ours = ops.double
    theirs = ops.double = lambda x: ours(x) + 0.5
    patch.revert()
    assert ops.double is theirs
    assert "another package has wrapped double since" in caplog.text


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (Target(MODULE, "halve", ("x",)), "p leaves halve alone: vllm/ops.py has no halve"),
        (Target(MODULE, "Gone.run", ("self",)), "p leaves Gone.run alone: vllm/ops.py has no Gone.run"),
        (Target(MODULE, "imported.run", ("self",)), "alone: vllm/ops.py has no imported.run"),
        # A class that only inherits the function does not have it: wrapping would change its base.
        (Target(MODULE, "Own.run", ("self",)), "p leaves Own.run alone: vllm/ops.py has no Own.run"),
        (Target(MODULE, "halve", ("x",), vital=True), "halve is left alone: vllm/ops.py has no halve; out"),
        (Target(MODULE, "double", ("z",)), "p leaves double alone: vllm/ops.py:5 double takes (x, y), not"),
    ],
)
def test_a_target_that_is_not_as_expected_is_left_alone(package, caplog, target, line):
    patch = _patch(target)
    # vLLM loads plugins again and again.
    for _ in range(3):
        patch.apply("1.0.0")
        assert _ops().double(1) == 2
    assert caplog.text.count(line) == 1


def test_an_exchange_is_made_once_and_undone(package):
    ops = _ops()
    own, seen = ops.double, []

    def swap(function):
        seen.append(function)
        return lambda x, y=0: function(x, y) + 1

    patch = _patch(_double(swap=swap))
    patch.apply("1.0.0")
    assert (ops.double(1), ops.double(2), seen) == (3, 5, [own])
    patch.revert()
    assert ops.double is own


def test_an_exchange_that_fails_is_one_line_and_vllms_own(package, caplog):
    ops = _ops()
    own = ops.double
    with _patch(_double(swap=planted)).applied("1.0.0"):
        assert ops.double is own
        # It stays in nobody's way.
        with _patch(_double(after=lambda r, a, k: r * 10), name="ten").applied("1.0.0"):
            assert ops.double(1) == 20
    (line,) = caplog.messages
    assert "leaves double alone: " in line
    assert "planted" in line


def test_a_call_with_unknown_arguments_is_vllms(package):
    hooks.wrap("p", Target(MODULE, "double", ("x", "y"), instead=lambda a, k: "ours"))
    double = _ops().double
    assert double(1, y=2) == "ours"
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        double(1, z=2)
    with pytest.raises(TypeError, match="positional arguments"):
        double(1, 2, 3)


def test_a_replacement_is_refused_where_the_signature_has_grown(package, caplog):
    grown = Target(MODULE, "local", ("x", "y"), instead=lambda a, k: "ours")
    with pytest.raises(PatchError, match=r"local takes \(x, y, extra\), not what was expected"):
        grown.check(Sources(package))
    hooks.wrap("p", grown)
    assert _ops().local(1, extra=3) == 5
    assert "p leaves local alone" in caplog.text
    # Hooks around vLLM's call pass on what they do not know.
    hooks.wrap("p", Target(MODULE, "local", ("x", "y"), after=lambda r, a, k: -r))
    assert _ops().local(1, extra=3) == -5


def test_a_reloaded_module_is_patched_again(package):
    hooks.wrap("p", Target(MODULE, "double", ("x",), after=lambda r, a, k: -r))
    hooks.wrap("p", Target(MODULE, "Impl.run", ("self",), after=lambda r, a, k: -r))
    ops = _ops()
    for _ in range(2):
        importlib.reload(ops)
        # Once, not twice.
        assert (ops.double(1), ops.Impl().run(1)) == (-2, -1)
    hooks.unwrap("p")
    assert (ops.double(1), ops.Impl().run(1)) == (2, 1)


IMPORTERS = {"ops": TEXT, "user": "from vllm.ops import double as two\nother = len\n", "none": "x = 1\n"}


@pytest.mark.parametrize("first", ["imported", "patched"])
def test_who_imported_a_function_by_its_name_calls_the_same(made_up, monkeypatch, first):
    made_up(IMPORTERS)
    own, other = None, type(sys)("vllm_other")
    monkeypatch.setitem(sys.modules, "vllm_other", other)
    if first == "imported":
        user, own = imported("user"), _ops().double
    other.two = own
    patch = _patch(_double(after=lambda r, a, k: -r))
    patch.apply("1.0.0")
    user = imported("user")
    none = imported("none")
    assert (user.two(1), _ops().double(1), user.other, none.x) == (-2, -2, len, 1)
    assert other.two is own, "a module of another package"
    assert hooks.checked("p") == {f"{MODULE}:double": "in place"}
    patch.revert()
    assert (user.two(1), _ops().double(1)) == (2, 2)
    assert own is None or user.two is own


def test_what_calls_something_else_than_what_was_put_in_place_is_named(made_up):
    made_up(IMPORTERS)
    ops = _ops()
    own, place = ops.double, f"{MODULE}:double"
    with _patch(_double(after=lambda r, a, k: -r)).applied("1.0.0"):
        ours = ops.double
        imported("user").two = own
        hooks._looked[0] = 0
        said = {"vllm.user imported double by its name and calls vLLM's"}
        assert {*hooks.checked("p").values()} == {*hooks.checked("p").values()} == said
        # Another patch of the function puts its name there in order.
        with _patch(_double(after=lambda r, a, k: r), name="another").applied("1.0.0"):
            assert sys.modules["vllm.user"].two(1) == -2
            assert hooks.checked("p") == {place: "in place"}
        ours = ops.double
        for theirs, said in (
            (own, "double was put back since"),
            (lambda x: x, f"double was replaced by {__file__} since"),
            (len, "double was replaced by builtin_function_or_method since"),
        ):
            ops.double = theirs
            assert hooks.checked("p") == {place: said}
        del ops.double
        assert hooks.checked("p") == {place: "double is gone"}
        ops.double = ours
        assert hooks.checked("p") == {place: "in place"}
        assert hooks.checked("another") == {}


@pytest.mark.parametrize(
    ("vital", "functions", "said"),
    [
        (True, ("double", "local"), ["p is in place (local)"]),
        (True, ("double", "gone"), []),
        (False, ("double", "gone"), ["p is in place (double)"]),
        # One function is vital, and what it is there for cannot be wrapped.
        ("double", ("double", "gone"), []),
    ],
)
def test_a_patch_is_announced_once_it_works(package, caplog, vital, functions, said):
    same = {"arguments": ("x",), "after": lambda r, a, k: r}
    targets = [Target(MODULE, name, vital=vital in (True, name), **same) for name in functions]
    with caplog.at_level(logging.INFO, hooks.logger.name):
        hooks.wrap("another", Target(MODULE, "Impl.run", ("self",), after=lambda r, a, k: r))
        hooks.wrap("p", *targets)
        _ops()
    hooks.unwrap("another")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines[1:] == [f"staleproof: {line}" for line in said]
    assert lines[0] == "staleproof: another is in place (Impl.run)"


def test_a_function_is_a_strangers_unless_its_file_is_of_the_modules_package(package, tmp_path):
    """vLLM's own may be wrapped by torch's decorators, of which torch's file says so."""
    ops = _ops()
    (tmp_path / "torch").mkdir()
    text = "import functools\ndef wrapped(f): return functools.wraps(f)(lambda *a: f(*a))\n"
    for name in ("torch/of_torch.py", "theirs.py"):
        (tmp_path / name).write_text(text)
    wrapped = {}
    for name in ("torch/of_torch.py", "theirs.py"):
        exec(compile(text, str(tmp_path / name), "exec"), scope := {"__name__": name})
        wrapped[name] = scope["wrapped"]
    by_torch, by_them = wrapped["torch/of_torch.py"], wrapped["theirs.py"]
    assert arguments.stranger_at(ops, ops.double, ops) is None
    assert arguments.stranger_at(ops, by_torch(ops.double), ops) is None
    assert arguments.stranger_at(ops, by_them(ops.double), ops) == MODULE
    assert arguments.stranger_at(ops, by_torch, ops) == "torch/of_torch.py"
    assert arguments.stranger_at(ops, by_torch(by_them), ops) == "theirs.py"
    by_them.__module__ = None
    assert arguments.stranger_at(ops, by_them, ops) == str(tmp_path / "theirs.py")
    assert arguments.stranger_at(Patch, ops.double, ops) == "staleproof.vllm.patch"
    # A class of the same package that lives in another module.
    assert arguments.stranger_at(Patch, Patch.apply, hooks) == "staleproof.vllm.patch"
    assert arguments.stranger_at(ops.Impl, ops.Impl.run, ops) is None
