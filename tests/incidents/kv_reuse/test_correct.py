"""A zeroer that writes elsewhere, or leaves something, is called wrong, although requests come out right."""

from __future__ import annotations

import pytest

from staleproof.cases.finding import OFF_ON_OFF
from staleproof.cases.words import FIXED, WRONG
from staleproof.incidents.kv_reuse import broken, correct
from staleproof.incidents.kv_reuse.cases import POLICIES, TABLE
from staleproof.incidents.kv_reuse.scene import Scene, ZeroNewBlocks, brief

FIX = "BlockZeroer, e4m3, blocks outermost"


def spoilt(spoil):
    """ZeroNewBlocks, after which ``spoil(raw memory of layers, ids)`` runs."""

    def run(self, ticket):
        self.zeroer.zero(ticket)
        spoil(self.raw, ticket)
        return ticket

    return run


def _one_byte_off(raw, ids):
    # A byte of the null block, which no request reads.
    raw[-1][0].view(-1)[7] = 0


def _one_byte_left(raw, ids):
    # The last byte of a page is padding.
    raw[0][ids[0]].view(-1)[-1] = 1


@pytest.fixture
def after_zeroing(monkeypatch):
    """Installs what happens to the layers' raw memory after each call of our zeroer."""
    start = ZeroNewBlocks.__init__

    def keep(self, buffers):
        start(self, buffers)
        self.raw = buffers.raw

    def install(spoil):
        monkeypatch.setattr(ZeroNewBlocks, "__init__", keep)
        monkeypatch.setattr(ZeroNewBlocks, "run", spoilt(spoil))

    return install


@pytest.mark.parametrize("spoil", [_one_byte_off, _one_byte_left])
def test_a_byte_too_many_or_too_few_is_wrong(after_zeroing, spoil):
    assert correct.wrong_bytes(brief("cpu"), ZeroNewBlocks) is None
    after_zeroing(spoil)
    assert "bytes differ" in (correct.wrong_bytes(brief("cpu"), ZeroNewBlocks) or "")


def test_a_fix_with_a_byte_too_many_is_not_called_fixed(after_zeroing):
    assert [f.verdict for f in TABLE.ask(OFF_ON_OFF, FIX)] == [FIXED]
    after_zeroing(_one_byte_off)
    (found,) = TABLE.ask(OFF_ON_OFF, FIX)
    assert (found.verdict, found.failed) == (WRONG, True)
    assert "bytes differ" in found.note


def test_a_zeroer_that_forgets_a_block_is_wrong(monkeypatch):
    submit = ZeroNewBlocks.submit
    monkeypatch.setattr(ZeroNewBlocks, "submit", lambda self, step: submit(self, step)[1:])
    assert "not the new ones" in (correct.wrong_bytes(brief("cpu"), ZeroNewBlocks) or "")


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "no_zeroing"])
def test_every_remedy_zeroes_what_it_says(name):
    assert correct.wrong_bytes(Scene("cpu"), POLICIES[name][0]) is None


def test_a_fill_that_is_not_zero_is_wrong(monkeypatch):
    def ones(buffers, ids):
        for raw in buffers.raw:
            raw.index_fill_(0, ids, 1)

    monkeypatch.setattr(broken, "index_fill", ones)
    assert "bytes differ" in (correct.wrong_bytes(Scene("cpu"), broken.ZeroOnFree) or "")
