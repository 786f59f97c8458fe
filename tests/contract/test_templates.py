"""What scripts show, template by template: run in this process, of small kernels of a user's module."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from staleproof.contract import row_probes, scripts
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import ARGUMENTS, Subject, load_module

K_TAIL, V_TAIL, NULL = ("K of the last page's tail", "V of the last page's tail", "the null page")
BYTES = "torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())"
# Kind, case and sizes; what kernels return whose break the script shows; and what others return.
SHOWN = [
    ("attention", ("tail", "NaN", K_TAIL, "out"), {}, ["q + 0 * k_cache[1, 3].sum()"],
     ["q + 0 * v_cache.sum() + 0 * k_cache[1, :3].sum()", "(q, q[..., 0] + 0 * k_cache.sum())"]),
    ("attention", ("tail", "NaN", V_TAIL, "out"), {}, ["q + 0 * v_cache[1, 3].sum()"],
     ["q + 0 * k_cache.sum()"]),
    ("attention", ("tail", "finite garbage", K_TAIL, "out"), {}, ["q + (k_cache[1, 3] > 1e3).any()"], ["q"]),
    ("attention", ("tail", "NaN", K_TAIL, "lse"), {}, ["(q, q[..., 0] + 0 * k_cache.sum())"], ["(q, q)"]),
    ("attention", ("tail", "NaN", NULL, "out"), {}, ["q + 0 * k_cache[0].sum()", "q + 0 * v_cache[0].sum()"],
     ["q + 0 * k_cache[1].sum() + 0 * v_cache[1].sum()"]),
    *(("attention", ("tail", "NaN", place, "out"), {"layout": "gathered"}, [f"q + 0 * {one}[:, :, 3].sum()"],
       [f"q + 0 * {other}.sum()"]) for place, one, other in ((K_TAIL, "k", "v"), (V_TAIL, "v", "k"))),
    # Attention to a neighbour's values, and an upper bound of what the table has room for.
    ("attention", ("empty",), {}, ["(seq_lens == 0)[:, None, None] * v_cache[1, :3].mean() * q"],
     ["(seq_lens > 0)[:, None, None] * q + (max_seq_len != 2 * page_size)"]),
    ("attention", ("empty lse",), {}, ["(q, 0 * q[..., 0])"], ["(q, -torch.inf * q[..., 0].abs())"]),
    *(("attention", ("table", page), {}, [f"q + 0 * {cache}._base[1 + block_table[0, 1]].sum()"], ["q"])
      for cache in ("k_cache", "v_cache") for page in ("-1", "6")),
    ("attention", ("table", str(2**24)), {}, ["q + (block_table[0, 1] == 2**24)"], ["q"]),
    ("attention", ("spare", "nan"), {"q_len": 0}, ["query_start_loc[1] * torch.cat([q[:2], 0 * q[2:]])"],
     ["query_start_loc[1] * 0 * q + (max_q_len < 2)"]),
    *(("routing", ("logits", "all NaN"), {}, [f"(router_logits, torch.{ids}[None, :top_k])"],
       ["(router_logits, torch.arange(12, 16)[None])"])
      for ids in ("arange(-1, 3)", "arange(13, 17)", "zeros(4).long()")),
    *(("rows", ("rows", fill), {}, [f"x + {odd}.any()"], ["x"]) for fill, odd in (
        ("nan", "x[1].isnan()"), ("inf", "x[1].isinf()"), ("largest", "(x[1] > 1e30)"),
        ("noise", "(x[1].abs() > 100)"))),
    *(("rows", ("behind", fill, "x"), {}, [f"x + ({BYTES}[-1] == {byte})"], ["x"])
      for fill, byte in (("0xff", 255), ("noise", 127))),
    ("ragged", ("spare", "nan"), {}, ["starts[-1] * torch.cat([x[:3], 0 * x[3:]])"],
     ["torch.cat([x[:2], 0 * x[2:]])"]),
    ("ragged", ("starts",), {}, ["x * kept.setdefault(id(starts), int(starts[-1]))"], ["x * starts[-1]"]),
    ("kv_write", ("slot",), {"pad_slot": 0},
     ["k_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)"],
     ["k_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping[:1], key[:1])"]),
]  # fmt: skip


# Whatever it does with them, a kernel names these.
ALWAYS = {"paged": "q k_cache v_cache block_table", "gathered": "q k v"}


def _run_here(kind, case, sizes, result, folder, monkeypatch):
    """Run the script of a kernel of a user's module; what it has defined."""
    text = f"{result} {ALWAYS[sizes.get('layout', 'paged')] if kind == 'attention' else ''}"
    names = [name for name in ARGUMENTS[kind] if re.search(rf"\b{name}\b", text)]
    (folder / "mine.py").write_text(
        f"import torch\nkept = {{}}\ndef kernel({', '.join(names)}):\n    return {result}\n"
    )
    module = load_module(str(folder / "mine.py"))
    subject = Subject("kernel", kind, module.kernel, sizes)
    text = scripts.counterexample(subject, Release(""), subject.clauses[1], case)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "mine", module)
    found = {}
    try:
        exec(text, found)
    finally:
        torch.use_deterministic_algorithms(False)
    return found


@pytest.mark.parametrize(("kind", "case", "sizes", "breaks", "keeps"), SHOWN)
def test_a_script_shows_its_case_and_no_other(tmp_path, monkeypatch, kind, case, sizes, breaks, keeps):
    for result in breaks:
        with pytest.raises(AssertionError, match=r"^expected .*, got "):
            _run_here(kind, case, sizes, result, tmp_path, monkeypatch)
    for result in keeps:
        assert _run_here(kind, case, sizes, result, tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "columns", "value"), row_probes._ODD_ROWS)
def test_logits_of_a_script_are_as_odd_as_those_of_its_probe(tmp_path, monkeypatch, name, columns, value):
    right = "(router_logits, torch.arange(top_k)[None])"
    found = _run_here("routing", ("logits", name), {}, right, tmp_path, monkeypatch)
    # Infinities in half of a row and ties have no script.
    assert bool(found.get("router_logits") is None) == (name in ("half -inf", "all equal"))
    if "router_logits" in found:
        logits = found["router_logits"].cpu()[0]
        odd = torch.zeros(16, dtype=torch.bool).index_fill(0, torch.arange(16)[columns], True)
        assert torch.equal(~logits.isfinite(), odd)
        # Whoever runs it sees the same numbers.
        again = _run_here("routing", ("logits", name), {}, right, tmp_path, monkeypatch)["router_logits"]
        assert torch.equal(again.cpu()[0][~odd], logits[~odd])
        assert str(logits[odd].unique()[:1].item()) == str(value)
