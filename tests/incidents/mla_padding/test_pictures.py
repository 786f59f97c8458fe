"""The notebook's picture of one captured step."""

import pytest

from staleproof.incidents.mla_padding.pictures import buffer_rows, stage_picture


def test_the_first_bad_stage_and_the_first_crossing(device):
    picture = stage_picture("empty_row_not_written", device)
    column = {stage: [row[i] for row in picture.cells] for i, stage in enumerate(picture.stages)}
    padding = len(picture.cells) - picture.live
    assert column["0.attention"] == [0] * picture.live + [1] * padding
    assert column["0.quantise"] == [2] * picture.live + [1] * padding
    assert picture.first_crossing.stage == "0.quantise"
    fixed = stage_picture("clear_empty_rows", device)
    assert not any(map(any, fixed.cells))
    assert fixed.first_crossing is None
    padded = fixed._replace(cells=[[0, 0], [0, 1]])
    assert [one.verdict for one in (picture, fixed, padded)] == ["leaked", "clean", "pad_only"]


def test_a_buffer_zeroed_once_is_zero_only_until_a_row_was_used(device):
    picture = buffer_rows("zeros_once_per_layer", device)
    assert picture.steps == ["1 live", "8 live", "3 live", "8 live, 1 sick", "3 live"]
    assert picture.cells[0] == ["this step"] * 5
    for row in picture.cells[3:7]:
        assert row == ["zero", "this step", "an earlier step", "this step", "an earlier step"]
    last = ["zero", "this step", "an earlier step", "NaN in a live row", "NaN of an earlier step"]
    assert picture.cells[7] == last


def test_cleared_rows_are_zero_after_every_step(device):
    for row in buffer_rows("clear_empty_rows", device).cells[3:]:
        assert [row[step] for step in (0, 2, 4)] == ["zero"] * 3


@pytest.mark.parametrize(
    ("name", "says"),
    [("empty_row_not_written", "NaN of an earlier step"), ("pad_with_seq_len_1", "NaN in a padding row")],
)
def test_nan_in_padding_was_there_or_was_written_by_the_step(device, name, says):
    assert [row[0] for row in buffer_rows(name, device).cells] == ["this step"] + [says] * 7


def test_a_kernel_that_writes_every_row_has_no_such_picture():
    with pytest.raises(ValueError, match="name: expected a setup whose kernel leaves empty rows unwritten"):
        buffer_rows("zeros_before_zero_by_zero", "cpu")
