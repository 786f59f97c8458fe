"""``engine.json`` says what the sources of the releases say, of those that can be fetched."""

from __future__ import annotations

import pytest
from tests.vllm import environment
from tools import engine_lines

from staleproof.triage import table
from staleproof.vllm.sources import Sources

SOME = environment.also("0.19.1", "0.24.0", "0.33.0")


@pytest.mark.parametrize("release", SOME)
def test_the_recorded_defects_and_gpus_are_those_of_the_sources(release):
    package = environment.sources(release) / "vllm"
    for row, defect in engine_lines.defects(Sources(package)).items():
        assert defect == (release in table.engine()["defects"][row]), row
    for backend, gpus in engine_lines.gpus(package).items():
        assert table.engine()["gpus"][backend] == gpus


def test_every_line_of_the_newest_release_is_recorded():
    package = environment.sources(SOME[-1]) / "vllm"
    for name, texts in engine_lines.lines(package).items():
        assert texts <= {*table.engine()["lines"][name]}
