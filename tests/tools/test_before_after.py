"""The table of what the checks of a real vLLM say without the patches and with them, of made-up answers."""

from __future__ import annotations

from tools import before_after

# Check -> what it answers without the patches, and what is shown of that.
ANSWERS = {
    "leak": ([0, 300, 600], "600"),
    "hybrid": ({"asked": [[1, 2], [], [3]]}, "1, 2, 3"),
    "hybrid MLA": ({"asked": [[], []]}, "none"),
    "race": ([[1, 2], [8, 9]], "1, 2; 8, 9"),
    "zeroed": ({"mla": [], "other": [3, 5]}, "none"),
    "Triton MLA": ({"bad": [6, 7]}, "6, 7"),
    "CUTLASS MLA": ({"bad": [], "kept": 4.0}, "none"),
    "FlashInfer MLA": ({"bad": [7]}, "7"),
    "FlashInfer MLA, q_len 4": ({"bad": [7, 9, 11]}, "3"),
    "FlashInfer MLA, ragged": ({"bad": []}, "none"),
    "routing": (
        {"softmax": 1, "sigmoid": 2, "grouped": 3, "softmax bias": 4, "grouped bias": 5},
        "1, 2, 3; 5",
    ),
    "hash routing": ({"logits": 2, "bias": 6}, "2; 6"),
    "fused MoE": ({"ids": [[3, 1, 3], [0]]}, "3, 1, 3"),
    "simulator": ({"uniform": 0.256, "normal": 0.0, "dtype": "torch.int64"}, "26%, 0%; int64"),
    "fp4 scales, traced": ({"stale": 512}, "512"),
    "dummy run": ({"dummy": [-1, 0, 5, -1, 7, -1, -1, -1, 9]}, "3"),
}
OFF = {name: answer for name, (answer, _) in ANSWERS.items()}


def test_each_question_has_its_answer_without_and_with_the_patches():
    absent = {"race": None, "hash routing": None, "fp4 scales, traced": None}
    found = before_after.table({"off": OFF, "on": OFF | absent})
    # The last is of the check of CUTLASS, which keeps them.
    assert [off for off, _ in found.values()] == [*(shown for _, shown in ANSWERS.values()), "4"]
    differ = [on for off, on in found.values() if off != on]
    assert differ == ["no shared buffer", "no such selection", "allocated in the op"]
    assert [*found] == [question for question, _ in before_after.QUESTIONS.values()]


def test_a_release_without_a_check_has_no_row_of_it():
    off = {name: OFF[name] for name in ("leak", "CUTLASS MLA")}
    found = before_after.table({"off": off, "on": off | {"leak": [0, 0, 1]}})
    assert [*found.values()] == [["600", "1"], ["none", "none"], ["4", "4"]]
