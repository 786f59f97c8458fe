"""MLA decode kernels of other packages, each called as :func:`staleproof.mla_decode` is.

The incidents happened in these kernels, and our own kernel is measured against them. A peer that
cannot run on this machine gives the reason in one line.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.harness.environment import VLLM_TRITON_MLA
from staleproof.harness.vllm_files import UnavailableError, load
from staleproof.vllm.sources import vllm_file

FLASHINFER_WORKSPACE_BYTES = 128 * 2**20
# DeepSeek's sizes, which every peer here is built for.
RANK, ROPE = 512, 64

Result = tuple[torch.Tensor, torch.Tensor | None]
Launch = Callable[[], Result]


@dataclass(frozen=True)
class Peer:
    """One implementation of MLA decode.

    Attributes:
        name: package, version where known, kernel.
        unavailable_reason: one line that says why it cannot run here, or ``None``.
        prepare: takes (q, kv_cache, block_table, seq_lens, softmax_scale, num_kv_splits, out) and
            returns a closure that only launches the kernel, so that it can be captured in a graph.
    """

    name: str
    unavailable_reason: str | None
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
        """Decode once.

        Args:
            q: (batch, heads, 576).
            kv_cache: (pages, page_size, 576).
            block_table: (batch, max_pages) int32.
            seq_lens: (batch,) int32.
            softmax_scale: factor of the scores.
            num_kv_splits: parts that vLLM's kernel splits the keys into, 4 by default.
            out: (batch, heads, 512), written and returned if given.

        Returns:
            ``out`` (batch, heads, 512), and ``lse`` (batch, heads), a natural logarithm, or ``None``
            if the kernel returns none. Rows of empty requests hold whatever the kernel left there.

        Raises:
            RuntimeError: the peer cannot run here.

        >>> q, kv_cache = torch.ones(1, 2, 576), torch.ones(1, 16, 576)
        >>> block_table, seq_lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3])
        >>> out, _ = peers()["torch_sdpa"](q, kv_cache, block_table, seq_lens, softmax_scale=0.1)
        >>> out.shape
        torch.Size([1, 2, 512])
        """
        if self.unavailable_reason is not None:
            raise RuntimeError(f"{self.name} is not available: {self.unavailable_reason}")
        return self.prepare(q, kv_cache, block_table, seq_lens, softmax_scale, num_kv_splits, out)()


def _new_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return torch.empty(*q.shape[:-1], RANK, dtype=q.dtype, device=q.device) if out is None else out


@cache
def vllm_triton_mla_module() -> types.ModuleType:
    """Execute the Triton MLA source file of an importable vLLM, and return its module.

    The package is not imported; :mod:`staleproof.harness.vllm_files` has stand-ins for the rest of it.

    Raises:
        UnavailableError: Triton or such a vLLM is missing, or the file does not load.
    """
    if not device.has_triton():
        raise UnavailableError("Triton is not installed")
    for path in VLLM_TRITON_MLA:
        file = vllm_file(path)
        if file is not None:
            device.load_triton()
            name = f"vllm.{path.removesuffix('.py').replace('/', '.')}"
            return load(file.parents[path.count("/")], name)[0]
    raise UnavailableError("no vllm with a Triton MLA kernel is installed")


def vllm_splits(max_seq_len: int, processors: int) -> int:
    """The parts that vLLM's Triton MLA splits the keys into, from 0.20.0 on; before that always 4.

    Args:
        max_seq_len: longest request of the batch. In a captured graph it is the longest that the
            server takes, whatever the batch holds.
        processors: multiprocessors of the GPU.

    >>> [vllm_splits(tokens, 132) for tokens in (1, 512, 4096, 40000, 1_000_000)]
    [1, 1, 8, 128, 264]
    """
    wanted = max(1, max_seq_len // 512)
    return min(1 << (wanted - 1).bit_length(), 2 * processors)


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
    # vLLM passes these keywords. Older releases do not have all of them.
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
    """Return the block table as FlashInfer's plan takes it: (batch + 1,) starts, (pages,) page ids."""
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
    """Return the keywords for ``BatchMLAPagedAttentionWrapper.plan``.

    >>> q, kv_cache = torch.ones(2, 16, 576), torch.ones(3, 64, 576)
    >>> block_table = torch.tensor([[2, 1], [0, 0]], dtype=torch.int32)
    >>> plan = flashinfer_plan_args(q, kv_cache, block_table, torch.tensor([65, 64]), 0.1)
    >>> plan["kv_indptr"].tolist(), plan["kv_indices"].tolist()
    ([0, 2, 3], [2, 1, 0])
    """
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
    """Return the keywords for ``BatchMLAPagedAttentionWrapper.run``.

    Only the CUTLASS backend takes lengths and block table here; the others took them in ``plan``.
    """
    args: dict[str, Any] = {
        "q_nope": q[..., :RANK],
        "q_pe": q[..., RANK:],
        "ckv_cache": kv_cache[..., :RANK],
        "kpe_cache": kv_cache[..., RANK:],
        "out": out,
    }
    if backend == "cutlass":
        return args | {"kv_len": seq_lens, "page_table": _whole_tiles(block_table, kv_cache)}
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return args | {"lse": lse, "return_lse": True, "return_lse_base_on_e": True}


def _whole_tiles(block_table: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """The block table up to a whole tile of 128 keys, without which FlashInfer's SM100 kernels refuse it.

    The entries added name page 0.
    """
    return torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % (128 // kv_cache.shape[1])))


def flashinfer_trtllm_args(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the keywords for ``trtllm_batch_decode_with_kv_cache_mla``, as vLLM passes them.

    ``q`` is (batch, heads, 576) or (batch, q_len, heads, 576).
    """
    block_table = _whole_tiles(block_table, kv_cache)
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
    # trtllm-gen keeps semaphores in the workspace, and they must start at zero.
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
            # The plan reads the lengths on the host, so it cannot be part of the captured launch.
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
    # vLLM passes no out and FlashInfer allocates it with torch.empty. Here the caller may pass one,
    # so that a test knows what an unwritten row contained before.
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
    # Block table entries after a request's last page are arbitrary. Use page 0 for them.
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


def _vllm_unavailable_reason() -> str | None:
    try:
        vllm_triton_mla_module()
    except UnavailableError as error:
        return str(error)
    return None


def _flashinfer_unavailable_reason(*, sm100: bool) -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if why := device.flashinfer_missing():
        return why
    if sm100 and not device.is_sm100():
        return f"needs an SM100 GPU (B200, GB200); this is {device.machine().capability}"
    return None


def peers() -> dict[str, Peer]:
    """Return every peer by its short key, whether it can run here or not.

    >>> print(*peers())
    vllm_triton flashinfer_fa2 flashinfer_fa3 flashinfer_trtllm flashinfer_cutlass torch_sdpa
    """
    flashinfer = f"FlashInfer {device.version_of('flashinfer-python') or ''}".strip()
    vllm = f"vLLM {device.version_of('vllm') or ''}".strip()
    fa2, sm100 = (_flashinfer_unavailable_reason(sm100=needed) for needed in (False, True))
    fa3 = fa2
    if fa3 is None and device.machine().capability != "sm_90":
        fa3 = f"needs an SM90 GPU (H100, H200); this is {device.machine().capability}"
    return {
        "vllm_triton": Peer(f"{vllm} Triton MLA", _vllm_unavailable_reason(), _prepare_vllm_triton),
        "flashinfer_fa2": Peer(f"{flashinfer} MLA fa2", fa2, _prepare_flashinfer("fa2")),
        "flashinfer_fa3": Peer(f"{flashinfer} MLA fa3", fa3, _prepare_flashinfer("fa3")),
        "flashinfer_trtllm": Peer(f"{flashinfer} trtllm-gen MLA", sm100, _prepare_trtllm),
        "flashinfer_cutlass": Peer(f"{flashinfer} CUTLASS MLA", sm100, _prepare_flashinfer("cutlass")),
        "torch_sdpa": Peer(f"torch {torch.__version__} SDPA, boolean mask", None, _prepare_sdpa),
    }
