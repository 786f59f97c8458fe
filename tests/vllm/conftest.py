"""A made-up vLLM that a test writes, imports and hooks, and that no later test finds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from staleproof.vllm import hooks


@pytest.fixture(name="made_up")
def made_up_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a package ``vllm``; its argument maps a module's name below ``vllm`` to the module's text.

    Until the test ends, ``import vllm`` finds that package. Afterwards none of its modules is left:
    whoever asks for ``vllm`` next would get them, from whatever test file it asks.
    """

    def write(modules: dict[str, str]) -> Path:
        for name, text in {**modules, "": ""}.items():
            file = (
                tmp_path.joinpath("vllm", *name.split(".")).with_suffix(".py")
                if name
                else tmp_path / "vllm/__init__.py"
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        importlib.invalidate_caches()
        return tmp_path / "vllm"

    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)  # a real one comes back
    hooks._warned.clear()
    hooks._places.clear()
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
