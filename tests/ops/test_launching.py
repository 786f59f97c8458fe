"""Calls that were checked and compiled before."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from staleproof.ops import launching, private
from staleproof.ops.launching import Seen, key_of
from staleproof.ops.topk import topk_softmax


def test_no_key_while_torch_traces():
    assert key_of(torch.ones(2)) is not None
    with FakeTensorMode():
        assert key_of(torch.ones(2), 3) is None


X, Y = torch.ones(4, 6), torch.zeros(3, dtype=torch.int32)
WIDE = torch.ones(4, 12)
# (arguments of another call, whether the call kept for (X, Y, 8, None) serves them)
OTHERS: dict[str, tuple[tuple[object, ...], bool]] = {
    "values of tensors": ((X * 3, Y + 1, 8, None), True),
    "a parameter": ((torch.nn.Parameter(X), Y, 8, None), False),
    "shape": ((X[:3], Y, 8, None), False),
    "shape of the second": ((X, Y[:2], 8, None), False),
    "strides": ((WIDE[:, :6], Y, 8, None), False),
    "dtype": ((X.double(), Y, 8, None), False),
    "device": ((X.to("meta"), Y, 8, None), False),
    "alignment": ((torch.ones(25)[1:].view(4, 6), Y, 8, None), False),
    "alignment of 8 bytes": ((torch.ones(26)[2:].view(4, 6), Y, 8, None), False),
    "number": ((X, Y, 9, None), False),
    "a float": ((X, Y, 8.0, None), False),
    "a list": ((X, Y, [8], None), False),
    "a tensor more": ((X, Y, 8, Y), False),
    "a tensor less": ((X, None, 8, None), False),
    "the same tensor twice": ((X, X, 8, None), False),
}


@pytest.mark.parametrize("in_python", [False, True], ids=["torch's guards", "without them"])
def test_a_kept_call_serves_the_same_layouts_and_numbers(in_python, monkeypatch):
    if in_python:
        monkeypatch.setattr(private, "_TensorGuards", None)
    for case, (arguments, serves) in OTHERS.items():
        seen: Seen[str] = Seen()
        seen.keep((X, Y, 8, None), "a call")
        assert seen.get(arguments) == ("a call" if serves else None), case
        assert seen.get((X, Y, 8, None)) == "a call"
        seen.keep(None, "another")
        assert seen.get(None) is None


def test_a_call_kept_for_an_odd_address_serves_every_address():
    seen: Seen[str] = Seen()
    seen.keep((torch.ones(25)[1:],), "no alignment")
    assert seen.get((torch.ones(24),)) == seen.get((torch.ones(25)[1:],)) == "no alignment"


def test_a_tensor_of_another_class_is_checked_each_time_and_not_kept_alive():
    class Other(torch.Tensor):
        pass

    seen, given = Seen[str](), torch.ones(24).as_subclass(Other)
    gone = weakref.ref(given)
    seen.keep((X, given), "a call")
    assert seen.get((X, given)) is None
    del given
    assert gone() is None


def test_an_argument_that_no_dict_holds_is_left_to_the_checks():
    seen: Seen[str] = Seen()
    seen.keep((X, (1, 2)), "a call")
    assert seen.get((X, ([1], 2))) is None
    with pytest.raises(ValueError, match="top_k"):
        topk_softmax(torch.ones(1, 4), [2])  # type: ignore[arg-type]


def test_calls_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(launching, "MOST_CALLS", 3)
    seen: Seen[int] = Seen()
    for number in range(10):
        seen.keep((X, number), number)
    # Full after three, and again after six and nine.
    assert [seen.get((X, number)) for number in range(5, 10)] == [None, None, None, None, 9]
    seen.keep((X, 10), 10)
    assert [seen.get((X, number)) for number in (9, 10)] == [9, 10]


@pytest.fixture
def gpus(monkeypatch) -> list[Any]:
    """Stand-ins for two GPUs, of which the first is current; filled with what they are asked."""
    asked: list[Any] = []
    current = [0]

    @contextlib.contextmanager
    def entered(index):
        current.append(index)
        yield
        current.pop()

    driver = SimpleNamespace(get_current_stream=lambda index: 70 + index)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(private, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", entered)

    def launcher(compiled):
        return lambda *given: asked.append((compiled, current[-1], *given)), ("before",), None

    monkeypatch.setattr(private, "launcher", launcher)
    return asked


def test_what_was_launched_is_launched_again_on_its_device_and_its_stream(gpus):
    grid, index = (5, 6), 1
    first = SimpleNamespace(is_cuda=True, get_device=lambda: index)
    taken: list[Any] = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: taken.append((grid, given, options)) or "compiled"

    ready = launching.launched(Kernel(), grid, (first, None), iter((8, 9)), num_warps=2)
    assert taken == [(grid, (first, None, 8, 9), {"num_warps": 2})]
    ready(1000, 2000)
    ready.on(33, (2, 3, 4), 1000, 55)
    expected = ("compiled", index, *(*grid, 1, 1)[:3], 70 + index, "before", 1000, 2000, 8, 9)
    assert gpus == [expected, ("compiled", 0, 2, 3, 4, 33, "before", 1000, 55)]
