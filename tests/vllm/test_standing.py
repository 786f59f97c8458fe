"""Patches that need each other are put in place together, and step back together."""

import contextlib
import functools
import logging

import pytest
from made_up import imported, planted

from staleproof.vllm import hooks, process, standing
from staleproof.vllm.hooks import Target
from staleproof.vllm.sources import Evidence, Sources
from staleproof.vllm.standing import registry

TEXT = """
def double(x):
    return 2 * x


def halve(x):
    return x / 2
"""


def _add(amount):
    return lambda result, args, kwargs: result + amount


DRAIN = Target("vllm.a", "double", ("x",), after=_add(100), vital=True)
FIRST = Target("vllm.b", "double", ("x",), after=_add(10), vital=True)
SECOND = Target("vllm.b", "halve", ("x",), after=_add(10), vital=True)


@pytest.fixture(name="module")
def module_fixture(made_up):
    """Imports ``vllm.a`` or ``vllm.b`` of a made-up vLLM."""
    made_up({"a": TEXT, "b": TEXT})
    return imported


def _wrap_all():
    hooks.wrap("other", Target("vllm.a", "halve", ("x",), after=_add(1)))
    hooks.wrap("drain", DRAIN)
    hooks.wrap("record", FIRST, SECOND, requires=("drain",))
    hooks.wrap("zero", Target("vllm.b", "double", ("x",), after=_add(1000)), requires=("record",))


def test_all_of_them(module, caplog):
    with caplog.at_level(logging.INFO, "vllm.staleproof"):
        _wrap_all()
        assert module("b").double(1) == 1012
        assert module("a").double(1) == 102
    # A patch is announced once, when its last vital target is in place.
    lines = [record.getMessage().removeprefix("staleproof: ") for record in caplog.records]
    assert lines == [
        "record is in place (halve)",
        "zero is in place (double)",
        "other is in place (halve)",
        "drain is in place (double)",
    ]
    assert registry.in_service() == ["other", "drain", "record", "zero"]


def test_another_package_owns_the_function_that_one_needs(module, caplog):
    own = module("a").double
    theirs = module("a").double = lambda x: own(x)
    _wrap_all()
    assert module("a").double is theirs
    assert (module("b").double(1), module("b").halve(2)) == (2, 1)
    assert module("a").halve(2) == 2
    assert "drain: double is left alone: double was wrapped by" in caplog.text
    assert "out of service: drain; in service: other" in caplog.text
    assert "record: needs drain, which stepped back" in caplog.text
    assert registry.in_service() == ["other"]
    # One of those that it needs is enough.
    hooks.wrap("both", Target("vllm.b", "halve", ("x",), after=_add(1)), requires=("other", "drain"))
    assert module("b").halve(2) == 1
    # vLLM loads plugins again and again.
    lines = len(caplog.records)
    _wrap_all()
    assert registry.in_service() == ["other"]
    assert module("b").double(1) == 2
    assert len(caplog.records) == lines


def test_a_function_that_turns_out_later_not_to_be_as_expected(module, caplog, tmp_path):
    _wrap_all()
    assert module("b").double(1) == 1012
    (tmp_path / "vllm/a.py").write_text(TEXT.replace("double(x)", "double(z)").replace("2 * x", "2 * z"))
    assert module("a").double(1) == 2
    # Those in place already do nothing any more.
    assert module("b").double(1) == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.endswith("out of service: drain, record, zero; in service: other")


@pytest.mark.parametrize("hook", ["before", "after"])
def test_a_hook_that_raises_takes_those_that_need_it_along(module, caplog, hook):
    hooks.wrap("drain", Target("vllm.a", "double", ("x",), **{hook: planted}))
    hooks.wrap("record", FIRST, SECOND, requires=("drain",))
    assert module("b").double(1) == 12
    assert module("a").double(1) == 2
    assert module("b").double(1) == 2
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.endswith("RuntimeError: planted; out of service: drain, record; in service: nothing")


def test_a_target_without_the_defect_is_not_wrapped(module, caplog):
    probe = {True: lambda s: Evidence(True, "there"), False: lambda s: Evidence(False, "not there")}
    for needed in (True, False):
        hooks.wrap("other", Target("vllm.a", "double", ("x",), after=_add(1), probe=probe[needed]))
        assert module("a").double(1) == (3 if needed else 2)
        assert registry.targets("other") == {"vllm.a:double": "in place" if needed else "not needed"}
        hooks.unwrap("other")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["around", "before", "instead", "after"])
def test_hooks_of_every_kind_stop(module, kind):
    calls = []
    hook = {
        "around": lambda args, kwargs: calls.append("call") or contextlib.nullcontext(),
        "before": lambda args, kwargs: calls.append("call"),
        "instead": lambda args, kwargs: calls.append("call") or NotImplemented,
        "after": lambda result, args, kwargs: calls.append("call") or result,
    }[kind]
    hooks.wrap("other", Target("vllm.a", "double", ("x",), **{kind: hook}))
    assert [module("a").double(1), len(calls)] == [2, 1]
    registry.step_back("other", "the test says so")
    assert [module("a").double(1), len(calls)] == [2, 1]


@pytest.mark.parametrize("failing", ["instead", "before"])
def test_behind_a_hook_that_failed_no_other_runs(module, failing):
    ran = []
    others = {"before": lambda *given: ran.append(given), "after": lambda *given: ran.append(given)}
    hooks.wrap("other", Target("vllm.a", "double", ("x",), **others | {failing: planted}))
    assert module("a").double(1) == 2
    assert not ran


def test_putting_a_hook_in_place_reads_no_source(module, monkeypatch):
    """Each process of vLLM does so, and parsing its larger files takes a tenth of a second each."""
    monkeypatch.setattr(Sources, "text", lambda self, path: pytest.fail(path))
    hooks.wrap("other", DRAIN)
    assert module("a").double(1) == 102


def test_a_patch_on_the_host_comes_back_a_few_times(module, monkeypatch):
    """With those that went along; one whose hooks may be in a graph stays out."""
    hooks.wrap("drain", Target("vllm.a", "double", ("x",), after=planted))
    hooks.wrap("record", FIRST, requires=("drain",))
    hooks.wrap("other", Target("vllm.a", "halve", ("x",), after=planted))
    registry.of("drain").on_host = True
    now = [0.0]
    monkeypatch.setattr(hooks.time, "monotonic", lambda: now[0])
    a, b = module("a"), module("b")
    for time in range(standing.RETRIES):
        assert (a.double(1), b.double(1), a.halve(2)) == (2, 2, 1)
        assert f"comes back in 60 s ({time + 1} of 3)" in registry.reason("drain")
        assert registry.retry(now[0] + standing.WAIT_S - 1) == []
        now[0] += standing.WAIT_S
        assert registry.retry(now[0]) == ["drain, record: in service again"]
        assert b.double(1) == 12
    a.double(1)
    assert "comes back" not in registry.reason("drain")
    assert registry.retry(now[0] + 10**6) == []
    assert {*registry.out_of_service()} == {"drain", "record", "other"}


def test_a_switch_turns_patches_off_and_on_without_touching_others(module):
    _wrap_all()
    kernel = Target("vllm.b", "halve", ("x",), swap=lambda own: lambda x: own(x) + 1)
    hooks.wrap("swapped", kernel)
    assert (module("a").double(1), module("b").halve(2)) == (102, 12)
    registry.step_back("other", "it failed")
    for off, results in ((["drain", "swapped"], (2, 1)), ([], (102, 12)), (["drain"], (2, 2))):
        registry.switch(off, "the test")
        hooks.renew()
        assert (module("a").double(1), module("b").halve(2)) == results
        assert registry.reason("other") == "it failed"
    # Somebody else's switch.
    assert registry.switch([], "another") == []


def test_what_needs_a_patch_that_is_switched_off_is_off_too_and_not_refused(module):
    hooks.wrap("drain", DRAIN)
    hooks.wrap("record", FIRST, requires=("drain",))
    module("a"), module("b")
    registry.switch(["drain", "record"], "the test")
    assert [process.state(name)[0] for name in ("drain", "record")] == [process.OFF] * 2
    registry.switch([], "the test")
    assert [process.state(name)[0] for name in ("drain", "record")] == [process.IN_PLACE] * 2
    registry.step_back("drain", "it failed")
    assert process.state("record") == (process.REFUSED, "needs drain, which stepped back")


def test_what_is_out_of_service_for_a_reason_of_its_own_does_not_come_back_with_what_it_needs(module):
    hooks.wrap("drain", DRAIN)
    hooks.wrap("record", FIRST, requires=("drain",))
    registry.step_back("record", "its hook raised")
    registry.switch(["drain"], "the test")
    registry.switch([], "the test")
    assert registry.out_of_service() == {"record": "its hook raised"}


def test_what_goes_out_of_service_undoes_what_it_did_and_so_do_those_that_need_it(module, monkeypatch):
    undone = []
    for name in ("drain", "record", "other"):
        monkeypatch.setattr(registry.of(name), "undo", functools.partial(undone.append, name))
    hooks.wrap("drain", DRAIN)
    hooks.wrap("record", FIRST, requires=("drain",))
    registry.step_back("drain", "it failed")
    assert undone == ["drain", "record"]
    registry.come_back("drain")
    # What cannot be undone stops neither vLLM nor the others.
    monkeypatch.setattr(registry.of("drain"), "undo", planted)
    registry.step_back("drain", "it failed")
    assert undone == ["drain", "record", "record"]
    monkeypatch.setattr(registry.of("drain"), "undo", None)


def test_a_module_that_is_imported_while_its_patch_is_off_is_patched_later(module):
    hooks.wrap("drain", DRAIN)
    registry.switch(["drain"], "the test")
    assert module("a").double(1) == 2
    registry.switch([], "the test")
    hooks.renew()
    assert module("a").double(1) == 102


def test_what_is_forgotten_does_not_come_back_by_itself():
    registry.of("gone").on_host = True
    # The second time it is not on the host any more.
    for _ in range(2):
        registry.step_back("gone", "planted", again_at=0.0)
        registry.forget("gone")
        assert registry.retry(1e9) == []
    registry.step_back("gone", "planted", again_at=0.0)
    assert registry.retry(1e9) == []
    registry.forget("gone")
    # Nor does it count how often that one came back.
    for _ in range(standing.RETRIES + 1):
        registry.of("gone").on_host = True
        registry.step_back("gone", "planted", again_at=0.0)
        assert "(1 of 3)" in registry.reason("gone")
        registry.forget("gone")


def test_what_logs_the_patches_and_what_keys_the_cache_are_no_patches():
    owners = standing.REPORT, standing.CACHE, "a"
    for owner in owners:
        registry.of(owner).targets["vllm.ops:double"] = "in place"
    served = registry.in_service()
    for owner in owners:
        registry.forget(owner)
    assert served == ["a"]
