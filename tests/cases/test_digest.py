"""A digest changes with every file a result depends on, and with no other."""

from __future__ import annotations

import ast
import io
import time
import tokenize
from pathlib import Path

import pytest

from staleproof.cases import digest
from staleproof.incidents.registry import INCIDENTS

CHECKOUT = Path(__file__).resolve().parents[2]

FILES = {
    "__init__.py": "from staleproof.ops.unused import unused\n",
    "device.py": "WORD = 'INTERPRETED'\n",
    "ops/reference/topk.py": "import torch\n",
    "ops/topk.py": "from staleproof.device import WORD\n",
    "evidence/__init__.py": "from staleproof.evidence.rows import judge\n",
    "cases/graph.py": "import staleproof.device\n",
    "incidents/one/scene.py": (
        "def serve():\n    from staleproof.cases import (\n        graph,\n        lazy as later,\n    )\n"
    ),
    "incidents/one/cases.py": (
        '"""\nfrom staleproof import what nobody wrote\n"""\n'
        "from staleproof.incidents.one import scene\n"
        "if True:\n    from staleproof.ops.reference import topk as reference\n"
    ),
    "incidents/two/cases.py": (
        "from staleproof.evidence import judge\nfrom staleproof.ops.topk import topk\n"
    ),
}
FILES |= dict.fromkeys(("ops/__init__.py", "ops/reference/__init__.py", "ops/unused.py"), "")
FILES |= dict.fromkeys(("evidence/rows.py", "cases/lazy.py", "report/matrix.py"), "")
SCENE = "incidents/one/scene.py"
ONE = {"device.py", "cases/graph.py", "cases/lazy.py", "ops/reference/topk.py"}
ONE |= {"incidents/one/scene.py", "incidents/one/cases.py"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of its own, so that its files can be changed."""
    root = tmp_path / "src" / "staleproof"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(digest, "PACKAGE", root)
    forget()
    yield root
    forget()


def forget() -> None:
    for cached in (digest.source_digest, digest.file_digest, digest._imports, digest._file):
        cached.cache_clear()


def digest_with(path: Path, text: str) -> str:
    """Of the incident ``one``, with this text in a file."""
    path.write_text(text)
    forget()
    return digest.source_digest("one")


def names(files: set[Path], root: Path) -> set[str]:
    return {file.relative_to(root).as_posix() for file in files}


def test_the_closure_holds_what_is_imported_also_inside_functions(package):
    assert names(digest.closure(["staleproof.incidents.one.cases"]), package) == ONE
    two = names(digest.closure(["staleproof.incidents.two.cases"]), package)
    used = {"evidence/__init__.py", "evidence/rows.py", "ops/topk.py", "device.py"}
    assert two == {"incidents/two/cases.py"} | used


def test_a_public_name_stands_for_all_of_them(package):
    (package / "incidents/one/cases.py").write_text("from staleproof import unused\n")
    files = names(digest.closure(["staleproof.incidents.one.cases"]), package)
    assert files == {"incidents/one/cases.py", "__init__.py", "ops/unused.py"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_digest_changes_with_each_file_of_the_closure_and_no_other(package, name):
    before = digest.source_digest("one")
    assert (digest_with(package / name, FILES[name] + "CHANGED = 1\n") != before) == (name in ONE)


@pytest.mark.parametrize(
    "again",
    [
        "# a comment\n\n",
        "x = 1  # another\n",
        '"""What the file is about."""\n',
        "def f():\n    'Text.'\n",
        "# 'a string'\n",
    ],
)
def test_comments_docstrings_and_blank_lines_age_nothing(package, again):
    code = {"x = 1  # another\n": "x = 1\n", "def f():\n    'Text.'\n": "def f():\n\n"}.get(again, "")
    path = package / SCENE
    assert digest_with(path, FILES[SCENE] + code) == digest_with(path, FILES[SCENE] + again)


ONE_LINE = 'x = Patch(name="a", summary="s", targets=[1], cost="2 us", mechanism="m", triton=True)\n'
WRAPPED = """x = Patch(name="a", summary="another", targets=[1], cost="one launch "  # so far
    "a layer, "
    "3 us", mechanism="more " "words", triton=True)
"""


@pytest.mark.parametrize(
    ("text", "is_the_same"),
    [
        (WRAPPED, True),
        (ONE_LINE.replace('"a"', '"b"'), False),
        (ONE_LINE.replace("[1]", "[2]"), False),
        (ONE_LINE.replace(", triton=True", ""), False),
        (ONE_LINE.replace('cost="2 us"', "cost=2"), False),
    ],
)
def test_sentences_for_a_reader_age_nothing(text, is_the_same):
    assert (digest.code(text) == digest.code(ONE_LINE)) == is_the_same


def _tokens(text: str) -> list[str]:
    """A file's tokens without comments and layout, and without the strings that Python takes for text."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg in digest.PROSE)
    ]
    spans = [
        ((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset))
        for one in texts
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.string.strip() and token.type != tokenize.COMMENT
        if not any(begin <= token.start and token.end <= end for begin, end in spans)
    ]


@pytest.mark.parametrize("folder", ["src/staleproof/cases", "benchmarks"])
def test_of_every_file_all_but_text_is_kept(folder):
    for path in sorted((CHECKOUT / folder).rglob("*.py")):
        # Columns of ast count bytes.
        if (text := path.read_text("utf-8")).isascii():
            words = tokenize.generate_tokens(io.StringIO(digest.code(text)).readline)
            assert [word.string for word in words if word.string.strip()] == _tokens(text), path


@pytest.mark.parametrize(
    "said", ["r'''a \"b\" # c'''", '\'a\' \\\n    """b\n\n  ( c"""  # d', "'\\'' 'a' # '"]
)
def test_a_docstring_may_have_any_quotes_and_end_the_file(said):
    assert digest.code(f"def f(x):\n    {said}") == "def f(x):"


@pytest.mark.parametrize(
    "text", ['cost = "a"', 'f(cost == "a")', 'f(cost="c", name="a")', 'f(cost="c")["a"]', 'f(cost=["a"])']
)
def test_only_arguments_are_sentences_for_a_reader(text):
    assert digest.code(text) != digest.code(text.replace('"a"', '"b"'))


@pytest.mark.parametrize("change", ["y = 'what is meant'\n", "x = 1\n", "if True:\n    x = 1\n"])
def test_any_other_change_ages(package, change):
    before = digest.source_digest("one")
    assert digest_with(package / SCENE, change + FILES[SCENE]) != before


def test_a_change_at_the_end_of_a_long_file_ages(package):
    long = FILES[SCENE] + "".join(f"X{n} = {n}\n" for n in range(3000))
    assert len({digest_with(package / SCENE, long + f"LAST = {n}\n") for n in (1, 2)}) == 2


def test_a_file_read_beside_a_module_belongs_to_it(package):
    path = package / SCENE
    path.write_text('from pathlib import Path\nTABLE = Path(__file__).with_name("table.json")\n')
    assert len({digest_with(path.with_name("table.json"), text) for text in ('"a"', '"b"')}) == 2


def test_bookkeeping_ages_nothing_and_what_it_imports_neither(package):
    (package / "cases/case.py").write_text("from staleproof.ops import unused\n")
    before = digest_with(package / SCENE, "from staleproof.cases.case import each\n")
    (package / "cases/case.py").write_text("from staleproof.ops import unused\nX = 1\n")
    assert digest_with(package / "ops/unused.py", "X = 1\n") == before
    # Beside report, and not in it.
    (package / "reports.py").touch()
    assert names(digest.closure(["staleproof.reports"]), package) == {"reports.py"}


def test_the_number_of_the_bookkeeping_goes_with_its_text():
    """Red where only the text moved. If the change could give another verdict, raise MACHINERY."""
    assert (digest.MACHINERY, digest.bookkeeping_digest()) == (1, "aa79d2994f39")


def test_a_file_that_moves_changes_the_digest(package):
    before = digest.source_digest("two")
    (package / "evidence/rows.py").rename(package / "evidence/lines.py")
    forget()
    assert digest.source_digest("two") != before
    # By its name alone: nothing is in these two.
    alike = [package / name for name in ("evidence/lines.py", "cases/lazy.py")]
    assert len({digest._digest({file}) for file in alike}) == 2
    # And in no order: that of a set differs from process to process.
    assert digest._digest(dict.fromkeys(alike)) == digest._digest(dict.fromkeys(alike[::-1]))


def test_a_benchmark_depends_on_itself_and_on_what_it_imports(package):
    benchmark = package.parent / "topk.py"
    benchmark.write_text("from staleproof.ops.topk import topk\nROWS = 1\n")
    before = digest.file_digest(benchmark)
    for name, text, same in (
        ("ops/topk.py", FILES["ops/topk.py"] + "FASTER = 1\n", False),
        ("device.py", "WORD = 'MEASURED'\n", False),
        ("ops/unused.py", "CHANGED = 1\n", True),
        ("../topk.py", benchmark.read_text().replace("1", "2"), False),
    ):
        (package / name).write_text(text)
        forget()
        after = digest.file_digest(benchmark)
        assert (after == before) is same, name
        before = after


def test_an_incident_without_cases_has_a_digest_and_so_has_a_room_of_its_own(package):
    (package / "engine").mkdir()
    (package / "engine/cases.py").write_text("import staleproof.device\n")
    nobody, engine = (digest.source_digest(name) for name in ("nobody", "engine"))
    assert len(nobody) == len(engine) == 12
    assert engine != nobody


def test_no_import_of_the_real_package_is_missed():
    """Imports are found by their first line, so compare with a walk over each whole file."""
    files = [*digest.PACKAGE.rglob("*.py"), *(CHECKOUT / "benchmarks").glob("*.py")]
    assert len(files) > 50
    for path in files:
        want = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                want |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                want.add(str(node.module))
        found = {name for name in want if name.split(".")[0] == "staleproof"}
        seen = set(digest._imports(path))
        missed = {name for name in found if not any(s == name or s.startswith(f"{name}.") for s in seen)}
        assert not missed, path


def test_an_incident_depends_on_no_other_and_on_no_report():
    for incident in INCIDENTS:
        files = names(digest.closure([f"staleproof.incidents.{incident}.cases"]), digest.PACKAGE)
        assert {"device.py", f"incidents/{incident}/cases.py"} <= files
        assert not [f for f in files if f.startswith(("report/", "cli/", "cases/finding"))]
        others = {name for name in INCIDENTS if name != incident}
        assert not [f for f in files if f.startswith(tuple(f"incidents/{name}/" for name in others))]


def test_the_digests_of_all_incidents_take_a_blink():
    def seconds() -> float:
        forget()
        begin = time.process_time()
        assert len({digest.source_digest(incident) for incident in INCIDENTS}) == len(INCIDENTS)
        return time.process_time() - begin

    # At least once: a busy machine may be slower.
    assert any(seconds() < 1.0 for _ in range(3))
