"""Hooks of single objects: vLLM's class keeps its own method, and only a given object has the hooks."""

import importlib
import sys
from types import SimpleNamespace as Space

import pytest
from made_up import planted

from staleproof.vllm import hooks, single
from staleproof.vllm.hooks import Target
from staleproof.vllm.standing import registry

TEXT = """
class Manager:
    def __init__(self, spec):
        self.kv_cache_spec, self.new_block_ids = spec, []

    def allocate(self, count):
        return list(range(count))

    def free(self):
        return 0


class Derived(Manager):
    def allocate(self, count):
        return super().allocate(count + 1)
"""


@pytest.fixture(name="managers")
def managers_fixture(tmp_path, monkeypatch):
    (tmp_path / "managers.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks._places.clear()
    yield importlib.import_module("managers")
    hooks.unwrap("p")
    registry.forget("p")
    del sys.modules["managers"]


def wrapped(after):
    hooks.wrap("p", Target("managers", "Manager.allocate", ("self", "count"), after=after, single=True))


def test_only_the_given_object_has_the_hook(managers):
    own = managers.Manager.allocate
    wrapped(lambda result, args, kwargs: [*result, type(args[0]).__name__])
    assert managers.Manager.allocate is own
    assert hooks.checked("p") == {"managers:Manager.allocate": "in place"}
    # A hook on the class is not put on the object once more.
    hooks.wrap("p", Target("managers", "Manager.free", ("self",), after=lambda r, args, kwargs: r + 1))
    one, other = managers.Derived(None), managers.Manager(None)
    single.hook("p", one)
    single.hook("p", one)
    single.hook("another patch", other)
    assert one.free() == 1
    # The method of its own class, once; and keywords too.
    assert one.allocate(1) == one.allocate(count=1) == [0, 1, "Derived"]
    assert other.allocate(1) == [0]
    single.hook("p", Space())


def test_the_hook_ends_when_the_patch_is_reverted(managers):
    wrapped(lambda result, args, kwargs: "hooked")
    one = managers.Manager(None)
    single.hook("p", one)
    assert one.allocate(1) == "hooked"
    hooks.unwrap("p")
    assert one.allocate(1) == [0]


def test_a_hook_that_raises_leaves_vllms_result_and_the_patch_steps_back(managers):
    wrapped(planted)
    one = managers.Manager(None)
    single.hook("p", one)
    assert one.allocate(2) == [0, 1]
    assert "planted" in registry.reason("p")
