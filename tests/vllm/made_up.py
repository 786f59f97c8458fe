"""A made-up vLLM to import and hook, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from staleproof.vllm import hooks
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence

# The modules in which vLLM makes and uses the key of its compile cache.
CACHE = {
    "envs": "def compile_factors(): return {'VLLM_USE_V1': True}",
    "compilation.caching": "def aot_compile_hash_factors(c): return [envs.compile_factors()]",
    "compilation.backends": """
class VllmBackend:
    def __call__(self, graph):
        return envs.compile_factors()
""",
    "compilation.wrapper": """
import types

class TorchCompileWithNoGuardsWrapper:
    def aot_compile(self, trace):
        trace()
        return types.SimpleNamespace()
""",
}


def write(root: Path, modules: dict[str, str]) -> Path:
    """Write a package ``vllm`` below ``root``, from the text of each module by its name below ``vllm``."""
    for name, text in {"__init__": "", **modules}.items():
        file = root.joinpath("vllm", *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    importlib.invalidate_caches()
    return root / "vllm"


def _of_vllm() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]


@contextlib.contextmanager
def made_up(root: Path) -> Iterator[Callable[[dict[str, str]], Path]]:
    """:func:`write` below ``root``.

    Until the end ``import vllm`` finds that package. Then none of its modules is left: whoever asks for
    ``vllm`` next would get them, from whatever test file it asks. A real one that was imported comes back.
    """

    before = {name: sys.modules.pop(name) for name in _of_vllm()}
    sys.path.insert(0, str(root))
    hooks._warned.clear()
    hooks._places.clear()
    try:
        yield partial(write, root)
    finally:
        hooks._places.clear()
        sys.path.remove(str(root))
        for name in _of_vllm():
            del sys.modules[name]
        sys.modules.update(before)


def imported(name: str) -> Any:
    """A module of the made-up vLLM, by its name below ``vllm``."""
    return importlib.import_module(f"vllm.{name}")


def patch(*targets: Target, name: str = "p", **fields: Any) -> Patch:
    """A patch of these targets, whose probe finds the defect in any release."""
    given = {"incident": "i", "summary": "s", "versions": (), "mechanism": "m", "threads": (), "cost": "c"}
    given |= {"probe": lambda sources: Evidence(True, "there")}
    return Patch(name=name, targets=targets, **given | fields)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def planted(*args: Any, **kwargs: Any) -> NoReturn:
    """A hook that raises."""
    raise RuntimeError("planted")


@contextlib.contextmanager
def planted_at_the_end() -> Iterator[None]:
    """A context that raises as it is left."""
    yield
    planted()
