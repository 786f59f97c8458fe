"""What the plugin costs while serving: equal servers on one GPU, put under load in turn by vLLM's own client.

    python -m tools.serve_cost --limit 200 --out workbook/runs/nvidia-h200-engine/serving.json
    python -m tools.serve_cost --page workbook/runs/nvidia-h200-engine/serving.json

Four ``vllm serve`` with dummy weights start at once: vLLM alone, vLLM alone again (what two equal servers
differ by), all patches, and a launch of ``nan_to_num(nan=-inf)`` before each router. Then only one is under
load at a time. The client is ``vllm bench serve``, in this process: its imports take longer than a run. Needs
an importable vLLM with its compiled parts, and a GPU. ``--page`` writes the table of ``workbook/serving.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.figures import replaced
from tools.soak_serve import Server, started

from staleproof import device
from staleproof.cases import store
from staleproof.engine.models import write_config

Result = dict[str, float]
# Takes a server's port and model, the rate, how many requests, and a seed.
Bench = Callable[[int, Path, float, int, int], Mapping[str, Any]]

OFF, AGAIN, PLUGIN, REMEDY = "off", "off again", "plugin", "nan_to_num"
# The launch that vLLM #39593 was chosen over, before whatever router a layer has.
NAN_TO_NUM = """
def register():
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    inner = BaseRouter.select_experts
    if inner.__name__ == "cleaned":
        return
    said = []
    def cleaned(self, hidden_states, router_logits, **more):
        if not said:
            said.append(print("nan_to_num before the router", flush=True))
        return inner(self, hidden_states, router_logits.nan_to_num(nan=float("-inf")), **more)
    BaseRouter.select_experts = cleaned
"""
# Server -> its variables, and the code of a plugin beside ours.
SERVERS: dict[str, tuple[dict[str, str], str]] = {
    OFF: ({"VLLM_PLUGINS": ""}, ""),
    AGAIN: ({"VLLM_PLUGINS": ""}, ""),
    PLUGIN: ({"VLLM_PLUGINS": "staleproof", "STALEPROOF_PATCHES": "all"}, ""),
    REMEDY: ({"VLLM_PLUGINS": "soak_fault"}, NAN_TO_NUM),
}
# Text that a server's log must contain, to prove that it ran what its name says.
LOGGED = {PLUGIN: "staleproof on vLLM", REMEDY: "nan_to_num before the router"}
WORDS = 8000
MODEL, CHANGES = "deepseek_v2", {"vocab_size": WORDS}
COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 32, 128]}
OPTIONS = [
    *("--host", "127.0.0.1", "--load-format", "dummy", "--served-model-name", "dummy"),
    *("--max-model-len", "1024", "--max-num-seqs", "128", "--no-enable-prefix-caching"),
    *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**30)),
    *("--attention-backend", "TRITON_MLA", "--moe-backend", "triton"),
    *("--compilation-config", json.dumps(COMPILATION), "--seed", "0", "--disable-uvicorn-access-log"),
]
# Requests a second; infinity sends BURST of them at once.
RATES, BURST, REPETITIONS = (32.0, 96.0, float("inf")), 128, 5
# Seconds of requests of a run at most, what a run at an infinite rate takes about, and those of warming up.
RUN_S, BURST_S, WARM_S = 2.5, 1.2, 1.0
LOAD = {"random-input-len": 64, "random-output-len": 64, "random-range-ratio": 0.5}
METRICS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    **{f"{p}_{of}_ms": f"{of.upper()} {p}, ms" for of in ("ttft", "tpot", "itl") for p in ("p50", "p99")},
}
BEGIN = "<!-- written by python -m tools.serve_cost -->"


def write_model(folder: Path) -> Path:
    """A model with dummy weights, and a tokenizer whose words are numbers: as many tokens as words."""
    model = folder / "model"
    model.mkdir()
    write_config(model, MODEL, CHANGES)
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w2"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | empty | {"model": words}))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1"}
    (model / "tokenizer_config.json").write_text(json.dumps(told))
    return model


def client() -> Bench:
    """``vllm bench serve`` of the installed vLLM, as its command calls it."""
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)

    def bench(port: int, model: Path, rate: float, requests: int, seed: int) -> Mapping[str, Any]:
        load = [text for name, value in LOAD.items() for text in (f"--{name}", str(value))]
        given = parser.parse_args(
            [
                *("--backend", "vllm", "--endpoint", "/v1/completions", "--dataset-name", "random", *load),
                *("--host", "127.0.0.1", "--port", str(port), "--model", str(model)),
                *("--served-model-name", "dummy", "--temperature", "0", "--disable-tqdm"),
                *("--request-rate", str(rate), "--num-prompts", str(requests), "--seed", str(seed)),
                *("--metric-percentiles", "50,99"),
            ]
        )
        return asyncio.run(serve.main_async(given))

    return bench


def requests_of(rate: float, seconds: float) -> int:
    """How many requests a run sends.

    >>> requests_of(16.0, 2.5), requests_of(0.1, 2.5), requests_of(float("inf"), 2.5)
    (40, 8, 128)
    """
    return BURST if rate == float("inf") else max(8, round(rate * seconds))


def in_turns(
    servers: Mapping[str, tuple[int, Path]], bench: Bench, until: float, say: Callable[[str], None]
) -> tuple[dict[str, dict[str, list[Result]]], float]:
    """Put servers under load one at a time; a repetition goes over all of them at each rate.

    The order of the servers is drawn anew each time, so that no drift favours one. A repetition that would
    not be over in time is left out.

    Args:
        servers: name -> port and model.
        bench: one run.
        until: end, on the monotonic clock.

    Returns:
        Server -> rate -> one result a repetition, and the seconds of a run's requests.

    Raises:
        RuntimeError: a request failed.
    """
    found: dict[str, dict[str, list[Result]]] = {name: {str(rate): [] for rate in RATES} for name in servers}
    draw = random.Random(0)
    # Kernels that are compiled at the first call of their size, by all servers at once.
    with ThreadPoolExecutor(len(servers)) as pool:
        for rate in (*RATES, *RATES):
            given = rate, requests_of(rate, WARM_S), 99
            list(pool.map(lambda place, given=given: bench(*place, *given), servers.values()))
    left = until - time.monotonic()
    # Beside its requests a run takes half a second to draw them, and to wait for the last answer.
    each = left / REPETITIONS / len(servers) - BURST_S
    seconds = min(RUN_S, max(1.0, each / (len(RATES) - 1) - 0.6))
    took = 0.0
    for repetition in range(REPETITIONS):
        begun = time.monotonic()
        if begun + took > until:
            say(f"{REPETITIONS - repetition} repetitions left out")
            break
        for rate in RATES:
            for name in draw.sample(list(servers), len(servers)):
                requests = requests_of(rate, seconds)
                got = bench(*servers[name], rate, requests, repetition)
                if got["completed"] != requests:
                    raise RuntimeError(f"{name}, {rate} a second: {got['completed']} answers of {requests}")
                found[name][str(rate)].append({key: float(got[key]) for key in METRICS})
        took = time.monotonic() - begun
    return found, round(seconds, 2)


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest: between these two the true median lies, of five values with 94 %.

    No distribution is assumed, and a value that is far off moves the median little.

    >>> interval([3.0, 626.0, 2.0, 4.0, 1.0])
    {'median': 3.0, 'low': 1.0, 'high': 626.0}
    """
    found = statistics.median(values), min(values), max(values)
    return {name: round(value, 3) for name, value in zip(("median", "low", "high"), found, strict=True)}


def summary(found: Mapping[str, Mapping[str, Sequence[Result]]]) -> dict[str, Any]:
    """For each server, rate and metric the values, median and range, and the comparison with ``off``.

    ``beside_off_percent`` is the ratio in the same repetition minus one, in per cent.
    """
    said: dict[str, Any] = {}
    for name, rates in found.items():
        for rate, results in rates.items():
            for key in METRICS:
                values, off = ([one[key] for one in of] for of in (results, found[OFF][rate]))
                shares = [100 * (a / b - 1) for a, b in zip(values, off, strict=True)]
                held = {"each": [round(value, 3) for value in values], **interval(values)}
                more = {} if name == OFF else {"beside_off_percent": interval(shares)}
                said.setdefault(name, {}).setdefault(rate, {})[key] = held | more
    return said


def lines_of(server: Server, text: str) -> list[str]:
    """The lines of a server's log with this text, once each."""
    found = [line for line in server.log.read_text(errors="replace").splitlines() if text in line]
    return [*dict.fromkeys(line.rpartition("] ")[2] for line in found)]


def measure(
    folder: Path, command: list[str], bench: Callable[[], Bench], limit_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start the servers, put them under load in turn, and return what is recorded.

    Args:
        folder: for logs and what the servers need; it exists.
        command: what is run before the arguments of ``serve``.
        bench: makes the client, while the servers start.
        limit_s: for all together.

    Raises:
        RuntimeError: a server did not start, did not run what its name says, or did not answer.
    """
    begun = time.monotonic()
    write_model(folder)
    made = (
        Server(name, folder, command, variables, OPTIONS, code) for name, (variables, code) in SERVERS.items()
    )
    with started(made) as servers:
        run = bench()
        ready = {name: server.wait(begun + limit_s) for name, server in servers.items()}
        if late := [name for name, seconds in ready.items() if seconds is None]:
            raise RuntimeError(f"did not start: {', '.join(late)}; see {servers[late[0]].log}")
        say(f"started after {time.monotonic() - begun:.0f} s")
        places = {name: (server.port, folder / "model") for name, server in servers.items()}
        found, seconds = in_turns(places, run, begun + limit_s - 5.0, say)
        logged = {name: lines_of(servers[name], text)[:20] for name, text in LOGGED.items()}
    if silent := [name for name, lines in logged.items() if not lines]:
        raise RuntimeError(f"the log of {silent[0]} does not say: {LOGGED[silent[0]]}")
    return {
        "run": {"seconds": seconds, "burst": BURST, "load": LOAD, "options": OPTIONS, "logged": logged},
        "model": {"shape": MODEL, **CHANGES},
        "servers": summary(found),
    }


def cell(told: Mapping[str, Any], name: str) -> str:
    """One cell of the table.

    >>> cell({"median": 3.14159, "low": 3.0, "high": 3.3}, "off")
    '3.14 [3.00, 3.30]'
    >>> beside = {"median": 1.26, "low": -0.5, "high": 3.0}
    >>> cell({"median": 20.04, "beside_off_percent": beside}, "plugin")
    '20.0, +1.3 % [-0.5, +3.0]'
    """

    def short(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"

    if name == OFF:
        return f"{short(told['median'])} [{short(told['low'])}, {short(told['high'])}]"
    beside = told["beside_off_percent"]
    return f"{short(told['median'])}, {beside['median']:+.1f} % [{beside['low']:+.1f}, {beside['high']:+.1f}]"


def table(recorded: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown: a row for each rate and metric, a column for each server."""
    servers = recorded["servers"]
    lines = ["| requests/s sent | | " + " | ".join(servers) + " |", "|---|---|" + "---|" * len(servers)]
    for rate in servers[OFF]:
        sent = "all at once" if rate == "inf" else f"{float(rate):.0f}"
        for key, says in METRICS.items():
            cells = [cell(servers[name][rate][key], name) for name in servers]
            lines.append(f"| {sent} | {says} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for all together")
    parser.add_argument("--out", type=Path, help="where the run is recorded")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs; it does not exist")
    parser.add_argument("--page", type=Path, help="a recorded run, whose table is written")
    given = parser.parse_args(arguments)
    if given.page is not None:
        page, lines = store.checkout() / "workbook/serving.md", table(json.loads(given.page.read_text()))
        page.write_text(replaced(page.read_text(), BEGIN, "\n".join(lines)))
        return
    if given.out is None:
        parser.error("--out: expected where the run is recorded, or --page")
    with tempfile.TemporaryDirectory(prefix="staleproof-serve-") as temporary:
        folder = given.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        said = sys.stdout

        def say(text: str) -> None:
            print(text, file=said, flush=True)

        # The client prints a table for each run.
        with (folder / "client.log").open("w") as log, contextlib.redirect_stdout(log):
            found = measure(folder, command, client, given.limit, say)
    machine = device.machine()
    found["machine"] = {"name": machine.name, "driver": machine.driver, "torch": machine.torch}
    import vllm

    found["vllm"] = vllm.__version__
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
