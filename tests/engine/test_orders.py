"""Orders start engines in processes of their own, and keep what those told, however they end."""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.children import tell
from staleproof.engine import orders
from staleproof.engine.models import MODELS, write_config
from staleproof.engine.orders import run, unavailable
from staleproof.engine.session import Order


def start(engine: object) -> None: ...
def rows(engine: object) -> None: ...


ORDER = Order("qwen3", {start: {}, rows: {}})


def answers_all(order: Order) -> None:
    for probe in order.probes:
        tell((probe.__name__, os.environ["STALEPROOF_PATCHES"]))


def stops_half_way(order: Order) -> None:
    tell(("start", 1))
    tell(("error", "ValueError: no such model"))


def dies(order: Order) -> None:
    tell(("start", 1))
    print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
    os._exit(1)


def hangs(order: Order) -> None:
    time.sleep(60)


def started_as(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    """Let an order start this function in place of an engine."""

    def start(order: Order, compiled: Path) -> children.Child:
        return children.start(
            function, order, env={"STALEPROOF_PATCHES": order.patches, orders.CACHE: str(compiled)}
        )

    monkeypatch.setattr(orders, "start", start)


def test_every_probe_is_answered_by_its_own_engine(monkeypatch):
    started_as(monkeypatch, answers_all)
    pair = {"off": ORDER, "on": replace(ORDER, patches="all")}
    told = dict(run(pair, timeout_s=60, at_once=2))
    assert {name: one.answers for name, one in told.items()} == {
        "off": {"start": "none", "rows": "none"},
        "on": {"start": "all", "rows": "all"},
    }
    assert all(one.failed is None for one in told.values())


def compiles(order: Order) -> None:
    """Tells what it finds in its folder of compiled graphs, takes a moment, and adds one."""
    folder = Path(os.environ[orders.CACHE])
    folder.mkdir(exist_ok=True)
    tell(("start", sorted(path.name for path in folder.iterdir())))
    time.sleep(0.3)
    (folder / order.patches).touch()
    tell(("rows", None))


def test_engines_that_share_kernels_start_one_after_another(monkeypatch):
    started_as(monkeypatch, compiles)
    group = {state: replace(ORDER, patches=state, kernels="mla") for state in ("off", "on", "again")}
    told = dict(run({**group, "other": ORDER, "third": ORDER}, timeout_s=60, at_once=5))
    assert {name: one.answers["start"] for name, one in told.items()} == {
        "off": [], "on": ["off"], "again": ["off", "on"], "other": [], "third": []
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "timeout_s", "failed"),
    [
        (stops_half_way, 60, "rows: ValueError: no such model"),
        (dies, 60, "rows: ended with 1 and said: CUDA error: an illegal memory access"),
        (hangs, 1, "start, rows: gave no answer within 1 s"),
    ],
)
def test_an_engine_that_fails_says_why_and_keeps_what_it_told(monkeypatch, function, timeout_s, failed):
    started_as(monkeypatch, function)
    ((name, one),) = run({"one": ORDER}, timeout_s=timeout_s, at_once=1)
    assert (name, one.failed) == ("one", failed)
    assert ("start" in one.answers) == (function is not hangs)


def test_the_time_of_all_engines_ends_what_runs_and_starts_no_more(monkeypatch):
    started_as(monkeypatch, hangs)
    with orders.at_most(1):
        told = dict(run({"one": ORDER, "two": ORDER}, timeout_s=60, at_once=1))
    assert {name: one.failed for name, one in told.items()} == {
        "one": "start, rows: gave no answer within 1 s",
        "two": "the time of all engines ended first",
    }


def test_what_an_engine_printed_is_kept_on_demand(monkeypatch, tmp_path):
    started_as(monkeypatch, dies)
    monkeypatch.setenv(orders.LOGS, str(tmp_path / "logs"))
    list(run({"TRITON_MLA, off": ORDER}, timeout_s=60, at_once=1))
    assert "illegal memory access" in (tmp_path / "logs/TRITON-MLA-off.log").read_text()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "vLLM is not installed; install vLLM 0.22.1 to 0.26.0"),
        ("0.20.2", "vLLM 0.20.2 is not one that these questions know"),
        ("0.33.0", "vLLM 0.33.0 is not one that these questions know"),
        ("0.22.1", None),
        ("0.26.0", None),
    ],
)
def test_the_reason_names_what_to_install(monkeypatch, version, said):
    monkeypatch.setattr(devices, "version_of", lambda package: version)
    monkeypatch.setattr(orders, "_free_bytes", lambda: 100 * 2**30)
    why = unavailable("cuda")
    assert why is None if said is None else why is not None and why.startswith(said)
    assert "needs a CUDA GPU" in str(unavailable("cpu"))


def test_a_gpu_that_is_too_small_is_one_line(monkeypatch):
    monkeypatch.setattr(devices, "version_of", lambda package: "0.22.1")
    monkeypatch.setattr(orders, "_free_bytes", lambda: 3 * 2**29)
    assert unavailable("cuda") == "an engine needs 8 GiB of free GPU memory; 1.5 GiB are free"


def test_every_order_can_be_sent_to_its_process(tmp_path):
    # Here, so that the processes of this file need not import torch.
    from staleproof.engine.cases import BENCHES

    for bench in BENCHES.values():
        for order in bench.orders.values():
            write_config(tmp_path, order.model, order.config)
            assert pickle.loads(pickle.dumps(order)) == order
    assert {order.model for bench in BENCHES.values() for order in bench.orders.values()} == {*MODELS}


def test_an_unknown_model_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"model: expected one of .*qwen3.*, got llama"):
        write_config(tmp_path, "llama", {})
    assert not [*tmp_path.iterdir()]
