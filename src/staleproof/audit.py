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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from staleproof.check import bound, fail, require

__all__ = ["attention", "operands", "routing", "rows"]

_MARK = "__padding_contract__"
NEEDS = ("", "cpu", "cuda", "sm90", "sm100")
ARGUMENTS_OF_ATTENTION = (
    "q k_cache v_cache kv_cache kv_lora_rank block_table seq_lens query_start_loc out lse "
    "softmax_scale max_seq_len max_q_len page_size"
)
# Kind of kernel -> its clauses, the arguments that a kernel may name, and sizes of its decorator -> defaults.
KINDS: dict[str, tuple[str, ...]] = {}
ARGUMENTS: dict[str, tuple[str, ...]] = {}
SIZES: dict[str, dict[str, Any]] = {}
for _kind, _clauses, _arguments in (
    ("attention", "0 E T B R N U Q L A O", ARGUMENTS_OF_ATTENTION),
    ("routing", "0 I Ib P R O", "router_logits top_k bias is_padding"),
    ("rows", "0 R W O", "x"),
    ("operands", "0 O", ""),
):
    KINDS[_kind], ARGUMENTS[_kind] = tuple(_clauses.split()), tuple(_arguments.split())
LAYOUTS = ("paged", "mla")
# Usual sizes of layout mla, DeepSeek's: a latent of 512, and 64 more for positions.
MLA = {"head_dim": 576, "value_dim": 512}
# Rows of a batch that routing and rows are asked with.
ROWS = 6

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class SettingError(ValueError):
    """What a decorator was given does not fit, or does not work, as a reference that raises."""


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


_COUNTS = (
    *("hidden", "experts", "top_k", "heads", "kv_heads", "head_dim", "value_dim", "page_size"),
    "live_rows",
)
# Size -> whether a value fits, and what is expected.
_FITTING: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("reference", "inverse", "make"), (callable, "a function")),
    **dict.fromkeys(_COUNTS, (lambda value: type(value) is int and value > 0, "a positive integer")),
    **dict.fromkeys(
        ("in_place", "grouped", "prepared", "planned"),
        (lambda value: isinstance(value, bool), "True or False"),
    ),
    "dtype": (lambda value: _is_dtype(value), "a dtype of torch by name, such as float16"),
    "q_len": (lambda value: type(value) is int and value >= 0, "an integer of 0 or more"),
    "padding_id": (lambda value: type(value) is int, "an integer"),
    "empty_lse": (lambda value: type(value) in (int, float), "a number"),
    "layout": (lambda value: value in LAYOUTS, " or ".join(LAYOUTS)),
}


def _is_dtype(name: object) -> bool:
    import torch

    return isinstance(getattr(torch, str(name), None), torch.dtype)


def _check_sizes(kind: str, given: Mapping[str, Any], of: str) -> None:
    """Refuse sizes that no kernel can be asked with.

    Args:
        kind: of the kernel.
        given: to its decorator.
        of: its name.
    """
    for name, value in given.items():
        fits, expected = _FITTING[name]
        require(fits(value), f"{name} of {of}", expected, repr(value))
    size = {**SIZES[kind], **given}
    if kind == "attention":
        heads, kv_heads = size["heads"], size["kv_heads"]
        require(heads % kv_heads == 0, f"heads of {of}", f"a multiple of kv_heads={kv_heads}", heads)
        if size["layout"] == "mla":
            whole, latent = (size[name] or usual for name, usual in MLA.items())
            require(kv_heads == 1, f"kv_heads of {of}", "1 with layout mla", kv_heads)
            require(latent <= whole, f"value_dim of {of}", f"at most head_dim={whole}", latent)
    if kind == "routing":
        experts, most, of_them = size["experts"], size["experts"], "experts"
        if size["grouped"]:
            in_groups = experts % 4 == 0 and experts >= 8
            require(in_groups, f"experts of {of}", "a multiple of 4, from 8, with grouped=True", experts)
            most, of_them = experts // 2, "experts in 2 of 4 groups"
        require(size["top_k"] <= most, f"top_k of {of}", f"at most {most} {of_them}", size["top_k"])
    live, padded = size.get("live_rows") or 1, f"1 to {ROWS - 1} of {ROWS} rows, so that one is padding"
    require(live < ROWS, f"live_rows of {of}", padded, live)


# What the text of every decorator says of the arguments that all have.
_COMMON = """\
name: of the kernel; by default the function's.
        needs: ``cpu``, ``cuda``, ``sm90``, ``sm100``, or ``""`` for any device.
        documented: clause -> what the kernel's documentation says of it; a break is then *undefined*.
        skip: clause -> why the kernel is not asked.
        given: further arguments of the function by name.

    Raises:
        SettingError: a ValueError that names the argument, what was expected and what came; some when the
            decorator is applied."""


def _decorator(kind: Callable[P, Any]) -> Callable[P, Callable[[F], F]]:
    """The decorator whose keyword arguments and text are those of a function of its name."""
    kind.__doc__ = (kind.__doc__ or "").replace("{common}", _COMMON)
    defaults = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    SIZES[kind.__name__] = {name: value for name, value in defaults.items() if name not in _ARGUMENTS}

    @wraps(kind)
    def register(*functions: Any, **given: Any) -> Callable[[F], F]:
        return _register(kind.__name__, *functions, **given)

    return register


@contextmanager
def _setting() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise SettingError(str(error)) from None


@_setting()
def _register(
    kind: str,
    *functions: object,
    name: str = "",
    needs: str = "",
    documented: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Callable[[F], F]:
    require(not functions, kind, f"@audit.{kind}(), with parentheses", f"@audit.{kind}")
    shape = {size: value for size, value in sizes.items() if value is not None}
    _checked(kind, shape, name=name, needs=needs, documented=documented, skip=skip, given=given)

    @_setting()
    def mark(function: F) -> F:
        of = name or function.__name__
        if given:
            try:
                inspect.signature(function).bind_partial(**given)
            except TypeError:
                fail("given", f"arguments of {function.__name__}", ", ".join(given))
        call = partial(function, **given) if given else function
        require(kind != "operands" or "make" in shape, "make", "a function of the device", "nothing")
        _check_sizes(kind, shape, of)
        for clause, text in (documented or {}).items():
            where = f"documented of {of}"
            # A kernel that is wrong on clean input is wrong, whatever its documentation says.
            require(clause != "0", where, "clauses other than 0", "0")
            require(bool(text.strip()), where, f"what the documentation says about {clause}", repr(text))
        try:
            # The arguments of kind "operands" are whatever ``make`` returns, so they are not checked.
            bound(call, dict.fromkeys(ARGUMENTS[kind])) if ARGUMENTS[kind] else None
        except TypeError as error:
            wrong = str(error).removeprefix("needs ").partition(";")[0]
            where = f"{wrong}: an argument of {of}"
            fail(where, f"arguments of {kind}: {', '.join(ARGUMENTS[kind])}", wrong)
        subject = Subject(of, kind, call, shape, needs, documented or {}, skip or {})
        # The topmost decorator is applied last, but its subject comes first.
        function.__dict__.setdefault(_MARK, []).insert(0, subject)
        return function

    return mark


@_decorator
def attention(
    *,
    layout: str = "paged",
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int | None = None,
    value_dim: int | None = None,
    page_size: int = 16,
    dtype: str | None = None,
    q_len: int = 1,
    prepared: bool = False,
    planned: bool = False,
    empty_lse: float = float("-inf"),
    name: str = "",
    needs: str = "",
    documented: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """Register a decode or prefill over pages; the module's text has its arguments.

    Args:
        layout: ``paged``: K and V in pages; ``mla``: one latent in pages, whose beginning is V.
        heads: of q; a multiple of ``kv_heads``.
        kv_heads: of the cache; 1 for ``mla``.
        head_dim: by default 32; 576 for ``mla``.
        value_dim: by default ``head_dim``; 512 for ``mla``.
        page_size: tokens a page.
        dtype: of q and the cache by name, e.g. ``float16``; by default float32 on a CPU, bfloat16 on a GPU.
        q_len: query tokens a request at most; 0 stands for any number, by ``query_start_loc``.
        prepared: whether the function returns one that launches.
        planned: whether that one holds only for the lengths that it was made with.
        empty_lse: what the kernel documents as the lse of an empty request.
        {common}

    >>> @attention(head_dim=64, skip={"A": "keeps a workspace"})
    ... def decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out): ...
    """


@_decorator
def routing(
    *,
    experts: int = 16,
    top_k: int = 4,
    grouped: bool = False,
    padding_id: int = -1,
    reference: Callable[..., Any] | None = None,
    name: str = "",
    needs: str = "",
    documented: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """Register a router: (router_logits, top_k, bias, is_padding) -> weights and ids.

    Args:
        experts: number of them; with ``grouped`` 8 or more in 4 groups.
        top_k: experts a row, up to ``experts``; with ``grouped`` up to half of them.
        grouped: whether experts are in 4 groups, and the router chooses from the 2 best.
        padding_id: the id in rows that ``is_padding`` marks.
        reference: takes router_logits and top_k, and returns weights and ids; needed where weights are
            neither those of softmax nor of sigmoid.
        {common}

    >>> @routing(experts=8, top_k=2)
    ... def route(router_logits, top_k):
    ...     return router_logits.softmax(-1).topk(top_k)
    """


@_decorator
def rows(
    *,
    hidden: int = 64,
    dtype: str | None = None,
    in_place: bool = False,
    reference: Callable[..., Any] | None = None,
    inverse: Callable[..., Any] | None = None,
    live_rows: int | None = None,
    name: str = "",
    needs: str = "",
    documented: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """Register a quantiser, a norm, an activation: x (rows, hidden) -> a tensor or several.

    Args:
        hidden: elements a row.
        dtype: of x by name, e.g. ``float16``; by default float32 on a CPU, bfloat16 on a GPU.
        in_place: whether the kernel may write x; if it returns nothing, x is its result.
        reference: takes x in float64 on the CPU, and returns every result. A quantiser that returns fp8 or
            int8 values and scales needs none.
        inverse: takes the results of a quantiser, and returns x; for packed formats.
        live_rows: only so many of 6 rows are live, 1 to 5; by default all.
        {common}

    >>> from staleproof.contract.runner import audit_here
    >>> @rows(hidden=32, reference=lambda x: 2 * x)
    ... def double(x):
    ...     return 2 * x
    >>> [one.verdict for one in audit_here(double, "cpu")]
    ['holds', 'holds', 'holds', 'holds']
    """


@_decorator
def operands(
    *,
    make: Callable[[str], Mapping[str, Any]],
    reference: Callable[..., Any] | None = None,
    name: str = "",
    needs: str = "",
    documented: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Any:
    """Register any other kernel: it is called with what ``make`` returns.

    Args:
        make: takes the device, ``cpu`` or ``cuda``, and returns a dict of arguments by name.
        reference: takes what the kernel takes, and returns every result.
        {common}

    >>> import torch
    >>> @operands(make=lambda device: {"x": torch.ones(4, device=device)}, reference=lambda x: x + 1)
    ... def plus_one(x):
    ...     return x + 1
    """


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
