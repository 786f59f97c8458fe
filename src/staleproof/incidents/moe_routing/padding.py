"""The question which passes of a server have padding, and whether its rows hold NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

import torch

from staleproof.cases.answers import Answer, no_answer
from staleproof.cases.children import ChildError
from staleproof.device import Provenance
from staleproof.incidents.moe_routing import ranks
from staleproof.incidents.moe_routing.origin import Setting

PADDING = "NaN in padding rows"
NEARLY_ALL, SOME, NONE = "nearly all", "some", "none"
# Servers, with what NaN in the padding of their attention output must come to.
SERVERS: dict[str, tuple[Setting, str | None]] = {
    "1 rank": (Setting(), NEARLY_ALL),
    "1 rank, fp32 never in that memory": (Setting(wide=False), NONE),
    "1 rank, output zeroed": (Setting(zeroed=True), NONE),
    "1 rank, no graphs": (Setting(graphs=False), NONE),
}
# The layout of PyTorch's allocator is not ours to fix, so there is no expected verdict.
PYTORCH = {"1 rank, PyTorch's allocator": (Setting(allocator="torch"), None)}
_PARALLEL = {"DP 2": Setting(ranks=2), "DEP 2": Setting(ranks=2, expert_parallel=True)}
GLOO, NCCL = ({f"{n}, {b}": (s, NEARLY_ALL) for n, s in _PARALLEL.items()} for b in ("gloo", "NCCL"))
# vLLM #39593, Qwen3-30B-A3B BF16, GSM8K: steps with padding, with NaN, with Inf, mean padding.
REPORTED = {"1 rank": (62, 62, 5, 4.0), "DP 2": (832, 829, 22, 16.7), "DEP 2": (729, 729, 11, 14.2)}


def padding(device: str) -> Iterator[Answer]:
    """Which passes of a server have padding, and what its rows contain: alone, DP 2 and DEP 2."""
    no_cuda = None if device == "cuda" else "needs a CUDA device"
    no_nccl = None if device == "cuda" and torch.cuda.device_count() >= 2 else "needs two CUDA devices"
    for servers, where, why in (
        (SERVERS, device, None),
        (PYTORCH, device, no_cuda),
        (GLOO, "cpu", None),
        (NCCL, device, no_nccl),
    ):
        if why:
            yield from (no_answer(why, question=PADDING, variant=name) for name in servers)
        else:
            yield from _served(servers, where)


def _served(servers: Mapping[str, tuple[Setting, str | None]], device: str) -> Iterator[Answer]:
    # Ranks on the CPU measure nothing, also on a machine with a GPU.
    on_cpu = device == "cpu"
    changes = {"provenance": Provenance.INTERPRETED} if on_cpu else {}
    try:
        counts = ranks.serve_ranks([setting for setting, _ in servers.values()], device)
    except ChildError as error:
        for name, (_, expected) in servers.items():
            yield Answer("failed", {}, str(error), PADDING, name, expected or NEARLY_ALL, changes=changes)
        return
    for (name, (_, expected)), of_server in zip(servers.items(), counts, strict=True):
        # The padding of an idle rank is zeros, because attention fills it in a dummy step.
        busy = of_server.padded - of_server.idle
        share = of_server.with_nan / busy if busy else 0.0
        verdict = NEARLY_ALL if share >= 0.9 else SOME if share else NONE
        numbers = asdict(of_server) | {"mean_padding": round(of_server.mean_padding, 2)}
        del numbers["sizes"]
        yield Answer(verdict, numbers, "ranks on the CPU" * on_cpu, PADDING, name, expected, changes=changes)
