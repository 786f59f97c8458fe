"""What is saved of Triton's interpreter: the same bits, everything put back, and less work."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from staleproof import device

if not device.has_triton() or not device.interpreting():
    pytest.skip("Triton's interpreter does not run here", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("device")
device.load_triton()
import triton
import triton.language as tl
from triton.runtime import interpreter

from staleproof import interpreter as quick


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _sums(x_ptr, out_ptr, SIZE: tl.constexpr, FAIL: tl.constexpr):
    """Calls of two ``triton.jit`` functions, ours and one of Triton's, which sees another module."""
    tl.static_assert(not FAIL, "planted")
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * SIZE + tl.arange(0, SIZE)).to(tl.float32)
    x = _twice(_twice(x)) + tl.zeros((SIZE,), tl.float32)
    tl.store(out_ptr + row, tl.sum(x).to(out_ptr.dtype.element_ty))


@triton.jit
def _sum_of_two(x_ptr, y_ptr, out_ptr):
    i = tl.arange(0, 4)
    tl.store(out_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))


def _run(dtype: torch.dtype, fail: bool = False) -> torch.Tensor:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 3] = float("nan")
    out = torch.empty(3, dtype=dtype)
    _sums[(3,)](x, out, SIZE=16, FAIL=fail)
    return out


@pytest.fixture(name="patches")
def patches_fixture(monkeypatch):
    """Each function for which Triton's own ``_patch_lang`` was called, under ours."""
    original = _original("_patch_lang")
    calls: list[object] = []

    def counted(fn: object) -> object:
        calls.append(fn)
        return original(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", counted)
    monkeypatch.setattr(interpreter, "_patch_lang", quick._patching_once(interpreter))
    return calls


def _original(name: str) -> object:
    return interpreter._staleproof[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_are_those_of_the_interpreter_as_it_comes(dtype, monkeypatch):
    ours = _run(dtype)
    for name in quick.NAMES:
        monkeypatch.setattr(interpreter, name, _original(name))
    for name in (quick.BROADCAST, quick.CHECKING):
        monkeypatch.setattr(interpreter.interpreter_semantic, name, _original(name))
    theirs = _run(dtype)
    size = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(ours.view(size), theirs.view(size))


def test_a_launch_patches_each_module_once(patches):
    _run(torch.float32)
    # The kernel's own module, and Triton's core for the functions that see only that.
    assert 1 <= len(patches) <= 2
    before = len(patches)
    ours = _run(torch.float32)
    # The second launch has the functions of the first.
    assert len(patches) == before
    assert torch.equal(ours.view(torch.int32), _run(torch.float32).view(torch.int32))


def test_a_function_of_the_language_that_was_replaced_since_is_the_one_that_runs(patches, monkeypatch):
    _run(torch.float32)
    before = len(patches)
    load, loads = tl.load, []

    def counted(*args, **fields):
        loads.append(args)
        return load(*args, **fields)

    monkeypatch.setattr(tl, "load", tl.core.builtin(counted))
    _run(torch.float32)
    assert len(loads) == 3
    assert len(patches) > before
    assert tl.load.__wrapped__ is counted


def _made() -> list[object]:
    """What Triton's types and tensors of a few elements and shapes say of themselves."""
    made: list[object] = []
    for size in (4, 8, 4):
        for kind in (tl.float32, tl.int32, tl.pointer_type(tl.float32)):
            block = tl.block_type(kind, [size, tl.constexpr(2)])
            made += [block.element_ty is kind, block.name, block.numel, sorted(vars(block))]
            value = tl.tensor("handle", block)
            made += [value.handle, value.type is block, value.dtype is kind, value.numel.value]
            made += [[size.value for size in value.shape], sorted(vars(value))]
    for wrong in ([3], [], [2.0], ["x"], [2**30]):
        try:
            made.append(tl.block_type(tl.float32, wrong).name)
        except Exception as error:
            made.append(repr(error))
    scalar = tl.tensor("handle", tl.int32)
    return [*made, scalar.numel.value, [*scalar.shape], scalar.dtype is tl.int32]


def test_equal_types_and_tensors_are_as_triton_makes_them(monkeypatch):
    theirs = _made()
    monkeypatch.setattr(tl.block_type, "__init__", quick._with_known_types(tl))
    monkeypatch.setattr(tl.tensor, "__init__", quick._with_known_shapes(tl))
    assert _made() == theirs
    assert _made() == theirs


def test_a_narrow_float_becomes_a_wide_one_by_the_bits_that_triton_gives_it():
    ours, theirs = quick._by_table(_original("_convert_float")), _original("_convert_float")
    for kind in (tl.bfloat16, tl.float16, tl.float8e4nv, tl.float8e5):
        unsigned = f"uint{kind.primitive_bitwidth}"
        bits = np.arange(2**kind.primitive_bitwidth, dtype=unsigned).reshape(-1, 16)[::-3, ::2]
        wider = [tl.float32, *([tl.float16] if kind.primitive_bitwidth == 8 else [])]
        for target in wider:
            for _ in range(2):
                made = ours(bits, kind, target, None)
                assert np.array_equal(made, theirs(bits, kind, target, None))
                made[:] = 0  # a result is the caller's own
    wide = np.array([1.0, np.nan, -3e38], dtype=np.float32)
    for target in (tl.bfloat16, tl.float8e5):
        assert np.array_equal(ours(wide, tl.float32, target, None), theirs(wide, tl.float32, target, None))


def test_a_float32_becomes_a_bfloat16_by_the_bits_that_triton_gives_it():
    ours, theirs = quick._by_table(_original("_convert_float")), _original("_convert_float")
    every = np.arange(0, 2**32, 65521, dtype=np.uint32)[:65536].reshape(256, 256)
    normal = np.where((every & 0x7F800000) == 0, np.uint32(0x80000000), every)
    small = np.arange(0, 2**23, 509, dtype=np.uint32)
    for bits in (every, normal, normal[::2, ::-3], small, small | np.uint32(0x80000000)):
        data = bits.view(np.float32)
        for rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            made = [convert(data, tl.float32, tl.bfloat16, rounding) for convert in (ours, theirs)]
            assert made[0].dtype == made[1].dtype
            assert np.array_equal(*made)


KINDS = (tl.int1, tl.int32, tl.uint32, tl.int64, tl.bfloat16, tl.float16, tl.float32, tl.float8e4nv)
KINDS += (tl.pointer_type(tl.float32), tl.pointer_type(tl.int8))
NUMBERS = (3, -1, 2**31, -(2**70), True, -1.5, float("inf"), 1e300, 1e-40, tl.constexpr(2))


# NaN, infinities, zeros, the largest float, and two subnormal ones.
EXTREMES = [0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000, 0, 0x7F7FFFFF, 1, 0x807FFFFF]


def _tensor(kind, *shape, first=1):
    data = np.arange(first, first + math.prod(shape)).astype(_original("_get_np_dtype")(kind))
    handle = interpreter.TensorHandle(data.reshape(shape or 1), kind)
    return tl.tensor(handle, tl.block_type(kind, [*shape]) if shape else kind)


def _said(function, *arguments):
    """What a function returns, tensor by tensor, or its error."""
    try:
        made = function(*arguments)
        tensors = made if isinstance(made, tuple) else (made,)
        return [
            (str(x.type), str(x.handle.dtype), x.handle.data.dtype, x.handle.data.tolist()) for x in tensors
        ]
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("name", quick.OPERATORS)
def test_an_operator_gives_the_type_the_shape_and_the_bits_that_tritons_gives(name, monkeypatch):
    semantic = interpreter.interpreter_semantic

    def theirs(lhs, rhs):
        return getattr(tl.tensor, name)(lhs, rhs, _semantic=semantic)

    for replaced in (quick.BROADCAST, quick.CHECKING):
        monkeypatch.setattr(semantic, replaced, _original(replaced))
    slow = []
    ours = quick._broadcast_by_numpy(interpreter, name)(lambda *pair: slow.append(pair) or theirs(*pair))
    shapes = ((), (1,), (4,), (4, 1), (1, 4), (2, 4), (8,), (1, 1, 4))
    kinds = [(left, right, (4,), (4,)) for left, right in product(KINDS, KINDS)]
    pointed = (tl.pointer_type(tl.float32), tl.int32)
    kinds += [(*pair, *both) for pair in ((tl.int64,) * 2, pointed) for both in product(shapes, shapes)]
    pairs = [(_tensor(left, *mine), _tensor(right, *other, first=2)) for left, right, mine, other in kinds]
    pairs += [(_tensor(kind, 4), number) for kind, number in product(KINDS, NUMBERS)]
    extremes = [np.array(bits, dtype=np.uint32).view(np.float32) for bits in (EXTREMES, EXTREMES[::-1])]
    block = tl.block_type(tl.float32, [8])
    pairs.append(tuple(tl.tensor(interpreter.TensorHandle(data, tl.float32), block) for data in extremes))
    with np.errstate(all="ignore"):
        for pair in pairs:
            assert str(_said(ours, *pair)) == str(_said(theirs, *pair)), pair
    # What kernels do most is done here.
    slow.clear()
    for kind in (tl.int32, tl.int64, tl.float32):
        for right in (_tensor(kind, 1, 4), _tensor(kind), 3, tl.constexpr(3)):
            ours(_tensor(kind, 4, 1), right)
    assert not slow


def test_operands_are_cast_and_refused_as_triton_does():
    ours, theirs = getattr(interpreter.interpreter_semantic, quick.CHECKING), _original(quick.CHECKING)
    assert ours is not theirs
    said, tensor = _said, _tensor
    for left in KINDS:
        for right in (*(tensor(kind) for kind in KINDS), tensor(left, 4), *NUMBERS):
            for options in ((), (True, True), (False, False, False), (False, False, True, True)):
                for pair in ((tensor(left), right), (right, tensor(left))):
                    assert said(ours, *pair, *options) == said(theirs, *pair, *options), (pair, options)


@pytest.mark.parametrize("fail", [False, True])
def test_the_language_is_put_back_after_a_launch_also_one_that_raises(patches, fail):
    names = [(tl, "load"), (tl.core, "load"), (tl.core, "reduce"), (tl.tensor, "__add__"), (tl, "range")]
    names += [(tl.tensor, "__init__"), (tl.block_type, "__init__"), (tl.core, "_unwrap_if_constexpr")]
    before = [getattr(module, name) for module, name in names]
    if fail:
        with pytest.raises(Exception, match="planted"):
            _run(torch.float32, fail=True)
    else:
        _run(torch.float32)
    assert patches
    assert [getattr(module, name) for module, name in names] == before


@pytest.mark.parametrize("debug", [False, True])
def test_an_overflow_is_an_error_exactly_where_the_interpreter_as_it_comes_has_one(monkeypatch, debug):
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=debug))
    x, y = torch.tensor([1, 2, 3, 2**31 - 1], dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    said, sums = [], []
    for check in (getattr(semantic, quick.OVERFLOW), _original(quick.OVERFLOW)):
        monkeypatch.setattr(semantic, quick.OVERFLOW, check)
        out = torch.zeros_like(x)
        try:
            _sum_of_two[(1,)](x, y, out)
            said.append("")
        except Exception as error:
            said.append(str(error))
        sums.append(out.tolist())
    assert said[0] == said[1]
    assert sums[0] == sums[1]
    assert ("int32 overflow detected for operation add" in said[0]) == debug


def test_a_constant_is_unwrapped_wherever_triton_does_so():
    theirs = tl.core._unwrap_if_constexpr
    ours = quick._leaving_plain_values(tl, theirs)
    two = tl.constexpr(2)
    for value in (2, 2.5, True, "x", None, two, tl.constexpr(None), [two, 3], (two, [two]), tl.float32):
        assert (type(ours(value)), repr(ours(value))) == (type(theirs(value)), repr(theirs(value)))
    assert [*ours(tl.core.tuple([two, 3]))] == [2, 3]


def test_a_tensor_of_one_element_is_a_number_where_numpy_refuses_its_array():
    class Tensor:
        handle = SimpleNamespace(data=np.array([7]))

    def of_triton_3_6(tensor, scope):
        # As numpy 2.4 answers it.
        scope.set_attr(tensor, "__index__", lambda self: int([]))

    scope = SimpleNamespace(set_attr=setattr)
    quick._with_numbers_of_one_element(of_triton_3_6)(Tensor, scope)
    assert [*range(operator.index(Tensor()))] == [*range(7)]
