"""Remedies that are right for an incident's own scene and nowhere else: none of them is called fixed."""

from dataclasses import replace
from functools import partial

import environment
import pytest
import torch

from staleproof.incidents.decode_buffer import questions as buffers
from staleproof.incidents.decode_buffer import setups as servers
from staleproof.incidents.decode_buffer.model import Attention, decode_live_rows
from staleproof.incidents.kv_reuse import broken as zeroing
from staleproof.incidents.kv_reuse import questions as reuse
from staleproof.incidents.kv_reuse import scene as reused
from staleproof.incidents.mla_padding import broken as decoding
from staleproof.incidents.mla_padding import questions as padding
from staleproof.incidents.mla_padding.remedies import Setup
from staleproof.incidents.moe_routing import questions as moe
from staleproof.incidents.moe_routing import scene as routing
from staleproof.incidents.published_unwritten import questions as published
from staleproof.incidents.published_unwritten.broken import REMEDIES
from staleproof.incidents.published_unwritten.scene import Miniature
from staleproof.incidents.scale_padding import broken as scaling
from staleproof.incidents.scale_padding import correct, ids
from staleproof.incidents.scale_padding import questions as scales
from staleproof.lab import Fix, Incident, Outcome

# --- Rows of empty requests that are cleared for some layers, lengths or batches only.


class Clears(decoding.NoRemedy):
    def __init__(self, kernel, which, leaves):
        super().__init__(kernel)
        self.which, self.leaves = which, leaves

    def after(self, a, out):
        out.masked_fill_(self.which(a)[:, None, None, None], self.leaves)


CLEARS = {
    "first layer only": lambda a: (a.seq_lens == 0) & (a.layer == 0),
    "requests of 2 to 15 tokens": lambda a: (a.seq_lens == 0) | ((a.seq_lens > 1) & (a.seq_lens < 16)),
    "requests of more than a page": lambda a: (a.seq_lens == 0) | (a.seq_lens > 16),
    "first eight rows only": lambda a: (a.seq_lens == 0) & (torch.ones_like(a.seq_lens).cumsum(0) <= 8),
}

# --- Buffers that grow behind a graph, or lose rows of a larger batch.


class GrowsForEachLane(Attention):
    def __init__(self, config, device):
        super().__init__(config, device)
        self.kept = [self.weight.new_zeros(config.batch, config.heads, config.rank) for _ in range(2)]

    def output(self, q, micro_batch):
        if len(self.kept[micro_batch]) < len(q):
            self.kept[micro_batch] = torch.zeros_like(q)
        return self.kept[micro_batch][: len(q)]


class EightRows(Attention):
    def decode(self, q, seq_lens, micro_batch=0):
        out = self.output(q, micro_batch)
        decode_live_rows(q[:8], seq_lens[:8], out[:8])
        return out


# --- Ids of blocks that come too early, too late, or not at all.


class AtMost16(zeroing.Fill):
    def submit(self, step):
        return super().submit(step)[:16]


class IdsOfSevenBits(zeroing.Fill):
    def submit(self, step):
        return super().submit(step) % 128


class WhenScheduled(zeroing.Fill):
    def submit(self, step):
        ids = super().submit(step)
        zeroing.index_fill(self.buffers, ids)
        return ids

    def run(self, ticket):
        return ticket


# --- Choices of experts.


def int64_ids(given, top_k, padding):
    weights, chosen = routing.select_ours(given, top_k)
    return weights, chosen.long()


def first_eight_tokens(given, top_k, padding):
    weights, chosen = routing.select_ours(given, top_k)
    early = (torch.arange(len(chosen), device=chosen.device) < 8)[:, None]
    return torch.where(early, weights, weights[:1]), torch.where(early, chosen, chosen[:1])


# --- Scales, draws and ids.


def few_columns(x):
    return (scaling.row_alone if x.shape[1] <= 64 else scaling.neighbour_in_the_maximum)(x)


class ScaleOfTheFirstCall:
    def __init__(self):
        self.kept = {}

    def __call__(self, x):
        values, scale = scaling.row_alone(x)
        return values, self.kept.setdefault(x.shape, scale)


def twins(tokens, experts, top_k, **how):
    half = ids.simulate_routing((tokens + 1) // 2, experts, top_k, **how)
    return tuple(part.repeat_interleave(2, 0)[:tokens] for part in half)


def of_128_experts(tokens, experts, top_k, **how):
    draw = ids.simulate_routing if experts == 128 else scaling.simulate_with_replacement
    return draw(tokens, experts, top_k, **how)


def four_ids(chosen, weights):
    return chosen * (chosen.shape[1] == 4), weights


def _miniature(monkeypatch):
    on = Miniature(caching=False)
    return published, Miniature(), on, published.miniature, published.differs_from_written


def _released(how, monkeypatch):
    environment.sources("0.33.0")
    off = published.Server("0.33.0")
    return published, off, replace(off, **how), published.sizes, published.changes_sound_plans


def _server(wiring, monkeypatch):
    monkeypatch.setitem(servers.SETUPS, "on trial", partial(servers.Wiring, wiring))
    off, on = servers.ServerCase(servers.OFF), servers.ServerCase("on trial")
    return buffers, off, on, buffers.server, buffers.wrong_output


SERVED, SERVED_WRONG = (partial(of, reused.brief("cpu")) for of in (reuse.served_with, reuse.wrong_on))


def _zeroing(remedy, monkeypatch):
    return reuse, reused.no_zeroing, remedy, SERVED, SERVED_WRONG


def _route(route, monkeypatch):
    monkeypatch.setitem(routing.ROUTES, "on trial", route)
    off = routing.RoutingCase()
    return moe, off, replace(off, choice="on trial"), routing.serve, moe.wrong


def _per_token(quantise, monkeypatch):
    monkeypatch.setitem(scaling.PER_TOKEN, "on trial", quantise)
    off = "neighbour_in_the_maximum"
    return scales, off, "on trial", scales.content_decides, correct.wrong_row_scale


def _draw(simulator, monkeypatch):
    return scales, scaling.simulate_with_replacement, simulator, scales.draws_twice, correct.wrong_draw


def _decode(which, monkeypatch, leaves=0.0):
    on = Setup(remedy=partial(Clears, which=which, leaves=leaves))
    return padding, on.without_fix, on, padding.served, padding.wrong


WRONG = {
    **{f"clears {name}": partial(_decode, which) for name, which in CLEARS.items()},
    # No detector minds them.
    "small numbers in empty rows": partial(_decode, lambda a: a.seq_lens == 0, leaves=2**-20),
    "grows for each lane": partial(_server, GrowsForEachLane),
    "eight rows": partial(_server, EightRows),
    **{of.__name__: partial(_zeroing, of) for of in (AtMost16, IdsOfSevenBits, WhenScheduled)},
    **{of.__name__: partial(_route, of) for of in (int64_ids, first_eight_tokens)},
    "few columns": partial(_per_token, few_columns),
    "scale of the first call": lambda monkeypatch: _per_token(ScaleOfTheFirstCall(), monkeypatch),
    **{of.__name__: partial(_draw, of) for of in (twins, of_128_experts)},
    "four ids": lambda monkeypatch: (
        *(scales, scales.ID_WIDTHS["int64_read_as_int32"], four_ids),
        *(scales.id_width, correct.wrong_ids),
    ),
    "no prefix cache": _miniature,
    "first come, first served": partial(_released, {"options": (("policy", "fcfs"),)}),
    "cache reset": partial(_released, {"remedy": REMEDIES["reset_cache"]}),
}


# Question -> what the fault alone says to it: the same beside each remedy.
FAULTS = {}


def once(ask, off):
    """The question, which is put to the fault for the first remedy only."""

    def asked(subject, device):
        if subject is not off:
            return ask(subject, device)
        if ask not in FAULTS:
            FAULTS[ask] = ask(off, device)
        return FAULTS[ask]

    return asked


@pytest.mark.parametrize("name", WRONG)
def test_a_remedy_for_the_scene_alone_is_not_fixed(name, monkeypatch, device):
    incident, off, on, ask, wrong = WRONG[name](monkeypatch=monkeypatch)
    if device == "cuda" and ask is buffers.server:
        pytest.skip("a server on a GPU is a process of its own, which knows no setup of a test")
    trial = Incident(incident.incident.name)
    trial.fixes(once(ask, off), {"on trial": Fix(off, on)}, compare=wrong)
    (found,) = trial.run(device)
    assert found.ran, found.note
    assert found.outcome is Outcome.BAD, found.three.text
