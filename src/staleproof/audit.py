"""The padding contract, probed on anybody's kernels: ``staleproof audit`` and ``pytest --padding-contract``.

A kernel is registered by a decorator of its kind, which leaves it as it is::

    from staleproof import audit

    @audit.attention(layout="paged", heads=8, kv_heads=2, head_dim=64, page_size=16)
    def my_decode(q, k_cache, v_cache, block_table, seq_lens, out, softmax_scale): ...

It is called with the arguments that it names, from these:

- ``attention``: q (tokens, heads, head_dim), block_table, seq_lens, query_start_loc, out, lse,
  softmax_scale, max_seq_len, max_q_len, page_size; layout ``paged``: k_cache and v_cache (pages,
  page_size, kv_heads, head_dim); ``mla``: kv_cache (pages, page_size, 576) and kv_lora_rank.
  It returns out, or out and lse. With ``q_len=0`` a request has any number of query tokens, by
  query_start_loc; with ``q_len=n`` up to n, and q is then (batch, q_len, heads, head_dim).
- ``routing``: router_logits (rows, experts), top_k, bias, is_padding; returns weights and ids.
- ``rows``: x (rows, hidden); returns a tensor or several, e.g. values and scales.
- ``operands``: what ``make=`` of the device returns, a dict; for any other kernel. Asked 0 and O.

``value_dim`` is ``head_dim`` unless it is given. ``prepared=True``: the function returns one that launches;
``planned=True``: that one holds for the lengths only that it was made with. ``given={"backend": "fa2"}``
passes further arguments, so that decorators above each other make several kernels of one function.

Clause 0 compares results with what is right. Where the probe cannot know it, say so:

- ``reference=`` of ``rows`` takes x in float64 on the CPU, and returns what the kernel should, every result
  of it; of ``operands`` it takes what the kernel takes; of ``routing``
  router_logits and top_k, and returns weights and ids. A quantiser that returns fp8 or int8 values and
  scales needs none: values times scales are x.
- ``inverse=`` of ``rows`` takes the results of a quantiser and returns x, for packed formats.

Without them clause 0 is ``not run``: "not checked, no reference".
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from staleproof.check import bound, fail, require

__all__ = ["attention", "operands", "routing", "rows"]

_MARK = "__padding_contract__"
NEEDS = ("", "cpu", "cuda", "sm90", "sm100")
ARGUMENTS_OF_ATTENTION = (
    "q k_cache v_cache kv_cache kv_lora_rank block_table seq_lens query_start_loc out lse "
    "softmax_scale max_seq_len max_q_len page_size"
)
# Kind of kernel -> its clauses, the arguments that a kernel may name, and the sizes its decorator takes.
KINDS: dict[str, tuple[str, ...]] = {}
ARGUMENTS: dict[str, tuple[str, ...]] = {}
SIZES: dict[str, tuple[str, ...]] = {}
for _kind, _clauses, _arguments, _sizes in (
    (
        "attention",
        "0 E T B R N U Q L A O",
        ARGUMENTS_OF_ATTENTION,
        "layout heads kv_heads head_dim value_dim page_size dtype q_len prepared planned empty_lse",
    ),
    (
        "routing",
        "0 I Ib P R O",
        "router_logits top_k bias is_padding",
        "experts top_k grouped padding_id reference",
    ),
    ("rows", "0 R W O", "x", "hidden dtype in_place reference inverse live_rows"),
    ("operands", "0 O", "", "make reference"),
):
    KINDS[_kind], ARGUMENTS[_kind] = tuple(_clauses.split()), tuple(_arguments.split())
    SIZES[_kind] = tuple(_sizes.split())

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Subject:
    """One kernel, and what it needs.

    Attributes:
        name: of the kernel.
        kind: key of :data:`KINDS`.
        call: the kernel, with the arguments that its decorator gives it.
        shape: sizes to test with, by name.
        needs: the device: ``cpu``, ``cuda``, ``sm90``, ``sm100``, or ``""`` for any.
        documented: clause -> what the kernel's documentation says about the case.
        skip: clause -> why the kernel is not tested against it.
    """

    name: str
    kind: str
    call: Callable[..., Any]
    shape: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    documented: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses to test."""
        return KINDS[self.kind]

    @property
    def function(self) -> Callable[..., Any]:
        """The function that was decorated, without the arguments that its decorator gives it."""
        function = inspect.unwrap(self.call.func if isinstance(self.call, partial) else self.call)
        return function

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that the decorator binds."""
        return dict(self.call.keywords) if isinstance(self.call, partial) else {}


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)


def _by_name(value: object) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value])


def _by_clause(value: object) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value, *value.values()])


# Argument of every decorator -> whether a value fits, and what is expected.
_ARGUMENTS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("name", "needs"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(("documented", "skip"), (_by_clause, 'a text for each clause, such as {"R": "why"}')),
    "given": (_by_name, 'arguments by name, such as {"backend": "fa2"}'),
}


def _checked(kind: str, shape: Mapping[str, Any], **arguments: Any) -> None:
    """Refuse what no decorator of this kind takes."""
    for name, (fits, expected) in _ARGUMENTS.items():
        if (value := arguments.get(name)) is not None:
            require(fits(value), name, expected, repr(value))
    require(arguments["needs"] in NEEDS, "needs", " or ".join(map(repr, NEEDS)), repr(arguments["needs"]))
    for name in ("documented", "skip"):
        for clause in arguments[name] or {}:
            require(clause in KINDS[kind], name, f"clauses of {kind}: {', '.join(KINDS[kind])}", clause)
    for size in sorted(set(shape) - set(SIZES[kind])):
        fail(size, f"a size of {kind}: {', '.join(sorted(SIZES[kind]))}", "another name")


def _decorator(kind: str) -> Callable[..., Any]:
    def register(
        *functions: object,
        name: str = "",
        needs: str = "",
        documented: Mapping[str, str] | None = None,
        skip: Mapping[str, str] | None = None,
        given: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Callable[[F], F]:
        require(not functions, kind, f"@audit.{kind}(), with parentheses", f"@audit.{kind}")
        _checked(kind, shape, name=name, needs=needs, documented=documented, skip=skip, given=given)

        def mark(function: F) -> F:
            if given:
                try:
                    inspect.signature(function).bind_partial(**given)
                except TypeError:
                    fail("given", f"arguments of {function.__name__}", ", ".join(given))
            call = partial(function, **given) if given else function
            require(kind != "operands" or "make" in shape, "make", "a function of the device", "nothing")
            try:
                # The arguments of kind "operands" are whatever ``make`` returns, so they are not checked.
                bound(call, dict.fromkeys(ARGUMENTS[kind])) if ARGUMENTS[kind] else None
            except TypeError as error:
                wrong = str(error).removeprefix("needs ").partition(";")[0]
                where = f"{wrong}: an argument of {name or function.__name__}"
                fail(where, f"arguments of {kind}: {', '.join(ARGUMENTS[kind])}", wrong)
            subject = Subject(
                name or function.__name__, kind, call, shape, needs, documented or {}, skip or {}
            )
            # The topmost decorator is applied last, but its subject comes first.
            function.__dict__.setdefault(_MARK, []).insert(0, subject)
            return function

        return mark

    return register


attention, routing, rows, operands = map(_decorator, KINDS)


def load_module(module: str) -> ModuleType:
    """Import a module by its name, or a file by its path.

    Raises:
        Exception: whatever the module raises.
    """
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).resolve()
    name = f"audited_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{path} is no Python file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(loaded)
    return loaded


def subjects_of(module: ModuleType) -> list[Subject]:
    """The subjects that a module registered, in its order, each once."""
    found: dict[str, Subject] = {}
    for value in vars(module).values():
        for subject in getattr(value, "__dict__", {}).get(_MARK, ()):
            found.setdefault(subject.name, subject)
    return [*found.values()]
