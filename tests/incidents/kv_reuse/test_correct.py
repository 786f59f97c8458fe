"""A zeroer that writes elsewhere, or leaves something, is called wrong, although requests come out right."""

from functools import partial

import pytest

from staleproof.incidents.kv_reuse import broken, correct
from staleproof.incidents.kv_reuse.questions import incident
from staleproof.incidents.kv_reuse.scene import ZeroNewBlocks, brief
from staleproof.lab import OFF_ON_OFF, WRONG

FIX = "BlockZeroer, e4m3, blocks outermost"


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
        def run(self, ticket):
            self.zeroer.zero(ticket)
            spoil(self.raw, ticket)
            return ticket

        monkeypatch.setattr(ZeroNewBlocks, "__init__", keep)
        monkeypatch.setattr(ZeroNewBlocks, "run", run)

    return install


@pytest.mark.parametrize("spoil", [_one_byte_off, _one_byte_left])
def test_a_byte_too_many_or_too_few_is_wrong(after_zeroing, device, spoil):
    after_zeroing(spoil)
    assert "bytes differ" in (correct.wrong_bytes(brief(device), ZeroNewBlocks, broken.both) or "")


def _forgets_one(self, step):
    return step.new_blocks[1:]


def _free_blocks_too(self, step):
    """Right in any load without prefix caching, and no longer the blocks that were asked for."""
    return [*step.new_blocks, *step.freed]


def _those_of_a_small_pool(self, step):
    return [block for block in step.new_blocks if block < 25]


@pytest.mark.parametrize("submit", [_forgets_one, _free_blocks_too, _those_of_a_small_pool])
def test_a_zeroer_of_other_blocks_is_wrong(monkeypatch, device, submit):
    monkeypatch.setattr(ZeroNewBlocks, "submit", submit)
    assert "bytes differ" in (correct.wrong_bytes(brief(device), ZeroNewBlocks, broken.both) or "")
    if submit is not _forgets_one:
        # No request comes out wrong, so that only this comparison tells.
        assert [f.verdict for f in incident.ask(OFF_ON_OFF, FIX)] == [WRONG]


@pytest.mark.parametrize(
    ("pick", "wanted"),
    [(broken.freed, broken.freed), (broken.freed, broken.both), (broken.hits_too, broken.both)],
)
def test_a_remedy_is_compared_with_the_blocks_that_it_must_zero(pick, wanted):
    scene = brief("cpu", prefix_caching=True, prefix=32, longest=60, shortest=34)
    found = correct.wrong_bytes(scene, partial(broken.Fill, pick=pick), wanted)
    assert (found is None) is (pick is wanted)
