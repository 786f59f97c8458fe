"""The arithmetic of costs on SM100."""

from __future__ import annotations

import pytest
from tests.made import measurement

from staleproof.cases import store
from tools import cost

BATCH = "bf16 batch 2 heads 128 page 64"
MLA = {"kernel": "mla_decode", "mode": BATCH, "x_value": 1000, "bytes": 2_304_000}


def row(provider, p50, bytes=8_000_000, mode="", **changes):
    return measurement(provider, p50, **{"bytes": bytes, "mode": mode} | changes)


ROWS = [
    row("limit: bytes at the memset rate", 0.576, **MLA),
    row("limit: FLOP at the matmul rate", 0.557056, **MLA),
    row("staleproof", 21.4, **MLA),
    row("staleproof", 3.4),
    row("staleproof", 1.5, bytes=4_000_000),
    row("somebody else", 1.0, bytes=16_000_000),
    row("staleproof", 0.5, bytes=9_000_000, mode="inputs in the L2", cache="warm"),
]


def test_rates_are_those_of_the_recorded_limits():
    rates = cost.measured_rates(ROWS)
    assert rates.bytes == pytest.approx(4e12)
    assert rates.flop == pytest.approx(1e15)


def test_an_operation_bound_by_memory_scales_with_bandwidth_and_a_slow_one_with_processors():
    rates, b200 = cost.measured_rates(ROWS), cost.PUBLISHED["B200"]
    assert cost.predicted_us(ROWS[3], rates, b200) == pytest.approx(1.4 + 2.0 / 2)
    assert cost.predicted_us(ROWS[2], rates, b200) == pytest.approx(1.4 + 20 * 132 / 148)
    # A limit of 2 us: what takes up to three times as long is bound by it.
    assert cost.predicted_us(row("", 1.4 + 5.9), rates, b200) == pytest.approx(1.4 + 5.9 / 2)
    assert cost.predicted_us(row("", 1.4 + 6.1), rates, b200) == pytest.approx(1.4 + 6.1 * 132 / 148)


def test_the_table_has_the_largest_case_of_ours_alone():
    lines = [line for line in cost.table(ROWS) if line.startswith(("| clear", "| mla"))]
    assert [line.split(" | ")[0] for line in lines] == ["| mla_decode", "| clear"]
    assert lines[1].split(" | ")[2] == "8.0"


def test_the_page_is_marked_as_arithmetic_and_names_no_measurement_of_a_b200():
    page = (store.checkout() / "workbook" / cost.NAME).read_text()
    assert "Grade: **arithmetic**" in page
    written = page.partition(cost.BEGIN)[2].partition(cost.END)[0].strip()
    assert written == "\n".join(cost.table(store.find("nvidia-h200").measurements))
