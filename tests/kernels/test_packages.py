"""Where packages under audit are found, and how their sources run without the rest of them."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import warm

from staleproof.kernels import packages
from staleproof.kernels.subject import Subject

SOURCE = "from {package}.config import is_hip\nfrom {package}.other import helper\nVALUE = {value}\n"


def _subject(package: str, *files: str, versions: tuple[str, ...] = ()) -> Subject:
    return Subject("x", "rows", print, package=package, files=files, versions=versions)


@pytest.fixture(name="cache")
def cache_fixture(tmp_path, monkeypatch):
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
    # By number, not by letter.
    (cache / "fast_kernels-10.0").mkdir()
    assert [r.version for r in packages.releases(_subject("fast-kernels"))] == ["1.0", "2.0", "10.0"]


def test_of_vllm_source_distributions_count_too_that_were_unpacked_whole(cache, monkeypatch):
    sources = cache / "sources"
    monkeypatch.setenv("STALEPROOF_VLLM_CACHE", str(sources))
    (cache / "vllm-0.20.2").mkdir()
    for folder in ("0.22.1/vllm", "0.23.0", "table/vllm"):
        (sources / folder).mkdir(parents=True)
    found = [(r.version, r.folder) for r in packages._cached("vllm")]
    assert found == [("0.20.2", cache / "vllm-0.20.2"), ("0.22.1", sources / "0.22.1")]


def test_an_installed_release_comes_first():
    (found,) = packages.releases(_subject("torch"))
    assert found.folder is None
    assert found.version


@pytest.mark.parametrize(("installed", "version"), [("1.0", "1.0"), (None, "checkout")])
def test_staleproof_is_its_installed_release_or_else_the_checkout(cache, monkeypatch, installed, version):
    monkeypatch.setattr(packages.devices, "version_of", lambda name: installed)
    assert [release.version for release in packages.releases(_subject("staleproof"))] == [version]


def test_a_copy_in_the_cache_of_the_installed_release_is_not_asked_beside_it(cache):
    (installed,) = packages.releases(_subject("torch"))
    for version in ("1.0", installed.version):
        (cache / f"torch-{version}").mkdir()
    other = packages.Release("1.0", cache / "torch-1.0")
    assert packages.releases(_subject("torch")) == [installed, other]


@pytest.mark.parametrize(
    ("needs", "here", "said"),
    [
        ("", None, ""),
        ("cpu", None, ""),
        ("cpu", "sm_90", "runs on CPU tensors only"),
        ("cuda", None, "needs a CUDA GPU"),
        ("cuda", "sm_80", ""),
        ("sm90", None, "needs a CUDA GPU"),
        ("sm90", "sm_100", "needs an SM90 GPU (H100, H200); this is sm_100"),
        ("sm90", "sm_90", ""),
        ("sm100", None, "needs a CUDA GPU"),
        ("sm100", "sm_90", "needs an SM100 GPU (B200, GB200); this is sm_90"),
        ("sm100", "sm_100", ""),
        # A B300 runs what a B200 runs.
        ("sm100", "sm_103", ""),
        ("sm100", "sm_120", "needs an SM100 GPU (B200, GB200); this is sm_120"),
    ],
)
def test_a_kernel_for_another_machine_says_which_it_needs(monkeypatch, needs, here, said):
    machine = replace(packages.devices.machine(), capability=here)
    monkeypatch.setattr(packages.devices, "machine", lambda: machine)
    assert packages.unavailable_reason(replace(_subject("torch"), needs=needs)) == said


def test_a_file_runs_with_stand_ins_for_the_rest_of_its_package(cache):
    program = (
        "from staleproof.kernels import packages\n"
        "from tests_subject import subject\n"
        "from staleproof.kernels.packages import Release\nfrom pathlib import Path\n"
        f"packages.make_importable([subject], Release('2.0', Path({str(cache / 'fast_kernels-2.0')!r})))\n"
        "from fast_kernels.ops import VALUE, helper\nprint(VALUE, callable(helper))\n"
    )
    (cache / "tests_subject.py").write_text(
        "from staleproof.kernels.subject import Subject\n"
        "subject = Subject('x', 'rows', print, package='fast-kernels', files=('fast_kernels.ops',))\n"
    )
    source = Path(__file__).parents[2] / "src"
    env = {"PYTHONPATH": f"{source}:{cache}", "PATH": "", "TRITON_INTERPRET": "1"}
    done = warm.run("-c", program, cwd=cache, env=env, timeout=60, vllm=False)
    assert done.stdout == "2.0 True\n", done.stderr


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("files", [(), ("fast_kernels.ops",)])
@pytest.mark.parametrize("installed", [False, True])
def test_sources_run_alone_but_for_an_installed_package_on_a_gpu(cache, monkeypatch, cuda, files, installed):
    """A release of the cache comes before an installed one."""
    folder = cache / "fast_kernels-2.0"
    path, machine = ["first", *[str(folder)] * installed], replace(packages.devices.machine(), kind="cpu")
    machine = replace(machine, kind="cuda") if cuda else machine
    monkeypatch.setattr(sys, "path", [*path, *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(packages.devices, "machine", lambda: machine)
    monkeypatch.setattr(packages.devices, "interpreting", lambda: False)
    before = [*sys.meta_path]
    subjects = [_subject("fast-kernels", *files), _subject("fast-kernels")]
    packages.make_importable(subjects, packages.Release("2.0", None if installed else folder))
    assert sys.path[: len(path) + 1 - installed] == [*[str(folder)] * (not installed), *path]
    added = [finder for finder in sys.meta_path if finder not in before]
    alone = files and not (cuda and installed)
    assert [(f.root, f.names, f.package, f.cuda) for f in added] == (
        [(folder / "fast_kernels", [*files], "fast_kernels", cuda)] if alone else []
    )


INTERPRETED = """
import torch, triton, triton.language as tl
from staleproof.kernels import interpreter
interpreter.repair()

@triton.jit
def convert(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)).to(out.dtype.element_ty))

@triton.autotune(configs=[triton.Config({"N": 8, "MORE": 1}), triton.Config({"N": 4, "MORE": 2})], key=[])
@triton.jit
def masked(x, out, n, scale, N: tl.constexpr, MORE: tl.constexpr):
    i = tl.arange(0, N)
    # Here the interpreter makes integers of the mask.
    read, written = (i < 3) & (n > 0), (i < 5) & (n > 0)
    found = tl.load(x + i, mask=read, other=7.0) * scale.to(tl.float32)
    tl.store(out + i, found + MORE, mask=written)

for fp8, largest in (torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344):
    x, out = torch.randn(4096) * largest / 4, torch.empty(4096, dtype=fp8)
    x[:4] = torch.tensor([127.0, 1e6, -1e6, float("nan")])
    for source in x, x.half():
        convert[(1,)](source, out, 4096)
        right = source[4:].clamp(-largest, largest).to(fp8).float()
        back = torch.empty(4096)
        convert[(1,)](out, back, 4096)
        print(out[:4].tolist(), torch.equal(out[4:].float(), right), torch.equal(back[4:], right))
half = torch.empty(4, dtype=torch.float16)
convert[(1,)](torch.tensor([0.1, 2.0, -3.0, 600.0]), half, 4)
print(half.tolist())
x, out = torch.arange(8.0), torch.zeros(8)
masked[(1,)](x, out, 8, 2.5)
print(out.tolist(), torch.cuda.get_device_capability(0))
"""
SHOWN = """[128.0, 448.0, -448.0, nan] True True
[128.0, 448.0, -448.0, nan] True True
[128.0, 57344.0, -57344.0, nan] True True
[128.0, 57344.0, -57344.0, nan] True True
[0.0999755859375, 2.0, -3.0, 600.0]
[1.0, 3.5, 6.0, 18.5, 18.5, 0.0, 0.0, 0.0] (9, 0)
"""


def test_the_interpreter_runs_and_rounds_as_a_gpu_does(tmp_path):
    (tmp_path / "kernels.py").write_text(INTERPRETED)
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": "", "TRITON_INTERPRET": "1"}
    done = warm.run(str(tmp_path / "kernels.py"), env=env, timeout=60, vllm=False)
    assert done.stdout == SHOWN, done.stderr


def test_a_fetched_wheel_is_cut_to_what_is_wanted_and_replaces_what_was_there(tmp_path, monkeypatch):
    ran = []

    def pip(command, check):
        ran.append((command, check))
        with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "kernels-1.0.whl", "w") as wheel:
            for name in ("kernels/ops.py", "kernels/ops.pyi", "kernels/_C.so", "more/kernels/ops.py"):
                wheel.writestr(name, name)

    monkeypatch.setattr(packages.subprocess, "run", pip)
    folder = tmp_path / "no/such/kernels-1.0"
    for _ in range(2):
        packages.fetch("kernels==1.0", r"kernels/.*\.py", folder)
        assert [file.relative_to(folder) for file in folder.rglob("*.*")] == [Path("kernels/ops.py")]
        # Neither the wheel nor a folder of work stays.
        assert [*folder.parent.iterdir()] == [folder]
        (folder / "old.py").touch()
    (command, check), _ = ran
    pip = [sys.executable, "-m", "pip", "download"]
    assert (command[:4], command[-1], check) == (pip, "kernels==1.0", True)
    # The machines that kernels run on are not the one that fetches.
    assert {
        "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp",
        "--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64",
    } <= {*command}  # fmt: skip


def _adapter(x):
    from json.decoder import JSONDecoder

    return JSONDecoder


def test_an_installed_release_does_not_answer_for_one_of_the_cache(cache, monkeypatch):
    subject = Subject("x", "rows", _adapter, package="fast-kernels")
    _adapter(0)
    folder = packages.Release("2.0", cache / "fast_kernels-2.0")
    why = packages.imported_elsewhere(subject, folder)
    assert why == "json.decoder was imported from another release"
    assert packages.imported_elsewhere(subject, packages.Release("2.0")) == ""
    # A cache that is reached through a link is one place.
    link = cache / "link"
    link.symlink_to(cache / "fast_kernels-2.0")
    monkeypatch.setattr(sys.modules["json.decoder"], "__file__", str(link / "json/decoder.py"))
    assert packages.imported_elsewhere(subject, packages.Release("2.0", link)) == ""


def _without_a_file(x):
    from sys import path

    from no_such_package import y
    from torch import nn

    return y, path, nn


def test_what_has_no_file_or_is_not_imported_came_from_nowhere_else(cache):
    subject = Subject("x", "rows", _without_a_file, package="fast-kernels")
    assert packages.imported_elsewhere(subject, packages.Release("2.0", cache / "fast_kernels-2.0")) == ""
    assert packages.other_torch(subject, packages.Release("2.0")) == ""


def _fast(x):
    from fast_kernels.ops import VALUE

    return VALUE


@pytest.fixture(name="built")
def built_fixture(cache, monkeypatch):
    """A release with a library that holds an assertion of a header of torch, at a line of it."""
    header = cache / "torch/include/c10/core/TensorImpl.h"
    header.parent.mkdir(parents=True)
    lines = [*["//"] * 40, "  TORCH_INTERNAL_ASSERT(", "      extra_meta_ && symbolic_);"]
    header.write_text("\n".join([*lines, *["//"] * 40]))
    monkeypatch.setattr(packages.torch, "__file__", str(cache / "torch/__init__.py"))
    monkeypatch.setattr(packages.torch, "__version__", "2.11.0+cu130")

    def made(line: int, condition: str = "extra_meta_ && symbolic_") -> packages.Release:
        said = "INTERNAL ASSERT FAILED at"
        there = "/opt/python3.12/site-packages/torch/include/c10/core/TensorImpl.h"
        text = f'{condition} {said} "{there}":{line}, please report a bug to PyTorch. '
        folder = cache / "fast_kernels-1.0"
        (folder / "fast_kernels/_C.so").write_bytes(
            b"\x7fELF\0" + there.encode() + b"\0" + text.encode() + b"\0"
        )
        packages.fits.cache_clear()
        return packages.Release("1.0", folder)

    return made


def test_a_library_that_was_compiled_against_another_torch_is_told_from_its_assertions(built):
    subject = Subject("x", "rows", _fast, package="fast-kernels")
    why = "_C.so was compiled against another torch than 2.11.0, the one here"
    # Of an assertion on two lines one compiler names the first and another the last.
    assert [packages.other_torch(subject, built(line)) for line in (41, 42)] == ["", ""]
    assert packages.other_torch(subject, built(60)) == why
    assert packages.other_torch(subject, built(4000)) == why
    assert packages.other_torch(subject, built(41, "is_mkldnn()")) == why


def test_every_package_that_an_adapter_imports_is_looked_at(built):
    def adapter(x):
        from a_package import y
        from fast_kernels.ops import VALUE

        return y, VALUE

    assert "_C.so was compiled" in packages.other_torch(
        Subject("x", "rows", adapter, package="fast-kernels"), built(60)
    )


def test_a_kernel_of_triton_sources_and_one_of_the_users_run_no_library_of_the_package(built):
    release = built(60)
    sources = Subject("x", "rows", _fast, package="fast-kernels", files=("fast_kernels.ops",))
    assert packages.other_torch(sources, release) == ""
    assert packages.other_torch(Subject("x", "rows", _fast), release) == ""
    assert packages.other_torch(Subject("x", "rows", print, package="fast-kernels"), release) == ""
