"""Descriptions of the kernels that the padding contract tests, and the decorators that register them.

A decorated function is not changed. It is called with the arguments of its kind that it names, see
:mod:`staleproof.audit`.
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

from staleproof.check import fail, require

_MARK = "__padding_contract__"
NEEDS = ("", "cpu", "cuda", "sm90", "sm100")
ARGUMENTS_OF_ATTENTION = (
    "q k_cache v_cache kv_cache kv_lora_rank k v mask block_table seq_lens query_start_loc out lse "
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
    ("merge", "0 E R O", "out_a lse_a out_b lse_b", "head_dim"),
    (
        "routing",
        "0 I Ib P R O",
        "router_logits top_k bias is_padding",
        "experts top_k grouped padding_id reference",
    ),
    ("rows", "0 R W O", "x", "hidden dtype in_place reference inverse live_rows"),
    ("ragged", "0 R N U O", "x starts", "hidden dtype reference"),
    ("experts", "0 R D X O", "x w1 w2 topk_weights topk_ids", "experts hidden inner top_k"),
    ("kv_write", "0 S O", "key value k_cache v_cache slot_mapping", "kv_heads head_dim pad_slot"),
    ("state", "0 R S O", "x state weight state_indices pad_index", "dim width pad_index"),
    ("operands", "0 O", "", "make reference"),
):
    KINDS[_kind], ARGUMENTS[_kind] = tuple(_clauses.split()), tuple(_arguments.split())
    SIZES[_kind] = tuple(_sizes.split())

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Subject:
    """One kernel and backend, and what it needs.

    Attributes:
        name: package and kernel.
        kind: key of :data:`KINDS`.
        call: the adapter, or the kernel itself.
        shape: sizes to test with, by name.
        package: distribution that it comes from; ``""`` for the user's own module.
        versions: releases to test; by default the one installed, or those in the cache.
        needs: the device: ``cpu``, ``cuda``, ``sm90``, ``sm100``, or ``""`` for any.
        files: modules of the package to execute; its other modules are replaced by stubs.
        documented: clause -> what the kernel's documentation says about the case.
        skip: clause -> why the kernel is not tested against it.
        asked: the clauses to test; all of its kind by default.
    """

    name: str
    kind: str
    call: Callable[..., Any]
    shape: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    versions: tuple[str, ...] = ()
    needs: str = ""
    files: tuple[str, ...] = ()
    documented: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[str, ...] = ()

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses to test."""
        return self.asked or KINDS[self.kind]

    @property
    def function(self) -> Callable[..., Any]:
        """The function that was decorated, without the arguments that its decorator gives it."""
        function = inspect.unwrap(self.call.func if isinstance(self.call, partial) else self.call)
        return function

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that the decorator binds."""
        return dict(self.call.keywords) if isinstance(self.call, partial) else {}


def bound(kernel: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments among ``known`` that a kernel names.

    Raises:
        TypeError: the kernel requires an argument that is not in ``known``.

    >>> bound(lambda q, seq_lens, *, softmax_scale=1.0: q, {"q": 1, "seq_lens": 2, "out": 3})
    {'q': 1, 'seq_lens': 2}
    """
    found = {}
    for name, parameter in inspect.signature(kernel).parameters.items():
        if name in known:
            found[name] = known[name]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"needs {name}; known: {', '.join(known)}")
    return found


def _decorator(kind: str) -> Callable[..., Any]:
    def register(
        *,
        name: str = "",
        package: str = "",
        versions: tuple[str, ...] = (),
        needs: str = "",
        files: tuple[str, ...] = (),
        documented: Mapping[str, str] | None = None,
        skip: Mapping[str, str] | None = None,
        given: Mapping[str, Any] | None = None,
        **shape: Any,
    ) -> Callable[[F], F]:
        require(needs in NEEDS, "needs", " or ".join(map(repr, NEEDS)), repr(needs))
        for argument, text in (("documented", documented), ("skip", skip)):
            for clause in text or {}:
                expected = f"clauses of {kind}: {', '.join(KINDS[kind])}"
                require(clause in KINDS[kind], argument, expected, clause)
        for size in sorted(set(shape) - set(SIZES[kind])):
            fail(size, f"a size of {kind}: {', '.join(sorted(SIZES[kind]))}", "another name")

        def mark(function: F) -> F:
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
                name or function.__name__,
                kind,
                call,
                shape,
                package,
                versions,
                needs,
                files,
                documented or {},
                skip or {},
            )
            # The topmost decorator is applied last, but its subject comes first.
            function.__dict__.setdefault(_MARK, []).insert(0, subject)
            return function

        return mark

    return register


attention, merge, routing, rows, ragged, experts, kv_write, state, operands = map(_decorator, KINDS)


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
