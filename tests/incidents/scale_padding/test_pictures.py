"""The tile's bytes belong to the rows that the layout says, and are written where the quantiser wrote."""

import pytest

from staleproof.incidents.scale_padding.pictures import tile_picture
from staleproof.ops.nvfp4_layout import padding_offsets, scale_offsets


def test_each_byte_has_its_row_and_column(device):
    picture = tile_picture(5, 80, device)
    at = scale_offsets(128, 4)
    for byte, (row, column) in enumerate(zip(picture.rows, picture.columns, strict=True)):
        assert at[row, column] == byte


@pytest.mark.parametrize(("rows", "width"), [(5, 80), (33, 64)])
def test_unwritten_bytes_are_the_padding(device, rows, width):
    nobody = {byte for byte in padding_offsets(rows, width).tolist() if byte < 512}
    written = tile_picture(rows, width, device).written
    assert {byte for byte, flag in enumerate(written) if not flag} == nobody
