"""``pytest --padding-contract``, run with pytester: what asks a kernel, in a process of its own."""

import importlib
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

# Here, because pytester unloads what a run in this process imports, and a second copy has other classes.
from staleproof.contract import pytest_plugin, runner
from staleproof.contract.contract import BREAKS, CLAUSES, NOT_RUN, NOT_TESTED, UNDEFINED, Answer

pytest_plugins = ["pytester"]
# What pytester changes; a child process is forked from a warm one only where the environment is the same.
CHANGED = {name: os.environ.get(name) for name in ("HOME", "USERPROFILE", "PY_COLORS")}


@pytest.fixture(autouse=True)
def same_environment(pytester, monkeypatch):
    for name, value in CHANGED.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


MODULE = """
from staleproof import audit

@audit.rows(name="right", reference=lambda x: 2 * x)
def right(x):
    return 2 * x

@audit.rows(name="per tensor", skip={"W": "asked elsewhere"})
def per_tensor(x):
    return x / x.abs().max()
"""


# By its module: an entry point exists only where the package was installed since. Without nbval, which
# takes a second to import.
PLUGIN = ("-p", "no:staleproof", "-p", "staleproof.contract.pytest_plugin")
PLUGIN += ("-p", "no:nbval", "-p", "no:randomly")  # a shuffled inner run prints its lines in any order


def test_a_broken_clause_fails_with_its_reproducer(pytester):
    pytester.makepyfile(my_kernels=MODULE)
    result = pytester.runpytest_inprocess(*PLUGIN, "--padding-contract", "my_kernels.py", "-rs", "-v")
    result.assert_outcomes(passed=5, failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        ["*right[[]R] PASSED*", "*per tensor[[]R] FAILED*", "clause R: Live rows keep their bits*"]
    )
    # The second has no reference.
    result.stdout.fnmatch_lines(["*: not checked, no reference"])
    result.stdout.fnmatch_lines(
        ["from my_kernels import per_tensor", "assert not off.any()*", "*per_tensor_R.py runs alone"]
    )
    (script,) = pytester.path.glob(".pytest_cache/d/padding-contract/*.py")
    assert script.with_suffix(".pt").is_file()
    result.stdout.fnmatch_lines(["*asked elsewhere*"])


def _test_of(verdict, script=""):
    """The test of an answer."""
    file = object.__new__(pytest_plugin.ContractFile)
    file.answers = {("k", "R"): Answer(verdict, "rows", "k", "R", script)}
    file.scripts = Path("folder")
    item = object.__new__(pytest_plugin.ContractItem)
    item.parent, item.case = file, ("k", "R")
    return item


@pytest.mark.parametrize(
    ("script", "said"), [("", ""), ("import torch\n", "\n\nimport torch\n\nfolder/k_R.py runs alone")]
)
def test_a_broken_clause_shows_its_script_if_there_is_one(script, said):
    with pytest.raises(pytest_plugin.BrokenClauseError) as error:
        _test_of(BREAKS, script).runtest()
    assert str(error.value) == f"clause R: {CLAUSES['R']}\nrows{said}"


def test_a_wrong_setting_fails_the_test():
    with pytest.raises((pytest_plugin.BrokenClauseError, pytest.skip.Exception)) as error:
        _test_of(NOT_TESTED).runtest()
    assert error.type is pytest_plugin.BrokenClauseError


@pytest.mark.parametrize("verdict", [NOT_RUN, UNDEFINED])
def test_what_was_not_run_or_is_left_to_the_caller_is_skipped_with_the_reason(verdict):
    with pytest.raises(pytest.skip.Exception, match="rows"):
        _test_of(verdict).runtest()


def test_kernels_are_audited_on_the_device_that_was_asked_for(monkeypatch):
    asked = []

    def audit(modules, device, scripts):
        asked.append((modules, device, scripts))
        return [Answer(BREAKS, "", "k", "R")]

    monkeypatch.setattr(runner, "audit", audit)
    file = object.__new__(pytest_plugin.ContractFile)
    file.path, file.config = Path("m.py"), SimpleNamespace(getoption=lambda name: f"{name} as asked for")
    for _ in range(2):
        assert file.answers["k", "R"].clause == "R"
    # Without pytest's cache there is no folder for reproducers.
    assert asked == [(["m.py"], "--padding-contract-device as asked for", None)]


def test_nothing_happens_without_the_option(pytester):
    pytester.makepyfile(my_kernels=MODULE)
    result = pytester.runpytest_inprocess(*PLUGIN, "my_kernels.py")
    result.assert_outcomes()
    assert pytester.parseconfig(*PLUGIN).getoption("--padding-contract-device") == "auto"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from staleproof import audit", True),
        ("from staleproof import mla_decode, audit as contract", True),
        ("    from staleproof.audit import rows", True),
        ("import staleproof.audit", True),
        ("from staleproof.auditing import audit", False),
    ],
)
def test_a_module_that_imports_the_decorators_in_any_way_is_read(line, found):
    assert bool(pytest_plugin._REGISTERS.search(f"import torch\n{line}\n")) == found


def test_a_page_that_shows_how_to_register_a_kernel_is_no_module(pytester):
    pytester.makefile(".md", page=MODULE)
    pytester.runpytest_inprocess(*PLUGIN, "--padding-contract").assert_outcomes()


def test_a_file_in_another_encoding_is_no_module(pytester):
    (pytester.path / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe4'\n")
    pytester.runpytest_inprocess(*PLUGIN, "--padding-contract").assert_outcomes()


def test_a_module_that_does_not_import_is_an_error(pytester):
    pytester.makepyfile(my_kernels="from staleproof import audit\nimport no_such_module\n")
    result = pytester.runpytest_inprocess(*PLUGIN, "--padding-contract", "my_kernels.py")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*my_kernels.py: does not import*no_such_module*"])


def test_an_installation_brings_the_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    assert importlib.import_module(module).pytest_addoption
