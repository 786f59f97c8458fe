"""The tile's bytes belong to the rows that the layout says, and are written where the quantiser wrote."""

import pytest

from staleproof.incidents.scale_padding.pictures import tile_picture
from staleproof.ops.nvfp4_layout import padding_offsets, scale_offsets


def test_each_byte_has_the_row_and_column_that_lie_there(device):
    picture = tile_picture(5, 80, device)
    at = scale_offsets(128, 4)
    for byte, (row, column) in enumerate(zip(picture.rows, picture.columns, strict=True)):
        assert at[row, column] == byte


@pytest.mark.parametrize(("rows", "width"), [(5, 80), (1, 32), (33, 64)])
def test_written_is_what_the_quantiser_wrote_and_padding_is_not(device, rows, width):
    nobody = {byte for byte in padding_offsets(rows, width).tolist() if byte < 512}
    written = tile_picture(rows, width, device).written
    assert {byte for byte, flag in enumerate(written) if not flag} == nobody


def test_an_allocation_that_is_zeroed_has_no_byte_left_over(device):
    assert all(tile_picture(5, 80, device, "zeros_swizzled_only").written)
