"""Single files of a vLLM run as they are; everything else that they import is a stand-in."""

import importlib
import sys
import types

import environment
import pytest

from staleproof.kernels import vllm_sources
from staleproof.kernels.vllm_sources import UnavailableError, executed, load
from staleproof.vllm.sources import Sources

# What benchmarks/patches.py and the GPU tests execute.
FILES = (
    "vllm.v1.attention.backends.mla.triton_mla",
    "vllm.v1.attention.ops.triton_decode_attention",
    "vllm.v1.worker.utils",
    "vllm._custom_ops",
)
TEXT = """
import vllm.envs as envs
from vllm.elsewhere import Base, Item, Support, helper
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import round_up

logger = init_logger(__name__)


class Impl(Base[Item]):
    support: Support = Support.UNIFORM_BATCH

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
        assert module.Impl.support is module.Support.UNIFORM_BATCH is not module.Support.NEVER
        # A class of vLLM's own has only what vLLM gave it.
        assert not hasattr(module.Impl, "UNIFORM_BATCH_2")
        # Each import of a name gives the same class.
        assert module.Support is importlib.import_module("vllm.elsewhere").Support
        assert module.current_platform.is_cuda()
        assert sys.modules["vllm"].__file__ == str(root / "__init__.py")
    assert sys.modules["vllm"] is before
    assert not [name for name in sys.modules if name.startswith("vllm.")]


def test_a_named_file_that_is_not_there(tmp_path):
    with executed(tmp_path / "vllm", "vllm.gone"), pytest.raises(FileNotFoundError):
        importlib.import_module("vllm.gone")
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise ValueError('one\\n  two')", "ValueError: one two"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(tmp_path, text, reason):
    (tmp_path / "ops.py").write_text(text)
    with pytest.raises(UnavailableError) as caught:
        load(tmp_path, "vllm.ops")
    assert str(caught.value) == f"vllm.ops does not load with stand-ins: {reason}"
    assert "vllm" not in sys.modules


def test_a_release_is_the_installed_one_only_if_that_is_of_this_version(tmp_path, monkeypatch):
    (tmp_path / "0.22.1/vllm").mkdir(parents=True)
    monkeypatch.setenv("STALEPROOF_VLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(vllm_sources, "installed", lambda: ("0.22.0+cu130", Sources(tmp_path / "site")))
    assert vllm_sources.package("0.22.0") == tmp_path / "site"
    assert vllm_sources.package("0.22.1") == tmp_path / "0.22.1/vllm"


@pytest.mark.parametrize("version", environment.also(*environment.READ))
def test_the_files_of_every_release_load(version):
    folder = environment.sources(version)
    assert [module.__name__ for module in load(folder / "vllm", *FILES)] == [*FILES]
