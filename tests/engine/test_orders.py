"""Orders start engines in processes of their own, and keep what those told, however they end."""

from __future__ import annotations

import math
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Space

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


def dies(order: Order) -> None:
    tell(("start", 1))
    print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
    os._exit(1)


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


def test_an_engine_that_dies_says_why_and_what_it_told_and_printed_is_kept(monkeypatch, tmp_path):
    started_as(monkeypatch, dies)
    monkeypatch.setenv(orders.LOGS, str(tmp_path / "logs"))
    told = dict(run({"TRITON_MLA, off": ORDER}, timeout_s=60, at_once=1))
    why = "rows: ended with 1 and said: CUDA error: an illegal memory access"
    assert told == {"TRITON_MLA, off": orders.EngineResult({"start": 1}, why)}
    assert "illegal memory access" in (tmp_path / "logs/TRITON-MLA-off.log").read_text()


@pytest.mark.parametrize(
    ("version", "free", "said"),
    [
        (None, 2**40, "vLLM is not installed; install vLLM 0.22.1 to 0.26.0"),
        ("0.22.0", 2**40, "vLLM 0.22.0 is not one that these questions know"),
        ("0.26.1", 2**40, "vLLM 0.26.1 is not one that these questions know"),
        ("0.22.1", 3 * 2**29, "an engine needs 8 GiB of free GPU memory; 1.5 GiB are free"),
        ("0.22.1", 2**33 - 1, "an engine needs 8 GiB of free GPU memory; 8.0 GiB are free"),
        ("0.22.1", 2**33, "None"),
        ("0.26.0", 2**40, "None"),
    ],
)
def test_the_reason_names_what_is_missing(monkeypatch, version, free, said):
    import torch

    monkeypatch.setattr(devices, "version_of", lambda package: version)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    assert str(unavailable("cuda")).startswith(said)
    assert "needs a CUDA GPU" in str(unavailable("cpu"))


class Made:
    """A child that ends once it was looked at so often."""

    def __init__(self, looks: float, told: list[tuple[str, object]], log: list[str], name: str) -> None:
        self.looks, self.told, self.log, self.name = looks, told, log, name

    def poll(self) -> int | None:
        self.looks -= 1
        return 0 if self.looks < 0 else None

    def wait(self, timeout_s: float) -> children.Ended:
        self.log.append(f"end {self.name}")
        return children.Ended(self.told, 0 if self.looks < 0 else None, "out", "err", timeout_s)


@pytest.fixture(name="made")
def made_fixture(monkeypatch):
    """Engines without a process: an order's ``model`` is its name."""
    log, now = [], [100.0]
    whole = [("start", 1), ("rows", 2)]

    def start(order: Order, compiled: Path) -> Made:
        log.append(f"start {order.model} in {compiled.name}")
        return Made(*order.options.get("made", (0, whole)), log, order.model)

    monkeypatch.setattr(orders, "start", start)
    clock = Space(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(orders, "time", clock)
    return log


def one(name: str, looks: float = 0, told: object = None, **fields: object) -> Order:
    told = [("start", 1), ("rows", 2)] if told is None else told
    return Order(name, {start: {}, rows: {}}, {"made": (looks, told)}, **fields)


def test_as_many_engines_run_at_a_time_as_fit(made, monkeypatch):
    import torch

    # Three cores, of which two are left: one engine at a time; and so without that number.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    names = "a b", "c", "d"
    for at_once in (1, None):
        made.clear()
        told = [*run({name: one(name, looks=2) for name in names}, at_once=at_once)]
        # An engine has a folder of compiled kernels of its own.
        assert made == ["start a b in a-b", "end a b", "start c in c", "end c", "start d in d", "end d"]
        assert told == [(name, orders.EngineResult({"start": 1, "rows": 2}, None)) for name in names]
    made.clear()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert [name for name, _ in run({name: one(name, looks=2) for name in names})] == [*names]
    made.clear()
    [*run({name: one(name, looks=2) for name in names}, at_once=2)]
    assert made[:3] == ["start a b in a-b", "start c in c", "end a b"]


def test_engines_that_share_kernels_wait_for_each_other_and_not_for_others(made):
    group = {name: one(name, looks=2, kernels="mla, off") for name in ("a", "b")}
    [*run({**group, "c": one("c", looks=3), "d": one("d", looks=3)}, at_once=4)]
    assert made[:3] == ["start a in mla-off", "start c in c", "start d in d"]
    assert made.index("end a") < made.index("start b in mla-off")


@pytest.mark.parametrize(
    ("ranks", "gpus", "runs"), [(2, 1, False), (2, 2, True), (1, 0, True), (3, 2, False)]
)
def test_an_engine_of_more_ranks_than_gpus_does_not_start(made, monkeypatch, ranks, gpus, runs):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    told = dict(run({"wide": one("wide", ranks=ranks), "a": one("a")}, at_once=1))
    why = None if runs else f"needs {ranks} GPUs, this machine has {gpus}"
    assert (told["wide"].failed, told["a"].failed) == (why, None)
    assert ("start wide in wide" in made) == runs


def test_time_that_ends_is_that_of_an_engine_or_of_all(made):
    # An engine that is looked at every 0.05 s and never ends.
    slow = {"a": one("a", looks=math.inf, told=[("start", 1)]), "b": one("b", looks=2)}
    told = dict(run(slow, timeout_s=7, at_once=2))
    assert told["a"] == orders.EngineResult({"start": 1}, "rows: gave no answer within 7 s")
    assert told["b"].failed is None
    with orders.at_most(9), orders.at_most(None):
        assert orders.left_s() == 9
        with orders.at_most(5):
            assert orders.left_s() == 5
        with orders.at_most(50):
            assert orders.left_s() == 9, "the whole of a run has no more"
        told = dict(run({**slow, "c": one("c")}, timeout_s=60, at_once=1))
    assert [*told] == ["b", "c", "a"]
    assert told["a"].failed == "rows: gave no answer within 9 s"
    assert {told["b"].failed, told["c"].failed} == {"the time of all engines ended first"}
    assert orders.left_s() == math.inf
    with pytest.raises(KeyError), orders.at_most(5):
        raise KeyError
    assert orders.left_s() == math.inf


@pytest.mark.parametrize(
    ("told", "failed"),
    [
        ([("start", 1), ("rows", 2)], None),
        # All was answered before it failed.
        ([("start", 1), ("rows", 2), ("error", "late")], None),
        ([("rows", 2), ("error", "ValueError: no"), ("more", 3)], "start: ValueError: no"),
        ([("start", 1), ("more", 2)], "rows: ended early"),
        ([], "start, rows: ended with 0 and said: nothing"),
    ],
)
def test_what_is_missing_of_an_engine_that_ended(told, failed):
    ended = children.Ended(told, 0, "", "", 60.0)
    assert orders.result_of(ORDER, ended) == orders.EngineResult(dict(told), failed)


@pytest.mark.parametrize(
    "own", [{}, {"VLLM_DISABLE_COMPILE_CACHE": "0"}, {"TORCHINDUCTOR_CACHE_DIR": "/own"}]
)
def test_an_engines_variables_are_its_own_before_all_others(monkeypatch, own):
    """Without any of its own nothing is loaded that another engine compiled."""
    started = []
    monkeypatch.setattr(children, "start", lambda *args, env: started.append((args, dict(env))))
    order = replace(ORDER, patches="kv_reuse", env={"A": "1", **own})
    orders.start(order, Path("/compiled"))
    ((args, env),) = started
    assert args == (orders.session.serve, order)
    ours = {"STALEPROOF_PATCHES": "kv_reuse", "TORCHINDUCTOR_CACHE_DIR": "/compiled"}
    all_others = {**orders.whole_vllm.ENVIRONMENT, "VLLM_DISABLE_COMPILE_CACHE": "1", **ours}
    assert env == {**all_others, **order.env}


def test_logs_are_kept_only_in_a_folder_that_is_named(monkeypatch, tmp_path):
    ended = children.Ended([("start", 1)], 0, "out", "err", 60.0)
    monkeypatch.chdir(tmp_path)
    for folder in ("", None):
        monkeypatch.delenv(orders.LOGS, raising=False)
        if folder is not None:
            monkeypatch.setenv(orders.LOGS, folder)
        orders.keep_log("a", ended)
    assert not [*tmp_path.iterdir()]
    monkeypatch.setenv(orders.LOGS, str(tmp_path / "deep" / "logs"))
    for name in ("Kimi-Linear, 0.22.1 (off)", "a"):
        orders.keep_log(name, ended)
    logs = tmp_path / "deep" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["Kimi-Linear-0-22-1-off-.log", "a.log"]
    assert (logs / "a.log").read_text() == "[('start', 1)]\nout\nerr"


@pytest.mark.parametrize(
    ("free", "cores", "fit"),
    [(2**40, 16, 14), (16 * 2**30, 16, 2), (16 * 2**30 - 1, 16, 1), (0, 16, 1), (2**40, 2, 1), (2**40, 4, 2)],
)
def test_each_engine_takes_memory_and_a_core(free, cores, fit):
    assert orders.width(free, cores) == fit


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
