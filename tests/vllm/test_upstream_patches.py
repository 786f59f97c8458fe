"""The patches and drafts of ``workbook/upstream``: they fit vLLM 0.33.0, and their tests fail without them.

Those in a folder change the call site of the file beside them; ``tests/ops/test_lifted.py`` compares its
results with those of our operations.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import environment
import pytest
import warm

VERSION = "0.33.0"
UPSTREAM = Path(__file__).parents[2] / "workbook/upstream"
# Their tests run on a CPU.
FP4 = UPSTREAM / f"vllm-{VERSION}-fused-fp4-scales.patch"
UNIFORM = UPSTREAM / f"vllm-{VERSION}-uniform-decode.patch"
# Folder of a fix -> its new file in vLLM.
TARGETS = {
    "mla-empty-rows": "vllm/v1/attention/ops/clear_empty_rows.py",
    "topk-distinct": "vllm/model_executor/layers/fused_moe/router/distinct_topk.py",
    "kv-block-zeroing": "vllm/v1/worker/zero_kv_blocks.py",
}
SITES = {folder: UPSTREAM / folder / f"call-site-{VERSION}.patch" for folder in TARGETS}
# As released it calls CUDA kernels: its tests say nothing without a GPU. Those with the next patch do.
ROUTER = "topk-distinct"
# Its test is of compiled kernels.
COMPILED = UPSTREAM / f"vllm-{VERSION}-router-nan-bias.patch"
PATCHES = [*SITES.values(), FP4, UNIFORM, COMPILED]
RUN = "import pytest; raise SystemExit(pytest.main('-q -p no:cacheprovider -p no:nbval tests'.split()))"
# vLLM's CUTLASS backend allocates its workspace and asks for the number of SMs when it is imported. A copy to
# the device begins in pinned memory.
CONFTEST = """
import torch
import vllm.utils.platform_utils as platform
import vllm.utils.torch_utils

vllm.utils.torch_utils.PIN_MEMORY = False
empty = torch.empty
platform.num_compute_units = lambda *_: 1


def on_cpu(*args, **kwargs):
    return empty(*args, **kwargs | ({"device": "cpu"} if str(kwargs.get("device")) == "cuda" else {}))


torch.empty = on_cpu
"""


@pytest.fixture(name="released")
def released_fixture():
    return environment.sources(VERSION)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.parent.name}/{patch.stem}")
def test_a_patch_fits_the_release_that_it_names(tmp_path, released, patch):
    for file in re.findall(r"^--- a/(.+)$", patch.read_text(), re.MULTILINE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(released / file, tmp_path / file)
    environment.apply(tmp_path, patch.read_text())
    # What it adds is vLLM's: none of ours is needed.
    assert "staleproof" not in patch.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(("mended", "expected"), [(False, "13 failed, 17 passed"), (True, "75 passed")])
def test_their_own_tests_fail_as_released_and_pass_with_them(tmp_path, mended, expected):
    diffs = [FP4, UNIFORM, *(SITES.values() if mended else ())]
    only = () if mended else ("tests/*",)
    variables = environment.patched(VERSION, tmp_path, *(patch.read_text() for patch in diffs), only=only)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for folder, target in TARGETS.items():
        # The new file and its test, without the fix.
        shutil.copy(UPSTREAM / folder / Path(target).name, tmp_path / target)
        if mended or folder != ROUTER:
            for test in (UPSTREAM / folder).glob("test_*.py"):
                shutil.copy(test, tmp_path / "tests" / test.name)
    done = warm.run("-c", RUN, cwd=tmp_path, env=variables, timeout=300)
    assert re.search(rf"^{expected}\b", done.stdout, re.MULTILINE), done.stdout[-2000:] + done.stderr


def _block(draft, language):
    """The one block of a draft in this language."""
    text = (UPSTREAM / draft).read_text()
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.slow
def test_the_script_of_published_blocks_fails_as_released_and_passes_with_its_diff(tmp_path):
    script, diff = (_block("vllm-published-before-written.md", language) for language in ("python", "diff"))
    found = warm.released(VERSION, "-c", script)
    said = "AssertionError: 256 tokens are computed, and the prefix cache gives 288"
    assert found.stderr.rstrip().endswith(said)
    mended = warm.run("-c", script, env=environment.patched(VERSION, tmp_path, diff), timeout=300)
    assert mended.returncode == 0, mended.stderr[-2000:]


# What vLLM registers for these two, of the whole library.
BINDINGS = r"""
#include "moe/moe_ops.h"
#include <torch/csrc/stable/library.h>
#define RESULTS "(Tensor! weights, Tensor! ids, Tensor! sources, Tensor logits, bool renormalize, " \
                "Tensor? bias, "
STABLE_TORCH_LIBRARY(nan_bias, m) {
  m.def("topk_softmax" RESULTS "Tensor? is_padding) -> ()");
  m.def("topk_sigmoid" RESULTS "float scaling, Tensor? is_padding) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(nan_bias, CUDA, m) {
  m.impl("topk_softmax", TORCH_BOX(&topk_softmax));
  m.impl("topk_sigmoid", TORCH_BOX(&topk_sigmoid));
}
"""
# As CMakeLists.txt of the release sets it.
OPTIONS = "-std=c++20 --expt-relaxed-constexpr -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020B000000000000ULL"
OPS = """
import os
import torch
torch.ops.load_library(os.environ["ROUTER"])
ops = torch.ops.nan_bias
def topk_softmax(*arguments): ops.topk_softmax(*arguments, None)
def topk_sigmoid(*arguments): ops.topk_sigmoid(*arguments, 1.0, None)
"""


def _compiling(sources):
    """Start compiling the router's kernels as a library of their own, ``router.so``."""
    import torch

    (sources / "bindings.cpp").write_text(BINDINGS)
    # Only the name of a type is used of it, and a small toolkit lacks it.
    (sources / "cublas_v2.h").write_text("typedef struct cublasContext* cublasHandle_t;\n")
    home = Path(torch.__file__).parent
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    files = ["moe/topk_softmax_kernels.cu", "bindings.cpp"]
    places = ["-I.", f"-I{home}/include", f"-L{home}/lib", "-Xlinker", "--no-as-needed"]
    libraries = ["-ltorch_cpu", "-ltorch_cuda", "-shared", "-Xcompiler", "-fPIC", "-o", "router.so"]
    command = ["nvcc", f"-arch=sm_{capability}", *OPTIONS.split(), *files, *places, *libraries]
    return subprocess.Popen(command, cwd=sources, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
def test_the_routers_kernels_repeat_experts_as_released_and_not_with_the_patch(tmp_path, released):
    found = {}
    for name in ("released", "patched"):
        shutil.copytree(released / "csrc", tmp_path / name / "csrc")
        (tmp_path / name / "vllm").mkdir()
        (tmp_path / name / "vllm/__init__.py").touch()
        (tmp_path / name / "vllm/_custom_ops.py").write_text(OPS)
        platform = "class current_platform:\n    is_cuda = staticmethod(lambda: True)\n"
        (tmp_path / name / "vllm/platforms.py").write_text(platform)
        options = [] if name == "patched" else ["--include=tests/*"]
        environment.apply(tmp_path / name, COMPILED.read_text(), options=options)
    started = {name: _compiling(tmp_path / name / "csrc") for name in ("released", "patched")}
    for name, compiler in started.items():
        said, _ = compiler.communicate(timeout=600)
        assert compiler.returncode == 0, said[-2000:]
        folder = tmp_path / name
        variables = os.environ | {"ROUTER": str(folder / "csrc/router.so"), "PYTHONPATH": str(folder)}
        found[name] = warm.new("-c", RUN, cwd=folder, env=variables).stdout
    assert re.search(r"^16 passed", found["patched"], re.MULTILINE), found["patched"][-2000:]
    failed = re.findall(r"^FAILED \S+::(\w+)", found["released"], re.MULTILINE)
    assert {*failed} == {"test_expert_ids_are_distinct_where_the_bias_is_nan"}, found["released"][-2000:]
