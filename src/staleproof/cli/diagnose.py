"""``staleproof diagnose``: from a symptom or a pasted log to what fits."""

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
    paste: Annotated[
        str | None, typer.Argument(metavar="LOG", help="A vLLM log, or - for stdin; as --log.")
    ] = None,
    log: Annotated[str | None, typer.Option(help="A file with a pasted vLLM log, or - for stdin.")] = None,
    symptom: Annotated[
        str | None,
        typer.Option(help="What you see, in words; release, model, GPU and graphs are read out of them."),
    ] = None,
    version: Annotated[str | None, typer.Option(help="vLLM release, e.g. 0.18.1.")] = None,
    model: Annotated[str | None, typer.Option(help="A model's name, or mla, moe, hybrid, dense.")] = None,
    gpu: Annotated[str | None, typer.Option(help="e.g. h200, b200, gb200.")] = None,
    graphs: Annotated[str | None, typer.Option(help="CUDA graphs: full, piecewise, none.")] = None,
    quant: Annotated[str | None, typer.Option(help="nvfp4, mxfp4, fp8, other, none.")] = None,
    parallel: Annotated[str | None, typer.Option(help="dp, ep, dp+ep, none.")] = None,
    backend: Annotated[str | None, typer.Option(help="Attention backend, e.g. FLASHINFER_MLA.")] = None,
    moe_backend: Annotated[str | None, typer.Option(help="e.g. flashinfer_cutlass, triton.")] = None,
    scheduling: Annotated[str | None, typer.Option(help="async, sync.")] = None,
    phase: Annotated[str | None, typer.Option(help="When it shows: start, serving.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the whole triage table.")] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Why, by what evidence, and what speaks against the others."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Say which incidents fit what you see, by what evidence, and what to do now.

    Without options it asks at most five questions. An option overrides what the log says.

    \b
    Examples:
      staleproof diagnose                                          asks
      staleproof diagnose --symptom "NaN from DeepSeek R1 on 0.20, B200"
      staleproof diagnose --log server.log --symptom "accuracy drops" -v
      kubectl logs my-pod | staleproof diagnose -

    Exit code 2: bad input, in one line.
    """
    from staleproof.triage import answer, judge, logs
    from staleproof.triage.facts import ASK, Facts, from_words

    given = {name: word for name, word in context.params.items() if name in ASK}
    if table:
        if any((*given.values(), paste, log, as_json, verbose)):
            raise BadInputError("diagnose: --table takes no other option and no log")
        from rich.console import Console

        from staleproof.triage.table import rich_table

        Console().print(rich_table())
        return
    if paste is not None and log is not None:
        raise BadInputError("diagnose: one log, please: an argument or --log")
    source = log if log is not None else paste
    facts = Facts() if source is None else logs.read(_text(source))
    if source is not None and not facts.known and not facts.traits:
        why = f"{source}: no line says a release, a model, a backend or an error that we know"
        if not any(given.values()):
            raise BadInputError(f"diagnose: {why}; is it a log of vLLM?")
        facts.notes.append(why)
    try:
        if symptom is not None:
            # The symptom's words override the log, and options override both.
            said = from_words(symptom)
            if facts.looks_like:
                facts.notes.append(f"{facts.origin['symptom']} of the log looks like {facts.looks_like}")
                facts.looks_like = ""
            facts.add(said)
        for name, word in given.items():
            if word is not None and name != "symptom":
                facts.learn(name, word, judge.option(name))
        facts.derive()
    except ValueError as error:
        raise BadInputError(f"diagnose: {error}") from error
    if source is None and not any(given.values()):
        if not sys.stdin.isatty():
            raise BadInputError("diagnose: give --symptom, --version ..., or --log FILE; see --help")
        _ask(facts)
        if not facts.known and not facts.traits:
            raise BadInputError(
                "diagnose: nothing is known, so nothing can be said; staleproof diagnose --table"
            )
    found = judge.judge_all(facts)
    width = shutil.get_terminal_size().columns
    if as_json:
        typer.echo(answer.as_json(facts, found))
        return
    for line in answer.as_text(facts, found, width, verbose=verbose).splitlines():
        # Bold: what fits, and the names of the lines. What is no terminal gets no codes.
        head = re.match(r"\d\. .*|[a-z].*?: |   (?:do now|confirm|patch|read|but)\b", line)
        end = head.end() if head else 0
        typer.echo(typer.style(line[:end], bold=True) + line[end:] if end else line)


def _text(source: str) -> str:
    """The log's text.

    Raises:
        BadInputError: it cannot be read.
    """
    try:
        if source == "-" and isinstance(sys.stdin, TextIOWrapper):
            # As of a file: a log may hold any bytes.
            sys.stdin.reconfigure(errors="replace")
        text = sys.stdin.read() if source == "-" else Path(source).read_text(errors="replace")
    except OSError as error:
        raise BadInputError(f"diagnose: {source}: {error.strerror}") from error
    if "\0" in text:
        raise BadInputError(f"diagnose: {source}: a binary file; expected the text that vLLM printed")
    if not text.strip():
        raise BadInputError(f"diagnose: {source}: nothing in it")
    return text


def _ask(facts: Facts) -> None:
    """Ask for what is not known, until no answer would change anything; Enter leaves a question open."""
    from staleproof.triage import judge
    from staleproof.triage.facts import ASK, from_words

    asked: list[str] = []
    while (name := judge.next_question(facts, asked)) is not None:
        asked.append(name)
        while True:
            word = typer.prompt(ASK[name], default="", show_default=False, prompt_suffix="\n> ")
            if not word.strip():
                break
            try:
                if name == "symptom":
                    facts.add(from_words(word))
                else:
                    facts.learn(name, word, "you")
                break
            except ValueError as error:
                typer.echo(f"  {error}; Enter if you do not know")
    facts.derive()
    typer.echo("")
