"""Faults planted in the hooks of each patch, and what the patched function of vLLM returns then.

A patch's hooks stand on a function of the name, the place and the leading arguments of vLLM's, which doubles
a tensor. The bodies of the hooks are replaced by faults.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.vllm.made_up import made_up

from staleproof.graph import capture
from staleproof.vllm import hooks, single, standing
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import CACHE_TARGETS, Patch
from staleproof.vllm.plugin import patches
from staleproof.vllm.standing import registry

OWN = "vLLM's own"
Double = Callable[[torch.Tensor], torch.Tensor]
Fail = Callable[[], None]


class Answer(NamedTuple):
    """What came of one fault.

    Attributes:
        returned: ``vLLM's own`` (each result is that of the function without the patch), or another text.
        lines: what the plugin logged.
        out_of_service: the patches whose hooks do nothing any more.
    """

    returned: str
    lines: list[str]
    out_of_service: list[str]


class Fault(NamedTuple):
    """One fault: the body of the hooks, made anew for each question, and the calls of the function.

    Attributes:
        fail: the body of each hook.
        run: calls the function; returns results and what they are without the patch.
        on: ``cpu`` or ``cuda``.
        traced: whether torch.compile traces the calls.
        leaving: whether it is planted at the end of a context, which only ``around`` has.
    """

    fail: Callable[[], Fail]
    run: Callable[[Double], tuple[Any, Any]]
    on: str = "cpu"
    traced: bool = False
    leaving: bool = False


def _raising(error: Exception, at: int = 1) -> Callable[[], Fail]:
    """A body that raises from call ``at`` on."""

    def make() -> Fail:
        calls = itertools.count(1)

        def fail() -> None:
            if next(calls) >= at:
                raise error

        return fail

    return make


def _always() -> None:
    raise RuntimeError("planted")


def _no_memory() -> None:
    raise torch.OutOfMemoryError("planted")


def _too_much() -> None:
    """Ask the device for a pebibyte, which no GPU has."""
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def _calls(count: int) -> Callable[[Double], tuple[Any, Any]]:
    def run(double: Double) -> tuple[Any, Any]:
        return [double(torch.tensor(i)).item() for i in range(count)], [2 * i for i in range(count)]

    return run


def _captured(on: str) -> Callable[[Double], tuple[Any, Any]]:
    def run(double: Double) -> tuple[Any, Any]:
        x, out = torch.ones(3, device=on), torch.zeros(3, device=on)
        graph = capture(lambda: out.copy_(double(x)), on)
        x.fill_(5)
        graph.replay()
        first = out.tolist()
        x.fill_(7)
        graph.replay()
        return [first, out.tolist()], [[10.0] * 3, [14.0] * 3]

    return run


def _traced(double: Double) -> tuple[Any, Any]:
    torch._dynamo.reset()
    traced = torch.compile(lambda x: double(x + 1), fullgraph=True, backend="eager")
    return traced(torch.ones(3)).tolist(), [4.0] * 3


def _threads(double: Double) -> tuple[Any, Any]:
    results: list[float] = []
    calls = [
        threading.Thread(target=lambda: results.extend(double(torch.tensor(i)).item() for i in range(20)))
        for _ in range(4)
    ]
    for thread in calls:
        thread.start()
    for thread in calls:
        thread.join()
    return sorted(results), sorted([2 * i for i in range(20)] * 4)


_ERROR = RuntimeError("planted")
# A capture calls the function first: once on a CPU, three times on a GPU.
FAULTS = {
    "at the first call": Fault(_raising(_ERROR), _calls(4)),
    "at the hundredth call": Fault(_raising(_ERROR, 100), _calls(103)),
    "out of memory": Fault(lambda: _no_memory, _calls(4)),
    "in four threads": Fault(lambda: _always, _threads),
    "while traced": Fault(lambda: _always, _traced, traced=True),
    "out of memory, while traced": Fault(lambda: _no_memory, _traced, traced=True),
    "leaving the call": Fault(lambda: _always, _calls(4), leaving=True),
    "in a capture (recorded launches)": Fault(_raising(_ERROR, 2), _captured("cpu")),
    "in a CUDA graph capture": Fault(_raising(_ERROR, 4), _captured("cuda"), on="cuda"),
    "out of memory in a CUDA graph": Fault(lambda: _too_much, _captured("cuda"), on="cuda"),
}


def targets() -> Iterator[tuple[Patch, Target]]:
    """Every function that a patch wraps, and those of the compile cache.

    A kernel that is exchanged once has no hook at a call; ``tests/vllm/test_hooks.py`` lets that fail.
    """
    for patch in patches().values():
        for target in patch.targets:
            if target.swap is None:
                yield patch, target
    # What makes the traced patches factors of vLLM's compile cache is no patch, but has hooks like one.
    cache = replace(patch, name=standing.CACHE, requires=(), traced=False, on_host=False)
    yield from ((cache, target) for target in CACHE_TARGETS)


def name_of(patch: Patch, target: Target) -> str:
    """A patch may wrap the same method of two releases' modules."""
    return f"{patch.name}: {target.module.removeprefix('vllm.')}.{target.name}"


def _bodies(target: Target, fail: Fail, leaving: bool) -> dict[str, Any]:
    """The hooks that a target has, each with a body that calls ``fail`` and changes nothing."""

    @contextlib.contextmanager
    def leaves() -> Iterator[None]:
        yield
        fail()

    def around(args: Any, kwargs: Any) -> Any:
        if leaving:
            return leaves()
        fail()
        return contextlib.nullcontext()

    def before(args: Any, kwargs: Any) -> None:
        fail()

    def instead(args: Any, kwargs: Any) -> Any:
        fail()
        return NotImplemented

    def after(result: Any, args: Any, kwargs: Any) -> Any:
        fail()
        return result

    if leaving:
        return {"around": around, "before": None, "instead": None, "after": None}
    bodies = {"around": around, "before": before, "instead": instead, "after": after}
    return {name: body for name, body in bodies.items() if getattr(target, name) is not None}


def _text(target: Target) -> str:
    *path, name = target.name.split(".")
    lines = [f"def {name}({', '.join([*target.arguments, '*', 'tensor'])}):", "    return tensor * 2"]
    return "\n".join([f"class {path[0]}:", *("    " + line for line in lines)] if path else lines)


@contextlib.contextmanager
def _stub(patch: Patch, target: Target, bodies: dict[str, Any]) -> Iterator[Double]:
    """A package ``vllm`` with one target and a patch's hooks on it; nothing is left of it."""
    with tempfile.TemporaryDirectory() as root, made_up(Path(root)) as write:
        write({target.module.removeprefix("vllm."): _text(target)})
        faulty = replace(target, arguments=(*target.arguments, "tensor"), probe=None, **bodies)
        try:
            hooks.wrap(patch.name, faulty, requires=patch.requires)
            holder = importlib.import_module(target.module)
            arguments = [None] * len(target.arguments)
            for part in target.name.split(".")[:-1]:
                holder = getattr(holder, part)()
                arguments = arguments[1:]
            if target.single:
                single.hook(patch.name, holder)
            double = getattr(holder, target.name.split(".")[-1])
            yield lambda x: double(*arguments, tensor=x)
        finally:
            hooks.unwrap(patch.name)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def ask(patch: Patch, target: Target, fault: Fault) -> Answer:
    """Plant a fault in the hooks of one target, call the function, and say what came of it."""
    log = _Lines()
    hooks.logger.addHandler(log)
    try:
        with _stub(patch, target, _bodies(target, fault.fail(), fault.leaving)) as double:
            got, own = fault.run(double)
            # As the next report, scrape or key does.
            hooks.settle()
            return Answer(OWN if got == own else f"{got} for {own}", log.lines, [*registry.out_of_service()])
    except Exception as error:
        return Answer(f"{type(error).__name__}: {error}", log.lines, [*registry.out_of_service()])
    finally:
        hooks.logger.removeHandler(log)
