"""The ledger walks attributes of foreign objects, and must not make them compute anything."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from staleproof.evidence.allocations import owned_tensors


def test_a_mapping_that_computes_its_items_is_not_asked_for_them():
    """vLLM has such a mapping of activations; building one fails unless a model is being loaded."""

    class OnDemand(Mapping):
        def __init__(self):
            self.made = {"known": torch.ones(2)}

        def __getitem__(self, name):
            raise RuntimeError("no configuration is set")

        def __iter__(self):
            return iter(["gelu"])

        def __len__(self):
            return 1

    tree = torch.nn.Module()
    tree.registry = OnDemand()
    assert [name for name, _, _ in owned_tensors(tree) if "registry" in name] == ["registry.made"]
