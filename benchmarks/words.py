"""What users see of a real model when its decode steps are CUDA graphs over released MLA kernels.

SmolLM2-135M-Instruct in float32; q, the KV cache and the attention output are bfloat16. The step of all 30
layers is one graph of 8 rows. A kernel that plans on the host is planned and captured again before each step;
the others are captured once. The model and the kernels are released ones. That they run together, the
quantiser (one fp8 scale for all rows, as vLLM's ``QuantFP8.forward_native``) and the poison are ours.

Each line of the output is one run: its texts, its token ids, the step in which each request died, and whether
the token ids equal those of a clean run of the same kernel, which clears padding rows with ``masked_fill_``.

Run: ``python benchmarks/words.py --out FOLDER [--model FILE]`` on a machine with a CUDA device, for about two
minutes. On a CPU it rehearses: no graphs, interpreted kernels, float32; there, give ``--tokens 3 --rows 4``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from staleproof import device, words

DEVICE = device.select()

from staleproof.incidents.mla_padding import broken
from staleproof.kernels.adapter import Peer
from staleproof.kernels.flashinfer import flashinfer_peers
from staleproof.kernels.mla import torch_sdpa
from staleproof.kernels.vllm import flashmla
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.mla.decode import mla_decode
from staleproof.words import kernels
from staleproof.words.server import SCALE, Kernel, Served, Server

NAN = torch.nan
GRADE = "real model, released kernel, real graph; their combination, the quantiser and the poison are ours"


class Planned:
    """A kernel that plans on the host, from a :class:`Peer`: its launches are prepared before each step."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.launches: dict[int, tuple[torch.Tensor, Callable[[], Any]]] = {}

    def plan(self, server: Server) -> None:
        """Prepare a launch for each layer, from the lengths and the block table of the next step."""
        for layer, out in enumerate(server.out):
            q = torch.zeros(*out.shape[:2], server.cache.shape[-1], dtype=out.dtype, device=out.device)
            given = server.cache[layer], server.table, server.seq_lens, SCALE, None, out
            self.launches[out.data_ptr()] = q, self.peer.prepare(q, *given)

    def __call__(self, q, kv_cache, block_table, seq_lens, *, softmax_scale, out) -> None:
        planned_q, launch = self.launches[out.data_ptr()]
        planned_q.copy_(q)
        result = launch()[0]
        if result.data_ptr() != out.data_ptr():
            out.copy_(result)


class GraphServer(Server):
    """Replays a CUDA graph of the whole step; on a CPU it runs the step."""

    graph: Any = None
    captures = 0

    def run_step(self) -> None:
        """Plan and capture where that is due, fill the memory, replay."""
        planned = self.kernel if isinstance(self.kernel, Planned) else None
        if planned is not None:
            planned.plan(self)
        if DEVICE == "cpu":
            return super().run_step()
        if self.graph is None or planned is not None:
            if self.graph is None:
                # Compiles kernels. It writes what the replay will write again.
                self.step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
            self.captures += 1
        self.memory(self.out)
        self.graph.replay()


def as_allocated(kernel: Kernel) -> Kernel:
    """The kernel with new memory for its output, which nobody filled: in a graph, of the graph's pool."""

    def call(q, kv_cache, block_table, seq_lens, *, softmax_scale, out) -> None:
        new = torch.empty_like(out)
        kernel(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale, out=new)
        out.copy_(new)

    return call


def masked_fill(out: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """What :func:`clear_empty_rows` does, in torch."""
    out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)


def all_kernels() -> dict[str, tuple[str, Kernel | str]]:
    """Key -> what it is, and the kernel, or why it cannot run here."""
    release = kernels.vllm_release()
    found: dict[str, tuple[str, Kernel | str]] = {
        "replica": ("ours: leaves empty rows unwritten", broken.empty_row_not_written),
        "vllm": (
            f"vLLM {release[0]} Triton MLA, unmodified source" if release else "vLLM's Triton MLA",
            kernels.vllm_triton if release else "no source of vLLM is here",
        ),
        "mla_decode": ("ours: staleproof.mla_decode", mla_decode),
    }
    if DEVICE == "cpu":
        found = {"torch": ("ours, in torch: leaves empty rows unwritten", kernels.torch_unwritten)} | found
    for key, peer in {**flashinfer_peers(), "flashmla": flashmla(), "torch_sdpa": torch_sdpa()}.items():
        found[key] = peer.name, peer.unavailable_reason or Planned(peer)
    return found


def runs_of(kernel: Kernel) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name -> number of requests, and options of the server. A clean run comes first."""
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "clean": (3, {"clear": masked_fill}),
        "NaN": (3, {"memory": NAN}),
        "NaN, clear_empty_rows": (3, {"memory": NAN, "clear": clear_empty_rows}),
        "full, clean": (8, {"clear": masked_fill}),
        "full, NaN": (8, {"memory": NAN}),
        "full, NaN, clear_empty_rows": (8, {"memory": NAN, "clear": clear_empty_rows}),
    }
    if isinstance(kernel, Planned):
        return runs
    return runs | {
        "NaN, again": (3, {"memory": NAN}),
        "zeros": (3, {}),
        "x 1,000": (3, {"memory": 1e3}),
        "x 1,000, clear_empty_rows": (3, {"memory": 1e3, "clear": clear_empty_rows}),
        "x 100,000": (3, {"memory": 1e5}),
        "x 100,000, clear_empty_rows": (3, {"memory": 1e5, "clear": clear_empty_rows}),
        "as allocated": (3, {"kernel": as_allocated(kernel)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of words.jsonl")
    parser.add_argument("--model", type=Path, help="the GGUF file; by default that of the installed wheel")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--kernels", nargs="*", help="some of them")
    parser.add_argument("--commit", default="", help="of this checkout, to be written down")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = words.load(given.model, DEVICE)
    on_gpu = DEVICE == "cuda"
    head = {"machine": device.machine().as_dict(), "commit": given.commit, "date": time.strftime("%Y-%m-%d")}
    grade = GRADE if on_gpu else "interpreted kernels, no graph"
    with (given.out / "words.jsonl").open("w") as file, torch.inference_mode():

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        write(**head, grade=grade, rows=given.rows, tokens=given.tokens, model="SmolLM2-135M-Instruct")
        for key, (name, kernel) in all_kernels().items():
            if given.kernels and key not in given.kernels:
                continue
            if isinstance(kernel, str):
                write(kernel=key, name=name, not_run=kernel)
                print(f"{key}: not run, {kernel}", flush=True)
                continue
            clean: dict[int, Served] = {}
            for run, (requests, options) in runs_of(kernel).items():
                if requests > given.rows:
                    continue
                options = {"kernel": kernel, "memory": 0.0} | options
                options["memory"] = kernels.memory_of(options["memory"])
                start = time.perf_counter()
                try:
                    server = GraphServer(
                        model,
                        quantise=broken.quantise_amax_torch_max,
                        rows=given.rows,
                        page=64,
                        longest=128,
                        dtype=torch.bfloat16 if on_gpu else torch.float32,
                        **options,
                    )
                    served = server.serve(words.PROMPTS[:requests], given.tokens)
                except Exception as error:
                    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    write(kernel=key, name=name, run=run, not_run=why)
                    print(f"{key}, {run}: not run, {why}", flush=True)
                    continue
                clean.setdefault(requests, served)
                equal = served.token_ids == clean[requests].token_ids
                write(
                    kernel=key,
                    name=name,
                    run=run,
                    equal_to_clean=equal,
                    died=served.died,
                    ended=served.ended,
                    prompts=served.prompts,
                    texts=served.texts,
                    token_ids=served.token_ids,
                    graph=f"{server.captures} captures" if on_gpu else "none",
                    seconds=round(time.perf_counter() - start, 2),
                )
                print(f"{key}, {run}: equal to clean: {equal}, died in {served.died}", flush=True)
                print(*(f"    {text[:100]!r}" for text in served.texts), sep="\n", flush=True)


if __name__ == "__main__":
    main()
