"""The decorators, and what a kernel is called with."""

import re
import sys
import types
from pathlib import Path

import pytest

from staleproof import audit
from staleproof.contract.cases import SUBJECTS
from staleproof.kernels.subject import bound, load_module, subjects_of


def test_a_decorated_function_stays_as_it_is():
    def double(x):
        return 2 * x

    assert audit.rows(name="double")(double) is double
    assert double(2) == 4
    (subject,) = subjects_of(types.SimpleNamespace(double=double))
    assert (subject.name, subject.kind, subject.clauses) == ("double", "rows", ("0", "R", "W", "O"))


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("attention", {"page_sise": 16}, "page_sise: expected a size of attention: .*page_size.*, got"),
        ("rows", {"documented": {"E": "left"}}, "documented: expected clauses of rows: 0, R, W, O, got E"),
        ("rows", {"needs": "sm80"}, "needs: expected"),
        ("operands", {}, "make: expected a function of the device, got nothing"),
    ],
)
def test_what_its_kind_has_not_is_refused(kind, given, said):
    with pytest.raises(ValueError, match=said):
        getattr(audit, kind)(**given)(print)


def test_a_kernel_gets_the_arguments_that_it_names():
    known = {"q": 1, "out": 2, "seq_lens": 3}
    assert bound(lambda out, q, *others, lse=None, **more: q, known) == {"out": 2, "q": 1}
    with pytest.raises(TypeError, match="needs sinks; known: q"):
        bound(lambda q, sinks: q, {"q": 1})


def test_an_argument_that_its_kind_has_not_is_refused_where_the_kernel_is_registered():
    def scaled(x, weight):
        return x * weight

    with pytest.raises(ValueError, match="weight: an argument of scaled: expected arguments of rows: x, got"):
        audit.rows()(scaled)
    assert audit.rows(given={"weight": 2})(scaled) is scaled


def test_a_file_is_loaded_by_its_path_and_imports_what_lies_beside_it(tmp_path, monkeypatch):
    (tmp_path / "their_helpers.py").write_text("VALUE = 3\n")
    (tmp_path / "their_kernels.py").write_text("from their_helpers import VALUE\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    loaded = load_module("their_kernels.py")
    assert (loaded.VALUE, loaded.__file__) == (3, str(tmp_path / "their_kernels.py"))
    # Dataclasses, and kernels that are pickled, look their module up.
    assert sys.modules[loaded.__name__] is loaded
    assert load_module("json.decoder") is sys.modules["json.decoder"]
    for name in ("their_helpers", loaded.__name__):
        del sys.modules[name]


@pytest.mark.parametrize("name", ["absent.py", "folder/absent.py"])
def test_a_path_without_a_file_is_refused(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"^{tmp_path / name} is no Python file$"):
        load_module(str(tmp_path / name))


def test_one_adapter_serves_kernels_that_differ_by_an_argument():
    def scaled(x, factor):
        return x * factor

    for factor in (2, 1):
        audit.rows(name=f"times {factor}", given={"factor": factor})(scaled)
    once, twice = subjects_of(types.SimpleNamespace(scaled=scaled))
    assert [(s.name, s.call(3), s.function, s.given) for s in (once, twice)] == [
        ("times 1", 3, scaled, {"factor": 1}),
        ("times 2", 6, scaled, {"factor": 2}),
    ]


def test_no_adapter_hides_another_of_its_name():
    for module in SUBJECTS:
        text = Path(load_module(module).__file__ or "").read_text()
        names = re.findall(r"^def (\w+)\(", text, re.MULTILINE)
        assert len(names) == len(set(names)), module
