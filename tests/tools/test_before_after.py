"""The table of what the checks of a real vLLM say without the patches and with them, of made-up answers."""

from __future__ import annotations

from tools import before_after

OFF = {
    "leak": [0, 300, 600],
    "hybrid": {"asked": [[1, 2], [], [3]]},
    "hybrid MLA": {"asked": [[], []]},
    "race": [[1, 2], [8, 9]],
    "zeroed": {"mla": [], "other": [3, 5]},
    "Triton MLA": {"bad": [6, 7]},
    "CUTLASS MLA": {"bad": [], "kept": 4.0},
    "FlashInfer MLA": {"bad": [7]},
    "FlashInfer MLA, q_len 4": {"bad": [7, 9, 11]},
    "FlashInfer MLA, ragged": {"bad": []},
    "routing": {"softmax": 1, "sigmoid": 2, "grouped": 3, "softmax bias": 4, "grouped bias": 5},
    "hash routing": {"logits": 2, "bias": 6},
    "fused MoE": {"ids": [[3, 1, 3], [0]]},
    "simulator": {"uniform": 0.256, "normal": 0.0, "dtype": "torch.int64"},
    "fp4 scales, traced": {"stale": 512},
    "dummy run": {"dummy": [-1, 0, 5, -1, 7, -1, -1, -1, 9]},
}
TOLD = [
    "600",
    "1, 2, 3",
    "none",
    "1, 2; 8, 9",
    "none",
    "6, 7",
    "none",
    "7",
    "3",
    "none",
    "1, 2, 3; 5",
    "2; 6",
    "3, 1, 3",
    "26%, 0%; int64",
    "512",
    "3",
    # Of the check of CUTLASS, which keeps them.
    "4",
]


def test_each_question_has_its_answer_without_and_with_the_patches():
    absent = {"race": None, "hash routing": None, "fp4 scales, traced": None}
    found = before_after.table({"off": OFF, "on": OFF | absent})
    assert [off for off, _ in found.values()] == TOLD
    differ = {off: on for off, on in found.values() if off != on}
    assert differ == {
        "1, 2; 8, 9": "no shared buffer",
        "2; 6": "no such selection",
        "512": "allocated in the op",
    }
    assert [*found] == [question for question, _ in before_after.QUESTIONS.values()]


def test_a_release_without_a_check_has_no_row_of_it():
    off = {name: OFF[name] for name in ("leak", "CUTLASS MLA")}
    found = before_after.table({"off": off, "on": off | {"leak": [0, 0, 1]}})
    assert [*found.values()] == [["600", "1"], ["none", "none"], ["4", "4"]]
