"""What a terminal of 80 columns shows: one line a finding, no word cut, the conclusion, elapsed time."""

from __future__ import annotations

import re
from pathlib import Path

from fakes import MEASUREMENT
from rich.console import Console
from screens import screen, typed

from staleproof import measure, runs
from staleproof.cli import app
from staleproof.incidents.registry import INCIDENTS
from staleproof.report import conclusion, matrix
from staleproof.runs import read_kept
from staleproof.triage import symptom

RUNS = Path(__file__).parents[2] / "workbook/runs"
COUNT = 40
# An incident whose answers take a few milliseconds each, so that the status line is drawn between them.
RUN = """
import sys, time, types, pathlib
from staleproof.cli import app as cli
from staleproof import device
from staleproof import runs
from staleproof import lab
from staleproof.incidents.registry import INCIDENTS, Incident
from staleproof.report import conclusion, terminal
conclusion.symptom = lambda name: "it looks true"
variants = [f"variant_{{n}}" for n in range({count})]
module = types.ModuleType("staleproof.incidents.fake.questions")
module.incident = lab.Incident("fake")
@module.incident.question("a question", variants, expect="clean")
def ask(variant, device):
    time.sleep(0.02)
    return lab.good("clean")
sys.modules[module.__name__] = module
INCIDENTS.clear()
INCIDENTS.update(fake=Incident(1, "a fake", "01_fake.ipynb", "it lies"))
root = pathlib.Path({root!r})
runs.checkout = lambda: root
sys.exit(cli.main(["run", "-v", "--device", "cpu"]))
"""


def test_no_finding_is_written_into_the_status_line(tmp_path):
    (tmp_path / "workbook/runs").mkdir(parents=True)
    sent = typed(RUN.format(count=COUNT, root=str(tmp_path)))
    lines = screen(sent)
    wanted = [f"INTERPRETED  fake, a question, variant_{n}: clean  (replica)" for n in range(COUNT)]
    assert [line.rstrip() for line in lines if "fake, a question" in line] == wanted, sent
    # The status line was there: the step, of how many, and the elapsed time.
    assert re.search(r"fake \d+/40: a question, variant_\d+ +(\x1b\[\d+m)*\d:\d\d:\d\d", sent)
    assert "  symptom  it looks true" in [line.rstrip() for line in lines]
    # A path is not cut.
    assert max(len(line.rstrip()) for line in lines if "/findings.jsonl" not in line) <= 80
    assert len(read_kept(tmp_path / "workbook/_build/findings.jsonl")) == COUNT


def test_tables_and_conclusion_of_a_recorded_run_fit_80_columns():
    findings = runs.read(RUNS / "nvidia-h200").findings
    # Broken between words a table fits, so that none of them is cut.
    tables = matrix.tables(findings, 80)
    assert max(Console(width=1000).measure(table).minimum for table in tables) <= 80
    assert len(tables) > len(matrix.build(findings)), "no table was too wide: the test shows nothing"
    lines = conclusion.text(findings).splitlines()
    assert max(map(len, lines)) <= 80
    there = {found.incident for found in findings}
    assert len(there) >= 5
    for name, about in INCIDENTS.items():
        if name not in there:
            continue
        first = lines.index(f"{name}: {about.title}")
        assert lines[first + 1].startswith(f"  symptom  {symptom(name)[:20]}")
        assert [line[:8] for line in lines[first:]].index("  cause ") < [
            line[:8] for line in lines[first:]
        ].index("  fixed ")


# Command -> how its first screen begins, and what is on it besides.
FIRST = {
    "": ("Usage: staleproof", "  staleproof diagnose  "),
    "-h": ("Usage: staleproof", "From what you see, or a log, to what to do now."),
    "diagnose --symptom NaN --model mla": ("known: symptom nan", "not decided: --version?"),
    "patches --version 0.18.1": ("vLLM 0.18.1, ", "would apply  decode_buffer      MLA models on CUTLASS or"),
    "patches --version 0.16.0": ("vLLM 0.16.0, ", "refused      "),
    "patches --version 0.18.1 -v": ("vLLM 0.18.1, ", "574 divides by a sum that is 0"),
    "patches --explain mla_padding": (
        "mla_padding: clears the rows",
        "affects    MLA models, and TurboQuant",
    ),
    "list": ("1  mla_padding: ", "   symptom   "),
    "compare nvidia-h200 nvidia-h200": ("the same verdicts: ", " timings, second / first: 1.00 to 1.00"),
}
# The help of these has examples.
TYPED = {"run", "report", "record", "compare", "patches"}
MANY = """
import sys
from staleproof.cli.app import COMMANDS, main
for command in [*{commands}, *(f"{{f.__name__.rstrip('_')}} -h" for f in COMMANDS)]:
    print(f"@@{{command}}")
    main(command.split())
"""


def test_the_first_screen_of_each_command_answers_and_fits_80_columns():
    shown = "\n".join(line.rstrip() for line in screen(typed(MANY.format(commands=[*FIRST]))))
    screens = {part.partition("\n")[0]: part.splitlines()[1:] for part in shown.split("@@")[1:]}
    assert len(screens) == len(FIRST) + len(app.COMMANDS)
    for command, lines in screens.items():
        name = command.removesuffix(" -h")
        assert max(map(len, lines)) <= 80, command
        first = lines[:40]
        if command.endswith("-h"):
            # One screen, and no description is cut; what to type stands in it.
            assert len(lines) <= 40, command
            assert name not in TYPED or any(
                f"{line} ".startswith(f"    staleproof {name} ") for line in lines
            )
            assert "..." not in "\n".join(lines).partition("Options:")[2], command
        start, besides = FIRST.get(command, ("Usage: staleproof ", "Options:"))
        assert first[0].startswith(start), command
        assert any(besides in line for line in first), (command, first)


def test_rows_of_a_benchmark_fit_80_columns(capsys):
    one = MEASUREMENT | {"mode": "28 layers, scattered ids, cold, of a mode with a long name"}
    limit = one | {"provider": "limit: cudaMemsetAsync, contiguous bytes", "p50": 1.0}
    measure.print_rows([one | {"provider": "staleproof"}, limit], baseline="staleproof", width=80)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    measure.print_rows([one | {"provider": "staleproof"}, limit], baseline="staleproof")
    wide = capsys.readouterr().out
    assert max(map(len, wide.splitlines())) > 80
    numbers = re.compile(r"\d+\.\d+")
    assert numbers.findall(narrow) == numbers.findall(wide) != []
    assert "limit: cudaMemsetAsync, contiguous bytes" in narrow
