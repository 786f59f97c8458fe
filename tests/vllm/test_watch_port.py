"""The watch's port against a watch without an engine: scrapes, the command, a port that is taken."""

import contextlib
import http.client
import json
import os
import socket
import struct
import sys
import threading
import time
from types import SimpleNamespace as Space
from unittest.mock import Mock

import pytest
import torch
from made_up import free_port
from tests.made import arrived

from staleproof import device
from staleproof.cli import app as cli
from staleproof.vllm import watch_client, watch_port
from staleproof.vllm.standing import registry
from staleproof.vllm.watch import Reading, Settings, Watch
from staleproof.vllm.watch_blocks import ATTENTION, STATE, Blocks
from staleproof.vllm.watch_memory import Memory
from staleproof.vllm.watch_owners import Part

pytest.importorskip("prometheus_client")

DEVICE = device.select()


@pytest.fixture(name="served", scope="module")
def served_fixture():
    device.select()
    watch, port = Watch(Settings(), DEVICE), free_port()
    blocks, memory = Blocks([STATE, ATTENTION], [16, 16]), Memory(None, lambda: 2**20)
    watch_port.serve(watch, port, blocks, memory)
    blocks.stale[STATE, ATTENTION] += 2
    memory.ready()
    memory.latest = {"layers.*.out": 2**21}
    watch.begin_step(3)
    watch.observe("attention", "layers.0", torch.full((8, 4), torch.nan, device=DEVICE))
    watch.observe(
        "router", "layers.0", *(torch.ones(8, 2, dtype=dtype, device=DEVICE) for dtype in (None, torch.int64))
    )
    arrived(watch)
    return watch, f"localhost:{port}"


@pytest.fixture(name="url")
def url_fixture(served):
    return served[1]


def test_a_scrape_has_what_was_counted(url):
    rows = watch_client.rows(watch_client.fetch(url))
    assert ("attention", "layers.0", 5, 3) in rows
    assert ("expert twice", "layers.0", 5, 3) in rows


@pytest.mark.parametrize(("at", "age"), [(90.0, 10.0), (0.0, 0.0)])
def test_a_scrape_has_each_count_that_arrived_and_its_age(monkeypatch, at, age):
    place = "router", "a"
    latest = Reading(8, 2, {place: (1, 2)}, {place: (3, 4)}, {"a": (5, 6)}, {place: 7}, at)
    read = [Part((4, 5), "a", "attention", 1, 3), Part((7,), "b", "attention", 4, None)]
    watch = Space(
        latest=latest, settings=Settings(layers=3, steps=4), steps=9, bad_request="b", bad_blocks=read
    )
    monkeypatch.setattr(watch_port, "time", Space(monotonic=lambda: 100.0))
    assert {
        family.name: [(*sample.labels.values(), sample.value) for sample in family.samples]
        for family in watch_port.Collector(watch)._counts()
    } == {
        "staleproof_bad_rows": [(*place, "padding", 1), (*place, "live", 2)],
        "staleproof_canary_rows": [(*place, "padding", 3), (*place, "live", 4)],
        "staleproof_duplicate_expert_rows": [("a", "padding", 5), ("a", "live", 6)],
        "staleproof_stage_runs": [(*place, 7)],
        "staleproof_steps": [(8,)],
        "staleproof_counted_steps": [(2,)],
        "staleproof_begun_steps": [(9,)],
        "staleproof_reading_age_seconds": [(age,)],
        "staleproof_sample": [("layers", 3), ("steps", 4)],
        "staleproof_bad_row_blocks": [
            ("b", "4-5 of a (steps 1 to 3)", 2),
            ("b", "7 of itself (steps 4 to now)", 1),
        ],
    }


def test_a_scrape_touches_no_device_and_starts_no_copy(url, monkeypatch):

    def forbidden(*args):
        raise AssertionError("a scrape must only read what has arrived")

    monkeypatch.setattr(Watch, "copy", forbidden)
    monkeypatch.setattr(Watch, "reading", forbidden)
    assert watch_client.fetch(url)


def test_many_scrapers_at_once_and_one_that_goes_away(url, capfd):
    host, port = url.split(":")
    gone = socket.create_connection((host, int(port)))
    # Closing it resets the connection: the server's next read or write raises.
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.sendall(b"GET /metrics HTTP/1.1\r\n")
    gone.close()
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(watch_client.fetch(url)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1
    assert len(found) == 8
    # The server was told of the one that is gone first; it answers each in a thread of its own.
    for answering in [t for t in threading.enumerate() if "process_request" in t.name]:
        answering.join(timeout=10)
    assert "Traceback" not in capfd.readouterr().err


def test_the_command_prints_a_table_or_json(url, capsys):
    assert cli.main(["watch", url, "--once"]) == 0
    table = capsys.readouterr().out
    assert "padding rows" in table
    assert "expert twice" in table
    assert "2 blocks of state read as attention before written" in " ".join(table.split())
    assert "2.0 MiB unprofiled: layers.*.out" in table
    assert cli.main(["watch", url, "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    live = {"layer": "layers.0", "rows": "live", "stage": "attention", "value": 3.0}
    assert live in told["bad_rows"]
    assert told["steps"] == told["counted_steps"] == [{"value": 1.0}]
    expected = {("attention", "layers.0", 1.0), ("router", "layers.0", 1.0)}
    assert {(one["stage"], one["layer"], one["value"]) for one in told["stage_runs"]} == expected
    assert told["stale_blocks_read"] == [
        {"written_as": "state", "read_as": "attention", "value": 2.0},
        {"written_as": "attention", "read_as": "attention", "value": 0.0},
    ]
    assert told["unprofiled_bytes"] == [{"owner": "layers.*.out", "value": 2.0**21}]
    assert {one["of"]: one["value"] for one in told["sample"]} == {"layers": 1.0, "steps": 1.0}


def test_the_command_shows_what_the_host_counts_and_which_blocks_are_harmless(url, capsys, monkeypatch):
    # Contain and poison count where there is no bad row to show.
    counts = {"contained_requests": 8, "poisoned_blocks": 344}
    monkeypatch.setattr(watch_port.registry, "counters", dict)  # those of other tests
    monkeypatch.setattr(watch_port.live, "health", lambda required: _health([{"counts": counts}]))
    assert watch_client.counters(watch_client.fetch(url)) == "contained requests 8; poisoned blocks 344"
    assert cli.main(["watch", url, "--once"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "contained requests 8; poisoned blocks 344" in table
    assert "0 blocks of attention read as attention before written (harmless)" in table
    assert "2 blocks of state read as attention before written 0 blocks" in table


def test_bad_input_of_the_command_is_one_line(capsys):
    assert cli.main(["watch", f"localhost:{free_port()}", "--once"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["watch", "localhost:1", "--json"]) == 2
    assert "--json needs --once" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--once"], ["--once", "--json"]])
def test_a_server_without_a_watch_shows_no_table_of_zeros(capsys, options):
    port = watch_port.serve(None, 0)
    assert cli.main(["watch", f"localhost:{port.server_address[1]}", *options]) == 2
    said = capsys.readouterr()
    assert said.err.endswith(": a server answers, but no watch runs in it\n")
    assert said.out == ""


def test_a_port_of_somebody_else_is_no_watch():
    from prometheus_client import CollectorRegistry, start_http_server

    port = free_port()
    start_http_server(port, registry=CollectorRegistry())
    with pytest.raises(watch_client.WatchError, match="no metrics of staleproof"):
        watch_client.fetch(f"http://localhost:{port}/metrics")


def test_a_port_in_use_is_one_line(caplog):
    """The counts and the line of their first bad row are still there, as after any other failure of it."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert watch_port.serve(Watch(Settings(), DEVICE), taken.getsockname()[1]) is None
    (line,) = caplog.messages
    assert "cannot be opened" in line


def test_a_port_that_cannot_be_is_one_line(caplog):
    """The port of a rank is the first one's and its number, which may be too large."""
    assert watch_port.serve(Watch(Settings(), DEVICE), 65536) is None
    (line,) = caplog.messages
    assert line.startswith("staleproof: watch without a port: 65536 cannot be opened: ")


def test_without_prometheus_client_there_is_no_port_and_one_line(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert watch_port.serve(None, 0) is None
    assert caplog.messages == ["staleproof: state without a port: prometheus_client is not installed"]


# The last one is an address of documentation (RFC 5737).
@pytest.mark.parametrize("host", ["no.such.host", "a..b", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_named_and_not_the_port(caplog, monkeypatch, host):
    monkeypatch.setenv(watch_port.HOST, host)
    if host == "no.such.host":  # as a resolver says, which may take long to say it
        error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(watch_port, "Port", Mock(side_effect=error))
    assert watch_port.serve(None, 0) is None
    (line,) = caplog.messages
    expected = f"{watch_port.HOST}: expected a name or address of this machine, got {host!r}: "
    assert line.startswith(f"staleproof: state without a port: {expected}")


def test_a_forked_child_does_not_keep_the_port():
    """Else a server that is started again finds it taken as long as the child lives."""
    server = watch_port.serve(None, 0)
    pid = os.fork()
    if pid == 0:
        os._exit(server.socket.fileno() != -1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert server.socket.fileno() != -1


def _health(processes):
    each = [{"process": "", "pid": 0, "patches": {}, **one} for one in processes]
    return {"staleproof": "", "vllm": "", "model": "", "ok": True, "patches": {}, "processes": each}


def test_a_count_is_there_before_anything_was_counted(url, monkeypatch):
    """Prometheus sees an increase only of a series that had a value before."""
    monkeypatch.setitem(registry.of("watch").counters, "unwritten_hits", lambda: 0)
    assert b"\nstaleproof_unwritten_hits_total 0.0\n" in _get(url, "/metrics")[1]


def test_a_count_is_the_sum_over_all_processes_of_the_server(url, monkeypatch):
    counts = [{"counts": {"hits": n}} for n in (1, 2, 3)]
    monkeypatch.setattr(watch_port.live, "health", lambda required: _health(counts))
    assert b"\nstaleproof_hits_total 6.0\n" in _get(url, "/metrics")[1]


@pytest.mark.parametrize("host", ["::1", "0:0:0:0:0:0:0:1"])
def test_a_port_answers_on_the_newer_protocol_too(monkeypatch, host):
    monkeypatch.setenv(watch_port.HOST, host)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    port = watch_port.serve(None, 0)
    assert port.address_family == socket.AF_INET6
    assert _get(f"[::1]:{port.server_address[1]}", "/metrics")[0] == 200


def _get(url, path):
    connection = http.client.HTTPConnection(url, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_nothing_but_metrics_and_health_is_served(url):
    # This process has no plugin, so nothing stands.
    answers = {"/": 404, "/metrics/../x": 404, "/debug": 404, "/metrics": 200, "/health?x": 503}
    assert {path: _get(url, path)[0] for path in answers} == answers


@pytest.mark.parametrize(("host", "bound"), [(None, "127.0.0.1"), ("", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")])
def test_the_port_is_this_machines_alone_unless_told(monkeypatch, host, bound):
    if host is not None:
        monkeypatch.setenv(watch_port.HOST, host)
    assert watch_port.serve(None, 0).socket.getsockname()[0] == bound


def test_half_open_connections_cost_a_few_threads_and_end(monkeypatch):
    assert watch_port.Handler.timeout < 10, "Prometheus gives a scrape no longer by default"
    monkeypatch.setattr(watch_port.Handler, "timeout", 1.0)
    address, before, peak = watch_port.serve(None, 0).server_address, threading.active_count(), 0
    half = [socket.create_connection(address) for _ in range(60)]
    for one in half:
        one.sendall(b"GET /met")
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        peak = max(peak, threading.active_count() - before)
        time.sleep(0.01)
    assert peak == watch_port.CONNECTIONS
    # Each is closed by the server, at the latest when its time is over.
    for one in half:
        one.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""
        one.close()
    assert _get(f"localhost:{address[1]}", "/metrics")[0] == 200


def test_a_scrape_that_fails_is_one_line_and_the_counts_are_out_of_service(caplog, capfd, monkeypatch):
    watch = Watch(Settings(), DEVICE)
    url = f"localhost:{watch_port.serve(watch, 0).server_address[1]}"
    assert b"staleproof_watch_up 1.0" in _get(url, "/metrics")[1]
    watch._latest = None
    first, second = (_get(url, "/metrics") for _ in range(2))
    # Out of service is out of service, also where there would be something to read again.
    watch._latest = Reading()
    later = second, _get(url, "/metrics")
    assert first[0] == 200
    assert b"staleproof_watch_up 0.0" in first[1]
    assert {status for status, _ in later} == {200}
    assert not any(b"staleproof_steps" in body for _, body in (first, *later))
    assert all(b"staleproof_watch_up 0.0" in body for _, body in later)
    assert b"staleproof_build_info" in first[1]
    (line,) = caplog.records
    assert line.getMessage().startswith("staleproof: watch: a scrape failed: AttributeError")
    monkeypatch.setattr(watch_port.live, "health", lambda required: 1 / 0)
    assert [_get(url, path)[0] for path in ("/health", "/metrics")] == [503, 503]
    assert "Traceback" not in capfd.readouterr().err
    registry.forget("watch")
