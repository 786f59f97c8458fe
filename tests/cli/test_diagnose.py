"""``staleproof diagnose``: options, a log, a command, questions, bad input."""

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
NAN = ("--symptom", "nan", "--version", "0.22.1", "--graphs", "full", "--model", "deepseek-r1")


def diagnose(capsys, *arguments: str) -> str:
    assert cli.main(["diagnose", *arguments]) == 0
    return capsys.readouterr().out


def flat(text: str) -> str:
    return " ".join(text.split())


def refused(capsys, *arguments: str) -> str:
    assert cli.main(["diagnose", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    return line


def test_a_row_that_fits_comes_with_flag_control_patch_and_chapter(capsys):
    text = flat(diagnose(capsys, *NAN, "--gpu", "b200", "--backend", "TRITON_MLA"))
    for words in (
        "fits as far as known: empty_rows (evidence: real).",
        "do now --enforce-eager",
        "control Restart one replica with the flag and one without it",
        "mla_padding: would apply, touches TRITON_MLA",
        "notebooks/01_mla_padding.ipynb",
    ):
        assert words in text


def test_evidence_of_one_backend_is_none_of_another(capsys):
    on_gb200 = (*NAN, "--gpu", "gb200")
    assert "empty_rows (evidence: source)" in flat(diagnose(capsys, *on_gb200, "--backend", "CUTLASS_MLA"))
    assert "evidence source: released" in flat(diagnose(capsys, *on_gb200, "--backend", "CUTLASS_MLA", "-v"))
    unknown = "evidence: real with TRITON_MLA, source with CUTLASS_MLA or FLASHINFER_MLA"
    assert unknown in flat(diagnose(capsys, *on_gb200))


def test_a_release_on_which_it_was_not_measured_is_named(capsys):
    assert "0.33.0 was not tried" in flat(diagnose(capsys, *NAN, "--gpu", "h200", "--version", "0.33.0"))
    assert "was not tried" not in diagnose(capsys, *NAN, "--gpu", "h200", "--version", "0.26.0")


def test_what_few_servers_have_is_asked_for_before_no_row_fits(capsys):
    text = flat(diagnose(capsys, "--symptom", "stranger"))
    assert 'no row fits, unless your server has what stands under "only with"' in text
    assert "tell also: --version" in text
    text = diagnose(capsys, "--symptom", "leak", "--version", "0.33.0")
    assert "unless" not in text


def test_the_traits_of_a_model_are_a_list_that_says_which_it_lacks(capsys):
    assert "; model: MLA, MoE, not hybrid (--model) " in flat(diagnose(capsys, *NAN))


def test_the_missing_fact_comes_first_and_nothing_is_said_to_do(capsys):
    text = flat(diagnose(capsys, *NAN))
    assert "not decided: --gpu? Which GPU?" in text
    assert "on an H200 the NaN stayed in padding rows" in text
    assert "do now" not in text


def test_none_of_these_comes_with_the_next_step_of_its_kind(capsys):
    for symptom, step in (
        ("crash", "compute-sanitizer"),
        ("nan", "STALEPROOF_WATCH=1"),
        ("leak", "ps -o rss"),
    ):
        text = flat(
            diagnose(
                capsys, "--symptom", symptom, "--version", "0.33.0", "--model", "dense", "--quant", "none"
            )
        )
        assert "none of these: no row fits" in text
        assert f"next ({symptom}):" in text
        assert step in text


def test_what_was_measured_otherwise_is_named_and_does_not_lead(capsys):
    text = flat(diagnose(capsys, *NAN, "--backend", "FLASH_ATTN_MLA"))
    assert "none of these" in text
    assert "measured otherwise: empty_rows: on an H200" in text
    assert "do now" not in text


def test_another_server_stops_with_its_thread(capsys):
    text = flat(diagnose(capsys, "--symptom", "SGLang on B200: accuracy drops with trtllm_mla"))
    assert "another server: sglang (your words)" in text
    assert "SGLang #22688" in text
    assert "none of these" not in text


def test_words_say_what_was_taken_from_them(capsys):
    text = flat(diagnose(capsys, "--symptom", "garbled text from Kimi-K2 on B200, gone with --enforce-eager"))
    assert "symptom nan (your words: garbled)" in text
    assert "gpu sm100 (your words)" in text
    assert "helped: enforce-eager" in text
    assert "--symptom: expected nan, crash" in flat(diagnose(capsys, "--symptom", "it is slow"))


def test_a_log_as_file_as_argument_and_from_stdin_say_the_same(capsys, monkeypatch, tmp_path):
    by_option = diagnose(capsys, "--log", str(OOM))
    assert "\nfits as far as known: decode_buffer (evidence: replica). OOM after upgrade" in by_option
    assert diagnose(capsys, str(OOM)) == by_option
    monkeypatch.setattr(sys, "stdin", io.StringIO(OOM.read_text()))
    assert diagnose(capsys, "-") == by_option
    (tmp_path / "broken.log").write_bytes(OOM.read_bytes() + b"\xff")
    assert diagnose(capsys, str(tmp_path / "broken.log")) == by_option
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.read_bytes() + b"\xff"), "utf-8"))
    assert diagnose(capsys, "-") == by_option
    # As a Windows editor saves it.
    (tmp_path / "crlf.log").write_bytes(OOM.read_bytes().replace(b"\n", b"\r\n"))
    assert diagnose(capsys, str(tmp_path / "crlf.log")) == by_option


def test_an_option_overrides_the_log_and_the_log_overrides_a_sentence(capsys):
    text = flat(diagnose(capsys, "-v", "--log", str(OOM), "--version", "0.20.0"))
    assert "decode_buffer: vLLM 0.20.0 does not have it (0.18.0 to 0.19.1 do)" in text
    assert "version 0.18.1 (line" in flat(diagnose(capsys, str(OOM), "--symptom", "OOM on 0.24.0"))


def test_a_symptom_that_is_named_wins_over_another_failure_in_the_log(capsys):
    log = str(LOGS / "host-oom-killed.log")
    assert "none of these. This looks like a host out of memory" in flat(diagnose(capsys, log))
    text = diagnose(capsys, log, "--symptom", "leak")
    assert "undrained_ids" in text
    assert "looks like" not in text


def test_json_says_what_the_text_says(capsys):
    answer = json.loads(diagnose(capsys, "--log", str(OOM), "--json"))
    assert answer["known"]["version"] == "0.18.1"
    first = answer["rows"][0]
    assert (answer["answer"], first["key"], first["status"]) == (
        "fits as far as known",
        "decode_buffer",
        "fits as far as known",
    )
    assert (first["patches"][0]["state"], first["patches"][0]["touches"]) == (
        "would apply",
        "touches FLASHINFER_MLA",
    )
    assert first["do_now"] == first["flag"]
    assert first["control"].startswith("Start two replicas, one unchanged")
    assert [row["do_now"] for row in answer["rows"][1:]] == [None] * len(answer["rows"][1:])
    open_answer = json.loads(diagnose(capsys, *NAN, "--json"))
    assert (open_answer["answer"], open_answer["ask"][0]) == ("not decided", "--gpu")
    assert open_answer["next"][0].startswith("start two replicas")


def test_the_watch_is_advised_only_for_releases_that_it_knows(capsys):
    for version, advised in (("0.18.1", False), ("0.20.0", True), ("0.22.1", True)):
        text = diagnose(capsys, "--symptom", "nan", "--version", version, "--model", "mla")
        assert ("STALEPROOF_WATCH" in text.partition("next (nan)")[2]) == advised


def test_the_whole_table(capsys):
    assert "Accuracy drops with uptime" in diagnose(capsys, "--table")
    for other in (["--json"], ["-v"], ["--version", "0.18.1"], ["--symptom", "nan"], [str(OOM)]):
        assert "--table takes no other option and no log" in refused(capsys, "--table", *other)


def asked_for(monkeypatch, answers: dict[str, str]) -> list[str]:
    """The questions that are asked, with these answers by how a question begins."""
    asked: list[str] = []

    def prompt(text: str, **options: object) -> str:
        asked.append(text)
        return next((answer for begin, answer in answers.items() if text.startswith(begin)), "")

    monkeypatch.setattr(typer, "prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    return asked


def test_in_a_terminal_symptom_deciding_facts_and_what_was_tried_are_asked_for(capsys, monkeypatch):
    answers = {
        "What do you see": "nan",
        "Which vLLM": "0.20.2",
        "Which model": "DeepSeek-R1",
        "Which GPU": "B200",
    }
    asked = asked_for(monkeypatch, {**answers, "Which CUDA": "full", "What was tried": "--enforce-eager"})
    text = flat(diagnose(capsys))
    assert [question.split("?")[0] for question in asked[:3]] == [
        "What do you see",
        "Which vLLM release",
        "Which model",
    ]
    assert "stranger" in text
    assert "fits: empty_rows" in text
    assert "helped: enforce-eager" in text


def test_no_answer_to_any_question_is_an_answer_too_and_json_asks_nothing(capsys, monkeypatch):
    asked = asked_for(monkeypatch, {})
    assert "not decided" in diagnose(capsys)
    assert asked[0] == ASK["symptom"]
    assert len({*asked}) == len(asked)
    asked.clear()
    assert json.loads(diagnose(capsys, "--json"))["answer"] == "not decided"
    assert asked == []


def test_ctrl_c_at_a_question_ends_as_it_does_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr(typer, "prompt", Mock(side_effect=typer.Abort))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["diagnose"]) == 130
    assert capsys.readouterr().err == "staleproof: interrupted\n"


def test_only_a_log_that_cannot_be_read_and_an_option_that_is_none_end_in_2(capsys, tmp_path, monkeypatch):
    assert "No such file" in refused(capsys, "--log", str(tmp_path / "absent.log"))
    assert "a sentence goes into --symptom" in refused(capsys, "answers are garbage")
    assert f"{tmp_path}: Is a directory" in refused(capsys, str(tmp_path))
    (tmp_path / "empty.log").write_text(" \n")
    assert "nothing in it" in refused(capsys, str(tmp_path / "empty.log"))
    (tmp_path / "binary.log").write_bytes(b"\0\1\2")
    assert "a binary file" in refused(capsys, str(tmp_path / "binary.log"))
    assert "one log, please" in refused(capsys, str(OOM), "--log", str(OOM))
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin, which is closed" in refused(capsys, "-")
    monkeypatch.undo()
    assert "No such option" in refused(capsys, "--nosuch")
    assert "is it a log of vLLM?" in flat(diagnose(capsys, str(LOGS / "not-a-vllm.log")))
    for arguments in (
        (),
        ("--version", "9.9"),
        ("--symptom", "slow"),
        ("--gpu", "voodoo2"),
        ("--helped", "hope"),
    ):
        assert "not decided" in diagnose(capsys, *arguments)


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


def test_the_answer_and_the_names_of_its_lines_are_bold(capsys, monkeypatch):
    monkeypatch.setattr(typer, "style", lambda text, bold: f"<{text}>")
    bold = re.findall("<(.*?)>", diagnose(capsys, str(OOM)))
    assert bold[:5] == ["known: ", "fits as far as known: ", "   do now", "   confirm", "   not when"]
