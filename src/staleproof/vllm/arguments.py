"""The arguments of a call that a hook sees: one of them, or all with one of them changed."""

from __future__ import annotations

import inspect
from typing import Any

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def argument(args: Arguments, kwargs: Keywords, position: int, name: str, default: Any = None) -> Any:
    """Return one argument of a call, passed by position or by name.

    >>> argument((1, 2), {"c": 3}, 1, "b"), argument((1, 2), {"c": 3}, 2, "c")
    (2, 3)
    """
    return args[position] if position < len(args) else kwargs.get(name, default)


def replaced(
    args: Arguments, kwargs: Keywords, position: int, name: str, value: Any
) -> tuple[Arguments, Keywords]:
    """Return the arguments of a call with one of them changed; the inputs stay as they are.

    >>> replaced((1, 2), {"c": 3}, 1, "b", 9), replaced((1, 2), {"c": 3}, 2, "c", 9)
    (((1, 9), {'c': 3}), ((1, 2), {'c': 9}))
    """
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, kwargs | {name: value}


def names_of(function: Any) -> tuple[str, ...]:
    """Return the argument names of a function, decorated or not.

    >>> names_of(lambda a, /, b, *, c=0, **d: None)
    ('a', 'b', 'c', 'd')
    """
    code = inspect.unwrap(function).__code__
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars])
