"""Figures of a page and the source they name: which are missing there, and which name none."""

from __future__ import annotations

import pytest

from tools import bound


@pytest.mark.parametrize(
    ("text", "source", "missing"),
    [
        ("12 blocks and 7 more", '{"blocks": 12}', ["7"]),
        ("1,234,567 ids", '{"ids": 1234567}', []),
        ("1234 ids", "1,234", []),
        # Rounded to as many decimals as the page has.
        ("3.9 GiB, 4 GiB and 3.8 GiB", '{"bytes": 4227907584}', ["3.8"]),
        ("3.00 MiB of 2.00 KiB", "3145728 and 2048", []),
        ("12 ms and 13 ms", '{"seconds": 0.0124}', ["13"]),
        # A source may count in the unit of the page.
        ("3.2 ms and 3.3 ms", "3.21 ms", ["3.3"]),
        ("0.5 %", "0.49", []),
        ("0.50 %", "0.49", ["0.50"]),
        # Releases are compared as they are, and the end of a sentence is no part of one.
        ("From 0.22.1, until 0.23.0.", "0.22.1 0.22.9", ["0.23.0"]),
        ("0.22.1.post1", "0.22.1", ["0.22.1.post1"]),
        # No figures: names, numbers of threads, code, targets of links, dates.
        ("H200, SM90, #57017, a/8, x.3, `--port 8000`, [a](b/7.md), 2026-11-23", "", []),
        ("[8 rows](b/7.md)", "", ["8"]),
    ],
)
def test_figures_that_the_source_does_not_hold_are_named(text, source, missing):
    assert bound.unbound(text, source) == missing


def test_a_mark_is_of_the_text_before_it_in_its_paragraph():
    page = """# 5 rows
Two of 3 <!-- file: a.json --> and
5 of 6. <!-- finding: mla | rows |
  off --> <!-- releases -->

- 7 <!-- by hand: on an H200 -->
- 8

| 9 | <!-- source: a.py:3 --> |
```
10 <!-- file: code -->
```
"""
    assert [*bound.passages(page)] == [
        ("# 5 rows\nTwo of 3", [("file", "a.json")]),
        ("and\n5 of 6.", [("finding", "mla | rows | off"), ("releases", "")]),
        ("- 7", [("by hand", "on an H200")]),
        ("| 9 |", [("source", "a.py:3")]),
    ]


def test_each_row_and_each_entry_is_a_paragraph_of_its_own():
    page = "One\nline.\n\n- a\n  more\n- b\n\n| c |\n| d |\n```\ncode\n```"
    assert [part.strip() for part in bound.paragraphs(page)] == [
        "One\nline.",
        "- a\n  more",
        "- b",
        "| c |",
        "| d |",
    ]


@pytest.mark.parametrize(
    ("paragraph", "named"),
    [
        ("It takes 3 us.", False),
        ("It takes 1,024.5 GiB.", False),
        *(
            (f"It is 7 {unit}.", False)
            for unit in ["us", "ms", "s", "MiB", "KiB", "GB", "TFLOP/s", "TB/s", "GB/s"]
        ),
        ("It is 7 per cent.", False),
        ("3 of 8", False),
        ("12 %", False),
        ("It takes 3 us. <!-- file: a -->", True),
        ("As #39593 says: 3 us.", True),
        ("As figure #7 says: 3 us.", False),
        ("By `a.py:12`: 3 us.", True),
        ("By `:12`: 3 us.", True),
        # Not measured: a count, a name, code.
        ("3 rows", True),
        ("3 usual rows, H200 s", True),
        ("`sleep 3 s`", True),
        ("```\n3 us\n```", True),
    ],
)
def test_a_measured_quantity_needs_a_source(paragraph, named):
    other = "It is fast."
    page = f"{other}\n\n{paragraph}\n\n- {other}\n"
    assert bound.unnamed(page) == ([] if named else [paragraph])


def test_entries_of_a_list_need_a_source_each_and_a_written_table_none():
    page = "Steps:\n- 3 us <!-- file: a -->\n- 4 us\n\n<!-- written by x -->\n5 us\n<!-- end of x -->"
    assert bound.unnamed(page) == ["- 4 us"]


def test_what_a_mark_names_is_read(tmp_path):
    (tmp_path / "a.json").write_text("in the file")
    probes = {release: {"a": {"needed": release < "0.33.0"}} for release in ("0.16.0", "0.20.0", "0.33.0")}

    def read(kind, name, findings=None):
        return bound.source_of(kind, name, findings or {}, tmp_path, probes)

    assert read("file", "a.json") == "in the file"
    assert read("releases", "") == "3 0.16.0, 0.20.0, 0.33.0; "
    assert read("releases", "a") == "2 0.16.0, 0.20.0; 0.33.0"
    with pytest.raises(KeyError, match=r"no recorded finding mla \| rows \| off"):
        read("finding", "mla | rows | off", {("mla", "rows", "on"): []})


def test_a_finding_is_named_by_incident_question_and_variant(tmp_path):
    from tests.made import finding

    found = {
        ("mla", "rows", variant): [finding("mla", "rows", variant, "clean", rows=rows)]
        for variant, rows in (("off", 3), ("off again", 4), ("on", 5))
    }
    read = bound.source_of("finding", "mla | rows | off*", found, tmp_path, [])
    assert [f'"rows": {rows}' in read for rows in (3, 4, 5)] == [True, True, False]
    assert read.count("\n") == 1
    # The number of a schema, a date or a digest was not measured.
    assert bound.unbound("1 of 3, 2 of 4", read) == ["1", "2"]
