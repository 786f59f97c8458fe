"""The reduced build, without a compiler: what it narrows, refuses and keeps."""

from __future__ import annotations

import difflib
import importlib.util
import stat
from pathlib import Path

import pytest

from staleproof import cli
from staleproof.harness import environment
from staleproof.incidents.moe_routing import moe_module
from staleproof.incidents.moe_routing.moe_module import ModuleError

# Records its arguments in the file it is asked for. HEADER and COMPILE are what it does first.
NVCC = """#!/bin/sh
case "$*" in
  *" -E "*) {header};;
  *" -c "*) {compile};;
esac
while [ $# -gt 0 ]; do
  case "$1" in -o) out="$2";; *.o) objects="$objects $(basename "$1")";; esac
  shift
done
echo "linked:$objects" > "$out"
"""


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """A folder with a package that has every anchor, and the version of the first check."""
    root = tmp_path / "unpacked"
    about = root / "flashinfer" / "_build_meta.py"
    about.parent.mkdir(parents=True)
    about.write_text('__version__ = "0.6.10"\n')
    csrc = root / "flashinfer/data/csrc"
    edits = {edit.file: edit for edit in (*moe_module.EDITS, moe_module.WITHOUT_CHECK)}
    for name in {*moe_module.SOURCES, *edits} - {*moe_module.OWN_SOURCES}:
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).touch()
    for name, edit in edits.items():
        (csrc / name).write_text(f"before {edit.start} between {edit.until or ''} after\n")
    return root


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that does as it is told; ``nvcc.write_text`` tells it."""
    tool = tmp_path / "nvcc"
    tool.write_text(NVCC.format(header="exit 0", compile=":"))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(environment, "tool", lambda name: tool)
    monkeypatch.setenv(moe_module.FOLDER_VARIABLE, str(tmp_path / "modules"))
    return tool


def edited_file(root: Path, edit: moe_module.Edit) -> Path:
    return root / "flashinfer/data/csrc" / edit.file


def changed_lines(source: moe_module.Package, name: str, text: str) -> tuple[list[str], list[str]]:
    """Lines of the package's file that are gone, and lines that are new."""
    old = (source.data / "csrc" / name).read_text().splitlines()
    marks = [line for line in difflib.ndiff(old, text.splitlines()) if line[0] in "+-"]
    return [m[2:] for m in marks if m[0] == "-"], [m[2:] for m in marks if m[0] == "+"]


def test_the_installed_package_is_the_one_the_build_was_written_for() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    source = moe_module.package()
    files = moe_module.narrowed(source)
    cuh = files[moe_module.UNCHECKED_RUNNER]
    gone, new = changed_lines(source, moe_module.RUNNER, cuh)
    assert [line.strip() for line in new] == ["if (false) {"]
    assert len(gone) == 1
    binding, dispatch, tiles = (files[edit.file] for edit in moe_module.EDITS)
    # One runner is made, where the package makes one a combination of types.
    assert binding.count("mKernelRunner = std::make") == 1
    assert "launcher(inputs, sm_count_);" not in dispatch
    gone, new = changed_lines(source, moe_module.EDITS[2].file, tiles)
    assert (gone, len(new)) == ([], 4)
    for name in moe_module.SOURCES:
        assert name in files or (source.data / "csrc" / name).is_file(), name


def test_narrowing_takes_out_what_it_says_and_nothing_else(unpacked: Path) -> None:
    source = moe_module.package(unpacked)
    files = moe_module.narrowed(source)
    for edit in moe_module.EDITS:
        end = f"{edit.until} after" if edit.until else " between  after"
        assert files[edit.file] == f"before {edit.text}{end}\n"
    assert files[moe_module.UNCHECKED_RUNNER] == "before false between  after\n"
    assert moe_module.RUNNER not in files


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (edit, change)
        for edit in (*moe_module.EDITS, moe_module.WITHOUT_CHECK)
        for change in ("gone", "twice", "no end", "no file")
        if edit.until or change != "no end"
    ],
)
def test_changed_sources_are_named(unpacked: Path, edit: moe_module.Edit, change: str) -> None:
    path = edited_file(unpacked, edit)
    text = path.read_text()
    if change == "no file":
        path.unlink()
    else:
        path.write_text(
            {
                "gone": text.replace(edit.start, "other"),
                "twice": text * 2,
                "no end": text.replace(edit.until or "", ""),
            }[change]
        )
    with pytest.raises(ModuleError) as caught:
        moe_module.build(unpacked)
    assert f"flashinfer 0.6.10: {edit.file}: cannot leave out {edit.why}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_source_that_is_gone_is_named(unpacked: Path) -> None:
    (unpacked / "flashinfer/data/csrc/nv_internal/cpp/common/logger.cpp").unlink()
    with pytest.raises(ModuleError, match=r"0\.6\.10: nv_internal/cpp/common/logger.cpp: the sour"):
        moe_module.build(unpacked)


def test_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleError, match="no flashinfer package is unpacked here"):
        moe_module.build(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleError, match="flashinfer is not installed: pip install"):
        moe_module.build()


def test_no_compiler(unpacked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "tool", lambda name: None)
    with pytest.raises(ModuleError, match="nvcc was not found on PATH"):
        moe_module.build(unpacked, cache=tmp_path / "modules")


def test_a_missing_header_names_its_wheel(unpacked: Path, nvcc: Path) -> None:
    header = 'if grep -q curand; then echo "not found" >&2; exit 1; else exit 0; fi'
    nvcc.write_text(NVCC.format(header=header, compile=":"))
    with pytest.raises(ModuleError) as caught:
        moe_module.build(unpacked)
    assert str(caught.value) == "curand_kernel.h was not found by nvcc: pip install nvidia-curand"


def test_a_failed_compilation_is_one_line_and_leaves_nothing(
    unpacked: Path, nvcc: Path, tmp_path: Path
) -> None:
    fails = 'echo "In file included" >&2; echo "a.cu(3): error: boom" >&2; exit 1'
    nvcc.write_text(NVCC.format(header="exit 0", compile=fails))
    with pytest.raises(ModuleError) as caught:
        moe_module.build(unpacked, jobs=1)
    assert str(caught.value) == ("ours/runner.cu does not compile: a.cu(3): error: boom")
    assert not (tmp_path / "modules").exists()


def test_each_module_gets_its_own_runner_and_is_kept(unpacked: Path, nvcc: Path) -> None:
    with pytest.raises(ModuleError, match="not built: staleproof moe-module build"):
        moe_module.built(unpacked)
    targets = moe_module.build(unpacked, say=lambda line: None)
    linked = {check: path.read_text().split() for check, path in targets.items()}
    assert "runner.o" in linked[True]
    assert "unchecked_runner.o" not in linked[True]
    assert "unchecked_runner.o" in linked[False]
    assert "runner.o" not in linked[False]
    assert len(linked[True]) == len(linked[False]) == 1 + len(moe_module.SOURCES)
    for check, path in targets.items():
        assert moe_module.built(unpacked, check=check) == path
    # Found again without a compiler, until the package's sources change.
    nvcc.unlink()
    assert moe_module.build(unpacked, say=lambda line: None) == targets
    path = edited_file(unpacked, moe_module.EDITS[0])
    path.write_text(path.read_text() + "// another release\n")
    with pytest.raises(ModuleError, match="not built"):
        moe_module.built(unpacked)


def test_where_modules_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(moe_module.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert moe_module.folder() == tmp_path / "staleproof" / "moe"
    monkeypatch.setenv(moe_module.FOLDER_VARIABLE, "carried")
    assert moe_module.folder() == Path("carried")


def test_the_command(unpacked: Path, nvcc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["moe-module", "build", "--package-root", str(unpacked)]
    cache = tmp_path / "here"
    assert cli.main([*arguments, "--cache", str(cache), "--jobs", "1"]) == 0
    assert len(list(cache.iterdir())) == 2
    assert "built " in capsys.readouterr().out
    (unpacked / "flashinfer/_build_meta.py").unlink()
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == f"staleproof: {unpacked}: no flashinfer package is unpacked here\n"
    assert captured.out == ""
