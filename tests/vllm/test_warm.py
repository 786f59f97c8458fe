"""A program that is forked finds what it would find in a new interpreter, and says as much."""

import json
import os
import subprocess

import environment
import pytest
import warm

pytestmark = pytest.mark.slow
STATE = """
import importlib.metadata, importlib.util, json, os, sys
loaded = [name for name in sys.modules if name.partition(".")[0] in ("vllm", "staleproof", "environment")]
print(json.dumps({
    "version": importlib.metadata.version("vllm"), "loaded": loaded, "cwd": os.getcwd(), "argv": sys.argv,
    "vllm": importlib.util.find_spec("vllm").origin, "path": sys.path[:4], "set": os.environ.get("SET"),
    "stdin": sys.stdin.read(), "main": __name__, "ours": importlib.util.find_spec("staleproof").origin,
}))
"""


@pytest.mark.parametrize(("version", "kind"), [("0.22.1", "a script"), ("0.33.0", "a program")])
def test_it_finds_what_a_new_interpreter_finds(version, kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STATE)
    arguments = [str(script), "one", "two"] if kind == "a script" else ["-c", STATE, "one"]
    env = environment.variables(version) | {"SET": version}
    forked = warm.run(*arguments, env=env, timeout=60, cwd=tmp_path)
    new = warm.new(*arguments, env=env, cwd=tmp_path)
    assert (forked.returncode, forked.stderr) == (new.returncode, "") == (0, "")
    assert json.loads(forked.stdout) == json.loads(new.stdout)


def test_an_error_is_its_own_and_one_that_hangs_is_ended():
    env = environment.variables("0.22.1")
    assert "ValueError: planted" in warm.run("-c", "raise ValueError('planted')", env=env, timeout=60).stderr
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run("-c", "import time; time.sleep(60)", env=env, timeout=0.5)
    # The next one runs.
    assert warm.run("-c", f"print({os.getpid()})", env=env, timeout=60).stdout == f"{os.getpid()}\n"
