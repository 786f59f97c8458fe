"""Private names of torch and Triton, which any release may drop, and the public code to use without them.

They only make a call cheaper. ``STALEPROOF_PUBLIC_NAMES=1`` uses none of them, as if the release had none;
``make public`` runs the tests in that way.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

_PUBLIC_ONLY = os.environ.get("STALEPROOF_PUBLIC_NAMES") == "1"


def _private(path: str) -> Any:
    """The attribute of ``torch._C`` at this path, or ``None``."""
    found: Any = torch._C
    for name in path.split("."):
        found = None if _PUBLIC_ONLY else getattr(found, name, None)
    return found


def _modes_by_public_names() -> int:
    return int(is_tracing())


def is_tracing() -> bool:
    """Whether a mode of torch records operators, on tensors without data or beside their values.

    >>> is_tracing()
    False
    """
    if _get_mode is not None:
        return any(_get_mode(kind) is not None for kind in _TRACING)
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    # Under a fake mode a new tensor is a fake one.
    return type(torch.empty(0)) is not torch.Tensor or get_proxy_mode() is not None


_get_mode = _private("_get_dispatch_mode")
_TRACING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE")] if _get_mode else []
# The number of modes that see each operator. The public code misses some modes that only watch.
mode_count: Callable[[], int] = _private("_len_torch_dispatch_stack") or _modes_by_public_names
current_device: Callable[[], int] = _private("_cuda_getDevice") or torch.cuda.current_device
is_capturing: Callable[[], bool] = (
    _private("_cuda_isCurrentStreamCapturing") or torch.cuda.is_current_stream_capturing
)
# Code compiled by torch.compile allocates with this: (shape, strides, dtype), the first two tuples, on the
# current device. It bypasses the dispatcher, which takes three quarters of the time of torch.empty.
empty_strided_cuda: Callable[..., torch.Tensor] | None = _private("_dynamo.guards._empty_strided_cuda")
_TensorGuards = _private("_dynamo.guards.TensorGuards")


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that says whether tensors have the layouts, dtypes and devices of these.

    >>> fits = layout_check([torch.ones(2, 3)])
    >>> fits(torch.zeros(2, 3)), fits(torch.zeros(3, 2).T)
    (True, False)
    """
    try:
        # torch.compile's guards use this: one call for all tensors, in C++.
        sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if guards.check(*tensors):
            return guards.check
    except Exception:  # The name is missing, or its signature is another.
        pass

    def layout(x: torch.Tensor) -> tuple[Any, ...]:
        return x.shape, x.stride(), x.dtype, x.device

    wanted = [*map(layout, tensors)]
    return lambda *others: [*map(layout, others)] == wanted


def launcher(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]:
    """How to launch a kernel that Triton has compiled.

    Args:
        compiled: what Triton's own launch returned.

    Returns:
        The launch function, the extra arguments that it takes, and a function that turns a tensor descriptor
        into arguments, which are valid while its tensor stays at the same address. The launch function takes
        the three sizes of the grid, the stream, the extra arguments, and the kernel's arguments.
    """
    import triton

    try:
        if _PUBLIC_ONLY:
            raise AttributeError
        # No metadata for a profiler, and no hooks.
        run, given = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
        if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
            return run, given, _as_it_is
        # In Triton 3.6 ``run`` allocates scratch memory, which is not needed here, and then calls this.
        launch, described = run.launch, _as_it_is
        if compiled.metadata.tensordesc_meta:
            # That function finds and encodes the descriptors among all arguments in each call. The function
            # inside it does not.
            from triton.backends.nvidia.driver import make_tensordesc_arg

            (meta,) = compiled.metadata.tensordesc_meta
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]

            def described(descriptor: Any) -> tuple[Any, ...]:
                return tuple(make_tensordesc_arg(descriptor, meta))

        options = run.launch_cooperative_grid, run.launch_pdl, None, None
        return launch, (given[0], *options, *given[1:]), described
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        pass

    def public(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        compiled[x, y, z](*arguments, stream=stream)

    return public, (), _as_it_is


def _as_it_is(descriptor: Any) -> tuple[Any, ...]:
    return (descriptor,)
