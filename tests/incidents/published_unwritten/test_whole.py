"""What is concluded from a whole vLLM's rounds, and what its fingerprints are told, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleproof.cases.case import MissingError
from staleproof.incidents.published_unwritten import cases, real, whole
from staleproof.incidents.published_unwritten.scene import burst, serve
from staleproof.vllm import hooks

ASKED = ("0.26.0", "on", "nan")


def told(victim: int = 0, stranger: int = 0, of: int = 16, **part: Any) -> dict[str, Any]:
    row = {"victim": {"nan": victim, "of": of}, "stranger": {"nan": stranger, "of": 8}, "hits": 0, "other": 0}
    shared = {"us_a_step": 2.04, "prints_us_a_step": 1.0, "stepped_back": []}
    return {"on, nan": {"rounds": {"7": row}, **shared, **part}, "failed": "it died"}


@pytest.mark.parametrize(
    ("rows", "verdict", "bad"),
    [({}, "its own", ([], [])), ({"victim": 16}, "NaN", (["7"], [])), ({"stranger": 1}, "NaN", ([], ["7"]))],
)
def test_one_bad_answer_of_either_makes_the_round_bad(rows, verdict, bad):
    found = cases.answers(ASKED, "cuda", told(**rows))
    assert found.verdict == verdict
    assert (found.numbers["victim_in"], found.numbers["stranger_in"]) == bad
    assert (found.numbers["rounds"], found.numbers["us_a_step"]) == (1, 2.0)


def test_a_patch_that_stepped_back_or_an_answer_cut_short_is_not_right():
    assert cases._answers_wrong(ASKED, "cuda", told()) is None
    assert "['unpublish']" in cases._answers_wrong(ASKED, "cuda", told(stepped_back=["unpublish"]))
    assert "{(15, 8)}" in cases._answers_wrong(ASKED, "cuda", told(of=15))


@pytest.mark.parametrize(
    ("hits", "other", "verdict"), [(0, 0, "differ"), (3, 0, "differ"), (3, 2, "the same")]
)
def test_both_detectors_must_agree_with_the_answers(hits, other, verdict):
    given = told(victim=16, stranger=8)
    given["on, nan"]["rounds"]["7"] |= {"hits": hits, "other": other}
    found = cases.detected(ASKED, "cuda", given)
    assert (found.verdict, found.numbers["blocks_with_other_bytes"]) == (verdict, other)


def test_what_the_engine_did_not_reach_is_not_run():
    with pytest.raises(MissingError, match="the engine ended before: it died"):
        cases.answers(("0.26.0", "again", "nan"), "cuda", told())
    for rows in ([], [{"hit_tokens": 0, "nan": 0}]):
        with pytest.raises(MissingError, match="no hit in the same step"):
            cases.same_step(ASKED, "cuda", {"same step": rows})
    assert cases._no_engine(ASKED, "cpu") == "needs a CUDA GPU"
    assert cases._no_engine(("0.0.1",), "cuda") == "vLLM 0.0.1 is not installed"


@pytest.mark.parametrize(("seed", "bad"), [(25, True), (26, False)])
def test_fingerprints_are_asked_of_what_each_step_writes_and_hits(device, seed, bad):
    """The blocks that the first reader of an unwritten hash got, and no other."""
    try:
        real.package("0.26.0")
    except MissingError as error:
        pytest.skip(str(error))
    engine = SimpleNamespace(
        runner=SimpleNamespace(kv_caches=[torch.zeros(whole.BLOCKS, 16, 2, device=device)])
    )
    with cases.Server("0.26.0").loaded():
        watched = whole._Watched(engine)
        watched.wrap()
        try:
            reads = serve(real.Real(whole.BLOCKS, **cases.SERVER), burst(seed)[1]).reads
        finally:
            for owner in ("watch", "fingerprints"):
                hooks.unwrap(owner)
    assert bool(reads) == bad
    found = watched.prints.check(wait=True)
    assert {one.block for one in found} == {read.block for read in reads}
    assert not any(one.committed for one in found)
    assert watched.prints.reads > 100
    assert watched.look()["hits"] == watched.watch.blocks.hits
    assert watched.look()["hits"] == 0
