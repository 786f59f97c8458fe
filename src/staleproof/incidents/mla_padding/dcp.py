"""Decode context parallelism: a rank without keys, in the merges that vLLM and SGLang shipped.

Two ranks share the keys of two requests; the second request is short, and rank 1 has none of its keys. That
rank's row is NaN and its lse -inf, as a kernel leaves them that divides by a sum of 0. Each rank calls the
release's own merge, whose kernels Triton interprets on a CPU; the exchange between ranks is ours. Which
attention kernel leaves a NaN there is another question, and not asked here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Space
from typing import Any

import torch

from staleproof import sglang
from staleproof.grades import Evidence, Grade
from staleproof.kernels.vllm_sources import executed, package
from staleproof.lab import Answer, Fix, Incident, MissingError, bad, good
from staleproof.vllm.patches.mla_padding import EXCHANGED, GATHERED
from staleproof.vllm.plugin import patches

RANKS, REQUESTS, HEADS, DIM = 2, 2, 4, 16
# Largest difference to the reference that counts as rounding: float32, values of up to 3.
ROUNDING = 1e-5
SGLANG = "0.5.23"
COMM, PLUGINS = "sglang.srt.layers.dcp.comm", "sglang.srt.plugins.hook_registry"


def partials() -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's outputs ``(ranks, requests, heads, dim)`` and natural lse, with a row without keys."""
    draw = torch.Generator().manual_seed(3)
    out = torch.randn(RANKS, REQUESTS, HEADS, DIM, generator=draw)
    lse = torch.randn(RANKS, REQUESTS, HEADS, generator=draw)
    out[1, 1], lse[1, 1] = torch.nan, -torch.inf
    return out, lse


def reference() -> torch.Tensor:
    """The merged outputs ``(requests, heads, dim)``: of the short request those of rank 0 alone."""
    out, lse = partials()
    weights = lse.softmax(0)[..., None]
    return torch.where(weights == 0, 0.0, out * weights).sum(0)


def gathered(module: ModuleType) -> torch.Tensor:
    """vLLM's merge after an all-gather of the lse; the ranks' parts are summed as reduce-scatter does."""
    out, lse = partials()
    parts = [module.correct_attn_out(out[rank].clone(), lse.clone(), rank, None)[0] for rank in range(RANKS)]
    return torch.stack(parts).sum(0)


def exchanged(merge: Callable[[torch.Tensor, torch.Tensor, int, Any], Any], after: Any) -> torch.Tensor:
    """A merge after an all-to-all. Each rank runs twice: in the second round it gets what all have sent.

    Args:
        merge: ``merge(out, lse, rank, exchange)``, ``exchange(received, sent)`` fills the first.
        after: heads of each rank's result, an axis.
    """
    out, lse = partials()
    sent: dict[int, torch.Tensor] = {}
    for _ in range(2):
        parts = []
        for rank in range(RANKS):

            def exchange(received: torch.Tensor, mine: torch.Tensor, rank: int = rank) -> None:
                sent[rank] = mine.clone()
                chunks = [one.chunk(RANKS)[rank] for one in sent.values()]
                received[: sum(map(len, chunks))] = torch.cat(chunks)

            parts.append(merge(out[rank].clone(), lse[rank].clone(), rank, exchange))
    return torch.cat(parts, after)


def _vllm_exchange(out: torch.Tensor, lse: torch.Tensor, rank: int, exchange: Any) -> Any:
    module = importlib.import_module(EXCHANGED)

    def send(received: torch.Tensor, mine: torch.Tensor, **options: Any) -> Any:
        exchange(received, mine)
        return Space(wait=lambda: None)

    # The functions of torch.distributed that it calls.
    vars(module)["dist"] = Space(all_to_all_single=send)
    return module.dcp_a2a_lse_reduce(out, lse, Space(world_size=RANKS, device_group=None))


def _vllm(version: str, name: str) -> torch.Tensor:
    module = importlib.import_module(name)
    return gathered(module) if name == GATHERED else exchanged(_vllm_exchange, 1)


def sglang_folder() -> Path:
    """The folder ``sglang`` of the release: installed, or unpacked by ``tests/vllm/environment.py``.

    Raises:
        MissingError: it is neither.
    """
    with contextlib.suppress(sglang.PatchError):
        version, folder = sglang.installed()
        if version == SGLANG:
            return folder
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staleproof/vllm"
    folder = Path(os.environ.get("STALEPROOF_VLLM_CACHE", home)) / f"sglang-{SGLANG}/sglang"
    if not folder.is_dir():
        raise MissingError(f"SGLang {SGLANG} is neither installed nor in the cache of tests/vllm")
    return folder


def _sglang_gathered(comm: ModuleType) -> torch.Tensor:
    out, lse = partials()
    parts: list[torch.Tensor] = []

    def reduce_scatter(part: torch.Tensor, dim: int) -> torch.Tensor:
        parts.append(part.transpose(0, 1))
        return part.chunk(RANKS, dim)[0]

    for rank in range(RANKS):
        group = Space(
            world_size=RANKS,
            rank_in_group=rank,
            all_gather=lambda mine, dim: lse.flatten(0, 1),
            reduce_scatter_along_dim=reduce_scatter,
        )
        comm.cp_lse_ag_out_rs_mla(out[rank].clone(), lse[rank].clone(), group, is_lse_base_on_e=True)
    return torch.stack(parts).sum(0)


def _sglang_exchange(comm: ModuleType) -> torch.Tensor:
    def merge(out: torch.Tensor, lse: torch.Tensor, rank: int, exchange: Any) -> Any:
        group = Space(world_size=RANKS, all_to_all_single=exchange)
        return comm.dcp_a2a_lse_reduce(out, lse, group)

    return exchanged(merge, 1)


# Engine, release, how the ranks exchange, whether the patch is in place.
Subject = tuple[str, str, str, bool]
GATHER, EXCHANGE = "all-gather", "all-to-all"


@contextlib.contextmanager
def _loaded(subject: Subject) -> Iterator[Callable[[], torch.Tensor]]:
    """The merge of a release, inside a ``with``."""
    engine, version, way, patched = subject
    with contextlib.ExitStack() as stack:
        if engine == "vLLM":
            name = GATHERED if way == GATHER else EXCHANGED
            stack.enter_context(executed(package(version), GATHERED, EXCHANGED))
            if patched:
                stack.enter_context(patches()["dcp_merge"].applied(version))
            yield lambda: _vllm(version, name)
            return
        folder = sglang_folder()
        kernels = "sglang.kernels.ops.attention.dcp_kernels"
        stack.enter_context(executed(folder, COMM, kernels, PLUGINS, of="sglang"))
        memory = importlib.import_module("sglang.srt.distributed.device_communicators.pynccl_allocator")
        vars(memory)["use_symmetric_memory"] = lambda group: contextlib.nullcontext()
        comm = importlib.import_module(COMM)
        if patched:
            registry = importlib.import_module(PLUGINS).HookRegistry
            stack.callback(registry.reset)
            sglang.register(version, folder)
            registry.apply_hooks()
        yield lambda: (_sglang_gathered if way == GATHER else _sglang_exchange)(comm)


def rank_without_keys(subject: Subject, device: str) -> Answer:
    """Rank 1 has none of a request's keys. Are the merged outputs of both requests right?"""
    with _loaded(subject) as merge:
        found, right = merge(), reference()
    dead = found.isnan().flatten(1).any(1).tolist()
    error = float((found - right).nan_to_num().abs().max())
    if any(dead):
        return bad("NaN", dead_requests=dead, error_of_others=error)
    return good("right", error=error) if error <= ROUNDING else bad("wrong, finite", error=error)


def compare(subject: Subject, device: str) -> str | None:
    """Requests with keys on both ranks must have the outputs that they have without the patch, to the bit."""
    found = []
    for patched in (False, True):
        with _loaded((*subject[:3], patched)) as merge:
            found.append(merge()[0])
    return None if torch.equal(*found) else "a request with keys on both ranks has other outputs"


def _interpreted(subject: Subject, device: str) -> str | None:
    return None if device == "cpu" else "its kernels run in Triton's interpreter, on a CPU"


SUBJECTS: dict[str, Subject] = {
    f"{engine} {version}, {way}": (engine, version, way, False)
    for engine, version, way in (
        ("vLLM", "0.24.0", GATHER), ("vLLM", "0.24.0", EXCHANGE), ("vLLM", "0.26.0", GATHER),
        ("vLLM", "0.26.0", EXCHANGE), ("SGLang", SGLANG, GATHER), ("SGLang", SGLANG, EXCHANGE),
    )
}  # fmt: skip
GUARDED = f"vLLM 0.26.0, {GATHER}"


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    more: dict[str, Any] = {
        "needs": _interpreted,
        "evidence": lambda subject: Evidence(Grade.REAL, f"{subject[0]} {subject[1]} merge of ranks"),
    }
    expect = dict.fromkeys(SUBJECTS, "NaN") | {GUARDED: "right"}
    incident.question("rank without keys", SUBJECTS, expect=expect, **more)(rank_without_keys)
    fixes = {
        f"dcp_merge, {name}": Fix(subject, (*subject[:3], True))
        for name, subject in SUBJECTS.items()
        if name != GUARDED
    }
    incident.fixes(rank_without_keys, fixes, compare=compare, **more)
