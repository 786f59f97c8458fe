"""Adapters are checked against signatures that are read, not imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from staleproof import audit
from staleproof.contract.binding import problem
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import subjects_of

SOURCE = """
class Wrapper:
    def __init__(self, workspace, *, backend="fa2"): ...
    def plan(self, starts, pages): ...

def decode(q, cache, *, scale): ...
"""


def _release(folder: Path, init: str = "from .kernels import decode, Wrapper\n") -> Release:
    (folder / "fastkernels").mkdir()
    (folder / "fastkernels/__init__.py").write_text(init)
    (folder / "fastkernels/kernels.py").write_text(SOURCE)
    return Release("1.0", folder)


@audit.rows(name="right")
def right(x):
    from fastkernels import Wrapper, decode

    wrapper = Wrapper(x, backend="fa3")
    wrapper.plan(x, x)
    return decode(x, x, scale=1.0)


@audit.rows(name="keyword")
def keyword(x):
    from fastkernels.kernels import decode

    return decode(x, x, sm_scale=1.0)


@audit.rows(name="count")
def count(x):
    from fastkernels.kernels import Wrapper

    wrapper = Wrapper(x)
    wrapper.plan(x)


@audit.rows(name="method")
def method(x):
    from fastkernels.kernels import Wrapper

    wrapper = Wrapper(x)
    wrapper.forward(x)


@audit.rows(name="name")
def name(x):
    from fastkernels import encode

    return encode(x)


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        (right, ""),
        (keyword, "decode: missing a required (keyword-only )?argument: 'scale'"),
        (count, "plan: missing a required argument: 'pages'"),
        (method, "Wrapper has no forward"),
        (name, "no file of it that was found defines fastkernels.encode"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, subject, why):
    (found,) = subject.__dict__["__padding_contract__"]
    assert re.match(why, problem(found, _release(tmp_path)))
    assert bool(problem(found, Release("1.0", tmp_path))) == bool(why)


def test_a_star_import_is_followed(tmp_path):
    (found,) = keyword.__dict__["__padding_contract__"]
    release = _release(tmp_path, "from .kernels import *\n")
    assert problem(found, release).startswith("decode: ")


def test_a_definition_under_try_is_found(tmp_path):
    (found,) = keyword.__dict__["__padding_contract__"]
    release = _release(tmp_path)
    body = SOURCE[SOURCE.index("def decode") :].strip()
    (tmp_path / "fastkernels/kernels.py").write_text(f"try:\n    {body}\nexcept ImportError:\n    pass\n")
    assert problem(found, release).startswith("decode: missing")


def test_flashinfers_compiled_kernels_bind():
    pytest.importorskip("flashinfer")
    from staleproof.kernels import flashinfer

    subjects = subjects_of(flashinfer)
    assert len(subjects) >= 15
    assert {
        subject.name: why for subject in subjects if (why := problem(subject, Release("installed")))
    } == {}
