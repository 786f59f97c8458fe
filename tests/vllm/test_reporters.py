"""Every command of ``workbook/reporters.md`` parses with the vLLM release that its block names."""

import json
import re
import shlex
from pathlib import Path

import pytest
import warm

PAGE = (Path(__file__).parents[2] / "workbook/reporters.md").read_text()
BLOCKS = re.findall(r"^```sh\n# vllm ([\d.]+), (server|load).*\n([\s\S]*?)^```", PAGE, re.MULTILINE)
# Prints of each command whether it parses. vLLM infers a device while a server's options get defaults.
PARSE = """
import json
import sys
import vllm.platforms
vllm.platforms.current_platform.device_type = "cpu"
from vllm.benchmarks.serve import add_cli_args
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for kind, *words in json.loads(sys.argv[1]):
    parser = FlexibleArgumentParser()
    (make_arg_parser if kind == "server" else add_cli_args)(parser)
    try:
        parser.parse_args(words)
    except SystemExit:
        print("refused")
    else:
        print("parsed")
"""


def _words(command):
    """The options of a command."""
    words = shlex.split(command.replace("\\\n", " "))
    words = words[next(at for at, word in enumerate(words) if word in ("serve", "-m")) + 1 :]
    return words[1:] if words[0].startswith("vllm.") else words


def test_the_page_has_six_commands():
    assert [kind for _, kind, _ in BLOCKS] == ["server", "load", "server", "load", "server", "load"]


@pytest.mark.slow
@pytest.mark.parametrize("release", sorted({release for release, *_ in BLOCKS}))
def test_the_commands_parse_with_their_release(release):
    commands = [[kind, *_words(command)] for of, kind, command in BLOCKS if of == release]
    commands.append([*commands[0], "--no-such-option"])
    done = warm.released(release, "-c", PARSE, json.dumps(commands))
    answers = [line for line in done.stdout.splitlines() if line in ("parsed", "refused")]
    assert answers == ["parsed"] * (len(commands) - 1) + ["refused"], done.stderr[-1000:]
