"""vLLM's compile cache over starts with and without the patches, with its own ``@support_torch_compile``."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import environment
import pytest
import warm
from made_up import CACHE, imported, write

from staleproof.vllm import hooks, process, standing
from staleproof.vllm import patch as patch_module
from staleproof.vllm.patch import check_cache_key
from staleproof.vllm.plugin import patches
from staleproof.vllm.sources import PatchError, Sources
from staleproof.vllm.standing import registry

STARTS = Path(__file__).with_name("real_cache.py")


# In the first a hook raises while torch.compile traces it; in the last another plugin replaces the function.
SEQUENCE = "fails", "all", "all", "none", "uninstalled", "bypassed"


@pytest.mark.slow
# In the first topk_nan is applied, in the second topk_nan_bias.
@pytest.mark.parametrize("version", environment.also("0.19.1", "0.33.0"))
def test_each_state_is_served_from_a_graph_of_its_own(version, tmp_path):
    count = 3 if version == "0.19.1" else len(SEQUENCE)
    # Without the last, g++ tries every vector unit at each cold start, for longer than all else.
    variables = {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    done = warm.released(version, str(STARTS), *SEQUENCE[:count], timeout=900, **variables)
    starts = warm.answer(done)
    assert [start["repeated"] for start in starts] == [6, 0, 0, 6, 6, 6][:count]
    assert [start["from disk"] for start in starts] == [False, False, True, False, True, False][:count]
    # ``none`` leaves vLLM as it is without the plugin: the same graph, of the same key.
    assert [start["plugin"] for start in starts] == [True, True, True, True, False, True][:count]
    says = [start.get("says", "").partition(":")[0] for start in starts]
    assert says == ["refused", "in place", "in place", "", "", "partly"][:count]
    assert "failed while torch.compile traced it" in starts[0]["says"]
    assert "unable to save" in done.stdout + done.stderr


FILES = CACHE | {"_custom_ops": "def create_fp4_scale_tensor(m, n, device, is_sf_swizzled_layout): pass"}


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("caching", "def aot_compile_hash_factors(c): return [c]", r"not hash envs\.compile_factors.*mix"),
        ("backends", "class VllmBackend:\n    def __call__(self, graph): pass", r"does not hash.*could mix"),
        ("wrapper", "class TorchCompileWithNoGuardsWrapper: pass", "has no .*aot_compile"),
    ],
)
def test_a_traced_patch_is_refused_where_the_key_is_not_as_expected(tmp_path, file, text, why):
    package = write(tmp_path, FILES)
    sources = Sources(package)
    check_cache_key(sources)
    patch = patches()["scale_padding"]
    patch.check("0.18.1", sources)
    (package / f"compilation/{file}.py").write_text(text)
    with pytest.raises(PatchError, match=why):
        patch.check("0.18.1", Sources(package))


KEY = "STALEPROOF_SCALE_PADDING"
PLACE = "vllm._custom_ops:create_fp4_scale_tensor"


@pytest.fixture(name="envs")
def envs_fixture(made_up):
    """The made-up ``vllm.envs``, with scale_padding applied."""
    made_up(FILES)
    with patches()["scale_padding"].applied("0.18.1"):
        yield imported("envs")
    assert not hooks._watched


def test_a_traced_patch_is_a_factor_while_it_waits_and_once_it_is_wrapped(envs):
    assert envs.compile_factors() == {"VLLM_USE_V1": True, KEY: PLACE}
    imported("_custom_ops")
    assert envs.compile_factors()[KEY] == PLACE
    patches()["scale_padding"].revert()
    assert envs.compile_factors() == {"VLLM_USE_V1": True}


def test_without_the_key_a_traced_patch_does_nothing_and_none_of_them_takes_it_along(envs):
    other = patches()["topk_nan"]
    other.apply("0.18.1")
    other.revert()
    assert [*envs.compile_factors()] == ["VLLM_USE_V1", KEY]
    # The key is no patch.
    assert registry.in_service() == ["scale_padding"]
    registry.step_back(standing.CACHE, "planted")
    assert registry.in_service() == []
    registry.forget(standing.CACHE)


def _nothing(ops) -> None:
    pass


def _replaced(ops) -> None:
    ops.create_fp4_scale_tensor = lambda *theirs: None


def _imported(ops) -> None:
    sys.modules["vllm.user"] = types.ModuleType("vllm.user")
    sys.modules["vllm.user"].scales = ops.create_fp4_scale_tensor.__wrapped__


def _step_back(ops) -> None:
    registry.step_back("scale_padding", "it failed")


def _fail_in_trace(ops) -> None:
    hooks._note_failure("scale_padding", "create_fp4_scale_tensor", "preparing a call", "RuntimeError")


def _replace_the_key(ops) -> None:
    sys.modules["vllm.envs"].compile_factors = dict


def test_a_function_that_is_bypassed_is_no_factor_and_not_in_place(envs):
    ops = imported("_custom_ops")
    assert process.state("scale_padding") == ("in place", "")
    _replaced(ops)
    assert envs.compile_factors()[KEY] == ""
    said = f"create_fp4_scale_tensor was replaced by {__file__} since"
    assert process.state("scale_padding") == ("refused", said)


def test_the_key_counts_as_much_as_the_function(envs):
    imported("_custom_ops")
    _replace_the_key(None)
    state, why = process.state("scale_padding")
    assert state == "partly"
    assert why.startswith("compile_factors was replaced by")


CHANGED = "patches changed while it was traced"


@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        (_nothing, None),
        (_fail_in_trace, "preparing a call of create_fp4_scale_tensor failed while torch.compile traced it"),
        (_step_back, CHANGED),
        (_replaced, CHANGED),
        (_imported, CHANGED),
        (_replace_the_key, "compile_factors was replaced by"),
    ],
)
def test_a_graph_is_saved_only_if_its_patches_stood_to_the_end(envs, meanwhile, why):
    ops = imported("_custom_ops")
    model = imported("compilation.wrapper").TorchCompileWithNoGuardsWrapper()
    before = envs.compile_factors()

    def traced():
        meanwhile(ops)
        # As vLLM does for the cache behind Dynamo's.
        envs.compile_factors()

    graph = model.aot_compile(traced)
    if why is None:
        assert not hasattr(graph, "save_compiled_function")
        return
    with pytest.raises(PatchError, match=why):
        graph.save_compiled_function("path")
    if meanwhile is _fail_in_trace:
        assert "RuntimeError" in registry.reason("scale_padding")
        # A part of this process's graphs has vLLM's own code: their key is nobody else's.
        assert envs.compile_factors()[KEY] == patch_module.UNPROVED != before[KEY]
