"""The reduced build, without a compiler: what it narrows, refuses and keeps."""

from __future__ import annotations

import difflib
import importlib.util
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleproof import device
from staleproof.cases import machine
from staleproof.cli import app as cli
from staleproof.kernels import moe_module, moe_sources, packages
from staleproof.kernels.moe_module import ModuleError

EDITS = (*moe_sources.EDITS, moe_sources.HOPPER.tiles)

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


def make_package(root: Path, version: str, check: bool) -> Path:
    """A folder with a package that has every anchor."""
    about = root / "flashinfer" / "_build_meta.py"
    about.parent.mkdir(parents=True)
    about.write_text(f'__version__ = "{version}"\n')
    csrc = root / "flashinfer/data/csrc"
    edits = {edit.file: edit for edit in EDITS}
    for name in {*moe_sources.SOURCES, *edits} - {*moe_sources.OWN_SOURCES, moe_sources.GEMM}:
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).touch()
    for name, edit in edits.items():
        (csrc / name).write_text(f"before {edit.start} between {edit.until or ''} after\n")
    (csrc / moe_sources.RUNNER).write_text(f"if ({moe_sources.CHECK})" if check else "no check")
    return root


@pytest.fixture
def unpacked(tmp_path):
    """A package with the version of the first check."""
    return make_package(tmp_path / "unpacked", "0.6.10", check=True)


@pytest.fixture
def two_releases(tmp_path, unpacked, monkeypatch):
    """The package as the installed one, and the folder where that without a check is looked for."""
    found = SimpleNamespace(submodule_search_locations=[str(unpacked / "flashinfer")])
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "flashinfer" else real(name)
    )
    monkeypatch.setenv("STALEPROOF_AUDIT_PACKAGES", str(tmp_path / "cache"))
    return tmp_path / "cache" / f"flashinfer_python-{moe_module.WITHOUT_CHECK}"


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """A compiler that does as it is told; ``nvcc.write_text`` tells it."""
    tool = tmp_path / "nvcc"
    tool.write_text(NVCC.format(header="exit 0", compile=":"))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(machine, "tool", lambda name: tool)
    monkeypatch.setenv(moe_module.FOLDER_VARIABLE, str(tmp_path / "modules"))
    return tool


def edited_file(root: Path, edit: moe_sources.Edit) -> Path:
    return root / "flashinfer/data/csrc" / edit.file


def changed_lines(source: moe_module.Package, name: str, text: str) -> tuple[list[str], list[str]]:
    """Lines of the package's file that are gone, and lines that are new."""
    old = (source.data / "csrc" / name).read_text().splitlines()
    marks = [line for line in difflib.ndiff(old, text.splitlines()) if line[0] in "+-"]
    return [m[2:] for m in marks if m[0] == "-"], [m[2:] for m in marks if m[0] == "+"]


@pytest.mark.parametrize("of", moe_sources.ARCHITECTURES.values(), ids=moe_sources.ARCHITECTURES)
def test_the_installed_package_is_the_one_the_build_was_written_for(of):
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    source = moe_module.package()
    files = moe_module.narrowed(source, of)
    # Whether a row index is checked is left as released.
    assert source.checks
    assert moe_sources.RUNNER not in files
    binding, dispatch = (files[edit.file] for edit in moe_sources.EDITS)
    # Two runners are made, where the package makes one a combination of types.
    assert binding.count("mKernelRunner = std::make") == 2
    assert "launcher(inputs, sm_count_);" not in dispatch
    gone, new = changed_lines(source, of.tiles.file, files[of.tiles.file])
    assert (len(gone), len(new)) == ((0, 4) if of is moe_sources.HOPPER else (1, 1))
    for name in moe_sources.SOURCES:
        assert name in files or (source.data / "csrc" / name).is_file(), name


def test_the_build_for_sm100_is_part_of_the_packages_own(tmp_path, monkeypatch):
    """FlashInfer's generator for a B200: its flags for BF16, and its kernels of the default tile."""
    jit = pytest.importorskip("flashinfer.jit.fused_moe")
    context = importlib.import_module("flashinfer.compilation_context").CompilationContext
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "10.0a")
    monkeypatch.setattr(jit, "current_compilation_context", context())
    monkeypatch.setattr(jit.jit_env, "FLASHINFER_GEN_SRC_DIR", tmp_path)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(jit, "gen_jit_spec", lambda name, sources, **rest: asked.update(rest, name=name))
    jit.gen_cutlass_fused_moe_sm100_module()
    theirs, ours = asked["extra_cuda_cflags"], moe_sources.BLACKWELL.flags
    assert asked["name"] == f"fused_moe_{moe_sources.BLACKWELL.number}"
    assert {flag for flag in theirs if "FP4" not in flag} <= set(ours)
    # FP8 is compiled where this is defined.
    assert moe_sources._FP8 not in "".join(ours)
    assert f"-D{moe_sources._FP8}" in moe_sources.HOPPER.flags
    assert not [flag for flag in ours if "SM90" in flag or "HOPPER" in flag or "90a" in flag]
    kernels = instances("".join(path.read_text() for path in tmp_path.rglob("*.cu")))
    of_the_tile = {
        one for one in kernels if one.count("__nv_bfloat16") == 3 and " 128, 128, 64, 1, 1, 1," in one
    }
    assert of_the_tile == instances(moe_sources.BLACKWELL.gemm)
    assert len(of_the_tile) == 12


def instances(text: str) -> set[str]:
    """The arguments of each GEMM that a source instantiates."""
    found = re.findall(r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\((.*?)\);", text, re.DOTALL)
    return {" ".join(one.split()) for one in found}


@pytest.mark.parametrize(
    ("capability", "number", "flag"),
    [
        ("sm_90", 90, "-gencode=arch=compute_90a,code=sm_90a"),
        ("sm_100", 100, "-gencode=arch=compute_100a,code=sm_100a"),
        (None, 90, "-gencode=arch=compute_90a,code=sm_90a"),
    ],
)
def test_the_gpu_chooses_the_flags_and_the_build_stops_at_the_compiler(
    capability, number, flag, nvcc, monkeypatch, tmp_path
):
    pytest.importorskip("flashinfer")
    root = moe_module.package().root
    monkeypatch.setattr(device, "machine", lambda: SimpleNamespace(capability=capability))
    told = tmp_path / "told"
    refuses = f'echo "$*" >> {told}; echo "nvcc fatal: unknown" >&2; exit 1'
    nvcc.write_text(NVCC.format(header="exit 0", compile=refuses))
    with pytest.raises(ModuleError, match=r"^ours/runner_bf16.cu does not compile: nvcc fatal: unknown$"):
        moe_module.build(root, jobs=1, say=lambda line: None)
    assert flag in told.read_text().split()
    # A compiler that accepts everything: the module is named after the architecture.
    nvcc.write_text(NVCC.format(header="exit 0", compile=":"))
    (made,) = moe_module.build(root, jobs=2, say=lambda line: None)
    assert made.name.startswith(f"fused_moe_sm{number}-")
    assert moe_module.built(moe_module.package()) == made


def test_another_gpu_is_one_line(unpacked, nvcc, monkeypatch):
    monkeypatch.setattr(device, "machine", lambda: SimpleNamespace(capability="sm_120"))
    says = r"^needs an SM90 or SM100 GPU \(H100, H200, B200, GB200\); this is sm_120$"
    for call in (lambda: moe_module.build(unpacked), lambda: moe_module.built(moe_module.package(unpacked))):
        with pytest.raises(ModuleError, match=says):
            call()


def test_narrowing_takes_out_what_it_says_and_nothing_else(unpacked):
    source = moe_module.package(unpacked)
    files = moe_module.narrowed(source)
    for edit in (*moe_sources.EDITS, moe_sources.HOPPER.tiles):
        end = f"{edit.until} after" if edit.until else " between  after"
        assert files[edit.file] == f"before {edit.text}{end}\n"
    assert moe_sources.RUNNER not in files


@pytest.mark.parametrize(
    ("edit", "change"),
    [*((edit, "gone") for edit in EDITS), *zip(EDITS[:3], ("twice", "no end", "no file"), strict=True)],
)
def test_changed_sources_are_named(unpacked, edit, change):
    path = edited_file(unpacked, edit)
    text = path.read_text()
    texts = {"gone": text.replace(edit.start, "other"), "twice": text * 2}
    texts["no end"] = text.replace(edit.until or "", "")
    path.unlink() if change == "no file" else path.write_text(texts[change])
    said = re.escape(f"flashinfer 0.6.10: {edit.file}: cannot leave out {edit.why}")
    with pytest.raises(ModuleError, match=rf"^[^\n]*{said}[^\n]*$"):
        moe_module.build(unpacked)


def test_a_source_that_is_gone_is_named(unpacked):
    (unpacked / "flashinfer/data/csrc/nv_internal/cpp/common/logger.cpp").unlink()
    with pytest.raises(ModuleError, match=r"0\.6\.10: nv_internal/cpp/common/logger.cpp: the sour"):
        moe_module.build(unpacked)


def test_no_package(tmp_path, monkeypatch):
    with pytest.raises(ModuleError, match="no flashinfer package is unpacked here"):
        moe_module.build(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleError, match="flashinfer is not installed: pip install"):
        moe_module.build()


def test_no_compiler(unpacked, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "tool", lambda name: None)
    with pytest.raises(ModuleError, match="nvcc was not found on PATH"):
        moe_module.build(unpacked, cache=tmp_path / "modules")


def test_a_build_needs_the_headers_of_tvm(unpacked, nvcc, monkeypatch):
    real = importlib.util.find_spec
    for found in (None, SimpleNamespace(submodule_search_locations=None)):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, found=found: found if name == "tvm_ffi" else real(name)
        )
        with pytest.raises(ModuleError, match=r"^apache-tvm-ffi is not installed: pip inst"):
            moe_module.build(unpacked)


def test_headers_of_wheels_come_after_those_of_the_package(unpacked, nvcc, monkeypatch, tmp_path):
    told, wheels, real = tmp_path / "told", tmp_path / "nvidia", importlib.util.find_spec
    for folder in (wheels / "cublas/include", wheels / "nvcc/bin", unpacked / "flashinfer/data/include"):
        folder.mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(wheels)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia" else real(name))
    nvcc.write_text(NVCC.format(header="exit 0", compile=f'echo "$*" >> {told}'))
    moe_module.build(unpacked, say=lambda line: None)
    system = [word for word in told.read_text().split("\n")[0].split() if word.startswith("-isystem=")]
    package = f"-isystem={unpacked}/flashinfer/data/include"
    assert (system[1], system[-1]) == (package, f"-isystem={wheels}/cublas/include")
    assert not [word for word in system if "bin" in word]


@pytest.mark.parametrize(("jobs", "workers"), [(None, 7), (3, 3)])
def test_as_many_compilations_run_as_are_asked_for(unpacked, nvcc, monkeypatch, jobs, workers):
    made, pool = [], moe_module.ThreadPoolExecutor
    monkeypatch.setattr(moe_module.os, "cpu_count", lambda: 7)
    monkeypatch.setattr(moe_module, "ThreadPoolExecutor", lambda n: made.append(n) or pool(n))
    moe_module.build(unpacked, jobs=jobs, say=lambda line: None)
    assert made == [workers]


def test_a_missing_header_names_its_wheel(unpacked, nvcc):
    header = 'if grep -q curand; then echo "not found" >&2; exit 1; else exit 0; fi'
    nvcc.write_text(NVCC.format(header=header, compile=":"))
    with pytest.raises(
        ModuleError, match=r"^curand_kernel.h was not found by nvcc: pip install nvidia-curan"
    ):
        moe_module.build(unpacked)


def test_a_failed_compilation_is_one_line_and_leaves_nothing(unpacked, nvcc, tmp_path):
    fails = 'echo "In file included" >&2; echo "a.cu(3): error: boom" >&2; exit 1'
    nvcc.write_text(NVCC.format(header="exit 0", compile=fails))
    with pytest.raises(ModuleError, match=r"^ours/runner_bf16.cu does not compile: a.cu\(3\): error: boom$"):
        moe_module.build(unpacked, jobs=1)
    assert not (tmp_path / "modules").exists()


def test_a_module_holds_every_source_of_its_release_and_is_kept(unpacked, nvcc, monkeypatch):
    source, later = moe_module.package(unpacked), moe_sources.LATER_SOURCES[0]
    told: list[str] = []
    with pytest.raises(ModuleError, match=r"0\.6\.10: not built: staleproof moe-module build"):
        moe_module.built(source)
    (path,) = moe_module.build(unpacked, say=told.append)
    assert sorted(told[:-1]) == sorted(f"compiled {name}" for name in moe_sources.SOURCES)
    assert path.read_text().split()[1:] == [f"{Path(name).stem}.o" for name in moe_sources.SOURCES]
    assert moe_module.built(source) == path
    # A file that a later release has is linked, too.
    source.file(later).touch()
    path.unlink()
    moe_module.build(unpacked, say=lambda line: None)
    assert f"{Path(later).stem}.o" in path.read_text().split()
    # Found again without a compiler, until nvcc's flags or the package's sources change.
    nvcc.unlink()
    assert moe_module.build(unpacked, say=lambda line: None) == [path]
    here = moe_module.architecture()
    with monkeypatch.context() as context:
        context.setattr(moe_module, "architecture", lambda: replace(here, flags=(*here.flags, "-O0")))
        with pytest.raises(ModuleError, match="not built"):
            moe_module.built(source)
    edited = edited_file(unpacked, moe_sources.EDITS[0])
    edited.write_text(edited.read_text() + "// another release\n")
    with pytest.raises(ModuleError, match="not built"):
        moe_module.built(source)


def test_the_release_without_a_check_is_fetched_once(two_releases, nvcc, monkeypatch):
    fetches = r"^flashinfer 0\.6\.10 has a bounds check: staleproof moe-module build fetches 0\.6\.8\.post1$"
    with pytest.raises(ModuleError, match=fetches):
        moe_module.of_release(check=False)
    fetched: list[str] = []

    def fetch(release: str, wanted: str, folder: Path) -> None:
        assert re.fullmatch(wanted, "flashinfer/data/csrc/a.cu")
        fetched.append(release)
        make_package(folder, moe_module.WITHOUT_CHECK, check=False)

    monkeypatch.setattr(packages, "fetch", fetch)
    told: list[str] = []
    for _ in range(2):
        made = moe_module.build(say=told.append)
        found = [moe_module.of_release(check) for check in (True, False)]
        assert [source.version for source in found] == ["0.6.10", "0.6.8.post1"]
        assert made == [moe_module.built(source) for source in found]
    assert fetched == ["flashinfer-python==0.6.8.post1"]
    assert told[0] == f"downloading flashinfer-python 0.6.8.post1 to {two_releases}"
    assert sum(line.startswith("downloading") for line in told) == 1


def test_a_release_that_cannot_be_fetched_is_one_line(two_releases, nvcc, monkeypatch):
    def fetch(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(packages, "fetch", fetch)
    with pytest.raises(ModuleError, match=r"^flashinfer-python 0\.6\.8\.post1 cannot be downloaded: .*pip"):
        moe_module.build(say=lambda line: None)


def test_an_installed_release_without_a_check_is_not_taken_for_one_with_it(two_releases, unpacked, nvcc):
    (unpacked / "flashinfer/data/csrc" / moe_sources.RUNNER).write_text("no check")
    with pytest.raises(ModuleError, match=r"has no bounds check: one from 0\.6\.10 on"):
        moe_module.of_release(check=True)
    assert moe_module.of_release(check=False).root == unpacked
    assert len(moe_module.build(say=lambda line: None)) == 1


def test_where_modules_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv(moe_module.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert moe_module.folder() == tmp_path / "staleproof" / "moe"
    monkeypatch.setenv(moe_module.FOLDER_VARIABLE, "carried")
    assert moe_module.folder() == Path("carried")


def test_the_command(unpacked, nvcc, tmp_path, capsys):
    arguments = ["moe-module", "build", "--package-root", str(unpacked)]
    cache = tmp_path / "not/yet/here"
    nvcc.write_text(nvcc.read_text() + 'truncate -s 1572864 "$out"\n')
    for said in ("built {} (1.5 MiB)", "built already: {}"):
        assert cli.main([*arguments, "--cache", str(cache), "--jobs", "1"]) == 0
        (made,) = cache.iterdir()
        assert capsys.readouterr().out.splitlines()[-1] == said.format(made)
    (unpacked / "flashinfer/_build_meta.py").unlink()
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == f"staleproof: {unpacked}: no flashinfer package is unpacked here\n"
    assert captured.out == ""


def test_a_module_that_cannot_be_written_or_is_cut_short_is_none(tmp_path, monkeypatch):
    (tmp_path / "draft").write_text("whole")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModuleError, match=r"m\.so: cannot be written: "):
        moe_module._keep(tmp_path / "draft", tmp_path / "file" / "m.so")

    def cut_short(source, target):
        target.write_text("who")
        raise KeyboardInterrupt

    monkeypatch.setattr(moe_module.shutil, "copy", cut_short)
    with pytest.raises(KeyboardInterrupt):
        moe_module._keep(tmp_path / "draft", tmp_path / "m.so")
    assert not (tmp_path / "m.so").exists()


def test_an_error_counts_also_where_a_compiler_prints_it():
    with pytest.raises(ModuleError, match=r"a\.cu does not compile: error: no such type$"):
        moe_module._run(["sh", "-c", "echo a.cu; echo 'error: no such type'; exit 1"], "a.cu")


def test_a_package_that_does_not_tell_its_version_is_one_all_the_same(tmp_path):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/_build_meta.py").write_text("")
    assert moe_module.package(tmp_path).version == "unknown"
