"""Single files of a vLLM run as they are; whatever else they import is a stand-in."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from staleproof.harness.vllm_files import executed

TEXT = """
import vllm.envs as envs
from vllm.elsewhere import Base, Item, helper
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import round_up

logger = init_logger(__name__)


class Impl(Base[Item]):
    def size(self, n):
        return round_up(n, 16)
"""


def test_a_file_runs_under_its_own_name_and_leaves_nothing(tmp_path, monkeypatch):
    before = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", before)
    root = tmp_path / "vllm"
    (root / "deep").mkdir(parents=True)
    (root / "deep/impl.py").write_text(TEXT)
    with executed(root, "vllm.deep.impl"):
        module = importlib.import_module("vllm.deep.impl")
        assert module.__file__ == str(root / "deep/impl.py")
        assert module.Impl.__module__ == "vllm.deep.impl"
        assert module.Impl().size(17) == 32
        assert module.current_platform.is_cuda()
        assert sys.modules["vllm"].__file__ == str(root / "__init__.py")
    assert sys.modules["vllm"] is before
    assert not [name for name in sys.modules if name.startswith("vllm.")]


def test_a_named_file_that_is_not_there(tmp_path):
    with executed(tmp_path / "vllm", "vllm.gone"), pytest.raises(FileNotFoundError):
        importlib.import_module("vllm.gone")
    assert "vllm" not in sys.modules
