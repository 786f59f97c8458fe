"""The start of a server: what the profile run leaves for the KV cache, and which server dies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from staleproof.incidents.decode_buffer.allocator import GIB, MIB, SimulatedMemory, oom_fields
from staleproof.incidents.decode_buffer.model import Attention, ServerConfig, kv_cache_bytes
from staleproof.incidents.decode_buffer.scene import DIES, LIVES, Server

TINY = ServerConfig(total_bytes=GIB, layers=3, batch=8, tokens=32, heads=2, rank=32, weight_bytes=64 * MIB)


class KeptPerLayer(Attention):
    """A buffer a layer, as in the incident."""

    kept: torch.Tensor | None = None

    def output(self, q, micro_batch):
        if self.kept is None or len(self.kept) < len(q):
            self.kept = torch.zeros_like(q)
        return self.kept[: len(q)]


def test_the_kv_cache_gets_what_the_profile_left():
    assert kv_cache_bytes(1000, 0.9, 400, 50, 30) == 420
    simulated = SimulatedMemory(TINY.total_bytes)
    server = Server(TINY, simulated, KeptPerLayer)
    weights = simulated.usage().allocated
    server.profile()
    # Nothing but the workspace of 32 tokens and the query of one layer was in flight.
    assert server.peak_bytes >= TINY.workspace_bytes
    assert server.kv_bytes == int(0.9 * GIB) - weights - server.peak_bytes
    assert all(layer.attn.kept is None for layer in server.model.layers)
    server.allocate_kv_cache()
    server.warm_up()
    assert all(layer.attn.kept is not None for layer in server.model.layers)


def test_a_profile_that_leaves_no_kv_cache_is_refused():
    config = replace(TINY, total_bytes=84 * MIB)
    with pytest.raises(ValueError, match=r"utilisation x total of more than weights 64\.00 MiB"):
        Server(config, SimulatedMemory(config.total_bytes)).profile()


@pytest.mark.parametrize(
    ("attention", "batch", "verdict", "died_in"),
    [(Attention, 2048, LIVES, None), (KeptPerLayer, 2048, DIES, "serve"), (KeptPerLayer, 1024, LIVES, None)],
)
def test_the_reported_server(attention, batch, verdict, died_in):
    config = ServerConfig(batch=batch)
    outcome = Server(config, SimulatedMemory(config.total_bytes), attention).start()
    assert (outcome.verdict, outcome.died_in) == (verdict, died_in)
    if died_in:
        fields = oom_fields(outcome.error)
        assert (fields["tried"], fields["total"]) == ("3.94 GiB", "184.00 GiB")
    kept = 61 * config.decode_out_bytes if attention is KeptPerLayer else 0
    assert outcome.kept_bytes == kept
    assert outcome.taken_bytes() >= kept
