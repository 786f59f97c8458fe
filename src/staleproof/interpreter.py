"""Saves Triton's CPU interpreter work that it does again at each call, and changes no value.

- Before a kernel runs, the interpreter replaces the functions of ``triton.language`` by its own
  (``_patch_lang``), and puts the old ones back after the launch. It does so again at each call of one
  ``triton.jit`` function from another, ``tl.sum`` and ``tl.zeros`` included, and reads through that
  module each time. Here once a launch.
- For each operation on a tensor it makes the table of numpy's types anew (``_get_np_dtype``). Here one
  table.
- Six operations, each with its own casts, find in 64 bits whether an integer overflows
  (``binary_op_sanitize_overflow_impl``), and ``device_assert`` drops their result, because the
  interpreter's option ``debug`` is false. Here they run only if it is true.

Read in Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0, ``python/triton/runtime/interpreter.py`` and
``python/triton/language/semantic.py``. A Triton without these names is left as it is, and the compiler
always: the last is replaced on the interpreter's own ``interpreter_semantic``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class _End:
    """The end of a launch, as ``GridExecutor`` calls it."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore


def _patching_once(interpreter: ModuleType) -> Callable[[Any], _End]:
    """``_patch_lang`` that does nothing for a module that the running launch has patched already."""
    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[ModuleType] = set()
    scopes: list[Any] = []
    names: dict[Any, set[ModuleType]] = {}

    def restore() -> None:
        # The last first: an inner scope holds as the original what an outer one has put there.
        while scopes:
            scopes.pop().restore()
        patched.clear()

    def patch_once(fn: Any) -> _End:
        if fn not in names:
            names[fn] = {module for module in language if any(x is module for x in fn.__globals__.values())}
        is_launch = not scopes
        if is_launch or not names[fn] <= patched:
            scopes.append(patch(fn))
            patched.update(names[fn])
        return _End(restore if is_launch else lambda: None)

    return patch_once


def _with_table(interpreter: ModuleType) -> Callable[[Any], Any]:
    """``_get_np_dtype`` that asks Triton's once a type of element."""
    numpy_dtype, tl = interpreter._get_np_dtype, interpreter.tl
    table: dict[str, Any] = {}

    def looked_up(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        # All pointers are one type to numpy. Names tell the others apart, as Triton's own table does.
        name = "pointer" if isinstance(element, tl.pointer_type) else element.name
        if name not in table:
            table[name] = numpy_dtype(dtype)
        return table[name]

    return looked_up


def _where_it_can_fail(check: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """``binary_op_sanitize_overflow_impl`` that computes nothing where no assert of a kernel is checked."""

    def check_in_debug_mode(lhs: Any, rhs: Any, binary_op: Any) -> Any:
        return check(lhs, rhs, binary_op) if builder.options.debug else None

    return check_in_debug_mode


# What is replaced: of the interpreter's module, and of its semantic.
NAMES, OVERFLOW = ("_patch_lang", "_get_np_dtype"), "binary_op_sanitize_overflow_impl"


def quicken() -> None:
    """Install all of it, once a process. An interpreter without these names is left as it is.

    >>> quicken()
    >>> quicken()
    """
    from triton.runtime import interpreter

    needed = (*NAMES, "_LangPatchScope", "tl", "interpreter_semantic", "interpreter_builder")
    if hasattr(interpreter, "_staleproof") or not all(hasattr(interpreter, name) for name in needed):
        return
    semantic = interpreter.interpreter_semantic
    # What was replaced, for the tests.
    interpreter._staleproof = {name: getattr(interpreter, name) for name in NAMES}
    interpreter._staleproof[OVERFLOW] = check = getattr(semantic, OVERFLOW, None)
    interpreter._patch_lang = _patching_once(interpreter)
    interpreter._get_np_dtype = _with_table(interpreter)
    if check is not None:
        setattr(semantic, OVERFLOW, _where_it_can_fail(check, interpreter.interpreter_builder))
