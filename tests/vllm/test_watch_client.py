"""``staleproof watch``: what the samples of a port become, as JSON and as a table."""

from __future__ import annotations

import io
import json
from urllib.error import URLError

import pytest

from staleproof.vllm import watch_client
from staleproof.vllm.watch_client import Sample


def sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name, labels, value)


def bad(stage: str, layer: str, rows: str, value: float) -> Sample:
    return sample("bad_rows", value, stage=stage, layer=layer, rows=rows)


PATCHES = [
    sample("patch_info", 1.0, process="server", patch="moe_routing", state="active"),
    sample("patch_info", 1.0, process="engine", patch="fp8_scales", state="off"),
    sample("patch_info", 1.0, process="server", patch="kv_reuse", state="off"),
]
SAMPLES = [
    sample("steps", 5.0, engine="0"),
    sample("steps", 3.0, engine="1"),
    sample("counted_steps", 8.0),
    bad("attention", "layers.0", "padding", 5.0),
    bad("attention", "layers.0", "live", 2.0),
    bad("attention", "layers.1", "padding", 4.0),
    sample("duplicate_expert_rows", 3.0, layer="layers.0", rows="padding"),
    sample("canary_rows", 2.0, layer="layers.0", rows="padding"),
    sample("canary_rows", 1.0, layer="layers.1", rows="live"),
    sample("stale_blocks_read", 6.0, written_as="state", read_as="keys"),
    sample("bad_row_blocks", 2.0, request="b", blocks="4-5 of a (step 1)"),
    sample("unprofiled_bytes", 3 * 2**19, owner="layers.*.out"),
    sample("unprofiled_bytes", 0.0, owner="nobody"),
    *PATCHES,
]


def test_only_our_samples_are_parsed_and_by_their_short_names():
    text = """# TYPE staleproof_steps counter
staleproof_steps_total 4.0
staleproof_steps_created 1.7e9
# TYPE vllm_steps counter
vllm_steps_total 5.0
# TYPE staleproof_up gauge
staleproof_up{of="a"} 1.0
"""
    assert watch_client.parse(text) == [Sample("steps", {}, 4.0), Sample("up", {"of": "a"}, 1.0)]


@pytest.mark.parametrize("url", ["httpd:1/", "host:1/metrics/", "http://host:1/metrics"])
def test_a_port_may_be_named_with_or_without_scheme_and_path(monkeypatch, url):
    host = "httpd" if "httpd" in url else "host"
    error = URLError(OSError("refused")) if "/" in url else ConnectionRefusedError("refused")
    asked = []

    def refuse(address, timeout):
        asked.append((address.rstrip("/"), timeout))
        raise error

    monkeypatch.setattr(watch_client.urllib.request, "urlopen", refuse)
    with pytest.raises(watch_client.WatchError, match=rf"^http://{host}:1/metrics/?: refused$"):
        watch_client.fetch(url)
    assert asked == [(f"http://{host}:1/metrics", watch_client.TIMEOUT_S)]


def test_what_answers_and_is_no_watch_is_an_error(monkeypatch):
    answer = b"<html>"
    monkeypatch.setattr(watch_client.urllib.request, "urlopen", lambda *_, **given: io.BytesIO(answer))
    with pytest.raises(watch_client.WatchError, match=r"^http://host:1/metrics: .*<html>"):
        watch_client.fetch("host:1")
    # A label in another encoding hides no count.
    answer = b'staleproof_up{of="\xe4"} 1.0\n'
    assert [one.value for one in watch_client.fetch("host:1")] == [1.0]


def test_json_has_every_sample_and_is_in_order_of_name():
    text = watch_client.as_json(SAMPLES)
    told = json.loads(text)
    assert text == json.dumps(told, sort_keys=True)
    assert told["steps"] == [{"engine": "0", "value": 5.0}, {"engine": "1", "value": 3.0}]
    assert sum(map(len, told.values())) == len(SAMPLES)
    assert told["duplicate_expert_rows"] == [{"layer": "layers.0", "rows": "padding", "value": 3.0}]


@pytest.mark.parametrize(
    ("steps", "counted", "layers", "said"),
    [
        ([8], [8], [], "step 8"),
        ([8], [0], [], "step 8"),
        ([], [], [], "step 0"),
        ([5, 4], [2, 1], [], "step 9; counts are of 3 steps: of all there were about 3.0 times as many"),
        ([8], [8], [2], "step 8; one layer in 2"),
        ([8], [8], [1, 4, 2], "step 8; one layer in 4"),
    ],
)
def test_the_heading_says_what_share_is_counted(steps, counted, layers, said):
    samples = [sample("steps", value) for value in steps]
    samples += [sample("counted_steps", value) for value in counted]
    samples += [sample("sample", value, of="layers") for value in layers]
    assert watch_client.heading([*samples, sample("sample", 9.0, of="steps")]) == said


def cells(table) -> list[tuple[str, ...]]:
    return [*zip(*([*column.cells] for column in table.columns), strict=True)]


def test_the_table_has_a_row_for_each_stage_and_layer_and_notes_below():
    table = watch_client.table(SAMPLES)
    assert [column.header for column in table.columns] == ["stage", "layer", "padding rows", "live rows"]
    assert cells(table) == [
        ("attention", "layers.0", "5", "2"),
        ("attention", "layers.1", "4", "0"),
        ("expert twice", "layers.0", "3", "0"),
    ]
    # Only what reached a request is red.
    assert [bool(row.style) for row in table.rows] == [True, False, False]
    assert table.title == "step 8"
    assert table.caption.splitlines() == [
        "moe_routing active; kv_reuse off",
        "3 bad rows hold a canary: nobody wrote them",
        "the first bad live row's request b read blocks 4-5 of a (step 1)",
        "6 blocks of state read as keys before written",
        "1.5 MiB unprofiled: layers.*.out",
    ]
    empty = watch_client.table([sample("canary_rows", 0.0, layer="a", rows="live")])
    assert (cells(empty), empty.caption) == ([], "no patch")


def test_the_table_is_drawn_again_and_again_until_the_port_goes(monkeypatch):
    events = []
    answers = iter([[sample("steps", 1.0)], [sample("steps", 2.0)]])

    def fetch(url):
        events.append(url)
        if (samples := next(answers, None)) is None:
            raise watch_client.WatchError("gone")
        return samples

    monkeypatch.setattr(watch_client, "fetch", fetch)
    monkeypatch.setattr(watch_client.time, "sleep", events.append)
    with pytest.raises(watch_client.WatchError, match="gone"):
        watch_client.follow("host:1", 0.5, lambda table: events.append(table.title))
    assert events == ["host:1", "step 1", 0.5, "host:1", "step 2", 0.5, "host:1"]
    for every_s in (0, -1.0):
        with pytest.raises(ValueError, match=f"every_s: expected a positive .*, got {every_s}"):
            watch_client.follow("host:1", every_s, print)
