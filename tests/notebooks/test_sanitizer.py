"""The sanitiser maps what may differ between machines, and erases no verdict and no count."""

import re
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbval.plugin import get_sanitize_patterns

from staleproof import lab
from staleproof.device import Provenance
from staleproof.evidence.rows import Verdict

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CONFIG = (NOTEBOOKS / "sanitize.cfg").read_text("utf-8")
# As nbval keeps them: a mapping, in the order of the file.
PATTERNS = dict(get_sanitize_patterns(CONFIG))

# What staleproof.evidence.canary.row_states says of a row.
ROW_STATES = ("unwritten", "partly written", "nan", "zero", "finite")
WORDS = sorted(
    {v.value for v in Verdict}
    | set(ROW_STATES)
    | {lab.FIXED, lab.NOT_FIXED, lab.NOT_REPRODUCED, lab.NOT_RUN}
    | {"written", "stale", "zeroed", "held", "refuted", "did not hold", "RECORDED", "NaN", "Inf"}
    | {"True", "False", "nan", "inf", "-inf", "none", "all"}
)


def sanitize(text):
    """nbval 0.11's rule: one re.sub a pattern, in file order."""
    for regex, replace in PATTERNS.items():
        text = re.sub(regex, replace, text)
    return text


def test_the_file_holds_what_nbval_reads():
    written = re.findall(r"^regex:", CONFIG, re.MULTILINE)
    assert len(PATTERNS) == len(written) == 3
    assert all(replace and not replace.isspace() for replace in PATTERNS.values())


def test_the_provenance_words_of_fresh_values_map_to_the_same_text():
    texts = {
        sanitize(f"{word} empty_row: pad_only, 127 of 128")
        for word in (Provenance.MEASURED, Provenance.INTERPRETED, "INTERPRETED+MEASURED")
    }
    assert texts == {"PROVENANCE empty_row: pad_only, 127 of 128"}


def test_two_machines_give_the_same_banner():
    banners = {
        "machine: CPU x86_64 · torch 2.13.0+cpu · triton 3.9.0 · INTERPRETED",
        "machine: NVIDIA H200 · torch 2.11.0+cu130 · triton 3.6.0 · MEASURED",
    }
    texts = {sanitize(f"before\n{b}\nINTERPRETED empty_row: leaked") for b in banners}
    assert texts == {"before\nmachine: MACHINE\nPROVENANCE empty_row: leaked"}


def test_the_size_of_a_picture_does_not_matter():
    assert sanitize("<Figure size 640x480 with 1 Axes>") == "<Figure>"
    assert sanitize("<Figure size 1100x545.5 with 3 Axes>") == "<Figure>"


@pytest.mark.parametrize("word", WORDS)
def test_no_word_of_evidence_is_erased(word):
    line = f"INTERPRETED mla_padding, empty_row, {word}: {word}"
    assert sanitize(line) == line.replace("INTERPRETED", "PROVENANCE")
    assert sanitize(word) == word


@given(
    counts=st.lists(st.integers(-(2**40), 2**40) | st.floats(allow_nan=True), min_size=1),
    word=st.sampled_from(WORDS),
)
def test_no_count_is_erased(counts, word):
    numbers = ", ".join(str(c) for c in counts)
    line = f"row {numbers} | {word} | {counts[0]} of {counts[-1]} rows, vLLM #37442, 0.20.2"
    assert sanitize(line) == line


def test_every_stored_verdict_line_keeps_all_but_its_first_word():
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                for line in output.get("text", "").splitlines():
                    word, _, rest = line.partition(" ")
                    if word in (Provenance.MEASURED, Provenance.INTERPRETED):
                        assert sanitize(line) == f"PROVENANCE {rest}", path.name
