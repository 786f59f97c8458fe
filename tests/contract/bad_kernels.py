"""Kernels that do what a kernel should not, beside one that is right."""

import os
import sys
import time

import torch

from staleproof import audit


@audit.rows(name="right", reference=lambda x: 2 * x)
def right(x):
    sys.stderr.write(1000 * "x")
    return x * 2


@audit.rows(name="leaves")
def leaves(x):
    os._exit(3)


@audit.rows(name="raises")
def raises(x):
    raise RuntimeError("no such configuration")


@audit.rows(name="hangs")
def hangs(x):
    time.sleep(600)


@audit.rows(name="ends its process", reference=lambda x: 2 * x)
def ends(x):
    if x.isnan().any():
        os.abort()
    return x * 2


@audit.attention(name="wrong shape", layout="paged")
def wrong_shape(q, out):
    return torch.zeros(1, 2)


@audit.attention(name="writes past its output", layout="paged")
def writes_past(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out):
    from staleproof.contract.scenes import Shape, make_call, reference

    call = make_call(Shape(), seq_lens.tolist(), str(q.device))
    out.copy_(reference(call)[0])
    out._base[-1] = 7.0
    return out


@audit.attention(name="another dtype", layout="paged")
def another_dtype(q):
    torch._assert(q.dtype == torch.float8_e4m3fn, "expected float8")
