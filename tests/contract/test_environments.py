"""What the first lines of a script say: what it shows, and what to install."""

import types

import pytest

from staleproof.contract import environments
from staleproof.contract.environments import Installed
from staleproof.kernels.subject import Subject

CPU, GPU = (Installed("2.11.0", "3.6.0", cuda) for cuda in (False, True))
BASE = "pip install torch==2.11.0 triton==3.6.0 numpy"
SGLANG = (
    "packaging orjson psutil pybase64 requests pillow starlette msgspec pyzmq tqdm ipython pydantic aiohttp"
)


@pytest.mark.parametrize(
    ("package", "seen", "installs"),
    [
        ("", GPU, []),
        ("torch", GPU, ["pip install torch==1.0 numpy"]),
        ("transformers", CPU, ["pip install torch==2.11.0 numpy transformers==1.0"]),
        ("sgl-flash-mla", GPU, ["pip install torch==2.11.0 numpy sgl-flash-mla==1.0"]),
        ("sgl-deep-gemm", GPU, ["pip install torch==2.11.0 numpy sgl-deep-gemm==1.0"]),
        ("flashinfer-python", GPU, [f"{BASE} flashinfer-python==1.0"]),
        ("fla-core", CPU, [f"{BASE} packaging fla-core==1.0"]),
        ("liger-kernel", CPU, [f"{BASE} packaging liger-kernel==1.0"]),
        ("vllm", CPU, [f"{BASE} packaging regex", "pip install --no-deps vllm==1.0"]),
        ("sglang", CPU, [f"{BASE} {SGLANG}", "pip install --no-deps sglang==1.0"]),
        ("vllm", GPU, ["pip install vllm==1.0  # seen with torch==2.11.0 triton==3.6.0"]),
    ],
)
def test_a_script_installs_what_its_package_needs_and_no_more(package, seen, installs):
    subject = Subject("decode", "attention", print, package=package)
    assert environments.commands(subject, "1.0+cu130", seen) == installs
    whose = f"{package} 1.0" if package else "your module"
    title = f"# decode ({whose}). Clause E: a row."
    lines = environments.head(subject, "1.0", "Clause E: a row.", seen)
    assert lines == [title, *(f"# {line}" for line in installs)]


@pytest.mark.parametrize(("triton", "kind", "wanted"), [
    ("3.6.0", "cuda", Installed("2.11.0", "3.6.0", cuda=True)),
    (None, "cpu", Installed("2.11.0", "", cuda=False)),
])  # fmt: skip
def test_a_script_was_seen_with_what_this_machine_has(monkeypatch, triton, kind, wanted):
    machine = types.SimpleNamespace(torch="2.11.0+cu130", triton=triton, kind=kind)
    monkeypatch.setattr(environments.devices, "machine", lambda: machine)
    assert environments.here() == wanted
