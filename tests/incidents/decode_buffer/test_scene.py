"""The start of a server: what the profile run leaves for the KV cache, and which server dies."""

from dataclasses import replace

import pytest

from staleproof.evidence.ledger import Usage
from staleproof.incidents.decode_buffer.allocator import GIB, MIB, SimulatedMemory
from staleproof.incidents.decode_buffer.model import ServerConfig, kv_cache_bytes
from staleproof.incidents.decode_buffer.scene import LIVES, Outcome, Server

TINY = ServerConfig(total_bytes=GIB, layers=3, batch=8, tokens=32, heads=2, rank=32, weight_bytes=64 * MIB)


def test_a_profile_that_leaves_no_kv_cache_is_refused():
    config = replace(TINY, total_bytes=84 * MIB)
    with pytest.raises(ValueError, match=r"utilisation x total of more than weights 64\.00 MiB"):
        Server(config, SimulatedMemory(config.total_bytes)).start()


def test_the_kv_cache_gets_what_the_profile_left():
    assert kv_cache_bytes(1000, 0.9, 400, 50, 30) == 420


def test_what_decoding_took_is_what_the_allocator_would_not_give_back():
    usages = {"kv_cache": Usage(100, 80, 50, 10), "warm_up": Usage(200, 150, 90, 30)}
    assert Outcome(LIVES, None, None, 0, 0, 0, usages).taken_bytes() == (200 - 30) - (100 - 10)
