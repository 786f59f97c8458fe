"""Other packages' MLA decode kernels, each behind one call of the shape of our own.

Nothing here is ours: these are the kernels that the incidents happened in, and the peers that our
own is measured against. A peer that cannot run here says why in one line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.harness.environment import VLLM_TRITON_MLA

FLASHINFER_WORKSPACE_BYTES = 128 * 2**20
# DeepSeek's: every peer here is built for 512 + 64.
RANK, ROPE = 512, 64

Result = tuple[torch.Tensor, torch.Tensor | None]
Launch = Callable[[], Result]


@dataclass(frozen=True)
class Peer:
    """One implementation of MLA decode.

    Attributes:
        name: package, version where known, kernel.
        why_not: one line why it cannot run here, or ``None``.
        prepare: makes a closure that launches the kernel and nothing else, so that it can be
            captured; takes (q, kv_cache, block_table, seq_lens, softmax_scale, num_kv_splits, out).
    """

    name: str
    why_not: str | None
    prepare: Callable[..., Launch]

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        softmax_scale: float,
        num_kv_splits: int | None = None,
        out: torch.Tensor | None = None,
    ) -> Result:
        """Decode once, as :func:`staleproof.mla_decode` does; q is (batch, heads, 576).

        Returns:
            ``out`` (batch, heads, 512), and ``lse`` (batch, heads) natural logarithm, or ``None``
            where the kernel gives none. Padding rows hold whatever the kernel left there.

        Raises:
            RuntimeError: the peer cannot run here.
        """
        if self.why_not is not None:
            raise RuntimeError(f"{self.name} is not available: {self.why_not}")
        return self.prepare(q, kv_cache, block_table, seq_lens, softmax_scale, num_kv_splits, out)()


def _new_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(*q.shape[:-1], RANK, dtype=q.dtype, device=q.device) if out is None else out


@contextlib.contextmanager
def _stand_ins(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Put modules into ``sys.modules`` for the length of one import."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@cache
def vllm_triton_mla_module() -> types.ModuleType:
    """vLLM's Triton MLA source file, executed on its own.

    The package itself is not imported: that would start its platform detection, and needs its
    compiled libraries. The file asks it for three names, which stand-ins give.

    Raises:
        RuntimeError: no vLLM with this file is installed.
    """
    path = device.vllm_file(*VLLM_TRITON_MLA)
    if path is None:
        raise RuntimeError("no importable vllm holds the Triton MLA kernel")
    device.load_triton()
    import logging

    import triton
    import triton.language as tl

    names = ("vllm", "vllm.platforms", "vllm.triton_utils", "vllm.logger")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["vllm.platforms"].current_platform = types.SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: True, is_xpu=lambda: False
    )
    modules["vllm.triton_utils"].tl = tl
    modules["vllm.triton_utils"].triton = triton
    modules["vllm.logger"].init_logger = logging.getLogger
    spec = importlib.util.spec_from_file_location("staleproof._vllm_triton_mla", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _stand_ins(modules):
        # Triton looks a kernel's globals up by its module.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def _prepare_vllm_triton(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    decode = vllm_triton_mla_module().decode_attention_fwd
    batch, heads = q.shape[:2]
    result = _new_out(q, out)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    splits = num_kv_splits or 4
    partial = torch.empty(batch, heads, splits, RANK + 1, dtype=torch.float32, device=q.device)
    cache_4d = kv_cache.unsqueeze(2)
    # As vLLM calls it; keywords that its release does not know are left out.
    extra: dict[str, Any] = {
        "k_scale": torch.ones(1, dtype=torch.float32, device=q.device),
        "v_scale": torch.ones(1, dtype=torch.float32, device=q.device),
        "is_mla": True,
    }
    known = inspect.signature(decode).parameters
    extra = {name: value for name, value in extra.items() if name in known}

    def launch() -> Result:
        decode(
            q,
            cache_4d,
            cache_4d[..., :RANK],
            result,
            lse,
            block_table,
            seq_lens,
            partial,
            splits,
            softmax_scale,
            kv_cache.shape[1],
            **extra,
        )
        return result, lse

    return launch


def _pages_in_use(
    block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table in the CSR form FlashInfer plans with: (batch + 1,) starts, (pages,) ids."""
    counts = (seq_lens + page_size - 1) // page_size
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    column = torch.arange(block_table.shape[1], device=block_table.device)
    return starts, block_table[column[None, :] < counts[:, None]].int()


def flashinfer_plan_args(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
) -> dict[str, Any]:
    """Keywords for ``BatchMLAPagedAttentionWrapper.plan``."""
    starts, pages = _pages_in_use(block_table, seq_lens, kv_cache.shape[1])
    return {
        "qo_indptr": torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device),
        "kv_indptr": starts,
        "kv_indices": pages,
        "kv_len_arr": seq_lens,
        "num_heads": q.shape[1],
        "head_dim_ckv": RANK,
        "head_dim_kpe": ROPE,
        "page_size": kv_cache.shape[1],
        "causal": False,
        "sm_scale": softmax_scale,
        "q_data_type": q.dtype,
        "kv_data_type": kv_cache.dtype,
    }


def flashinfer_run_args(
    backend: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None,
) -> dict[str, Any]:
    """Keywords for ``BatchMLAPagedAttentionWrapper.run``.

    CUTLASS takes the batch here; the others have planned it.
    """
    args: dict[str, Any] = {
        "q_nope": q[..., :RANK],
        "q_pe": q[..., RANK:],
        "ckv_cache": kv_cache[..., :RANK],
        "kpe_cache": kv_cache[..., RANK:],
        "out": out,
    }
    if backend == "cutlass":
        return args | {"kv_len": seq_lens, "page_table": block_table}
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return args | {"lse": lse, "return_lse": True, "return_lse_base_on_e": True}


def flashinfer_trtllm_args(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor | None,
) -> dict[str, Any]:
    """Keywords for ``trtllm_batch_decode_with_kv_cache_mla``, as vLLM's backend passes them.

    ``q`` is (batch, heads, 576) or (batch, q_len, heads, 576).
    """
    return {
        "query": q if q.ndim == 4 else q.unsqueeze(1),
        "kv_cache": kv_cache.unsqueeze(1),
        "workspace_buffer": workspace,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": RANK,
        "qk_rope_head_dim": ROPE,
        "block_tables": block_table,
        "seq_lens": seq_lens,
        "max_seq_len": block_table.shape[1] * kv_cache.shape[1],
        "out": out,
        "bmm1_scale": softmax_scale,
        "bmm2_scale": 1.0,
    }


def _workspace(q: torch.Tensor) -> torch.Tensor:
    # trtllm-gen keeps semaphores in it, which must start at zero.
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _prepare_flashinfer(backend: str) -> Callable[..., Launch]:
    def prepare(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        num_kv_splits: int | None,
        out: torch.Tensor | None,
    ) -> Launch:
        mla = importlib.import_module("flashinfer.mla")
        wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(q), backend=backend)
        result = _new_out(q, out)
        run_args = flashinfer_run_args(backend, q, kv_cache, block_table, seq_lens, result)
        if backend != "cutlass":
            # The plan reads the lengths on the host: it belongs to the batch, not to the launch.
            wrapper.plan(**flashinfer_plan_args(q, kv_cache, block_table, seq_lens, softmax_scale))

        def launch() -> Result:
            wrapper.run(**run_args)
            return result, run_args.get("lse")

        return launch

    return prepare


def _prepare_trtllm(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache_mla
    # vLLM passes no out, and FlashInfer allocates it with torch.empty: here it is the caller's,
    # so that what a row held before is known.
    result = _new_out(q, out)
    target = result if q.ndim == 4 else result.unsqueeze(1)
    args = flashinfer_trtllm_args(q, kv_cache, block_table, seq_lens, softmax_scale, _workspace(q), target)

    def launch() -> Result:
        decode(**args)
        return result, None

    return launch


def _prepare_sdpa(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor | None,
) -> Launch:
    result = _new_out(q, out)
    # Entries behind a request's pages may hold anything: page 0 stands in, as in vLLM.
    counts = (seq_lens + kv_cache.shape[1] - 1) // kv_cache.shape[1]
    column = torch.arange(block_table.shape[1], device=q.device)
    pages = torch.where(column[None, :] < counts[:, None], block_table, 0).long()
    position = torch.arange(pages.shape[1] * kv_cache.shape[1], device=q.device)
    mask = (position[None, :] < seq_lens[:, None])[:, None, None, :]

    def launch() -> Result:
        keys = kv_cache[pages].flatten(1, 2).unsqueeze(1)
        result.copy_(
            torch.nn.functional.scaled_dot_product_attention(
                q.unsqueeze(1), keys, keys[..., :RANK], attn_mask=mask, scale=softmax_scale
            ).squeeze(1)
        )
        return result, None

    return launch


def _why_not_vllm() -> str | None:
    if not device.has_triton():
        return "Triton is not installed"
    found = device.vllm_file(*VLLM_TRITON_MLA)
    return None if found else "no vllm with a Triton MLA kernel is installed"


def _why_not_flashinfer(*, sm100: bool) -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    if sm100 and not device.is_sm100():
        return f"needs an SM100 GPU (B200, GB200); this is {device.machine().capability}"
    return None


def peers() -> dict[str, Peer]:
    """Every peer by its short key, runnable here or not.

    ``vllm_triton``, ``flashinfer_fa2``, ``flashinfer_fa3``, ``flashinfer_trtllm``,
    ``flashinfer_cutlass`` and ``torch_sdpa`` (gathered keys, boolean mask).
    """
    flashinfer = f"FlashInfer {device.version_of('flashinfer-python') or ''}".strip()
    vllm = f"vLLM {device.version_of('vllm') or ''}".strip()
    fa3 = _why_not_flashinfer(sm100=False)
    if fa3 is None and device.machine().capability != "sm_90":
        fa3 = f"needs an SM90 GPU (H100, H200); this is {device.machine().capability}"
    return {
        "vllm_triton": Peer(f"{vllm} Triton MLA", _why_not_vllm(), _prepare_vllm_triton),
        "flashinfer_fa2": Peer(
            f"{flashinfer} MLA fa2", _why_not_flashinfer(sm100=False), _prepare_flashinfer("fa2")
        ),
        "flashinfer_fa3": Peer(f"{flashinfer} MLA fa3", fa3, _prepare_flashinfer("fa3")),
        "flashinfer_trtllm": Peer(
            f"{flashinfer} trtllm-gen MLA", _why_not_flashinfer(sm100=True), _prepare_trtllm
        ),
        "flashinfer_cutlass": Peer(
            f"{flashinfer} CUTLASS MLA", _why_not_flashinfer(sm100=True), _prepare_flashinfer("cutlass")
        ),
        "torch_sdpa": Peer(f"torch {torch.__version__} SDPA, boolean mask", None, _prepare_sdpa),
    }
