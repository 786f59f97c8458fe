"""Predictions, and what a recorded run of an SM100 GPU says about them."""

import json
from dataclasses import asdict, replace

import pytest
from tests.made import finding, not_run

from staleproof.cases import predictions, store
from staleproof.cases.digest import source_digest
from staleproof.cases.finding import RunFileError
from staleproof.incidents.registry import INCIDENTS


def test_every_prediction_is_of_a_known_incident_and_says_what_would_refute_it():
    told = predictions.read()
    assert len(told) >= 12
    assert len({one.key for one in told}) == len(told)
    for one in told:
        assert one.incident in INCIDENTS
        assert one.why
        assert one.refuted_by
        assert one.predicted not in one.refuted_by.split(":")[0].split(" or ")
        assert len(one.source_digest) >= 8


def test_the_page_shows_every_prediction():
    page = (store.checkout() / "workbook" / "predictions.md").read_text()
    for one in predictions.read():
        assert f"| {one.incident}, {one.question} | {one.variant} | {one.predicted} |" in page


def test_questions_that_name_sm100_as_missing_are_predicted():
    # On another machine, what cannot be asked for want of SM100 is what has to be predicted.
    run = store.find("nvidia-h200")
    absent = {found.key for found in run.findings if not found.ran and "SM100" in found.note}
    assert absent
    assert absent <= {one.key for one in predictions.read()}


def test_misses_come_first_and_what_did_not_run_stays_open():
    told = [replace(predictions.read()[0], question=name, predicted="nan") for name in ("a", "b", "c", "d")]
    incident, _, variant, _ = told[0].key
    found = [
        finding(incident, "a", variant, "nan"),
        finding(incident, "b", variant, "zero"),
        not_run(incident, "c", variant, "needs an SM100 GPU"),
    ]
    states = [(one.prediction.question, one.state) for one in predictions.outcomes(told, found)]
    assert states == [("b", "refuted"), ("a", "confirmed"), ("c", "open"), ("d", "open")]


@pytest.mark.parametrize("stale", [False, True])
def test_what_became_of_a_prediction_is_one_line(stale):
    key = {"incident": "mla_padding", "question": "empty row", "variant": "theirs"}
    given = {"predicted": "zero", "refuted_by": "nan: it reads", "date": "2026-11-21"}
    digest = "0" * 12 if stale else source_digest("mla_padding")
    told = replace(predictions.read()[0], **key, **given, source_digest=digest)
    when = "(2026-11-21; the code has changed since)" if stale else "(2026-11-21)"
    for verdict, line in (
        ("zero", f"confirmed  mla_padding, empty row, theirs: predicted zero {when}"),
        ("nan", f"refuted    mla_padding, empty row, theirs: predicted zero, got nan {when}: nan: it reads"),
        (None, f"open       mla_padding, empty row, theirs: predicted zero {when}"),
    ):
        found = [finding("mla_padding", "empty row", "theirs", verdict)] if verdict else []
        (outcome,) = predictions.outcomes([told], found)
        assert (outcome.text, outcome.verdict, outcome.prediction) == (line, verdict, told)


def test_a_run_of_another_gpu_is_refused_in_one_line():
    run = store.find("nvidia-h200")
    for capability, this in (("sm_90", "sm_90"), (None, "a CPU")):
        other = replace(run, environment={"machine": {"capability": capability}})
        with pytest.raises(RunFileError, match=f"the predictions are for sm_100 and sm_103, this is {this}$"):
            predictions.of_run(predictions.read(), other)
    for capability in ("sm_100", "sm_103"):
        theirs = replace(run, environment={"machine": {"capability": capability}})
        told = predictions.of_run(predictions.read(), theirs)
        assert told == predictions.outcomes(predictions.read(), run.findings)


def test_a_row_with_an_unknown_field_is_named(tmp_path):
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps([{"incident": "x"}]))
    with pytest.raises(ValueError, match="prediction 1: expected the fields"):
        predictions.read(path)


def test_registering_anew_changes_date_and_digest_of_stale_ones_alone(tmp_path):
    fresh, other = (replace(one, source_digest=source_digest(one.incident)) for one in predictions.read()[:2])
    fresh, other = replace(fresh, date="2026-01-01"), replace(other, date="2026-01-01", source_digest="old")
    path = tmp_path / "predictions.json"
    path.write_text(json.dumps([asdict(fresh), asdict(other)]))
    predictions.register(path)
    kept, changed = predictions.read(path)
    assert kept == fresh
    assert changed == replace(other, date=changed.date, source_digest=fresh.source_digest)
    assert changed.date > "2026-01-01"
