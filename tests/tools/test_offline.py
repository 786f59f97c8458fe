"""What is packed for a machine without a package index, how that goes on, and what arrives there."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "offline"))

import bundle
import compiled
import parts

from staleproof.incidents.moe_routing import fused_moe
from staleproof.kernels import moe_module


def test_every_file_is_in_one_part_and_parts_are_of_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "PART_BYTES", 100)
    for number in range(9):
        (tmp_path / f"{number}.py").write_bytes(bytes(40))
    groups = bundle.groups(tmp_path)
    assert sorted(path.name for group in groups for path in group) == [f"{n}.py" for n in range(9)]
    assert [len(group) for group in groups] == [3, 2, 3, 1]


@pytest.fixture
def downloads(monkeypatch):
    """Wheels that are made here, and which were asked for."""
    asked = []

    def fetch(folder: Path, python: str, *wanted: str) -> None:
        asked.append((python, *wanted))
        for each in wanted:
            name, _, version = each.partition("==")
            stem = f"{name.replace('-', '_')}-{version or 1}"
            with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
                for file in FILES.get(name, (f"{name}.py",)):
                    wheel.writestr(file, f"# {each}")
                wheel.writestr(f"{stem}.dist-info/METADATA", f"Name: {name}")

    monkeypatch.setattr(parts, "fetch", fetch)
    return asked


FILES = {
    "vllm": (
        "vllm/__init__.py",
        "vllm/vllm-rs",
        "vllm/_moe_C.abi3.so",
        "vllm/_C.abi3.so",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/_flashmla_C.abi3.so",
        "vllm/_flashmla_extension_C.abi3.so",
        "vllm/third_party/deep_gemm/x.h",
        "vllm/entrypoints/serve/static/page.js",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    ),
    "flashinfer-python": (
        "flashinfer/__init__.py",
        "flashinfer/data/csrc/kernel.cu",
        "flashinfer/data/cutlass/include/a.h",
        "flashinfer/data/cutlass/test/a.cu",
    ),
    "nvidia-cuda-runtime-cu12": ("nvidia/cuda_runtime/lib/libcudart.so.12",),
}


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """An old vLLM that needs no download."""
    for name in ("vllm", f"vllm-{parts.OLD_VLLM}.dist-info", "requirements"):
        (tmp_path / "old" / name).mkdir(parents=True)
        (tmp_path / "old" / name / "file").write_text(name)
    monkeypatch.setattr(parts.environment, "sources", lambda version: tmp_path / "old")


@pytest.fixture
def compiler(monkeypatch):
    """Compilations that write their names, and which ran."""
    ran = []

    def compile_(command, toolkit, sources, **environment):
        name, folder = "moe" if "moe-module" in command else command[-2], Path(command[-1])
        ran.append(name)
        target = folder / "fused.so" if name == "moe" else folder / name / f"{name}.so"
        target.parent.mkdir(exist_ok=True)
        target.write_text(name)

    monkeypatch.setattr(compiled, "toolkit", lambda folder: None)
    monkeypatch.setattr(compiled, "_compile", compile_)
    return ran


def there(folder: Path, *names: str) -> tuple[Path, dict[str, str]]:
    """Unpack parts as on the GPU machine, and the variables that they set there."""
    site = folder.parent / "there"
    lines = "".join(f'sh "{folder}/{n}/setup.sh" "{site}/{n}"; . "{site}/{n}/env"; ' for n in names)
    said = subprocess.run(
        ["sh", "-ec", f"{lines} env"],
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": "/checkout/src",
            "LD_LIBRARY_PATH": "/cuda",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return site, dict(line.partition("=")[::2] for line in said.splitlines() if "=" in line)


def test_findings_arrive_with_every_variable_naming_what_is_there(tmp_path, downloads, sources, compiler):
    bundle.main(["findings", "--to", str(tmp_path / "to")])
    site, variables = there(tmp_path / "to", "vllm", "flashinfer", "moe")
    found = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    for name, value in variables.items():
        if name.startswith(("STALEPROOF", "FLASHINFER_W")):
            assert Path(value).exists(), name
    python = [str(site / "vllm/0.20.2"), str(site / "flashinfer")]
    assert variables["PYTHONPATH"].split(":") == ["/checkout/src", *python]
    assert variables["FLASHINFER_DISABLE_JIT"] == "1"
    assert Path(variables["STALEPROOF_FLASHMLA_SO"]).with_name("_flashmla_extension_C.abi3.so").exists()
    assert {f"flashinfer/flashinfer/data/aot/{n}/{n}.so" for n in compiled.MODULES} <= {*found}
    assert "moe/moe/fused.so" in found
    cached = site / "moe/cache"
    assert variables["STALEPROOF_AUDIT_PACKAGES"] == str(cached)
    assert (cached / f"flashinfer_python-{moe_module.WITHOUT_CHECK}/flashinfer/data/csrc/kernel.cu").exists()
    assert (cached / f"vllm-{fused_moe.VLLM}/vllm/{fused_moe.MOE_LIBRARY}").exists()
    before, carried = variables["LD_LIBRARY_PATH"].split(":")
    assert (before, (Path(carried) / fused_moe.CUDA_RUNTIME).exists()) == ("/cuda", True)
    assert "vllm/0.19.1/vllm/file" in found
    assert "flashinfer/flashinfer/data/csrc/kernel.cu" in found
    for left_out in ("vllm-rs", "deep_gemm", "static", "_vllm_fa2", "stable", "data/cutlass"):
        assert not [name for name in found if left_out in name], left_out


def test_a_list_of_packages_holds_no_comment():
    names = [name for file in ("engine.txt", "serve.txt", "audit.txt") for name in parts.listed(file)]
    assert all(name[0].isalnum() for name in names)


def test_a_part_that_arrived_broken_stops_the_setup(tmp_path, downloads, sources):
    bundle.main(["vllm", "--to", str(tmp_path / "to")])
    with (tmp_path / "to/vllm/part0.tar.xz").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(subprocess.CalledProcessError):
        there(tmp_path / "to", "vllm")
    assert not (tmp_path / "there/vllm/env").exists()


def test_what_is_there_is_not_made_again_and_what_was_stopped_goes_on(
    tmp_path, downloads, sources, compiler, monkeypatch
):
    order = ["findings", "--to", str(tmp_path)]
    real = compiled._compile

    def stopped(command, *arguments, **environment):
        if "fp4" in command:
            Path(command[-1], "half").touch()
            raise KeyboardInterrupt
        real(command, *arguments, **environment)

    monkeypatch.setattr(compiled, "_compile", stopped)
    with pytest.raises(KeyboardInterrupt):
        bundle.main(order)
    assert compiler == ["mla-fa3", "mla-fa2"]
    monkeypatch.setattr(compiled, "_compile", real)
    bundle.main(order)
    assert not [*tmp_path.rglob("half")], "a folder that was half made does not count"
    assert len(downloads) == len({*downloads}), "nothing was downloaded twice"
    assert compiler == [*compiled.MODULES, "moe", "moe"]
    fetched = [*downloads]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("part*.tar.xz")}
    bundle.main(order)
    assert downloads == fetched
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("part*.tar.xz")} == before
    assert compiler == [*compiled.MODULES, "moe", "moe"]


def test_other_arguments_make_a_part_again(tmp_path, downloads, sources):
    bundle.main(["vllm", "--to", str(tmp_path)])
    before = (tmp_path / "vllm").stat().st_ino
    bundle.main(["vllm", "--no-ptx", "--to", str(tmp_path)])
    assert (tmp_path / "vllm").stat().st_ino == before, "only the engine's PTX is a choice"
    bundle.main(["vllm", "--python", "3.11", "--to", str(tmp_path)])
    assert [python for python, *_ in downloads] == ["3.12", "3.12", "3.11", "3.11"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nosuch"], "nosuch: no such part; there are engine, vllm, audit-vllm,"),
        (["moe", "--gpu", "80"], "--gpu 80: moe can be compiled for 90 only"),
        (["vllm", "--to", "{file}/below"], "{file}/below: cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_downloaded(arguments, line, tmp_path, downloads, capsys):
    file = tmp_path / "file"
    file.touch()
    arguments = [text.format(file=file) for text in arguments]
    with pytest.raises(SystemExit, match="2"):
        bundle.main(["--to", str(tmp_path / "to"), *arguments])
    said = capsys.readouterr().err
    assert line.format(file=file) in said
    assert said.count("\n") == 1
    assert downloads == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_runs_by_itself(tmp_path):
    done = subprocess.run(
        [sys.executable, bundle.__file__, "nosuch", "--to", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("nosuch: no such part;")


def test_two_processes_do_not_work_in_one_folder(tmp_path, downloads, capsys):
    with bundle._locked(tmp_path), pytest.raises(SystemExit, match="2"):
        bundle.main(["vllm", "--to", str(tmp_path)])
    assert capsys.readouterr().err == f"--to {tmp_path}: another process works there\n"
    assert downloads == []


def test_a_download_that_failed_is_one_line(tmp_path, monkeypatch, capsys):
    def fetch(folder, python, *wanted):
        raise subprocess.CalledProcessError(1, ["pip", "download", *wanted])

    monkeypatch.setattr(parts, "fetch", fetch)
    with pytest.raises(SystemExit, match="1"):
        bundle.main(["vllm", "--to", str(tmp_path)])
    assert capsys.readouterr().err == "vllm: pip download vllm==0.20.2: exit code 1\n"


def test_a_missing_compiler_is_said_before_anything_is_downloaded(tmp_path, downloads, capsys, monkeypatch):
    monkeypatch.setattr(bundle.shutil, "which", lambda name: None if name == "c++" else name)
    with pytest.raises(SystemExit, match="2"):
        bundle.main(["moe", "--to", str(tmp_path / "to")])
    assert capsys.readouterr().err == "c++ was not found on PATH\n"
    assert downloads == []


@pytest.mark.parametrize(
    ("name", "ordered", "ptx", "by_kernel"),
    [
        ("engine", True, True, False),
        ("engine", False, False, False),
        ("vllm", True, False, False),
        ("audit-vllm", False, True, True),
        ("audit-rest", True, False, False),
    ],
)
def test_device_code_is_cut_as_the_part_says(name, ordered, ptx, by_kernel, tmp_path, monkeypatch):
    library = tmp_path / "_moe_C.abi3.so"
    library.write_bytes(b"host code")
    said = []
    monkeypatch.setattr(parts, "reduce", lambda *given: said.append(given) or (0, 0))
    monkeypatch.setattr(parts, "_unpackers", lambda order: None)
    parts._reduce(parts.PARTS[name], parts.Order(tmp_path, 90, ptx=ordered), library, tmp_path)
    ((path, gpu, kept_ptx, wanted),) = said
    assert (path, gpu, kept_ptx, wanted is not None) == (library, 90, ptx, by_kernel)
    if wanted is not None:
        assert wanted("vllm::moe::topkGatingSoftmax")
        assert not wanted("marlin_moe_wna16")


def test_the_engine_brings_the_plugin_and_serving_only_if_asked():
    one, both = (parts.engine("0.22.1", serve) for serve in (False, True))
    names = [[x for wanted in part.wheels[0].wanted for x in parts.listed(wanted)] for part in (one, both)]
    assert names[0][0] == "vllm==0.22.1"
    assert "uvicorn" not in names[0]
    assert set(names[1]) - set(names[0]) >= {"uvicorn", "httptools", "mistral-common"}
    assert one.more is parts._own_plugin
    assert one.ptx is None


def test_every_list_and_group_names_what_there_is():
    for part in parts.PARTS.values():
        for wheels in part.wheels:
            assert all(parts.listed(wanted) for wanted in wheels.wanted)
        assert part.env
    assert {name for group in parts.GROUPS.values() for name in group} <= {*parts.PARTS}
    assert [part for name, part in parts.PARTS.items() if part.compiles] == [*parts.PARTS.values()][-2:]
    assert {parts.PARTS[name].compiles for name in parts.GROUPS["audit"]} == {False}


def test_the_modules_are_those_that_the_questions_ask_flashinfer_for():
    """By FlashInfer's own signatures, whose names the GPU machine looks for."""
    jit = pytest.importorskip("flashinfer.jit")
    for module in compiled.MODULES.values():
        place, _, name = f"flashinfer.jit.{module.maker}".rpartition(".")
        inspect.signature(getattr(importlib.import_module(place), name)).bind(*module.arguments)
    assert jit.gen_batch_mla_module


def test_the_fused_moe_is_compiled_with_the_command_that_names_its_modules(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        compiled.subprocess, "run", lambda command, **how: asked.update(command=command, env=how["env"])
    )
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    compiled.build_moe(Path("flashinfer"), Path("toolkit"))(tmp_path)
    assert asked["command"][:4] == ["nice", "-n", "15", sys.executable]
    assert asked["command"][4:9] == ["-m", "staleproof", "moe-module", "build", "--jobs"]
    assert asked["env"]["CUDA_HOME"] == "toolkit/nvidia/cu13"
    assert asked["env"]["PATH"].startswith("toolkit/nvidia/cu13/bin:toolkit/bin:")
    assert "FLASHINFER_DISABLE_JIT" not in asked["env"]
    assert compiled.moe_recipe() == Path(moe_module.__file__).with_name("moe_sources.py").read_text()
