"""What a child runs whose torch multiplies matrices of bfloat16."""

from __future__ import annotations

import time

import torch

from staleproof.incidents.moe_routing import ranks


def products() -> tuple[float, list[bool]]:
    """How many times as long a product of bfloat16 takes as one of float32, and whether each way is right."""
    torch.set_num_threads(1)
    ranks._multiply_in_float32()
    torch.manual_seed(0)
    wide = torch.randn(64, 512), torch.randn(512, 512)
    a, b = (x.bfloat16() for x in wide)
    out = torch.empty(64, 512, dtype=torch.bfloat16)
    want = (a.double() @ b.double()).bfloat16()

    def seconds(*given: torch.Tensor) -> float:
        took = []
        for _ in range(5):
            begin = time.perf_counter()
            torch.matmul(*given)
            took.append(time.perf_counter() - begin)
        return min(took)

    def is_right(x: torch.Tensor) -> bool:
        return torch.allclose(x, want, rtol=0.02, atol=0.01)

    right = [is_right(x) for x in (a @ b, torch.matmul(a, b), torch.matmul(a, b, out=out), out)]
    return seconds(a, b) / seconds(*wide), [*right, (wide[0] @ wide[1]).dtype == torch.float32]
