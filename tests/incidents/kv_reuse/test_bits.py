"""The table of fp32 bits read as something smaller, against an independent count."""

import numpy as np
import pytest

from staleproof.incidents.kv_reuse.bits import DTYPES, SAMPLES, SOURCES, nan_share, nan_table

# Percent of elements and of fp32 words, from four million other samples, counted with numpy.
KNOWN = {
    "N(0, 1)": ((0.529, 2.10), (1.60, 6.24), (1.56, 3.12), (0.194, 0.39)),
    "N(0, 0.01²)": ((0.410, 1.63), (1.56, 6.11), (1.56, 3.12), (0.195, 0.39)),
    "N(0, 100²)": ((0.523, 2.08), (1.59, 6.22), (1.55, 3.11), (0.192, 0.38)),
    "U(-1, 1)": ((0.389, 1.55), (1.36, 5.36), (1.54, 3.09), (0.184, 0.37)),
    "random bytes": ((0.784, 3.10), (2.35, 9.06), (3.13, 6.15), (0.388, 0.78)),
    "bf16 values in fp32": ((0.142, 0.57), (0.43, 1.71), (0.0, 0.0), (0.0, 0.0)),
}


def test_the_table_agrees_to_sampling_error():
    assert SAMPLES >= 1_000_000
    table = {(row.source, row.dtype): row for row in nan_table()}
    assert len(table) == len(SOURCES) * len(DTYPES) == 24
    for source, known in KNOWN.items():
        for dtype, (elements, words) in zip(DTYPES, known, strict=True):
            row = table[source, dtype]
            for share, percent in ((row.elements, elements), (row.words, words)):
                p = percent / 100
                # Five standard errors of both counts, and half of the last digit printed there.
                slack = 5 * np.sqrt(p * (1 - p) * 1.25 / SAMPLES) + 5e-5
                assert abs(share - p) <= slack, (source, dtype, share, p)


@pytest.mark.parametrize(("dtype", "share"), [("e4m3", 0.0), ("e5m2", 2 / 2**8)])
def test_infinities_of_both_signs_are_counted_where_a_dtype_has_them(dtype, share):
    counted = nan_share("random bytes", dtype).infinite
    assert abs(counted - share) <= 5 * np.sqrt(share / SAMPLES)


@pytest.mark.parametrize(
    ("source", "dtype", "message"),
    [("N(0,1)", "e4m3", "source: expected one of"), ("N(0, 1)", "fp8", "dtype: expected one of")],
)
def test_bad_input_is_refused(source, dtype, message):
    with pytest.raises(ValueError, match=message):
        nan_share(source, dtype)
