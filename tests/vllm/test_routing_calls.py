"""Which batches reach FlashInfer's fused MoE with repeated experts, and what the others get instead."""

import torch

from staleproof.incidents.moe_routing import consumer
from staleproof.incidents.moe_routing.consumer import holes
from staleproof.vllm import routing_calls as calls
from staleproof.vllm.patches import moe_routing


def _into_experts(device, rows, top_k, experts, dtype=torch.bfloat16, **given):
    """What the patch gives FlashInfer in place of ids that name one expert in every slot; None: nothing."""
    (patched,) = [p for p in moe_routing.PATCHES if p.name == "duplicate_experts"]
    (target,) = patched.targets_for("0.20.2")
    x = torch.zeros(rows, 16, dtype=torch.bfloat16, device=device)
    w1 = torch.zeros(experts, 1, dtype=dtype, device=device)
    # Rows need not lie side by side.
    weights = torch.full((rows, top_k + 1), 0.125, device=device)[:, :top_k]
    ids = torch.full((rows, top_k + 1), 3, dtype=torch.int32, device=device)[:, :top_k]
    args = None, torch.empty_like(x), x, w1, w1, weights, ids
    if given:
        kwargs = dict(zip(calls.APPLY[1:], args[1:], strict=True))
        found = target.before(args[:1], kwargs)
        return None if found is None else (found[1]["topk_weights"], found[1]["topk_ids"])
    found = target.before(args, {})
    return None if found is None else found[0][5:]


# Experts -> the most rows of eight that one block sorts.
MOST_ROWS = {126: 256, 127: 128, 255: 64}


BATCHES = [
    *((1, 1, 8, True), (128, 6, 254, True), (64, 2, 510, True)),
    *((most, 8, experts, True) for experts, most in MOST_ROWS.items()),
    *((most + 1, 8, experts, False) for experts, most in MOST_ROWS.items()),
    *((1, 8, 511, False), (1, 10, 64, False), (1, 3, 64, False)),
]


def test_repeated_experts_stay_only_where_flashinfer_gives_every_slot_a_row(device):
    for rows, top_k, experts, harmless in BATCHES:
        assert calls.sorts_in_one_block(rows, top_k, experts) is harmless
        assert consumer.takes_one_block(rows, top_k, experts) >= harmless
        # By position, and where it is quick by name.
        for given in ({}, {"by": "name"}) if rows == 1 else ({},):
            found = _into_experts(device, rows, top_k, experts, **given)
            assert (found is None) is harmless
            if found is not None:
                weights, ids = found
                assert ids.tolist() == [[3] + [-1] * (top_k - 1)] * rows
                assert weights.tolist() == [[0.125 * top_k] + [0.0] * (top_k - 1)] * rows
        ids = torch.full((rows, top_k), 3, dtype=torch.int32)
        if harmless:
            assert not holes(consumer.build_map(ids, experts), ids).any()


def test_weights_stored_otherwise_than_activations_get_distinct_ids(device):
    # FlashInfer sorts the slots of 4-bit weights with three kernels, whatever the shape.
    assert _into_experts(device, 16, 8, 64) is None
    assert _into_experts(device, 16, 8, 64, torch.uint8) is not None
    assert _into_experts(device, 16, 8, 64, torch.float8_e4m3fn) is not None
