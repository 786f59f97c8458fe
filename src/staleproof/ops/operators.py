"""The operations as operators of the ``staleproof`` namespace, so that torch can trace them.

``torch.compile``, ``torch.export`` and fake tensors cannot look into a Triton launch. They need an
operator with a schema that says what it writes, and a kernel for tensors without data. Every
operator here writes into tensors that its caller allocated and returns nothing, so the kernel for
tensors without data has nothing to do.

Operators check nothing. Call the public functions, which do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from staleproof import check
from staleproof.ops.private import current_device, is_tracing, mode_count

LIBRARY = torch.library.Library("staleproof", "FRAGMENT")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_GUARD = contextlib.nullcontext()

Launch = TypeVar("Launch", bound=Callable[..., Any])


def traced(x: torch.Tensor) -> bool:
    """Whether torch is tracing the call that ``x`` is an argument of, or ``x`` has no data.

    >>> traced(torch.ones(2)), traced(torch.ones(2, device="meta"))
    (False, True)
    """
    if torch.compiler.is_compiling() or type(x) not in _PLAIN or x.is_meta:
        return True
    # Under other modes (a profiler, the graph stand-in of staleproof.graph) launches are not traced.
    return mode_count() > 0 and is_tracing()


def require_values(x: torch.Tensor) -> None:
    """Refuse ``validate=True`` where the values of ``x`` cannot be read.

    ``torch.compile`` breaks its graph here and calls the rest from Python, which can read them;
    with ``fullgraph=True`` it names this reason.

    Raises:
        ValueError: ``torch.export`` or the like is tracing the call, or ``x`` has no data.

    >>> require_values(torch.ones(2, device="meta"))
    Traceback (most recent call last):
    ValueError: validate: expected False while torch traces the call, got True
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg="validate=True reads values on the host")
    else:
        check.require(not traced(x), "validate", "False while torch traces the call", True)


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which kernels are launched on the device of ``x``.

    Triton launches on the current device, whatever device the tensors are on.

    >>> with on_device_of(torch.ones(2)):
    ...     pass
    """
    if not x.is_cuda or x.get_device() == current_device():
        return _NO_GUARD
    return torch.cuda.device(x.device)


def operator(schema: str) -> Callable[[Launch], Launch]:
    """Register the decorated launcher as ``torch.ops.staleproof.<name>``.

    Args:
        schema: as ``torch.library`` expects it. Tensors that the launcher writes carry ``(a!)``,
            ``(b!)``. The first argument is a tensor.

    Returns:
        A function with the launcher's arguments, all positional. While torch traces, it calls the
        operator, otherwise the launcher, which saves the microseconds of torch's dispatcher, and
        returns its result. Both launch on the device of the first argument.

    >>> @operator("double_(Tensor(a!) x) -> ()")
    ... def double_(x):
    ...     x.mul_(2)
    >>> x = torch.ones(2)
    >>> double_(x), torch.ops.staleproof.double_(x), x
    (None, None, tensor([4., 4.]))
    """
    name = schema.partition("(")[0]

    def register(launch: Launch) -> Launch:
        def run(x: torch.Tensor, *args: Any) -> Any:
            with on_device_of(x):
                return launch(x, *args)

        def operate(x: torch.Tensor, *args: Any) -> None:
            run(x, *args)

        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, operate, "CompositeExplicitAutograd")
        torch.library.register_fake(f"staleproof::{name}", _writes_nothing, lib=LIBRARY)
        overload = getattr(torch.ops.staleproof, name).default

        def call(x: torch.Tensor, *args: Any) -> Any:
            return overload(x, *args) if traced(x) else run(x, *args)

        call.__doc__ = launch.__doc__
        return call  # type: ignore[return-value]

    return register


def _writes_nothing(*args: Any, **kwargs: Any) -> None:
    """The kernel for tensors without data: the caller allocated all results."""
