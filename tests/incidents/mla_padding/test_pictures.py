"""The notebook's picture of one captured step."""

from __future__ import annotations

from staleproof.evidence import Verdict
from staleproof.incidents.mla_padding.pictures import live_count_verdict, stage_picture


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


def test_one_padding_row_is_enough(device):
    assert live_count_verdict(15, device) == Verdict.LEAKED
    assert live_count_verdict(16, device) == Verdict.CLEAN
