"""``staleproof diagnose``: options, a log, questions, bad input."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import typer

from staleproof.cli import app as cli
from staleproof.triage.facts import ASK

LOGS = Path(__file__).parents[1] / "triage/logs"
OOM = LOGS / "vllm-0.18.1-oom-gb200.log"


def diagnose(capsys, *arguments: str) -> str:
    assert cli.main(["diagnose", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert cli.main(["diagnose", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    return line


def test_options_give_ranked_rows_with_evidence_patch_and_notebook(capsys):
    given = "symptom=nan version=0.18.1 model=mla gpu=b200 graphs=full quant=none"
    text = diagnose(capsys, "-v", *(f"--{option}" for option in given.split(" ")))
    first = text[text.index("1. ") : text.index("2. ")]
    assert first.startswith("1. fits: empty_rows (mla_padding)")
    for words in ("patch     mla_padding: ", "--enforce-eager", "real: ", "notebooks/01_mla_padding.ipynb"):
        assert words in first
    assert "scale_padding: quant none (--quant); it needs nvfp4" in text


def test_a_log_as_file_as_argument_and_from_stdin_say_the_same(capsys, monkeypatch):
    by_option = diagnose(capsys, "--log", str(OOM))
    assert "\nfits: decode_buffer (evidence: replica). OOM after upgrade" in by_option
    assert diagnose(capsys, str(OOM)) == by_option
    for dash in (["-"], ["--log", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(OOM.read_text()))
        assert diagnose(capsys, *dash) == by_option


def test_a_log_of_one_line_that_names_the_model_and_one_with_a_broken_character_are_read(
    capsys, monkeypatch, tmp_path
):
    path = tmp_path / "a.log"
    path.write_text("Resolved architecture: DeepseekV3ForCausalLM")
    assert "known: model mla moe no hybrid (line 1)\n" in diagnose(capsys, str(path))
    path.write_bytes(OOM.read_bytes() + b"\xff")
    assert diagnose(capsys, str(path)) == diagnose(capsys, str(OOM))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes()), "utf-8"))
    assert diagnose(capsys, "-") == diagnose(capsys, str(OOM))


def test_what_fits_and_the_names_of_the_lines_are_bold(capsys, monkeypatch):
    monkeypatch.setattr(typer, "style", lambda text, bold: f"<{text}>")
    bold = re.findall("<(.*?)>", diagnose(capsys, str(OOM)))
    assert bold == ["known: ", "fits: ", "   do now", "   confirm", "   patch", "   read"]
    assert "<1. fits: decode_buffer (decode_buffer)>\n" in diagnose(capsys, "-v", str(OOM))


def test_an_option_overrides_the_log(capsys):
    text = diagnose(capsys, "-v", "--log", str(OOM), "--version", "0.20.0")
    assert "decode_buffer: vLLM 0.20.0 does not have it (0.18.0 to 0.19.1 do)" in " ".join(text.split())


def test_what_options_and_answers_say_of_the_backend_says_something_of_the_model_and_the_graphs(
    capsys, monkeypatch
):
    given = ("--symptom", "nan", "--backend", "TRITON_MLA", "--graphs", "full", "--version", "0.20.2")
    said = " ".join(diagnose(capsys, *given).split())
    assert "graphs piecewise (Triton MLA has no full graphs before 0.22.0)" in said
    assert "model mla (--backend)" in said
    answers = {ASK["symptom"]: "OOM", ASK["version"]: "0.18.1", ASK["backend"]: "FLASHINFER_MLA"}
    monkeypatch.setattr(typer, "prompt", lambda text, **_: answers.get(text, ""))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "model mla (you)" in " ".join(diagnose(capsys).split())


def test_words_are_read_with_the_symptom_and_an_option_overrides_them(capsys):
    text = diagnose(capsys, "--symptom", "NaN from DeepSeek with CUDA graphs on 0.20")
    assert "version 0.20.2 (your words)" in " ".join(text.split())
    assert "model mla moe no hybrid (DeepSeek, taken for V2, V3 or R1)" in " ".join(text.split())
    # 0.20.2 does not have the buffer of incident 2, and no row of it is named.
    assert "decode_buffer" not in text
    assert "version 0.18.1 (--version)" in diagnose(capsys, "--symptom", "NaN on 0.20", "--version", "0.18.1")


def test_what_words_say_of_another_server_is_a_note(capsys):
    assert "note: the table is of vLLM's releases" in diagnose(capsys, "--symptom", "NaN with sglang")


def test_words_replace_what_a_log_of_another_kind_says(capsys):
    log = str(LOGS / "host-oom-killed.log")
    assert "\nnothing here fits; this looks like a host out of memory" in diagnose(capsys, log)
    text = diagnose(capsys, log, "--symptom", "host memory grows")
    assert "fits: undrained_ids" in text
    assert "note: line 5 of the log looks like a host out of memory" in text
    assert "symptom leak (your words)" in " ".join(text.split())
    words = json.loads(diagnose(capsys, log, "--symptom", "NaN from Qwen3-Next", "--json"))
    assert words["known"]["model"] == {"mla": False, "moe": True, "hybrid": True}
    # Nor is it the answer where nothing fits the words.
    given = (log, "--symptom", "OOM", "--version", "0.33.0", "--model", "dense")
    assert "Nothing in the table fits." in diagnose(capsys, *given)
    answer = json.loads(diagnose(capsys, *given, "--json"))
    assert (answer["nothing_fits"], answer["looks_like"]) == (True, None)


def test_json_for_programs(capsys):
    answer = json.loads(diagnose(capsys, "--log", str(OOM), "--json"))
    assert answer["known"]["version"] == "0.18.1"
    assert answer["origin"]["symptom"] == "line 15"
    first = answer["rows"][0]
    assert (first["key"], first["status"], first["patches"][0]["patch"]) == (
        "decode_buffer",
        "fits",
        "decode_buffer",
    )
    assert all(item["rests_on"] for row in answer["rows"] for item in row["evidence"])


def test_the_whole_table(capsys):
    assert "Accuracy drops with uptime" in diagnose(capsys, "--table")
    for other in (["--json"], ["-v"], ["--version", "0.18.1"], ["--symptom", "NaN"], [str(OOM)]):
        assert "--table takes no other option and no log" in refused(capsys, "--table", *other)


def test_help_names_every_quantisation(capsys):
    assert "nvfp4, mxfp4, fp8, other, none" in " ".join(diagnose(capsys, "--help").replace("│", "").split())


def test_questions_are_asked_of_a_person_and_a_bad_answer_is_asked_again(capsys, monkeypatch):
    asked: list[str] = []
    answers = iter(["slow", "host memory", "0.22.1", ""])

    def prompt(text: str, **options: object) -> str:
        asked.append(text)
        # The answer is typed on a line of its own, and Enter is one.
        assert options == {"default": "", "show_default": False, "prompt_suffix": "\n> "}
        return next(answers)

    monkeypatch.setattr(typer, "prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    text = diagnose(capsys)
    assert re.search("symptom: expected one of .*; Enter if you do not know\n", text)
    first = "What do you see"
    assert [line.split("?")[0] for line in asked] == [first, first, "Which vLLM release", "Which model"]
    assert "fits as far as known: undrained_ids (evidence: real)." in text


def test_the_first_answer_may_be_a_sentence(capsys, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(typer, "prompt", lambda text, **_: asked.append(text) or next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    answers = iter(["NaN on vLLM 9.9.9", "NaN from DeepSeek R1 with CUDA graphs on 0.20", *[""] * 4])
    text = " ".join(diagnose(capsys).split())
    assert "version: vLLM 9.9.9 is not" in text
    assert "version 0.20.2 (your words), graphs full (your words), model mla moe no hybrid" in text
    assert {*asked} & {ASK["version"], ASK["model"], ASK["graphs"]} == set()


def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path):
    assert "symptom: expected one of" in refused(capsys, "--symptom", "slow")
    assert "version: vLLM 9.9" in refused(capsys, "--version", "9.9")
    assert "No such file" in refused(capsys, "--log", str(tmp_path / "absent.log"))
    assert f"{tmp_path}: Is a directory" in refused(capsys, str(tmp_path))
    (tmp_path / "empty.log").write_text(" \n")
    assert "nothing in it" in refused(capsys, str(tmp_path / "empty.log"))
    (tmp_path / "binary.log").write_bytes(b"\0\1\2")
    assert "a binary file" in refused(capsys, str(tmp_path / "binary.log"))
    other = str(LOGS / "not-a-vllm.log")
    assert "is it a log of vLLM?" in refused(capsys, other)
    beside = " ".join(diagnose(capsys, other, "--gpu", "h200").split())
    assert f"note: {other}: no line says a release, a model, a backend or an error that we know" in beside
    assert "one log, please" in refused(capsys, str(OOM), "--log", str(OOM))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert "give --symptom" in refused(capsys)


def test_no_answer_to_any_of_five_questions_says_nothing(capsys, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(typer, "prompt", lambda text, **_: asked.append(text) or "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["diagnose"]) == 2
    assert "nothing is known" in capsys.readouterr().err
    assert len({*asked}) == len(asked) == 5


def test_ctrl_c_at_a_question_ends_as_it_does_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr(typer, "prompt", Mock(side_effect=typer.Abort))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["diagnose"]) == 130
    assert capsys.readouterr().err == "staleproof: interrupted\n"


def test_it_works_without_torch_and_in_a_narrow_terminal():
    program = (
        "import os, sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from staleproof.cli.app import main\n"
        "for os.environ['COLUMNS'] in ('60', '80'):\n"
        f"    print('@@'); assert main(['diagnose', {str(OOM)!r}]) == 0"
    )
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    _, *screens = done.stdout.split("@@\n")
    for columns, text in zip((60, 80), screens, strict=True):
        assert "decode_buffer" in text
        assert [line for line in text.splitlines() if len(line) > columns and len(line.split()) > 1] == []
