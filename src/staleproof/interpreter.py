"""Makes Triton's CPU interpreter faster: work that it repeats at each call is done once. No value changes.

- Before a kernel runs, the interpreter replaces the functions of ``triton.language`` by its own
  (``_patch_lang``), and restores the old ones after the launch. It repeats this whenever one ``triton.jit``
  function calls another, ``tl.sum`` and ``tl.zeros`` included, and scans that module each time. Here this
  is done once a launch.
- Each operation on a tensor builds the table of numpy's types again (``_get_np_dtype``). Here there is one
  table.
- Six operations, each with its own casts, find in 64 bits whether an integer overflows
  (``binary_op_sanitize_overflow_impl``), and ``device_assert`` drops their result, because the
  interpreter's option ``debug`` is false. Here they run only if it is true.
- Each launch creates and installs the same hundred functions again. Here those of the first launch are
  reused.
- Each result creates a type, and each tensor the objects of its shape (``block_type``, ``tensor``), though
  a kernel has few types and shapes. Here each is created once.
- Operands of equal shape are compared dimension by dimension, and then returned unchanged
  (``broadcast_impl_value``). Here they are returned at once.
- A constant is unwrapped, and every other argument is tested four times for being a constant
  (``_unwrap_if_constexpr``). Here it is tested once, by its type.
- Operands are cast to a common type (``binary_op_type_checking_impl``). Here this is skipped if both
  have that type already, or if one is a number that the type of the other can hold.
- A sum, product or comparison goes through seven functions, and both operands are copied to one shape.
  Here two tensors of the same 32-bit or 64-bit type, or such a tensor and a number, go to numpy directly, and
  numpy computes the shape. So does an offset that is added to a pointer.
- Each function of the language is called through two others that inspect its keywords. Here through one.
- A float of 8 or 16 bits is widened by twenty operations on whole arrays (``_convert_float``). Here a table,
  made once with these operations, has all results. A float32 is truncated to bfloat16 by one shift.

One thing is repaired: Triton 3.6 converts a tensor of one element to a number by ``int(array)``, which numpy
from 2.4 on refuses if the array has a dimension.

Based on Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0: ``python/triton/runtime/interpreter.py``,
``python/triton/language/core.py`` and ``python/triton/language/semantic.py``. A Triton without these
names is not changed. The compiler is never changed: whatever is replaced belongs to the interpreter, or is
restored after the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


class _End:
    """Has the method ``restore``, which ``GridExecutor`` calls at the end of a launch."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore


def _called_at_once(installed: Any, semantic: Any) -> Any:
    """A function of the language as ``_patch_attr`` installs it, without its two wrappers."""
    inner: Any = (getattr(installed, "__kwdefaults__", None) or {}).get("member")
    while getattr(inner, "__triton_builtin__", False) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    if inner is None:
        return installed

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return called


def _with_known_functions(interpreter: ModuleType) -> Callable[..., Any]:
    """``_patch_lang`` that reuses the functions of an earlier call, if what they replace is still the same.

    It also takes the language's modules that the kernel can see; only these decide what is replaced.
    """
    patch, missing = interpreter._patch_lang, interpreter._MISSING
    semantic = interpreter.interpreter_semantic
    known: dict[frozenset[ModuleType], list[tuple[Any, str, Any, Any]]] = {}

    def patch_again(fn: Any, modules: frozenset[ModuleType]) -> Any:
        scope = interpreter._LangPatchScope()
        for owner, name, before, after in known.get(modules, ()):
            if getattr(owner, name, missing) is not before:
                # Somebody else has replaced this since, and the cached functions would not call theirs.
                scope.restore()
                break
            scope.set_attr(owner, name, after)
        else:
            if modules in known:
                return scope
        scope = patch(fn)
        # For an attribute that is set twice, keep its value before the first change and after the last.
        first: dict[tuple[Any, str], Any] = {}
        for owner, name, before in scope._changes:
            first.setdefault((owner, name), before)
        known[modules] = [
            (owner, name, before, _called_at_once(getattr(owner, name), semantic))
            for (owner, name), before in first.items()
        ]
        return scope

    return patch_again


def _with_known_types(tl: ModuleType) -> Callable[..., None]:
    """``block_type.__init__`` that computes a type's attributes once for each element and shape."""
    build = tl.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, dict[str, Any]]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        values = getattr(shape, "values", shape)
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in values]
        # Each launch creates its own pointer types, which would accumulate in the cache.
        if isinstance(element_ty, tl.pointer_type) or not {*map(type, sizes)} <= {int}:
            build(self, element_ty, shape)
            return
        key = (id(element_ty), *sizes)
        if key not in known:
            build(self, element_ty, shape)
            # Keep the element's type alive: otherwise another object could get its id.
            known[key] = element_ty, dict(vars(self))
        vars(self).update(known[key][1])

    return init


# The attributes of a tensor that do not follow from its shape.
OWN = ("handle", "type", "dtype")


def _with_known_shapes(tl: ModuleType) -> Callable[..., None]:
    """``tensor.__init__`` that creates the objects of each shape once."""
    build = tl.tensor.__init__
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = (*getattr(type.shape, "values", type.shape),) if type.is_block() else ()
        if shape in known:
            vars(self).update(known[shape], handle=handle, type=type, dtype=type.scalar)
            return
        build(self, handle, type)
        if {*vars(self)} == {*OWN, "shape", "numel"}:
            known[shape] = {name: value for name, value in vars(self).items() if name not in OWN}

    return init


# Types that Triton's ``_unwrap_if_constexpr`` returns unchanged, after four tests.
PLAIN = (int, float, bool, str, type(None))


def _leaving_plain_values(tl: ModuleType, unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``_unwrap_if_constexpr`` that tests the type of its argument once."""
    plain, constexpr = frozenset((*PLAIN, tl.tensor)), tl.constexpr

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constexpr else unwrap(value)

    return unwrapped


def _leaving_one_shape(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """``broadcast_impl_value`` that returns at once if both operands have the same shape."""

    def broadcast_two(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            shape, other = (getattr(kind.shape, "values", kind.shape) for kind in (left, right))
            if [*shape] == [*other]:
                return lhs, rhs
        return broadcast(lhs, rhs)

    return broadcast_two


def _holding(tl: ModuleType) -> Callable[[Any, Any], bool]:
    """A test whether a number, combined with a tensor of a type, becomes a constant of that type."""
    wide, whole = tl.float32, (tl.int32, tl.int64)

    def holds(kind: Any, number: Any) -> bool:
        if type(number) is int:
            return (kind is wide or kind is whole[0] or kind is whole[1]) and -(2**31) <= number < 2**31
        return kind is wide and type(number) is float

    return holds


# Operators of a tensor, with the names of the builder's functions for floats and for signed integers.
OPERATORS = {
    "__add__": ("create_fadd", "create_add"),
    "__sub__": ("create_fsub", "create_sub"),
    "__mul__": ("create_fmul", "create_mul"),
    "__lt__": ("create_fcmpOLT", "create_icmpSLT"),
    "__le__": ("create_fcmpOLE", "create_icmpSLE"),
    "__gt__": ("create_fcmpOGT", "create_icmpSGT"),
    "__ge__": ("create_fcmpOGE", "create_icmpSGE"),
    "__eq__": ("create_fcmpOEQ", "create_icmpEQ"),
    "__ne__": ("create_fcmpUNE", "create_icmpNE"),
}


def _broadcast_by_numpy(interpreter: ModuleType, name: str) -> Callable[[Any], Callable[[Any, Any], Any]]:
    """A wrapper of a tensor's operator that leaves shapes to numpy if no type has to change."""
    tl, builder, semantic = interpreter.tl, interpreter.interpreter_builder, interpreter.interpreter_semantic
    of_floats, of_integers = (getattr(builder, function) for function in OPERATORS[name])
    create = {id(tl.float32): of_floats, id(tl.int32): of_integers, id(tl.int64): of_integers}
    tensor, block_type, constexpr, holds = tl.tensor, tl.block_type, tl.constexpr, _holding(tl)
    keeps_type, adds = name in ("__add__", "__sub__", "__mul__"), name == "__add__"

    def around(slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def operator(lhs: Any, rhs: Any) -> Any:
            kind = lhs.dtype
            compute = create.get(id(kind))
            if type(rhs) is constexpr:
                rhs = rhs.value
            if type(rhs) is not tensor:
                if compute is None or not holds(kind, rhs):
                    return slow(lhs, rhs)
                rhs = semantic.scalar_constant(rhs, kind)
            elif compute is None and adds and kind.is_ptr() and rhs.dtype in (tl.int32, tl.int64):
                compute = builder.create_addptr
            elif compute is None or rhs.dtype is not kind:
                return slow(lhs, rhs)
            if builder.options.debug:
                return slow(lhs, rhs)
            left, right = (
                [*getattr(operand.type.shape, "values", operand.type.shape)]
                if operand.type.is_block()
                else []
                for operand in (lhs, rhs)
            )
            shape = left or right
            if left and right and left != right:
                if len(left) != len(right) or any(
                    a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)
                ):
                    return slow(lhs, rhs)
                shape = [*map(max, left, right)]
            element = kind if keeps_type else tl.int1
            handle = compute(lhs.handle, rhs.handle)
            return tensor(handle, block_type(element, shape) if shape else element)

        return operator

    return around


def _casting_no_equal_types(check: Callable[..., Any], semantic: Any, tl: ModuleType) -> Callable[..., Any]:
    """``binary_op_type_checking_impl`` that skips the search for a common type if a tensor has it already.

    That is the case for two tensors of one type, and for a tensor and a number that its type can hold. A
    division is left to Triton, which widens some types.
    """
    tensor, broadcast, holds = tl.tensor, getattr(semantic, BROADCAST), _holding(tl)

    def checked(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if div_or_mod:
            pass
        elif left and right:
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return broadcast(lhs, rhs)
        elif left and arithmetic_check and holds(lhs.dtype, rhs):
            return broadcast(lhs, semantic.scalar_constant(rhs, lhs.dtype))
        elif right and arithmetic_check and holds(rhs.dtype, lhs):
            return broadcast(semantic.scalar_constant(lhs, rhs.dtype), rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return checked


def _by_table(convert: Callable[..., Any]) -> Callable[..., Any]:
    """``_convert_float`` that widens with a table made by Triton's, and truncates float32 to bfloat16."""
    tables: dict[tuple[str, str, Any], Any] = {}

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = source.primitive_bitwidth
        if (source.name, target.name, rounding) == ("fp32", "bf16", None):
            wide = np.ascontiguousarray(data).view(np.uint32)
            # Triton shifts the mantissa of a subnormal. Of all other numbers it keeps the upper half.
            if not np.any((wide & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF):
                return (wide >> 16).astype(np.uint16).reshape(data.shape)
        if bits > 16 or bits >= target.primitive_bitwidth:
            return convert(data, source, target, rounding)
        unsigned = f"uint{bits}"
        key = (source.name, target.name, rounding)
        if key not in tables:
            tables[key] = convert(np.arange(2**bits, dtype=unsigned), source, target, rounding)
        return tables[key][np.ascontiguousarray(data).view(unsigned)]

    return converted


def _with_numbers_of_one_element(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``_patch_lang_tensor`` that converts a tensor of one element to a number, whatever its shape."""

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor


def _patching_once(interpreter: ModuleType) -> Callable[[Any], _End]:
    """``_patch_lang`` that does nothing for a module that the running launch has patched already."""
    tl = interpreter.tl
    patch, language = _with_known_functions(interpreter), (tl, tl.core)
    types, shapes = _with_known_types(tl), _with_known_shapes(tl)
    unwrapped = _leaving_plain_values(tl, tl.core._unwrap_if_constexpr)
    operators = {name: _broadcast_by_numpy(interpreter, name) for name in OPERATORS}
    patched: set[ModuleType] = set()
    scopes: list[Any] = []
    names: dict[Any, frozenset[ModuleType]] = {}

    def restore() -> None:
        # In reverse order: what an inner scope saved as the original was installed by an outer scope.
        while scopes:
            scopes.pop().restore()
        patched.clear()

    def patch_once(fn: Any) -> _End:
        if fn not in names:
            globals_ = {id(value) for value in fn.__globals__.values()}
            names[fn] = frozenset(module for module in language if id(module) in globals_)
        is_launch = not scopes
        if is_launch or not names[fn] <= patched:
            scopes.append(patch(fn, names[fn]))
            patched.update(names[fn])
        if is_launch:
            scopes[-1].set_attr(tl.block_type, "__init__", types)
            scopes[-1].set_attr(tl.tensor, "__init__", shapes)
            scopes[-1].set_attr(tl.core, "_unwrap_if_constexpr", unwrapped)
            for name, around in operators.items():
                scopes[-1].set_attr(tl.tensor, name, around(getattr(tl.tensor, name)))
        return _End(restore if is_launch else lambda: None)

    return patch_once


def _with_table(interpreter: ModuleType) -> Callable[[Any], Any]:
    """``_get_np_dtype`` that calls Triton's once for each element type."""
    numpy_dtype, tl = interpreter._get_np_dtype, interpreter.tl
    table: dict[str, Any] = {}

    def looked_up(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        # All pointers have the same numpy type. Other types are distinguished by name, as in Triton's table.
        name = "pointer" if isinstance(element, tl.pointer_type) else element.name
        if name not in table:
            table[name] = numpy_dtype(dtype)
        return table[name]

    return looked_up


def _where_it_can_fail(check: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """``binary_op_sanitize_overflow_impl`` that computes nothing if a kernel's asserts are not checked."""

    def check_in_debug_mode(lhs: Any, rhs: Any, binary_op: Any) -> Any:
        return check(lhs, rhs, binary_op) if builder.options.debug else None

    return check_in_debug_mode


# The names that are replaced: in the interpreter's module, and in its semantic.
NAMES = ("_patch_lang", "_patch_lang_tensor", "_get_np_dtype", "_convert_float")
OVERFLOW, BROADCAST = "binary_op_sanitize_overflow_impl", "broadcast_impl_value"
CHECKING = "binary_op_type_checking_impl"
SEMANTIC = (OVERFLOW, BROADCAST, CHECKING)


def quicken() -> None:
    """Install all replacements, once a process. An interpreter without these names is not changed.

    >>> quicken()
    >>> quicken()
    """
    from triton.runtime import interpreter

    needed = (*NAMES, "_LangPatchScope", "_MISSING", "tl", "interpreter_semantic", "interpreter_builder")
    if hasattr(interpreter, "_staleproof") or not all(hasattr(interpreter, name) for name in needed):
        return
    semantic = interpreter.interpreter_semantic
    # The originals, for the tests.
    interpreter._staleproof = {name: getattr(interpreter, name) for name in NAMES}
    interpreter._staleproof |= {name: getattr(semantic, name, None) for name in SEMANTIC}
    interpreter._patch_lang_tensor = _with_numbers_of_one_element(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _patching_once(interpreter)
    interpreter._get_np_dtype = _with_table(interpreter)
    interpreter._convert_float = _by_table(interpreter._convert_float)
    if check := interpreter._staleproof[OVERFLOW]:
        setattr(semantic, OVERFLOW, _where_it_can_fail(check, interpreter.interpreter_builder))
    if broadcast := interpreter._staleproof[BROADCAST]:
        setattr(semantic, BROADCAST, _leaving_one_shape(broadcast))
        if checking := interpreter._staleproof[CHECKING]:
            setattr(semantic, CHECKING, _casting_no_equal_types(checking, semantic, interpreter.tl))
