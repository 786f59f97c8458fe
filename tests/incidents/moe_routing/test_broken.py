"""The faulty choices fail as upstream's did, and each remedy cures what upstream's cured."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.moe_routing import broken
from staleproof.ops.reference import topk as reference

NAN = float("nan")


def logits(rows: int, experts: int, device: str, nan_rate: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, experts, generator=generator)
    x[torch.rand(rows, experts, generator=generator) < nan_rate] = NAN
    return x.to(device)


def ids_of(name: str, x: torch.Tensor, top_k: int, remedy: str, **options: object) -> torch.Tensor:
    return broken.route(broken.CHOICES[name], x, top_k, remedy=broken.REMEDIES[remedy], **options)[1]  # type: ignore[arg-type]


def test_a_warp_holds_each_column_once():
    for experts, itemsize in ((128, 2), (128, 4), (512, 2), (64, 4), (4, 2), (192, 2), (320, 4), (576, 2)):
        columns = broken.warp_columns(experts, itemsize)
        assert columns.flatten().sort().values.tolist() == list(range(experts))
    assert broken.warp_columns(128, 4)[1].tolist() == [4, 5, 6, 7]
    assert broken.warp_columns(512, 2)[1].tolist() == [*range(8, 16), *range(264, 272)]
    # 192 experts: three loads of two elements a lane, 16-bit logits and fp32 alike.
    assert broken.warp_columns(192, 2)[1].tolist() == [2, 3, 66, 67, 130, 131]
    assert torch.equal(broken.warp_columns(192, 2), broken.warp_columns(192, 4))


def test_a_warp_holds_multiples_of_64_and_else_powers_of_two_only(device):
    x = logits(20, 448, device)
    assert torch.equal(ids_of("warp_keeps_its_first_column", x, 4, "none"), reference.topk_softmax(x, 4)[1])
    for experts in (60, 640, 1024):
        with pytest.raises(
            ValueError, match="choice: expected a power of two of experts up to 512, or a mult"
        ):
            broken.warp_keeps_its_first_column(logits(1, experts, device), 4, 2)


def test_only_the_kernels_quantiser_drops_nan(device):
    x = torch.tensor([[1.0, NAN, -2.0], [0.5, 0.25, -0.125]], device=device)
    kept, scale = broken.quantise_fp8(x, per_token=True, drops_nan=False)
    assert kept.float().isnan().all(1).tolist() == [True, False]
    assert scale.isnan().flatten().tolist() == [True, False]
    dropped, scale = broken.quantise_fp8(x, per_token=True, drops_nan=True)
    # fminf(NaN, 448) is 448: a NaN leaves as the row's largest magnitude.
    assert dropped.float().tolist() == [[224.0, 448.0, -448.0], [448.0, 224.0, -112.0]]
    assert bool(scale.isfinite().all())
    whole = broken.quantise_fp8(x, per_token=False, drops_nan=True)
    assert whole[1].tolist() == [[pytest.approx(2 / 448)]]
    assert bool(broken.quantise_fp8(x, per_token=False, drops_nan=False)[1].isnan().all())


def test_the_block_picks_256_first_and_then_expert_0(device):
    few = torch.full((1, 60), NAN, device=device)
    many = torch.full((1, 300), NAN, device=device)
    assert ids_of("block_keeps_the_left", few, 5, "none").tolist() == [[0] * 5]
    assert ids_of("block_keeps_the_left", many, 5, "none").tolist() == [[256, 0, 0, 0, 0]]
