"""The arguments of a call that a hook sees, and whose function it is that a hook is put on."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def argument(args: Arguments, kwargs: Keywords, position: int, name: str, default: Any = None) -> Any:
    """Return one argument of a call, passed by position or by name.

    >>> argument((1, 2), {"c": 3}, 1, "b"), argument((1, 2), {"c": 3}, 2, "c"), argument((1,), {}, 1, "b", 0)
    (2, 3, 0)
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


def python_of(function: Any) -> Any:
    """Return the Python function of a Triton kernel, and anything else as it is.

    >>> python_of(len)
    <built-in function len>
    """
    return function if hasattr(function, "__code__") else getattr(function, "fn", function)


def package_of(module: ModuleType) -> Path:
    """Return the folder of the package that a module belongs to.

    >>> import json.decoder
    >>> package_of(json.decoder).name
    'json'
    """
    return Path(str(sys.modules[module.__name__.partition(".")[0]].__file__)).parent


def stranger_at(holder: Any, function: Any, module: ModuleType) -> str | None:
    """Name the package whose function stands in a module or class; ``None`` if it is the module's own.

    >>> import json.decoder
    >>> stranger_at(json.decoder, json.decoder.scanstring, json.decoder)
    'a builtin_function_or_method'
    """
    home = package_of(module)
    if isinstance(holder, type) and holder.__module__ != module.__name__:
        return holder.__module__
    function = python_of(function)
    while (code := getattr(function, "__code__", None)) is not None:
        path = Path(code.co_filename)
        if home in path.parents:
            return None
        # vLLM decorates some functions with torch.inference_mode().
        if "torch" not in path.parts or not hasattr(function, "__wrapped__"):
            return str(getattr(function, "__module__", None) or path)
        function = function.__wrapped__
    return f"a {type(function).__name__}"
