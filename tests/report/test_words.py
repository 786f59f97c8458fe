"""What a reader sees of the recorded texts of a real model."""

from __future__ import annotations

import json

import pytest

from staleproof import runs
from staleproof.report import words

HEAD = {"machine": {"name": "a GPU"}, "date": "2026-11-28", "commit": "abc", "grade": "real model"}
RUN = {"kernel": "k", "name": "a kernel", "prompts": ["a?", "b?"], "died": [None, None]}
DEAD = RUN | {
    "run": "NaN",
    "equal_to_clean": False,
    "died": [None, 3],
    "texts": ["A", "B<|endoftext|><|endoftext|>"],
}
MENDED = RUN | {"run": "NaN, clear_empty_rows", "equal_to_clean": True, "texts": ["A", "B is b"]}
OTHER = RUN | {"run": "x 1,000", "equal_to_clean": False, "texts": ["A", "C"]}


def test_each_recorded_run_has_its_verdict(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "workbook/words"
    folder.mkdir(parents=True)
    lines = [HEAD, DEAD, MENDED, OTHER, {"kernel": "other", "not_run": "needs a CUDA device"}]
    (folder / "gpu.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(words, "checkout", lambda: tmp_path)
    words.control()
    printed = capsys.readouterr().out
    assert "RECORDED a GPU, 2026-11-28, abc: real model" in printed
    table = [" ".join(line.split()) for line in printed.splitlines()]
    assert "NaN none 1 of 2 dead from step 3 on" in table
    assert "NaN clear_empty_rows right words" in table
    assert "x 1,000 none other words" in table
    assert "needs a CUDA device" not in printed


def test_every_recorded_file_can_be_read():
    files = [*(runs.checkout() / "workbook/words").glob("*.jsonl")]
    assert files
    assert all(words.recorded(file)[1] for file in files)


def test_another_file_is_one_line_that_names_it(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"other.jsonl: expected lines of benchmarks/words.py, got KeyError"):
        words.recorded(file)
