"""quack's CuTe kernels."""

from __future__ import annotations

from functools import partial

import torch

from staleproof.kernels import references, subject

_rows = partial(subject.rows, package="quack-kernels", needs="sm90", hidden=256)


@_rows(name="softmax", reference=references.softmax)
def softmax(x):
    from quack.softmax import softmax_fwd

    return softmax_fwd(x)


@_rows(name="rmsnorm", reference=references.rms_norm)
def rmsnorm(x):
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, torch.ones_like(x[0]).float())


@subject.routing(name="topk with softmax", package="quack-kernels", needs="sm90", experts=64)
def topk(router_logits, top_k):
    from quack.topk import topk

    return topk(router_logits, top_k, True)
