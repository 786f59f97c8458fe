"""Verdict words: each is defined once, and no word makes a remedy "fixed" that is not."""

import re
from itertools import product

import pytest

from staleproof.cases.finding import Finding, Key, Three, finding
from staleproof.cases.words import FAMILIES, FIX, NOT_RUN, Outcome, UnknownWordError, outcome, word

KEY = Key("an_incident", "off/on/off", "ours")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_word_has_an_outcome_and_a_sentence(family):
    assert FAMILIES[family], family
    for verdict in FAMILIES[family]:
        # A bound or a byte may be part of a word; what was measured may not.
        rest = re.sub(r"[13] %|0x[0-9a-f]{2}", "", verdict)
        assert not any(sign.isdigit() for sign in rest), "a figure"
        meaning, says = word(family, verdict)
        assert meaning in (Outcome.GOOD, Outcome.BAD, Outcome.OPEN)
        assert says.endswith(".")
        assert says[0].isupper()
    assert outcome(family, NOT_RUN) is Outcome.NOT_RUN


def test_an_unknown_word_and_an_unknown_family_are_errors_that_name_them():
    with pytest.raises(UnknownWordError, match=r"family rows .*leaked.*got 'leeked'"):
        word("rows", "leeked")
    with pytest.raises(UnknownWordError, match=r"words: expected a family of .*got 'nope'"):
        word("nope", "clean")
    with pytest.raises(UnknownWordError, match=r"got '98\.2%'"):
        finding(KEY, "rows", "98.2%")
    with pytest.raises(UnknownWordError, match="got 'leeked'"):
        finding(KEY, "rows", "leaked", expected="leeked")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != FIX])
def test_fixed_is_bad_good_bad_and_a_compared_right_result(family):
    # A word of each outcome.
    words = {outcome(family, verdict).value: verdict for verdict in (*FAMILIES[family], NOT_RUN)}
    for means in product(words, repeat=3):
        for right in (True, False, None):
            three = Three(family, *map(words.get, means), right=right)
            shown = means == ("bad", "good", "bad")
            assert (three.verdict == "fixed") == (shown and right is True), three
            assert (three.verdict == "wrong") == (shown and right is not True), three
            assert (three.verdict == NOT_RUN) == (NOT_RUN in means)
            if three.verdict != "fixed":
                with pytest.raises(ValueError, match="verdict: expected"):
                    Finding(*KEY[:3], FIX, "fixed", three=three)


@pytest.mark.parametrize(
    "three",
    [("no step seen", "clean", "no step seen"), ("leaked", "fine", "leaked"), ("right", "clean", "right")],
)
def test_words_that_nobody_defined_make_no_verdict(three):
    with pytest.raises(UnknownWordError):
        _ = Three("rows", *three, right=True).verdict


def test_a_fix_has_its_three_readings_and_nothing_else_has():
    three = Three("rows", "leaked", "clean", "leaked", right=True)
    assert finding(KEY, FIX, "fixed", three=three).outcome is Outcome.GOOD
    for words, verdict, given in (("rows", "clean", three), (FIX, "fixed", None), (FIX, "not fixed", None)):
        with pytest.raises(ValueError, match="three: expected what off/on/off gave"):
            finding(KEY, words, verdict, three=given)


def test_a_false_line_of_a_file_becomes_what_it_shows():
    three = Three("rows", "leaked", "clean", "leaked", right=True)
    row = {"incident": "a", "question": "off/on/off", "variant": "v", "words": FIX, "schema": 3}
    good = row | {"verdict": "fixed", "outcome": "good", "three": vars(three)}
    assert Finding.from_json(good).verdict == "fixed"
    for change, want in (
        ({"on": "leaked"}, "not fixed"),
        ({"off": "clean"}, "not reproduced"),
        ({"right": None}, "wrong"),
        ({"right": False}, "wrong"),
    ):
        read = Finding.from_json(good | {"three": vars(three) | change})
        assert (read.verdict, read.expected, read.failed) == (want, "fixed", True)
        assert read.note.startswith("said fixed, but off/on/off gave")
    hoped = Finding.from_json(good | {"three": vars(three) | {"on": "leaked"}, "expected": "not fixed"})
    assert (hoped.verdict, hoped.ok) == ("not fixed", True)
    # What says that it was not run is taken at its word, whatever stands beside it.
    assert not Finding.from_json(good | {"verdict": "not run", "outcome": "not run"}).ran
