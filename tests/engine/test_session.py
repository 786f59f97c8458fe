"""An engine's own process: how it starts, its other ranks, and what it tells however it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace as Space

import pytest
from tests.engine.made_engine import stand_in

from staleproof.engine import session, spies
from staleproof.engine.models import MODELS
from staleproof.engine.session import Order


def start(engine: object) -> str:
    return f"{engine} started"


def rows(engine: object, live: int, tokens: int = 24) -> tuple[object, ...]:
    return engine, live, tokens


def broken(engine: object) -> None:
    raise ValueError("no\n such " + 400 * "x")


class Child:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait(self, timeout_s: float) -> Space:
        assert timeout_s == session.OTHERS_S
        return Space(told=[("start", self.number), ("start", -self.number)])


@pytest.fixture(name="told")
def told_fixture(monkeypatch):
    """What the process of an order tells; it ends with 0 as its last answer."""
    told: list[tuple[str, object]] = []
    monkeypatch.setattr(session, "tell", told.append)
    process = Space(environ={"PATH": "/bin"}, _exit=lambda code: told.append(("exit", code)))
    monkeypatch.setattr(session, "os", process)
    streams = {name: Space(flush=lambda name=name: told.append(("flush", name))) for name in ("out", "err")}
    monkeypatch.setattr(session, "sys", Space(stdout=streams["out"], stderr=streams["err"]))
    return told


# Without a teardown nobody else writes what was printed.
END = [("flush", "out"), ("flush", "err"), ("exit", 0)]


def made(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    """Let an order's engine be its name, once its configuration is there."""

    def engine(one: Order, folder: str) -> str:
        assert one is order
        config = json.loads(Path(folder, "config.json").read_text())
        assert config == {**MODELS["qwen3"], "num_hidden_layers": 2}
        return "engine"

    monkeypatch.setattr(session, "start", engine)


def test_every_probe_is_told_at_once_and_the_process_ends(monkeypatch, told):
    order = Order("qwen3", {start: {}, broken: {}, rows: {"live": 3}}, config={"num_hidden_layers": 2})
    made(monkeypatch, order)
    session.serve(order)
    assert told == [
        ("start", "engine started"),
        # In one line, and no longer than 300 characters.
        ("error", f"ValueError: {('no such ' + 400 * 'x')[:300]}"),
        ("rows", ("engine", 3, 24)),
        *END,
    ]


def test_an_engine_that_does_not_start_is_told(monkeypatch, told, capsys):
    order = Order("qwen3", {start: {}}, config={"num_hidden_layers": 2})
    monkeypatch.setattr(session, "start", lambda order, folder: broken(folder))
    session.serve(order)
    assert [name for name, _ in told] == ["error", "flush", "flush", "exit"]
    # The whole of it is in the log.
    assert "ValueError: no\n such" in capsys.readouterr().err


def test_the_other_ranks_serve_alone_and_their_answers_follow(monkeypatch, told):
    order = Order("qwen3", {start: {}}, config={"num_hidden_layers": 2}, ranks=3)
    started, variables = [], []

    def child(function, one, env):
        assert function is session.serve
        started.append(one)
        variables.append(dict(env))
        return Child(len(started))

    monkeypatch.setattr(session.children, "start", child)
    made(monkeypatch, order)
    session.serve(order)
    assert told == [("start", "engine started"), ("rank 1", {"start": -1}), ("rank 2", {"start": -2}), *END]
    # They start no ranks of their own, and are the same engine otherwise.
    alone = Order("qwen3", {start: {}}, config={"num_hidden_layers": 2})
    assert started == [alone] * 2
    port = variables[0]["VLLM_DP_MASTER_PORT"]
    assert 1024 < int(port) < 65536
    common = {
        "VLLM_DP_SIZE": "3",
        "VLLM_DP_MASTER_PORT": port,
        "NCCL_NVLS_ENABLE": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert variables == [{**common, "VLLM_DP_RANK": str(rank)} for rank in (1, 2)]
    assert session.os.environ == {"PATH": "/bin", **common, "VLLM_DP_RANK": "0"}


def test_one_rank_needs_no_variables(monkeypatch, told):
    assert session._other_ranks(Order("qwen3", {})) == []
    assert session.os.environ == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("packages", "named", "added"),
    [(None, "/a", []), ("FOLDERS", None, []), ("FOLDERS", "", []), ("FOLDERS", "/a::/b", ["/a", "/b"])],
)
def test_the_engine_starts_with_the_plugin_then_the_spies(monkeypatch, packages, named, added):
    calls = []

    class LLM:
        def __init__(self, model: str, **options: object) -> None:
            calls.append(("engine", model, options))

    stand_in(monkeypatch, "vllm.plugins", load_general_plugins=lambda: calls.append("plugin"))
    stand_in(monkeypatch, "vllm", LLM=LLM)
    monkeypatch.setattr(spies, "scaled_weights", lambda: calls.append("weights"))
    monkeypatch.setattr(session.time, "perf_counter", iter((3.0, 7.5)).__next__)
    monkeypatch.setattr(sys, "path", before := [*sys.path])
    if named is not None:
        monkeypatch.setenv("FOLDERS", named)
    before = [*before]

    def one(watch: spies.Rows) -> None:
        calls.append(("one", watch))

    def two(watch: spies.Rows) -> None:
        calls.append(("two", watch))

    order = Order("qwen3", {}, {"max_num_seqs": 4, "block_size": 16}, spies=(one, two), packages=packages)
    engine = session.start(order, "/folder")
    options = {**session.OPTIONS, "max_num_seqs": 4, "block_size": 16}
    watch = engine.watch
    assert calls == ["plugin", "weights", ("one", watch), ("two", watch), ("engine", "/folder", options)]
    assert (type(engine.llm), engine.started_s, engine.requests) == (LLM, 4.5, [0])
    assert sys.path == [*before, *added]


@pytest.mark.parametrize(
    ("options", "compiles"), [({}, False), ({"mode": 0}, False), ({"mode": 3}, True), ({"mode": 2}, False)]
)
def test_only_mode_3_compiles(options, compiles):
    given = {"compilation_config": options} if options else {}
    assert Order("qwen3", {}, given).compiles is compiles


def test_a_prompt_that_is_served_again_is_computed_again_and_drawn_alike():
    """The rounds of an engine ask the same prompts, and engines are compared bit by bit."""
    assert not session.OPTIONS["enable_prefix_caching"]
    assert session.OPTIONS["seed"] == 0
