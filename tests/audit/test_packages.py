"""Where packages under audit are found, and how their sources run without the rest of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from staleproof.audit import packages
from staleproof.audit.registry import Subject

SOURCE = "from {package}.config import is_hip\nfrom {package}.other import helper\nVALUE = {value}\n"


def _subject(package: str, *files: str, versions: tuple[str, ...] = ()) -> Subject:
    return Subject("x", "rows", print, package=package, files=files, versions=versions)


@pytest.fixture(name="cache")
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for version in ("1.0", "2.0"):
        kernels = tmp_path / f"fast_kernels-{version}/fast_kernels"
        kernels.mkdir(parents=True)
        (kernels / "__init__.py").write_text("import no_such_dependency\n")
        (kernels / "ops.py").write_text(SOURCE.format(package="fast_kernels", value=version))
    monkeypatch.setenv("STALEPROOF_AUDIT_PACKAGES", str(tmp_path))
    return tmp_path


def test_every_release_of_the_cache_is_found(cache):
    found = packages.releases(_subject("fast-kernels"))
    assert [(r.version, r.folder) for r in found] == [
        (v, cache / f"fast_kernels-{v}") for v in ("1.0", "2.0")
    ]
    assert [r.version for r in packages.releases(_subject("fast-kernels", versions=("2.0",)))] == ["2.0"]
    assert packages.releases(_subject("no-such-kernels")) == []


def test_an_installed_release_comes_first():
    (found,) = packages.releases(_subject("torch"))
    assert found.folder is None
    assert found.version


def test_a_file_runs_with_stand_ins_for_the_rest_of_its_package(cache):
    program = (
        "from staleproof.audit import packages\n"
        "from tests_subject import subject\n"
        "from staleproof.audit.packages import Release\nfrom pathlib import Path\n"
        f"packages.make_importable([subject], Release('2.0', Path({str(cache / 'fast_kernels-2.0')!r})))\n"
        "from fast_kernels.ops import VALUE, helper\nprint(VALUE, callable(helper))\n"
    )
    (cache / "tests_subject.py").write_text(
        "from staleproof.audit.registry import Subject\n"
        "subject = Subject('x', 'rows', print, package='fast-kernels', files=('fast_kernels.ops',))\n"
    )
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=cache,
        env={"PYTHONPATH": f"{source}:{cache}", "PATH": "", "TRITON_INTERPRET": "1"},
    )
    assert done.stdout == "2.0 True\n", done.stderr


def _adapter(x):
    from json.decoder import JSONDecoder

    return JSONDecoder


def test_an_installed_release_does_not_answer_for_one_of_the_cache(cache):
    subject = Subject("x", "rows", _adapter, package="fast-kernels")
    _adapter(0)
    folder = packages.Release("2.0", cache / "fast_kernels-2.0")
    why = packages.imported_elsewhere(subject, folder)
    assert why == "json.decoder was imported from another release"
    assert packages.imported_elsewhere(subject, packages.Release("2.0")) == ""
