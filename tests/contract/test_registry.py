"""The decorators, and what a kernel is called with."""

from __future__ import annotations

import types

import pytest

from staleproof import audit
from staleproof.contract.registry import subjects_of
from staleproof.contract.scenes import WrongArgumentsError, bound


def test_a_decorated_function_stays_as_it_is():
    def double(x):
        return 2 * x

    assert audit.rows(name="double")(double) is double
    assert double(2) == 4
    (subject,) = subjects_of(types.SimpleNamespace(double=double))
    assert (subject.name, subject.kind, subject.clauses) == ("double", "rows", ("0", "R", "W"))


def test_a_size_that_its_kind_has_not_is_refused():
    with pytest.raises(ValueError, match=r"page_sise: expected a size of attention: .*page_size.*, got"):
        audit.attention(page_sise=16)


def test_a_clause_that_its_kind_has_not_is_refused():
    with pytest.raises(ValueError, match="documented: expected clauses of rows: 0, R, W, got E"):
        audit.rows(documented={"E": "rows of padding are left"})


def test_an_unknown_need_is_refused():
    with pytest.raises(ValueError, match="needs: expected"):
        audit.rows(needs="sm80")


def test_a_kernel_gets_the_arguments_that_it_names():
    assert bound(lambda out, q, *, lse=None, **more: q, {"q": 1, "out": 2, "seq_lens": 3}) == {
        "out": 2,
        "q": 1,
    }
    with pytest.raises(WrongArgumentsError, match="needs sinks; known: q"):
        bound(lambda q, sinks: q, {"q": 1})
