"""The operations as operators of the ``staleproof`` namespace, so that torch can trace them.

``torch.compile``, ``torch.export`` and fake tensors cannot look into a Triton launch. They need an
operator with a schema that says what it writes, and a kernel that runs on tensors without data.
Every operator here writes into tensors that its caller made and returns nothing, so that the second
of these does nothing at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _TorchDispatchModeKey as ModeKey

LIBRARY = torch.library.Library("staleproof", "FRAGMENT")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HERE = contextlib.nullcontext()

Launch = TypeVar("Launch", bound=Callable[..., None])


def traced(x: torch.Tensor) -> bool:
    """Whether torch is tracing the call that ``x`` is an argument of, or ``x`` has no data."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or torch._C._get_dispatch_mode(ModeKey.PROXY) is not None
        or torch._C._get_dispatch_mode(ModeKey.FAKE) is not None
    )


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which kernels are launched on the device of ``x``.

    Triton launches on the current device, which need not be the one the tensors lie on.
    """
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


def operator(schema: str) -> Callable[[Launch], Launch]:
    """Register the decorated launcher as ``torch.ops.staleproof.<name>``.

    Args:
        schema: as ``torch.library`` wants it, e.g. ``"clear(Tensor(a!) out, Tensor seq_lens) -> ()"``.
            Tensors that are written carry ``(a!)``, ``(b!)``; the first argument is a tensor.

    Returns:
        A function with the launcher's arguments. While torch traces it calls the operator,
        otherwise the launcher, without the microseconds that torch's dispatcher takes; both launch
        on the device of the first argument.
    """
    name = schema.partition("(")[0]

    def register(launch: Launch) -> Launch:
        def run(x: torch.Tensor, *args: Any) -> None:
            with on_device_of(x):
                launch(x, *args)

        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"staleproof::{name}", _writes_nothing, lib=LIBRARY)
        overload = getattr(torch.ops.staleproof, name).default

        def call(x: torch.Tensor, *args: Any) -> None:
            if traced(x):
                overload(x, *args)
            else:
                run(x, *args)

        call.__doc__ = launch.__doc__
        return call  # type: ignore[return-value]

    return register


def _writes_nothing(*args: Any, **kwargs: Any) -> None:
    """The operator on tensors without data: its results were made by the caller."""
