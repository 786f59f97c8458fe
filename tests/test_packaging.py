"""What a fresh machine installs and runs."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import staleproof
from staleproof import device

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Import names of what the extra "workbook" brings, where they are not the names of distributions.
IMPORT_NAMES = {"nvidia-ml-py": "pynvml"}


def _name_and_range(requirement: str) -> tuple[str, str]:
    match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
    assert match, requirement
    return match[1].lower().replace("_", "-"), match[2].strip()


def test_environment_yml_and_pyproject_agree():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = dict(_name_and_range(entry) for entry in listed if isinstance(entry, str))
    (pip,) = (entry["pip"] for entry in listed if isinstance(entry, dict))
    assert conda.pop("python") == PROJECT["requires-python"]
    conda.pop("pip")
    # The package itself brings every dependency, with its extras for notebooks and tests.
    (editable,) = (entry for entry in pip if entry.startswith("-e"))
    match = re.fullmatch(r"-e \.\[([a-z,]+)\]", editable)
    assert match
    assert match[1] == "workbook,test"
    # make installs the same.
    assert f'pip install -e ".[{match[1]}]"' in _make("-n", "-W", "pyproject.toml", "workbook")
    # A package listed beside it must have the range that pyproject.toml gives it.
    needs = [*PROJECT["dependencies"], *EXTRAS["workbook"], *EXTRAS["test"], *EXTRAS["flashinfer"]]
    ranges = dict(map(_name_and_range, needs))
    beside = conda | dict(_name_and_range(entry) for entry in pip if entry != editable)
    assert beside.items() <= ranges.items()
    assert "flashinfer-python" in beside


def test_a_server_installs_nothing_of_jupyter():
    core = dict(map(_name_and_range, PROJECT["dependencies"]))
    assert core.keys() == {"torch", "triton", "numpy", "typer", "rich", "prometheus-client"}
    assert core["numpy"] == core["rich"] == ""
    workbook = {name for name, _ in map(_name_and_range, EXTRAS["workbook"])}
    # jupyter_client comes with nbclient.
    assert set(device.WORKBOOK) - {"jupyter_client"} <= workbook


# torch and Triton of vLLM's releases (requirements/cuda.txt, and what that torch asks for), and the next.
VLLM_PINS = {
    "0.17.1 to 0.19.1": ("2.10.0", "3.6.0"),
    "0.20.0 to 0.26.0": ("2.11.0", "3.6.0"),
    "0.27.1 and 0.28.0": ("2.13.0", "3.7.1"),
    "0.33.0": ("2.14.0", "3.8.0"),
    "none yet": ("2.15.0", "3.9.0"),
}


def test_the_ranges_admit_what_vllm_pins():
    ranges = dict(map(_name_and_range, PROJECT["dependencies"]))
    for release, pins in VLLM_PINS.items():
        for name, version in zip(("torch", "triton"), pins, strict=True):
            assert SpecifierSet(ranges[name]).contains(version), (release, name)


def _wheel(folder: Path, *, date: float, mode: int) -> Path:
    """The wheel of a copy of the sources, with files of other dates and permissions than here."""
    copied = folder / "copy"
    shutil.copytree(ROOT / "src", copied / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied)
    for path in copied.rglob("*"):
        if path.is_file():
            path.chmod(mode)
            os.utime(path, (date, date))
    hatchling = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(hatchling, cwd=copied, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_a_wheel_has_all_files_and_the_same_bytes_each_time(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = _wheel(tmp_path / "a", date=1_600_000_000, mode=0o644)
    assert first.read_bytes() == _wheel(tmp_path / "b", date=1_700_000_000, mode=0o664).read_bytes()
    copied = tmp_path / "a/copy/src"
    sources = {str(path.relative_to(copied)) for path in copied.rglob("*.*")}
    assert sources <= {*zipfile.ZipFile(first).namelist()}


def test_every_public_name_has_a_home():
    assert set(staleproof.__all__) == set(staleproof._MODULES)
    for name, home in staleproof._MODULES.items():
        assert getattr(staleproof, name) is getattr(importlib.import_module(f"staleproof.ops.{home}"), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nan_to_num'"):
        staleproof.nan_to_num  # noqa: B018


def _make(*arguments: str, **environment: str) -> str:
    command, env = ["make", "-C", str(ROOT), *arguments], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def _fake_python(folder: Path, torch: str) -> Path:
    """A Python whose ``torch`` is ``torch`` and whose venv is a folder with a recording python."""
    path = folder / "python3"
    site = folder / "machine/lib/python3/site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch/__init__.py").write_text(torch)
    path.write_text(
        f"""#!/bin/sh
if [ "$1" = -m ]; then
  mkdir -p .venv/bin .venv/lib/python3/site-packages
  cp '{folder}/venv_python' .venv/bin/python
elif [ "$2" = 'import sys; print(sys.prefix)' ]; then
  echo '{folder}/machine'
else
  PYTHONPATH='{site}' exec "$REAL_PYTHON" "$@"
fi
"""
    )
    (folder / "venv_python").write_text(
        """#!/bin/sh
if [ "$1" = -c ]; then echo .venv/lib/python3/site-packages; else echo "$@" >> installed; fi
"""
    )
    for name in ("python3", "venv_python"):
        (folder / name).chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("torch", "kept"),
    [("class version:\n    cuda = '13.0'\n", True), ("class version:\n    cuda = None\n", False)],
)
def test_a_machine_keeps_the_cuda_torch_it_has(tmp_path, torch, kept):
    python = _fake_python(tmp_path, torch)
    (tmp_path / "machine/share/jupyter/nbconvert").mkdir(parents=True)
    (tmp_path / "machine/share/jupyter/kernels/python3").mkdir(parents=True)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        (checkout / name).write_text((ROOT / name).read_text())
    arguments = ["-C", str(checkout), f"PYTHON={python}", ".venv/.ready"]
    environment = {"REAL_PYTHON": sys.executable}
    _make(*arguments, **environment)
    pth = checkout / ".venv/lib/python3/site-packages/machine.pth"
    installed = (checkout / "installed").read_text().splitlines()
    package = "-m pip install -e .[workbook,test]"
    assert installed[: 2 - kept] == [*(["-m pip install torch==2.13.0"] if not kept else []), package]
    assert pth.exists() is kept
    if kept:
        assert str(tmp_path / "machine/lib/python3/site-packages") in pth.read_text().splitlines()
    # A kernel of the machine names another Python, so it stays behind.
    came_along = [p.name for p in (checkout / ".venv").glob("share/jupyter/*")]
    assert came_along == (["nbconvert"] if kept else [])
    # The stamp spares the second call everything.
    _make(*arguments, **environment)
    assert (checkout / "installed").read_text().splitlines() == installed


def test_without_triton_everything_but_kernels_is_there():
    program = """
import sys
sys.modules["triton"] = None
import torch
from staleproof import evidence
from staleproof.ops.reference import fp8 as reference
from staleproof.cli.app import main
assert evidence.judge_rows(lambda fill: torch.zeros(2, 3), 1) == "clean"
x_fp8, scale = reference.quantize_fp8_per_tensor(torch.ones(2, 4), live_rows=1)
assert scale.shape == (1,)
try:
    evidence.RowCounters
except ImportError as error:
    print(error)
main(["list"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout.splitlines()[0]
    assert "mla_padding" in done.stdout


LIGHT_CORE = """
import importlib, pkgutil, sys, types
for name in {blocked}:
    sys.modules[name] = None
import staleproof
from staleproof.cli import app as cli
from staleproof.lab import Finding
# These render notebooks and pictures.
names = "charts drawings kernels plots".split()
# And this is for vLLM's processes.
needs_more = (*("report." + name for name in names), "vllm.mla_backend")
for module in pkgutil.walk_packages(staleproof.__path__, "staleproof."):
    if not module.name.endswith(("__main__", *needs_more)):
        importlib.import_module(module.name)
from staleproof.report import matrix
print(matrix.text([Finding("kv_reuse", "a question", "a variant", "clean", "good")]))
from staleproof import lab
incident = lab.Incident("kv_reuse")
incident.question("q", ["v"], expect="clean")(lambda *_: lab.good("clean"))
sys.modules["staleproof.incidents.kv_reuse.questions"] = types.SimpleNamespace(incident=incident)
for command in {commands}:
    print(command, cli.main(command.split()), file=sys.stderr)
from staleproof.evidence.ledger import Report
for needs in (lambda: importlib.import_module("staleproof.report.plots"), Report(0, 0, (), (), 0, 0).figure):
    try:
        needs()
    except ImportError as error:
        print(error, file=sys.stderr)
"""


def test_the_light_core_loads_every_question_and_plots_name_the_extra_they_need(tmp_path):
    blocked = [name for name, _ in map(_name_and_range, EXTRAS["workbook"])]
    blocked = [IMPORT_NAMES.get(name, name) for name in blocked] + ["jupyter_client", "IPython", "yaml"]
    fine = ["list", "patches --version 0.18.1", "compare nvidia-h200 nvidia-h200"]
    fine.append(f"run kv_reuse --json {tmp_path}/findings.jsonl")
    commands = [*fine, "run nothing"]
    program = LIGHT_CORE.format(blocked=blocked, commands=commands)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    missing = r"not installed: [a-z_, ]*{}[a-z_, ]*; run: pip install -e \".\[workbook\]\""
    for line, expected in zip(
        done.stderr.splitlines(),
        [
            *(f"{command} 0" for command in fine),
            "staleproof: incidents: unknown incident .*",
            "run nothing 2",
            missing.format("seaborn"),
            missing.format("seaborn"),
        ],
        strict=True,
    ):
        assert re.fullmatch(expected, line), done.stderr
    assert "a variant" in done.stdout
