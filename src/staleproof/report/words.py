"""Shows what users of a real model read, in this process or on a recorded machine.

The recorded machines are the files of ``workbook/words``, each written by ``benchmarks/words.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleproof.runs import checkout

if TYPE_CHECKING:
    from staleproof.lab import Finding

_REPEATED = re.compile(r"(<\|\w+\|>)\1+")


def one_line(text: str) -> str:
    """A text in one line, with a repeated special token once, and how often.

    >>> one_line("The sea<|endoftext|><|endoftext|>")
    'The sea<|endoftext|> x 2'
    """
    shown = _REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])}", text)
    return shown.replace("\n", "⏎")


def read_by_users(found: Finding) -> Sequence[tuple[str, str, str]]:
    """Prompts, and the texts without a remedy and with it; empty unless a real model was asked.

    Args:
        found: off / on / off of a remedy.
    """
    columns = [found.numbers.get(name, ()) for name in ("prompts_off", "texts_off", "texts_on")]
    return [(prompt, one_line(off), one_line(on)) for prompt, off, on in zip(*columns, strict=True)]


def recorded(path: Path) -> tuple[str, list[Mapping[str, Any]]]:
    """Machine, day and grade of a recorded file in one line, and its runs.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        head, *lines = map(json.loads, path.read_text().splitlines())
        title = f"{head['machine']['name']}, {head['date']}, {head['commit']}: {head['grade']}"
        return title, [line for line in lines if "not_run" not in line]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path.name}: expected lines of benchmarks/words.py, got {error!r}") from error


REMEDY = "clear_empty_rows"


def _verdict(run: Mapping[str, Any]) -> str:
    dead = [step for step in run["died"] if step]
    if dead:
        return f"{len(dead)} of {len(run['died'])} dead from step {min(dead)} on"
    return "right words" if run["equal_to_clean"] else "other words"


def control() -> None:
    """Let a reader pick a recorded kernel, what memory held, and the remedy, and show the texts.

    Without a front end: a table of the verdicts.
    """
    from staleproof.report import show

    for path in sorted((checkout() / "workbook/words").glob("*.jsonl")):
        title, runs = recorded(path)
        print(f"RECORDED {title}")
        # Kernel, memory, remedy -> run.
        by_name: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for run in runs:
            memory, with_remedy = run["run"].removesuffix(f", {REMEDY}"), run["run"].endswith(REMEDY)
            by_name[run["kernel"], memory, REMEDY if with_remedy else "none"] = run
        kernels, memories, _ = ([*dict.fromkeys(names)] for names in zip(*by_name, strict=True))

        def draw(kernel: str, memory: str, remedy: str, by_name: Any = by_name) -> None:
            run = by_name.get((kernel, memory, remedy))
            if run is None:
                print("not recorded")
                return
            print(f"{run['name']}: {_verdict(run)}")
            show.table(("asked", "read"), zip(run["prompts"], map(one_line, run["texts"]), strict=True))

        def instead(by_name: Any = by_name, kernels: Any = kernels) -> None:
            rows = [
                (*how, *(_verdict(by_name[k, *how]) if (k, *how) in by_name else "-" for k in kernels))
                for how in dict.fromkeys(name[1:] for name in by_name)
            ]
            show.table(("memory", "remedy", *kernels), rows)

        show.turn(draw, instead, kernel=kernels, memory=memories, remedy=("none", REMEDY))
