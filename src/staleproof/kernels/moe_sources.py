"""What the reduced build changes in the sources of FlashInfer's fused MoE, and nvcc's flags for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BACKEND = "fused_moe/cutlass_backend/"
INTERNAL = "nv_internal/tensorrt_llm/kernels/"
MOE_GEMM = INTERNAL + "cutlass_kernels/moe_gemm/"


@dataclass(frozen=True)
class Edit:
    """One change to a source file.

    Attributes:
        file: below the package's ``data/csrc``.
        why: what is left out, in words.
        start: where the change begins; this text occurs once in the file.
        until: the change ends before the next occurrence of this text; ``None``: it ends with ``start``.
        text: the replacement.
    """

    file: str
    why: str
    start: str
    until: str | None
    text: str


RUNNER = BACKEND + "cutlass_fused_moe_kernels.cuh"
# The bounds check of the finalise kernel, which releases before 0.6.10 do not have.
CHECK = "expanded_permuted_row >= expanded_rows"
EDITS = (
    Edit(
        BACKEND + "flashinfer_cutlass_fused_moe_binding.cu",
        "data types other than BF16 and FP8",
        "mInnerDimMultiplier = 1;",
        "if (!mKernelRunner) {",
        """mInnerDimMultiplier = 1;
    if (mActivationDtype == dl_bfloat16 && mWeightDtype == dl_bfloat16) {
      using Bf16Runner = kernels::CutlassMoeFCRunner<__nv_bfloat16, __nv_bfloat16>;
      mKernelRunner = std::make_shared<Bf16Runner>();
    }
#ifdef COMPILE_HOPPER_TMA_GEMMS
    if (isFp8Quant() && mOutputDtype == dl_bfloat16) {
      using Fp8Runner = kernels::CutlassMoeFCRunner<__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16>;
      mKernelRunner = std::make_shared<Fp8Runner>();
    }
#endif
    """,
    ),
    Edit(
        MOE_GEMM + "moe_gemm_template_dispatch.h",
        "the grouped GEMMs of Ampere",
        "// dispatch for quant op type",
        "} else {",
        'TLLM_THROW("left out of the reduced build");\n  ',
    ),
)
_RUNNER = f"""#ifdef {{}}
#include "{Path(RUNNER).name}"
#include "moe_kernels.h"
namespace tensorrt_llm::kernels::cutlass_kernels {{{{
template class CutlassMoeFCRunner<{{}}>;
}}}}
#endif
"""
# These, and the GEMM of an architecture, replace the package's instantiations. FP8 is Hopper's only.
_FP8 = "COMPILE_HOPPER_TMA_GEMMS"
OWN_SOURCES = {
    "ours/runner_bf16.cu": _RUNNER.format("ENABLE_BF16", "__nv_bfloat16, __nv_bfloat16"),
    "ours/runner_fp8.cu": _RUNNER.format(_FP8, "__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16"),
    "ours/fp8.cu": f"""#ifdef {_FP8}
#include "moe_gemm/moe_gemm_template_dispatch.h"
namespace tensorrt_llm::kernels::cutlass_kernels {{
template class MoeGemmRunner<__nv_fp8_e4m3, __nv_fp8_e4m3, __nv_bfloat16>;
}}
#endif
""",
    "ours/deep_gemm.cu": """#include <tvm/ffi/extra/module.h>
// DeepGEMM is left out; the Python entry tells every module where its headers are.
void no_deep_gemm(tvm::ffi::Array<tvm::ffi::String>) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_deepgemm_jit_include_dirs, no_deep_gemm);
""",
}
GEMM = "ours/gemm.cu"
SOURCES = (
    *OWN_SOURCES,
    GEMM,
    BACKEND + "flashinfer_cutlass_fused_moe_binding.cu",
    MOE_GEMM + "moe_gemm_kernels_bf16_bf16.cu",
    MOE_GEMM + "moe_gemm_tma_warp_specialized_input.cu",
    INTERNAL + "cutlass_kernels/cutlass_heuristic.cpp",
    # Without ENABLE_FP8_BLOCK_SCALE it refuses.
    INTERNAL + "cutlass_kernels/fp8_blockscale_gemm/fp8_blockscale_gemm.cu",
    INTERNAL + "lora/lora.cpp",
    INTERNAL + "preQuantScaleKernel.cu",
    "nv_internal/cpp/common/envUtils.cpp",
    "nv_internal/cpp/common/logger.cpp",
    "nv_internal/cpp/common/memoryUtils.cu",
    "nv_internal/cpp/common/stringUtils.cpp",
    "nv_internal/cpp/common/tllmException.cpp",
)
# Not in every release.
LATER_SOURCES = (MOE_GEMM + "moe_gemm_mixed_utils.cu",)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "-w",
    "-Xcompiler=-fPIC",
    "-use_fast_math",
    "--expt-relaxed-constexpr",
    "-static-global-template-stub=false",
)
_MORE_FLAGS = (
    "-DFLASHINFER_ENABLE_FP8_E8M0",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
)


@dataclass(frozen=True)
class Architecture:
    """The parts of the reduced build that are specific to one generation of GPUs.

    Attributes:
        number: of the module in FlashInfer: 90 or 100.
        tiles: keeps the tile of the default tactic only.
        gemm: source that instantiates the GEMM with that tile.
        flags: for nvcc, as ``flashinfer/jit/fused_moe.py`` gives them, without FP4.
    """

    number: int
    tiles: Edit
    gemm: str
    flags: tuple[str, ...]


_TILES = MOE_GEMM + "moe_gemm_template_dispatch_tma_ws.h"
HOPPER = Architecture(
    90,
    Edit(
        _TILES,
        "tiles other than the default tactic's",
        "constexpr int cta_n = get<1>(CTAShape{});",
        None,
        """constexpr int cta_n = get<1>(CTAShape{});
  if constexpr (cta_m != 128 || cta_n != 16 || get<0>(ClusterShape{}) != 1 ||
                get<1>(ClusterShape{}) != 1) {
    return false;
  }""",
    ),
    """#include "moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"
namespace tensorrt_llm::kernels::cutlass_kernels_oss {
#define ONE_TILE(TYPE, K, FUSION, SWAP)                                                          \\
  INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, TYPE, TYPE, __nv_bfloat16, void,               \\
                                            EpilogueOpDefault, FUSION, 128, 16, K, 1, 1, 1,      \\
                                            false, false, false, SWAP)
#define ONE_TYPE(TYPE, K)        \\
  ONE_TILE(TYPE, K, NONE, false); \\
  ONE_TILE(TYPE, K, NONE, true); \\
  ONE_TILE(TYPE, K, FINALIZE, false); \\
  ONE_TILE(TYPE, K, FINALIZE, true)
ONE_TYPE(__nv_bfloat16, 64);
ONE_TYPE(__nv_fp8_e4m3, 128);
}
""",
    (
        *_FLAGS,
        "-gencode=arch=compute_90a,code=sm_90a",
        "-Xfatbin=-compress-all",
        "-DENABLE_BF16",
        "-DENABLE_FP8",
        "-DUSING_OSS_CUTLASS_MOE_GEMM",
        "-DCOMPILE_HOPPER_TMA_GEMMS",
        "-DCOMPILE_HOPPER_TMA_GROUPED_GEMMS",
        "-DCUTLASS_ENABLE_GDC_FOR_SM90=1",
        "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
        *_MORE_FLAGS,
    ),
)


def _blackwell_gemm() -> str:
    """The default tactic's tile with all epilogues and clusters, because the dispatch names them."""
    tma, no_smem = "PtrArrayTmaWarpSpecialized", "PtrArrayNoSmemWarpSpecialized"
    instances = "".join(
        f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm100, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, "
        f"{epilogue}, EpilogueOpDefault, {fusion}, 128, 128, 64, 1, 1, 1, false, {dynamic}, false, {swap});\n"
        for epilogue, fusion in ((tma, "NONE"), (no_smem, "NONE"), (tma, "FINALIZE"))
        for dynamic in ("false", "true")
        for swap in ("false", "true")
    )
    return (
        '#include "moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"\n'
        f"namespace tensorrt_llm::kernels::cutlass_kernels_oss {{\n{instances}}}\n"
    )


BLACKWELL = Architecture(
    100,
    Edit(
        _TILES,
        "tiles other than the default tactic's",
        "if constexpr (TileM != 64 && TileM != 128) {",
        None,
        "if constexpr (TileM != 128 || TileN != 128 || size<0>(ClusterShape{}) != 1) {",
    ),
    _blackwell_gemm(),
    (
        *_FLAGS,
        "-gencode=arch=compute_100a,code=sm_100a",
        "-Xfatbin=-compress-all",
        "-DENABLE_BF16",
        "-DENABLE_FP8",
        "-DUSING_OSS_CUTLASS_MOE_GEMM",
        "-DCOMPILE_BLACKWELL_TMA_GEMMS",
        "-DCOMPILE_BLACKWELL_TMA_GROUPED_GEMMS",
        "-DCUTLASS_ENABLE_GDC_FOR_SM100=1",
        *_MORE_FLAGS,
    ),
)
# GPU -> its architecture. A B300 (sm_103) is missing, because FlashInfer has another module for it.
ARCHITECTURES = {"sm_90": HOPPER, "sm_100": BLACKWELL}
