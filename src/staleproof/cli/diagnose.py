"""``staleproof diagnose``: from a symptom, a log and a command line to what fits, or that nothing does."""

from __future__ import annotations

import re
import shutil
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from staleproof.cli.common import BadInputError

if TYPE_CHECKING:
    from staleproof.triage.facts import Facts


def diagnose(
    context: typer.Context,
    paste: Annotated[str | None, typer.Argument(metavar="LOG", help="A vLLM log, or - for stdin.")] = None,
    log: Annotated[str | None, typer.Option(help="The same, as an option.")] = None,
    symptom: Annotated[
        list[str] | None, typer.Option(help="nan crash oom drift leak differs stranger.")
    ] = None,
    command: Annotated[str | None, typer.Option(help='As "vllm serve a/model -tp 8".')] = None,
    version: Annotated[str | None, typer.Option(help="vLLM release, e.g. 0.18.1.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name, or mla, moe, hybrid, dense.")] = None,
    gpu: Annotated[str | None, typer.Option(help="e.g. h200, b200, mi300x, cpu.")] = None,
    graphs: Annotated[str | None, typer.Option(help="CUDA graphs: full, piecewise, none.")] = None,
    quant: Annotated[str | None, typer.Option(help="nvfp4 mxfp4 fp8-block fp8-tensor other none.")] = None,
    parallel: Annotated[str | None, typer.Option(help="dp, ep, dp+ep, dcp, pp, none.")] = None,
    backend: Annotated[str | None, typer.Option(help="Attention, e.g. FLASHINFER_MLA.")] = None,
    prefill: Annotated[str | None, typer.Option(help="MLA prefill, e.g. TRTLLM_RAGGED.")] = None,
    moe_backend: Annotated[str | None, typer.Option(help="e.g. flashinfer_cutlass, triton.")] = None,
    scheduling: Annotated[str | None, typer.Option(help="async, sync.")] = None,
    phase: Annotated[str | None, typer.Option(help="When it shows: start, serving.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option("--with", help="e.g. spec, lora, kv-transfer, nan-bias.")
    ] = None,
    helped: Annotated[list[str] | None, typer.Option(help="What was tried, e.g. enforce-eager.")] = None,
    did_not_help: Annotated[list[str] | None, typer.Option(help="The same.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the whole triage table.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Why, and why no other row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Say which incidents fit and what to do now; most often, that none does.

    Without a symptom, a terminal is asked. Options win over log and command.

    \b
    Examples:
      staleproof diagnose                                              asks
      staleproof diagnose --symptom nan --log server.log --gpu h200
      staleproof diagnose --symptom "worse by the hour" --version 0.22.1
      staleproof diagnose --symptom nan --log x.log --helped enforce-eager
      kubectl logs my-pod | staleproof diagnose -

    Exit code 2: a log that cannot be read. An unknown word is a note.
    """
    from staleproof.triage import answer, judge, read
    from staleproof.triage.facts import ASK, Facts

    if table:
        if any(value for name, value in context.params.items() if name != "table"):
            raise BadInputError("diagnose: --table takes no other option and no log")
        from rich.console import Console

        from staleproof.triage.table import rich_table

        Console().print(rich_table())
        return
    if paste is not None and log is not None:
        raise BadInputError("diagnose: one log, please: an argument or --log")
    source = log if log is not None else paste
    text = None if source is None else _text(source)
    facts = Facts()
    for word in symptom or ():
        _symptom(facts, word)
    if text is not None:
        named = list(facts.symptoms)
        read.log(facts, text)
        # A log holds other failures too: what was named is what is asked about.
        facts.symptoms = named or facts.symptoms
        if not (facts.known or facts.traits or facts.symptoms or facts.others or facts.server):
            why = f"{source}: no line says a release, a model, a backend or an error that we know"
            facts.notes.append(f"{why}; is it a log of vLLM?")
    if command is not None:
        read.command(facts, command, "--command", whole=True)
    for name in ASK:
        if name != "symptom" and (word := context.params[name]) is not None:
            facts.learn(name, word, judge.option(name))
    for name, given in (("parallel", [parallel] if parallel else ()), ("with", setup or ())):
        for word in given:
            facts.learn(name, word, f"--{name}")
    _tried(facts, facts.helped, helped or (), "--helped")
    _tried(facts, facts.failed, did_not_help or (), "--did-not-help")
    facts.derive()
    if sys.stdin.isatty() and not (as_json or facts.server or facts.symptoms):
        _ask(facts)
    found = judge.judge_all(facts)
    if as_json:
        typer.echo(answer.as_json(facts, found))
        return
    for line in answer.as_text(
        facts, found, shutil.get_terminal_size().columns, verbose=verbose
    ).splitlines():
        # Bold: the answer, and the names of the lines. What is no terminal gets no codes.
        head = re.match(r"[a-z][^:?.]*[:?.] |   (?:do now|confirm|not when|patch|read|only if)\b", line)
        end = head.end() if head else 0
        typer.echo(typer.style(line[:end], bold=True) + line[end:] if end else line)


def _symptom(facts: Facts, word: str) -> None:
    """One of the seven words, several with commas between, or a sentence."""
    from staleproof.triage import read, table

    parts = re.split(r"[,|+ ]+", word.strip().lower())
    if {*parts} <= {*table.symptoms()}:
        for part in parts:
            facts.add_symptom(part, "--symptom")
        return
    before = len(facts.symptoms)
    read.words(facts, word)
    if len(facts.symptoms) == before:
        none = f"--symptom: expected {', '.join(table.symptoms())}, or a sentence that names one"
        facts.notes.append(f"{none}; got {word!r}")


def _tried(facts: Facts, into: list[str], given: list[str] | tuple[str, ...], option: str) -> None:
    from staleproof.triage.facts import remedies
    from staleproof.triage.table import terms

    for word in given:
        found = remedies(word)
        into += [one for one in found if one not in into]
        if not found:
            facts.notes.append(f"{option}: {word} is in no row; the rows know {', '.join(terms('remedies'))}")


def _text(source: str) -> str:
    """The log's text.

    Raises:
        BadInputError: it cannot be read.
    """
    if source == "-" and sys.stdin is None:
        raise BadInputError("diagnose: -: expected a log on stdin, which is closed")
    try:
        if source == "-" and isinstance(sys.stdin, TextIOWrapper):
            # As of a file: a log may hold any bytes.
            sys.stdin.reconfigure(errors="replace", newline="")
        # A carriage return is no line's end: a progress bar stands in one line.
        text = sys.stdin.read() if source == "-" else Path(source).read_bytes().decode(errors="replace")
    except OSError as error:
        hint = "; a sentence goes into --symptom" if " " in source else ""
        raise BadInputError(f"diagnose: {source}: {error.strerror}{hint}") from error
    if "\0" in text:
        raise BadInputError(f"diagnose: {source}: a binary file; expected the text that vLLM printed")
    if not text.strip():
        raise BadInputError(f"diagnose: {source}: nothing in it")
    return text


def _ask(facts: Facts) -> None:
    """Ask for the symptom, facts that would decide, and what was tried; Enter leaves a question open."""
    from staleproof.triage import judge, table
    from staleproof.triage.facts import ASK

    def prompt(text: str) -> str:
        return str(typer.prompt(text, default="", show_default=False, prompt_suffix="\n> ")).strip()

    if not facts.symptoms:
        for name, entry in table.symptoms().items():
            typer.echo(f"  {name:<9}{entry['says']}")
        if word := prompt(ASK["symptom"]):
            _symptom(facts, word)
    skip = ["symptom"]
    while len(skip) <= judge.MOST:
        wanted = judge.deciding(facts, judge.judge_all(facts), skip)
        if not wanted:
            break
        skip.append(wanted[0])
        if word := prompt(ASK[wanted[0]]):
            facts.learn(wanted[0], word, "you")
            facts.derive()
    if any(one.alive and one.row.remedies for one in judge.judge_all(facts)):
        for into, question in (
            (facts.helped, "What was tried and helped?"),
            (facts.failed, "And what did not help?"),
        ):
            if word := prompt(question):
                _tried(facts, into, [word], "you")
    facts.derive()
    typer.echo("")
