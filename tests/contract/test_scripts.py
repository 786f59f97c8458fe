"""The counterexamples run alone: they fail while the kernel breaks the clause, and pass for a right one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm

from staleproof.cases import children
from staleproof.cases.finding import read_findings
from staleproof.contract import cases, environments, scripts
from staleproof.contract.contract import BREAKS, CLAUSES, UNDEFINED, breaks
from staleproof.kernels import packages
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import ARGUMENTS, Subject, load_module, subjects_of

# A case of each kind that a probe can hand on.
CASES = {
    "attention": [
        ("empty",), ("empty lse",), ("tail", "NaN", "K of the last page's tail"),
        ("tail", "finite garbage", "V of the last page's tail"), ("tail", "NaN", "the null page"),
        ("table", "-1"), ("spare", "nan"),
    ],
    "routing": [("logits", "all NaN"), ("logits", "one +inf"), ("bias", "one NaN in the bias")],
    "rows": [("rows", "nan"), ("rows", "noise")],
    "ragged": [("spare", "nan"), ("starts",)],
    "merge": [("merge", "nan"), ("merge", "0")],
    "kv_write": [("slot",)],
    "experts": [("repeated",), ("range", "-1")],
}  # fmt: skip
OURS = {s.name: s for s in subjects_of(load_module("staleproof.kernels.ours"))}
TORCH = {s.name: s for s in subjects_of(load_module("staleproof.kernels.torch"))}


def _run(text: str, folder: Path, *paths: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a clean environment: only these folders are importable beside installed packages."""
    path = folder / "counterexample.py"
    path.write_text(text)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return warm.run(str(path), env=env, timeout=300, cwd=folder, vllm=False)


def _all_subjects() -> list[Subject]:
    return [s for module in cases.SUBJECTS for s in subjects_of(load_module(module))]


def test_every_script_is_short_parses_needs_ours_for_ours_alone_and_says_what_to_install():
    made = 0
    for subject in _all_subjects():
        for case in CASES.get(subject.kind, ()):
            text = scripts.counterexample(subject, Release("1.0"), subject.clauses[1], case)
            assert len(text.splitlines()) < 30
            compile(text, subject.name, "exec")
            if text and subject.package != "staleproof":
                made += 1
                assert "staleproof" not in text, subject.name
                title, *installs = re.findall(r"\A((?:#.*\n)+)", text)[0].splitlines()
                clause = f"Clause {subject.clauses[1]}: {CLAUSES[subject.clauses[1]]}"
                assert title == f"# {subject.name} ({subject.package} 1.0). {clause}"
                assert all(line.startswith("# pip install ") for line in installs), text
                assert f"{subject.package}==1.0" in installs[-1]
                triton = not subject.needs and subject.package not in environments.PLAIN
                assert ("TRITON_INTERPRET" in text) == triton, subject.name
    assert made > 100


@pytest.mark.parametrize("clause", ["0", "E"])
def test_nothing_is_made_for_clean_input_or_a_clause_that_holds(clause):
    subject = OURS["mla_decode"]
    assert scripts.counterexample(subject, Release("1"), clause, ("clean",)) == ""
    assert scripts.counterexample(subject, Release("1"), clause, ()) == ""
    # It takes no query_start_loc.
    assert scripts.counterexample(subject, Release("1"), clause, ("spare", "nan")) == ""


def _experts(x, w1, w2, topk_weights, topk_ids):
    out = torch.zeros_like(x)
    for token, expert in (topk_ids >= 0).nonzero().tolist():
        chosen = topk_ids[token, expert]
        gate, up = (w1[chosen] @ x[token]).chunk(2)
        out[token] += topk_weights[token, expert] * (w2[chosen] @ (torch.nn.functional.silu(gate) * up))
    return out


EXPERTS = Subject("kernel", "experts", _experts, {"experts": 8}, package="torch")


def _off_by_a_bit(x):
    return x * (1 + 2**-22 * (x.abs().max() > 20))


@pytest.mark.parametrize(
    ("subject", "clause", "case", "got"),
    [
        (TORCH["SDPA math, boolean mask"], "T", ("tail", "NaN", "V of the last page's tail"), "nan"),
        (Subject("k", "rows", _off_by_a_bit, {}, package="torch"), "R", ("rows", "noise"), r"-?\d\.\d+"),
    ],
)
def test_a_script_fails_for_a_kernel_that_breaks_the_clause(tmp_path, subject, clause, case, got):
    done = _run(scripts.counterexample(subject, Release("2"), clause, case), tmp_path)
    assert done.returncode == 1
    assert "AssertionError: expected tensor([" in done.stderr
    # On a GPU device and dtype follow the numbers.
    assert re.search(rf"got tensor\(\[ ?{got}(, +{got}){{3}}\][^\]]*\)$", done.stderr.rstrip())


@pytest.mark.parametrize(
    ("subject", "clause", "shown"),
    [
        (
            OURS["mla_decode"],
            "B",
            ["block_table[0, 1] = -1", "block_table[0, 1] = 4", "block_table[0, 1] = 2**24"],
        ),
        (EXPERTS, "D", ["([[0, 0]],"]),
        (EXPERTS, "X", ["([[0, -1]],", "([[0, 8]],"]),
        (TORCH["SDPA math, boolean mask"], "B", []),
    ],
)
def test_where_no_probe_is_left_to_name_a_case_each_of_the_clause_is_shown(subject, clause, shown):
    texts = scripts.counterexamples(subject, Release("1"), clause)
    assert [part in text for part, text in zip(shown, texts, strict=True)] == [True] * len(shown)
    assert [*texts[:1]] == [*scripts.counterexamples(subject, Release("1"), clause, scripts.CASES[clause][0])]


@pytest.mark.parametrize("case", CASES["attention"][:-1], ids=lambda case: " ".join(case)[:25])
def test_the_same_scripts_pass_for_a_right_kernel(tmp_path, case):
    text = scripts.counterexample(OURS["mla_decode"], Release("1"), "E", case)
    done = _run(text, tmp_path, str(Path(__file__).parents[2] / "src"))
    assert done.returncode == 0, done.stderr


LAYOUTS = {"paged": "k_cache v_cache", "mla": "kv_cache kv_lora_rank", "gathered": "k v mask"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_argument_that_a_kernel_of_attention_may_name_is_defined(tmp_path, layout):
    others = " ".join(own for other, own in LAYOUTS.items() if other != layout).split()
    names = ", ".join(name for name in ARGUMENTS["attention"] if name not in others)
    right = "out[: query_start_loc[-1]] = 0\n    return out, lse.fill_(float('-inf'))"
    (tmp_path / f"of_{layout}.py").write_text(f"def kernel({names}):\n    {right}\n")
    kernel = load_module(str(tmp_path / f"of_{layout}.py")).kernel
    subject = Subject("kernel", "attention", kernel, {"layout": layout})
    texts = [scripts.counterexample(subject, Release(""), "E", case) for case in CASES["attention"]]
    assert sum(map(bool, texts)) == (3 if layout == "gathered" else len(texts))
    done = _run("".join(texts), tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_error_of_the_script_itself_is_told():
    broken = breaks("row of an empty request: NaN is written")
    subject = Subject("kernel", "attention", print)
    said = scripts.tried(broken, ["x = 1\n", "undefined\n", "assert False\n"], subject, Release(""), 1.0)
    wrong = "its script fails: NameError: name 'undefined' is not defined"
    assert (said.note, said.script) == (f"{broken.note}; {wrong}", "")


def _spare_zero(q, query_start_loc):
    out = torch.empty_like(q)
    out[: query_start_loc[-1]] = 1
    out[query_start_loc[-1] :] = 0
    return out


def _spare_unwritten(q, query_start_loc):
    out = torch.empty_like(q)
    out[: query_start_loc[-1]] = 1
    return out


def _spare_left(q, query_start_loc, out):
    out[: query_start_loc[-1]] = 1
    return out


def _spare_written(q, query_start_loc, out):
    out[:] = 1
    return out


@pytest.mark.parametrize("kernel", [_spare_zero, _spare_unwritten, _spare_left, _spare_written])
def test_rows_past_the_last_cu_seqlens_must_be_zero_or_left(tmp_path, kernel):
    subject = Subject("kernel", "attention", kernel, {"q_len": 0}, package="torch")
    done = _run(scripts.counterexample(subject, Release("2"), "U", ("spare", "nan")), tmp_path)
    wrong = kernel in (_spare_unwritten, _spare_written)
    assert done.returncode == wrong, done.stderr
    assert ("AssertionError: expected" in done.stderr) == wrong
    # Not what the memory happened to hold.
    assert ("got tensor([nan" in done.stderr) == (kernel is _spare_unwritten)


def _experts_of_a_set(x, w1, w2, topk_weights, topk_ids):
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for chosen in {*topk_ids[token].tolist()} - {-1}:
            gate, up = (w1[chosen] @ x[token]).chunk(2)
            out[token] += topk_weights[token, 0] * (w2[chosen] @ (torch.nn.functional.silu(gate) * up))
    # A slot of -1 takes the place of the first token of the last expert.
    out[(topk_ids == 3).any(1) & (topk_ids < 0).any()] = 0
    return out


@pytest.mark.parametrize("kernel", [_experts, _experts_of_a_set])
@pytest.mark.parametrize("case", CASES["experts"], ids=lambda case: case[0])
def test_ids_of_one_token_may_spoil_the_row_of_another(tmp_path, kernel, case):
    subject = Subject("kernel", "experts", kernel, {}, package="torch", needs="cuda")
    text = scripts.counterexample(subject, Release("2"), "X", case)
    # What needs a GPU is asked with the ids of the probe; here the kernel is ours.
    done = _run(text.replace('device = "cuda"', 'device = "cpu"'), tmp_path)
    assert done.returncode == (kernel is _experts_of_a_set), done.stderr
    assert ("AssertionError: expected" in done.stderr) == (kernel is _experts_of_a_set)


def _merge_in_half(out_a, lse_a, out_b, lse_b):
    assert out_a.dtype == torch.bfloat16, "failed to dispatch data type"
    lse = torch.stack([lse_a, lse_b])
    shift = lse.amax(0).clamp(min=-1e30)
    weight = (lse - shift).exp()[..., None] / (lse - shift).exp().sum(0)[..., None].clamp(min=1e-30)
    return (weight.to(out_a.dtype) * torch.stack([out_a, out_b])).sum(0), lse.logsumexp(0)


@pytest.mark.parametrize(("left", "wrong"), [("0", False), ("nan", True)])
def test_a_compiled_merge_is_shown_in_the_dtype_of_its_probe(tmp_path, left, wrong):
    # As FlashInfer 0.7.2's: two empty parts are right, and a weight of 0 does not remove a NaN.
    subject = Subject("kernel", "merge", _merge_in_half, {}, package="torch", needs="cuda")
    text = scripts.counterexample(subject, Release("2"), "E", ("merge", left))
    done = _run(text.replace('device = "cuda"', 'device = "cpu"'), tmp_path)
    assert done.returncode == wrong, done.stderr
    assert ("AssertionError: expected tensor([" in done.stderr) == wrong


def test_vllms_script_runs_on_its_real_package(tmp_path):
    module = load_module("staleproof.kernels.vllm")
    subject = next(s for s in subjects_of(module) if s.name == "Triton MLA decode")
    folders = [r.folder for r in packages.releases(subject) if r.version == "0.33.0" and r.folder]
    beside = [*folders[0].parent.glob("packages-*")] if folders else []
    if not beside:
        pytest.skip("vLLM 0.33.0 and what it imports are not in the cache")
    text = scripts.counterexample(subject, Release("0.33.0"), "E", ("empty",))
    done = _run(text, tmp_path, str(folders[0]), str(beside[0]))
    assert done.stderr.splitlines()[-1] == "AssertionError: expected 0, got tensor([nan, nan, nan, nan])"
    right = replace(subject, call=OURS["mla_decode"].call, shape={"layout": "mla"})
    text = scripts.counterexample(right, Release("0.33.0"), "E", ("empty",))
    assert _run(text, tmp_path, str(Path(__file__).parents[2] / "src")).returncode == 0


def test_every_recorded_script_is_short_stands_alone_and_says_what_to_install():
    folder = Path(__file__).parents[2] / "workbook/audits"
    rows = [row for path in folder.glob("*.jsonl") for row in read_findings(path)]
    texts = [(row, row.script) for row in rows if row.script]
    assert len(texts) > 50
    for row, text in texts:
        assert row.verdict in (BREAKS, UNDEFINED)
        assert len(text.splitlines()) < 30
        assert f"Clause {row.question}: {CLAUSES[row.question]}" in text
        assert "staleproof" not in text
        wanted = row.release.partition("+")[0].replace(" ", "==")
        assert re.search(rf"^# pip install .*{re.escape(wanted)}", text, re.MULTILINE), row
        assert re.search(r"^assert .*expected .*, got ", text.splitlines()[-1]), row


def test_a_script_that_is_too_long_writes_each_statement_on_one_line(monkeypatch):
    # What a CPU installs takes more lines.
    monkeypatch.setattr(environments, "here", lambda: environments.Installed("2.13.0", "3.9.0", cuda=False))
    subject = next(s for s in _all_subjects() if s.name == "Triton extend, unified")
    long, short = scripts._source(subject), scripts._source(subject, short=True)
    assert len(short) < len(long)
    assert ast.dump(ast.parse("\n".join(short))) == ast.dump(ast.parse("\n".join(long)))
    text = scripts.counterexample(subject, Release("1"), "E", ("empty",))
    assert 0 < len(text.splitlines()) < 30
    assert "\n".join(short) in text


USERS = '''
import torch
from staleproof import audit


@audit.attention(layout="paged", heads=8, kv_heads=2, head_dim=64, page_size=16)
def my_decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    """Gives what is not the request's a weight of 0, and follows every entry of the table."""
    k, v = (
        cache[block_table.long()].flatten(1, 2).transpose(1, 2).repeat_interleave(4, 1).float()
        for cache in (k_cache, v_cache)
    )
    past = torch.arange(k.shape[2], device=q.device) >= seq_lens[:, None]
    scores = (q.float().unsqueeze(2) @ k.transpose(2, 3)).squeeze(2) * softmax_scale
    weights = scores.masked_fill(past[:, None], float("-inf")).softmax(-1)
    # As kernels do: out has the shape of q, because keys and values have one head_dim.
    return torch.empty_like(q).copy_((weights.unsqueeze(2) @ v).squeeze(2))


def hidden(x):
    """Registered under a name that its module does not have: no script can import it."""
    return x / x.abs().max()


audit.rows(name="hidden")(hidden)
shown, hidden = hidden, None
'''


def test_each_script_of_a_users_kernel_was_run_and_runs_from_anywhere(tmp_path, device):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/my_kernels.py").write_text(USERS)
    found = cases.audit([str(tmp_path / "mine/my_kernels.py")], device)
    broken = {(row.variant, row.question): row for row in found if row.verdict == BREAKS}
    assert set(broken) == {("my_decode", "E"), ("my_decode", "T"), ("my_decode", "B"), ("hidden", "R")}
    assert broken["hidden", "R"].script == ""
    for (name, clause), row in broken.items():
        if name == "hidden":
            continue
        assert row.script, (clause, row.note)
        done = _run(row.script, tmp_path, str(Path(__file__).parents[2] / "src"))
        assert done.returncode == 1
        # An entry past the end is an error of torch's, as the row of the audit says.
        past = {"cpu": "IndexError: index ", "cuda": "AcceleratorError: CUDA error: "}[device]
        expected = past if clause == "B" else "AssertionError: expected "
        assert expected in done.stderr, (clause, done.stderr)
    # Once mended, it ends quietly.
    (tmp_path / "mine/my_kernels.py").write_text(USERS.replace("softmax(-1)", "softmax(-1).nan_to_num()"))
    done = _run(broken["my_decode", "E"].script, tmp_path, str(Path(__file__).parents[2] / "src"))
    assert (done.returncode, done.stderr) == (0, "")
    error = "IndexError" if device == "cpu" else "AcceleratorError"
    assert f"raises {error}" in broken["my_decode", "B"].note


def test_a_script_imports_a_package_that_was_audited_by_its_path(tmp_path):
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine/__init__.py"
    path.write_text("def kernel(q, out): pass")
    seen = {"out": torch.ones(1)}
    exec("\n".join(scripts._import(load_module(str(path)).kernel)), seen)
    # One that writes to out may return nothing.
    assert seen["first"](seen["kernel"](None, None)) is seen["out"]
    assert seen["first"]((1, 2)) == 1


def returns_a_pair_at_last(x):
    for one in x:
        if one:
            return one
    return x, x


def test_the_last_return_of_an_adapter_is_the_last_in_its_text():
    assert scripts._returns_pair(SimpleNamespace(function=returns_a_pair_at_last))


@pytest.mark.parametrize(
    ("note", "code", "stderr", "shown"),
    [
        ("NaN", 1, "\nAssertionError: expected 0, got 1\n", True),
        ("NaN", 1, "\nAssertionError: float32\n", False),
        ("NaN", 0, "\nAssertionError: expected 0\n", False),
        ("NaN", -11, "", False),
        ("ended its process with signal 6", 0, "", False),
        ("no answer within 9 s", 0, "", False),
        ("ended its process with signal 11", -11, "", True),
        ("raises IndexError: index 7", 1, "IndexError: index 4 is out of bounds\n", True),
        ("raises IndexError: index 7", 1, "TypeError: needs x\n", False),
        ("raises IndexError: index 7", 0, "IndexError: index 4 is out of bounds\n", False),
        ("raises AcceleratorError: x", 1, "torch.AcceleratorError: CUDA error: x\nCompile with `Y`\n", True),
        ("no answer within 9 s", None, "", True),
        ("NaN", None, "", False),
    ],
)
def test_only_a_script_that_ends_as_its_row_says_shows_it(note, code, stderr, shown):
    assert scripts.shows(note, children.Ended([], code, "", stderr, 9.0)) is shown
