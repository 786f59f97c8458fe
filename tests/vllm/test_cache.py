"""vLLM's compile cache over starts with and without the patches, with its own ``@support_torch_compile``."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import environment
import warm

from staleproof.vllm import hooks
from staleproof.vllm.patch import check_cache_key
from staleproof.vllm.plugin import patches
from staleproof.vllm.sources import PatchError, Sources

STARTS = Path(__file__).with_name("real_cache.py")


def _sources(version: str) -> Path:
    with environment.skipped_if_unavailable():
        return environment.sources(version)


@pytest.mark.slow
# In the first topk_nan is applied, in the second topk_nan_bias.
@pytest.mark.parametrize("version", ["0.19.0", "0.22.1"])
def test_each_state_is_served_from_a_graph_of_its_own(version, tmp_path):
    _sources(version)
    done = warm.run(
        *(str(STARTS), "none", "all", "none", "all", "uninstalled"),
        timeout=900,
        # Without the last, g++ tries every vector unit at each cold start, for longer than all else.
        env=environment.variables(version)
        | {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_VEC_ISA_OK": "0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    starts = json.loads(done.stdout.splitlines()[-1])
    assert [start["repeated"] for start in starts] == [6, 0, 6, 0, 6]
    assert [start["from disk"] for start in starts] == [False, False, True, True, True]
    # ``none`` leaves vLLM as it is without the plugin: the same graph, of the same key.
    assert [start["plugin"] for start in starts] == [True, True, True, True, False]


@pytest.fixture(name="package")
def package_fixture(tmp_path):
    """The files that vLLM's cache key is made in."""
    folder = tmp_path / "vllm/compilation"
    folder.mkdir(parents=True)
    (folder / "caching.py").write_text("def aot_compile_hash_factors(c): return [envs.compile_factors()]")
    (folder / "backends.py").write_text(
        "class VllmBackend:\n    def __call__(self, graph):\n        return envs.compile_factors()\n"
    )
    (folder.parent / "_custom_ops.py").write_text(
        "def create_fp4_scale_tensor(m, n, device, is_sf_swizzled_layout): pass"
    )
    return folder.parent


def test_a_traced_patch_is_refused_where_the_key_is_not_as_expected(package):
    sources = Sources(package)
    check_cache_key(sources)
    patch = patches()["scale_padding"]
    patch.check("0.18.1", sources)
    (package / "compilation/caching.py").write_text("def aot_compile_hash_factors(c): return [c]")
    with pytest.raises(PatchError, match=r"does not hash envs\.compile_factors.*could mix graphs"):
        patch.check("0.18.1", Sources(package))


def test_a_traced_patch_changes_the_factors_of_the_cache_key(package, monkeypatch):
    """While it waits for its module, once its function is wrapped, and if it leaves the function alone."""
    (package / "__init__.py").write_text("")
    (package / "envs.py").write_text("def compile_factors(): return {'VLLM_USE_V1': True}")
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    hooks._places.clear()
    envs = importlib.import_module("vllm.envs")
    try:
        key = "STALEPROOF_SCALE_PADDING"
        wrapped = "vllm._custom_ops:create_fp4_scale_tensor vllm.envs:compile_factors"
        with patches()["scale_padding"].applied("0.18.1"):
            assert envs.compile_factors() == {"VLLM_USE_V1": True, key: wrapped}
            importlib.import_module("vllm._custom_ops")
            assert envs.compile_factors()[key] == wrapped
        assert envs.compile_factors() == {"VLLM_USE_V1": True}
        sys.modules["vllm._custom_ops"].create_fp4_scale_tensor = lambda *theirs: None
        with patches()["scale_padding"].applied("0.18.1"):
            assert envs.compile_factors()[key] == "vllm.envs:compile_factors"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
