"""The page of costs on SM100 is what the tool makes of the recorded run."""

from __future__ import annotations

from staleproof.cases import store
from tools import cost


def test_the_page_is_marked_as_arithmetic_and_names_no_measurement_of_a_b200():
    page = (store.checkout() / "workbook" / cost.NAME).read_text()
    assert "Grade: **arithmetic**" in page
    written = page.partition(cost.BEGIN)[2].partition(cost.END)[0].strip()
    assert written == "\n".join(cost.table(store.find("nvidia-h200").measurements))
