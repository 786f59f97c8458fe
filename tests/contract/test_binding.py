"""Adapters are checked against signatures that are read, not imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from staleproof.contract import binding
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import Subject, subjects_of

SOURCE = """
class Wrapper:
    def __init__(self, workspace, *, backend="fa2"): ...
    @overload
    def plan(self, starts): ...
    def plan(self, starts, pages): ...

def decode(q, cache, *, scale): ...
"""


def problem(adapter, release: Release) -> str:
    return binding.problem(Subject("k", "rows", adapter), release)


def _release(folder: Path) -> Release:
    (folder / "fastkernels").mkdir()
    (folder / "fastkernels/__init__.py").write_text("from .kernels import decode, Wrapper\n")
    (folder / "fastkernels/kernels.py").write_text(SOURCE)
    return Release("1.0", folder)


def right(x):
    from fastkernels import Wrapper, decode

    wrapper = Wrapper(x, backend="fa3")
    wrapper.plan(x, x)
    return decode(x, x, scale=1.0)


def keyword(x):
    from fastkernels.kernels import decode as attend

    return attend(x, x, sm_scale=1.0)


def count(x):
    from fastkernels.kernels import Wrapper

    wrapper = Wrapper(x)
    wrapper.plan(x)


def method(x):
    from fastkernels.kernels import Wrapper

    wrapper = Wrapper(x)
    wrapper.forward(x)


def name(x):
    from fastkernels import encode

    return encode(x)


def handed_on(x):
    from fastkernels.kernels import Wrapper as Made
    from fastkernels.kernels import decode as attend

    given = {"scale": 1.0}
    attend(*x)
    attend(x, **given)
    Made(x).plan(1, 2, 3)
    return attend(x, x, scale=given)


def badly_made(x):
    from fastkernels.kernels import Wrapper

    wrapper = Wrapper()
    return wrapper.plan(x, x)


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (right, ""),
        # What is handed on is not checked, and how a class is made is.
        (handed_on, ""),
        (badly_made, "__init__: missing a required argument: 'workspace'"),
        (keyword, "decode: missing a required (keyword-only )?argument: 'scale'"),
        (count, "plan: missing a required argument: 'pages'"),
        (method, "Wrapper has no forward"),
        (name, "no file of it that was found defines fastkernels.encode"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, adapter, why):
    found = problem(adapter, _release(tmp_path))
    assert re.match(why, found)
    assert bool(found) == bool(why)
    # Without a folder it would be an installed package.
    assert problem(adapter, Release("1.0")).startswith("no file of it that was found defines fastkernels.")


DECODE = "decode: missing a required"
NOWHERE = "no file of it that was found defines fastkernels.decode"
# The package's files beside kernels.py, by name -> why the call with one argument too few does not fit.
FILES = [
    ({"__init__.py": "from .kernels import *"}, DECODE),
    ({"__init__.py": "from .one import Wrapper as other, attend as decode",
      "one.py": "def attend(q, cache, *, scale): ..."}, "attend: missing a required"),
    ({"__init__.py": "from fastkernels.kernels import decode"}, DECODE),
    ({"__init__.py": "try:\n    from .kernels import decode\nexcept ImportError:\n    pass"}, DECODE),
    ({"__init__.py": "if True:\n    def decode(q, cache, *, scale): ..."}, DECODE),
    ({"__init__.py": "try:\n    def decode(q, cache, *, scale): ...\nfinally:\n    pass"}, DECODE),
    ({"__init__.py": "from .one import *\nfrom .kernels import *", "one.py": "x = 1"}, DECODE),
    # As for Python: a package before a module of its name, and the last definition counts.
    ({"__init__.py": "from .one import decode", "one.py": "def decode(q, cache): ...",
      "one/__init__.py": "from ..kernels import decode"}, DECODE),
    ({"__init__.py": "def decode(q, cache): ...\ndef decode(q, cache, *, scale): ..."}, DECODE),
    ({"__init__.py": "def decode(q, cache, *, scale): ...\ndef decode(q, cache): ..."}, ""),
    ({"__init__.py": "from .deep import decode", "deep/__init__.py": "from ..kernels import decode"}, DECODE),
    ({"__init__.py": "from .deep import decode", "deep/__init__.py": "from .more import decode",
      "deep/more.py": "from fastkernels.kernels import decode"}, DECODE),
    ({"__init__.py": "def decode(q, cache, scale=1.0, *, more=None): ..."}, ""),
    ({"__init__.py": "def decode(*args): ..."}, ""),
    # Nothing of the package is computed here.
    ({"__init__.py": "def decode(q, cache, lse=NONE, *, scale=ONE): ..."}, ""),
    ({"__init__.py": "decode = print"}, NOWHERE),
    ({"__init__.py": "from .gone import decode"}, NOWHERE),
    # In a circle.
    ({"__init__.py": "from .one import decode", "one.py": "from .two import decode",
      "two.py": "from .one import decode"}, NOWHERE),
    ({}, NOWHERE),
]  # fmt: skip


def short(x):
    import torch  # noqa: F401
    from fastkernels import decode
    from torch.nn import functional  # noqa: F401

    from staleproof import device  # noqa: F401

    return decode(x, x)


@pytest.mark.parametrize(("files", "why"), FILES)
@pytest.mark.parametrize("installed", [False, True])
def test_a_definition_is_found_through_the_imports_of_a_package(tmp_path, monkeypatch, files, why, installed):
    release = _release(tmp_path)
    (tmp_path / "fastkernels/__init__.py").unlink()
    for name, text in files.items():
        (tmp_path / "fastkernels" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "fastkernels" / name).write_text(text + "\n")
    if installed:
        # Each test has a package of this name.
        importlib.invalidate_caches()
        monkeypatch.syspath_prepend(tmp_path)
        release = Release("1.0")
    said = problem(short, release)
    assert said.startswith(why) if why else said == ""


def test_flashinfers_compiled_kernels_bind():
    pytest.importorskip("flashinfer")
    from staleproof.kernels import flashinfer

    subjects = subjects_of(flashinfer)
    assert len(subjects) >= 15
    assert {
        subject.name: why for subject in subjects if (why := binding.problem(subject, Release("installed")))
    } == {}
