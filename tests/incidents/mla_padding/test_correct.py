"""What the comparison with the reference finds that a search for NaN does not."""

from __future__ import annotations

from staleproof.incidents.mla_padding import correct
from staleproof.ops.mla.decode import mla_decode


def test_live_rows_of_a_decode_a_little_too_large_are_wrong(device, monkeypatch):
    assert [*filter(None, correct._decode(device))] == []

    def louder(*args, **kwargs):
        out, lse = mla_decode(*args, **kwargs)
        return out * 1.003, lse

    monkeypatch.setattr(correct, "mla_decode", louder)
    found = [line.partition(": row")[0] for line in filter(None, correct._decode(device))]
    assert found == ["mla_decode, live rows"] * 2
