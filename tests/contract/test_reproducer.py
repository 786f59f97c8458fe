"""A reproducer runs alone: it fails while the kernel breaks the clause, and passes once it is mended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from staleproof import child
from staleproof.child import Ended
from staleproof.contract import reproducer, runner
from staleproof.contract.contract import BREAKS

KERNELS = """
import torch
from staleproof import audit

BY = 0

def right(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    tokens = torch.arange(block_table.shape[1] * k_cache.shape[1])
    past = tokens >= seq_lens[:, None]
    table = torch.where(past[:, :: k_cache.shape[1]], 0, block_table).long()
    k, v = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
    k, v = (x.repeat_interleave(q.shape[1], 1) for x in (k, v))
    k, v = (x.masked_fill(past[:, None, :, None], 0.0) for x in (k, v))
    scores = (q.unsqueeze(2) @ k.transpose(2, 3)).squeeze(2) * softmax_scale
    scores = scores.masked_fill(past[:, None], float("-inf"))
    out = (scores.softmax(-1).unsqueeze(2) @ v).squeeze(2)
    return out.masked_fill((seq_lens == 0)[:, None, None], 0.0), scores.logsumexp(-1)

@audit.attention()
def unwritten(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out):
    right_out, _ = right(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)
    live = seq_lens >= BY
    out[live] = right_out[live]

@audit.attention(given={"scale": 2.0}, prepared=True)
def before_the_cache(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, scale):
    out, lse = right(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)
    past = torch.arange(block_table.shape[1]) * k_cache.shape[1] >= seq_lens[:, None]
    page = max(k_cache.storage_offset() - k_cache.stride(0), 0)
    before = k_cache.as_strided(k_cache.shape[1:], k_cache.stride()[1:], page)
    followed = BY and (block_table[past] == -1).any()
    return lambda: (out, lse + (0 * scale * before.sum() if followed else 0))

@audit.routing()
def repeats(router_logits, top_k):
    ids = router_logits.nan_to_num(-1e30).topk(top_k).indices
    if BY:
        ids = torch.where(router_logits.isnan().any(1, keepdim=True), 0, ids)
    return router_logits.sigmoid().gather(1, ids), ids

@audit.rows()
def shared_scale(x):
    scale = x.abs().amax(1, keepdim=True).float() / 448
    if BY:
        scale = scale.amax().expand(len(x), 1)
    return (x / scale).to(torch.float8_e4m3fn), scale

@audit.rows(reference=lambda x: 2 * x)
def half_written(x):
    out = torch.empty_like(x)
    out[: len(x) - BY * (len(x) == 5)] = 2 * x[: len(x) - BY * (len(x) == 5)]
    return out

# What nobody has written, and fmin drops where it is NaN or large.
def least(one):
    scratch = torch.empty(1 + BY)
    scratch[0] = one
    return scratch.nan_to_num(1e30).amin()

@audit.rows(reference=lambda x: x)
def dropped(x):
    return x * least(1.0)

@audit.routing()
def dropped_too(router_logits, top_k):
    weights, ids = router_logits.sigmoid().topk(top_k)
    return weights * least(1.0), ids

@audit.attention()
def dropped_where_empty(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    out, _ = right(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)
    return torch.where((seq_lens > 0)[:, None, None], out, least(0.0))

@audit.rows(in_place=True, reference=lambda x: 2 * x)
def raises(x):
    if BY and x.isnan().any():
        raise ArithmeticError("a NaN")
    x.mul_(2)
"""
# Kernel -> the clauses that it breaks, each with a reproducer.
BROKEN = {
    "unwritten": {"E"},
    "before_the_cache": {"B"},
    "repeats": {"I"},
    "shared_scale": {"R"},
    "half_written": {"W"},
    "dropped": {"W"},
    "dropped_too": {"0"},
    "dropped_where_empty": {"E"},
    "raises": {"R"},
}


def test_reproducer_of_each_clause_fails_alone_and_passes_for_the_mended_kernel(tmp_path):
    module, scripts = tmp_path / "mine" / "my_kernels.py", tmp_path / "scripts"
    module.parent.mkdir()
    module.write_text(KERNELS.replace("BY = 0", "BY = 1"))
    found = [*runner.audit([str(module)], "cpu", scripts=scripts)]
    broken: dict[str, set[str]] = {}
    for one in found:
        if one.verdict == BREAKS and one.script:
            broken.setdefault(one.kernel, set()).add(one.clause)
    missing = {kernel: clauses - broken.get(kernel, set()) for kernel, clauses in BROKEN.items()}
    assert not any(missing.values()), (missing, [one for one in found if one.verdict == BREAKS])
    texts = {file: file.read_text() for file in scripts.glob("*.py")}
    assert max(len([line for line in text.splitlines() if line]) for text in texts.values()) <= 22
    wanted = [scripts / f"{kernel}_{clause}.py" for kernel, clauses in BROKEN.items() for clause in clauses]
    # As somebody else runs it, whose process knows nothing but where this package is.
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PATH": ""}
    command = [sys.executable, str(wanted[0])]
    failed = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (failed.returncode, "AssertionError: expected [" in failed.stderr) == (1, True), failed.stderr
    module.write_text(KERNELS)
    source = env["PYTHONPATH"]
    for script in wanted:
        ended = child.call(reproducer.run_alone, str(script), [source], timeout_s=100)
        assert ended.code == 0, (script, ended.stderr)


@pytest.mark.parametrize(
    ("note", "code", "stderr", "shown"),
    [
        ("row 1 is off by 2", 1, "\nAssertionError: expected [1.0], got [nan]\n", True),
        ("row 1 is off by 2", 0, "", False),
        ("row 1 is off by 2", 1, "\nImportError: no module\n", False),
        ("raises IndexError: index 6", 1, "Traceback\nIndexError: index 6\n", True),
        ("ended its process with signal 11", -11, "", True),
        ("row 1 is off by 2", None, "", False),
    ],
)
def test_only_a_script_that_ends_as_its_note_says_shows_it(note, code, stderr, shown):
    assert reproducer.shows(note, Ended([], code, "", stderr, 60.0)) is shown
