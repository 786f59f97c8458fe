"""What people type and paste, and the right answer: the cases of ``cases.toml``, through the command."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from staleproof.cli import app as cli

CASES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())["case"]


def answer(capsys: Any, arguments: list[str]) -> dict[str, Any]:
    assert cli.main(["diagnose", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def missing(found: dict[str, Any], known: str) -> list[str]:
    """The facts of a case that the answer does not have."""
    words = {f"{name}={word}" for name, word in found["known"].items()} | {*found["symptoms"]}
    words |= {f"helped={one}" for one in found["helped"]} | {f"failed={one}" for one in found["did_not_help"]}
    words |= {name if there else f"-{name}" for name, there in found["traits"].items()}
    return [word for word in known.split() if word not in words]


@pytest.mark.parametrize("case", CASES, ids=[case.get("id") or case["args"][1] for case in CASES])
def test_a_case_gets_its_answer_and_no_other_row_something_to_do(case, capsys, tmp_path):
    arguments = list(case.get("args", []))
    if "log" in case:
        (tmp_path / "server.log").write_text(case["log"])
        arguments += ["--log", str(tmp_path / "server.log")]
    found = answer(capsys, arguments)
    want, _, what = case["want"].partition(" ")
    rows = [row for row in found["rows"] if row["status"] not in ("speaks against", "only if")]
    keys = [row["key"] for row in rows]
    led = [row["key"] for row in rows if row["do_now"]]
    if want == "leads":
        assert led == [what]
    elif want in ("first", "second"):
        assert what in keys[: 1 + (want == "second")]
        assert {*led} <= {*keys[: 1 + (want == "second")]}
    elif want == "ask":
        assert (found["ask"][0], led) == (what, [])
    elif want == "server":
        name, _, thread = what.partition(" ")
        assert (found["server"], found["answer"], keys) == (name, "another server", [])
        assert any(line.startswith(thread) for line in found["known_there_as"]) or not thread
    else:
        assert (found["answer"], led) == ("none of these", [])
        assert what in (found["looks_like"] or {"says": ""})["says"]
    assert missing(found, case.get("known", "")) == []
    assert {*keys} & {*case.get("not", [])} == set()
