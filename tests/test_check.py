"""Bad input is one error that names the argument, what was expected and what came; good input is none."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from staleproof import check

X = torch.ones(2, 3)
META = torch.ones(2, 3, device="meta")
# Not of CUDA: where that is, torch makes a real tensor on the device of a fake one.
with FakeTensorMode():
    TWO = [torch.ones(2, 3, device=f"mtia:{index}") for index in (0, 1)]


REFUSED_AND_TAKEN = [
    ([1.0], {}, "x: expected a torch.Tensor, got list"),
    (X, {"ndim": 3}, "x: expected a tensor of rank 3, got shape (2, 3)"),
    (X, {"ndim": (1, 3)}, "x: expected a tensor of rank 1 or 3, got shape (2, 3)"),
    (X, {"shape": (2, 4)}, "x: expected shape (2, 4), got shape (2, 3)"),
    (X, {"shape": (None, 4)}, "x: expected shape (*, 4), got shape (2, 3)"),
    (X, {"shape": (2,)}, "x: expected shape (2,), got shape (2, 3)"),
    (X, {"shape": (2, 3, None)}, "x: expected shape (2, 3, *), got shape (2, 3)"),
    (X, {"dtype": torch.int32}, "x: expected torch.int32, got torch.float32"),
    (X, {"dtype": (torch.int32, torch.int64)}, "x: expected torch.int32 or torch.int64, got torch.float32"),
    (META, {"like": X}, "x: expected a tensor on cpu, got one on meta"),
    (TWO[1], {"like": TWO[0]}, "x: expected a tensor on mtia:0, got one on mtia:1"),
    (X.T, {"contiguous": True}, "x: expected a contiguous tensor, got strides (1, 3)"),
    (X[:, :2], {"contiguous": True}, "x: expected a contiguous tensor, got strides (3, 1)"),
    (X, {"ndim": 2}, None),
    (X, {"ndim": (1, 2)}, None),
    (X, {"shape": (2, 3)}, None),
    (X, {"shape": (None, 3)}, None),
    (X, {"dtype": torch.float32}, None),
    (X, {"dtype": (torch.int32, torch.float32)}, None),
    (X, {"like": torch.ones(1), "contiguous": True}, None),
    (X.T, {}, None),
]


def test_a_tensor_is_refused_by_the_first_rule_that_it_breaks():
    for x, rules, said in REFUSED_AND_TAKEN:
        if said is None:
            check.tensor("x", x, **rules)
        else:
            with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
                check.tensor("x", x, **rules)


@pytest.mark.parametrize(
    ("out", "got"), [(X, "Tensor"), (None, "NoneType"), ([X], "a list of 1"), ((X,) * 3, "a tuple of 3")]
)
def test_two_results_go_into_a_pair(out, got):
    said = re.escape(f"out: expected (x_fp8, scale), got {got}")
    with pytest.raises(ValueError, match=f"^{said}$"):
        check.out_pair(out, "(x_fp8, scale)")
    check.out_pair((X, X), "(x_fp8, scale)")
    check.out_pair([X, X], "(x_fp8, scale)")


def test_what_is_required_is_an_error_only_where_it_is_not_so():
    check.require(True, "top_k", "1 to 8", 9)
    with pytest.raises(ValueError, match=r"^top_k: expected 1 to 8, got 9$"):
        check.require(False, "top_k", "1 to 8", 9)
