"""The kernels agree on clean caches, and differ on what lies past a request's end."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.kv_reuse import attention
from staleproof.incidents.kv_reuse.attention import Call, kernels, masked_loads, used_table
from staleproof.incidents.kv_reuse.questions import part_full_blocks


def _expected(call: Call) -> torch.Tensor:
    """Row by row, from the tokens alone."""
    rows = []
    for row, tokens in enumerate(call.seq_lens.tolist()):
        keys, values = (
            x.float()[call.table[row]].flatten(0, 1)[:tokens, 0] for x in (call.keys, call.values)
        )
        q = call.q[row].float()
        rows.append(((q @ keys.T) * q.shape[-1] ** -0.5).softmax(-1) @ values)
    return torch.stack(rows)


@pytest.mark.parametrize("name", list(kernels()))
def test_every_kernel_computes_attention(device, name):
    kernel = kernels()[name]
    if kernel.unavailable_reason is not None:
        pytest.skip(kernel.unavailable_reason)
    for dtype in kernel.dtypes:
        call = part_full_blocks(device, dtype)
        assert (call.q.dtype == torch.bfloat16) == (device == "cuda")
        near = 2e-2 if call.q.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(kernel.attend(call).float(), _expected(call), rtol=near, atol=near)


def test_grouped_query_heads_share_a_kv_head(device):
    call = part_full_blocks(device, torch.bfloat16)
    twice = Call(call.q.repeat(1, 2, 1), call.keys, call.values, call.table, call.seq_lens)
    out, one = masked_loads(twice), masked_loads(call)
    assert out.shape[1] == 2
    for head in range(2):
        assert torch.equal(out[:, head], one[:, 0])


def test_blocks_behind_the_last_token_are_not_followed():
    table = torch.tensor([[4, 5, 6], [7, 8, 9]])
    assert used_table(table, torch.tensor([17, 48]), 16).tolist() == [[4, 5, 0], [7, 8, 9]]
    assert used_table(table, torch.tensor([16, 1]), 16).tolist() == [[4, 0, 0], [7, 0, 0]]


class _MissingError(Exception):
    def __init__(self, spec):
        self.spec = spec


ABSENT, SHIPPED = (SimpleNamespace(name="prefill_equal", is_compiled=built) for built in (False, True))
MISSING = "FlashInfer's module prefill_equal is not compiled, and may not or cannot be here"


@pytest.mark.parametrize(
    ("nvcc", "switched_off", "raised", "why"),
    [
        (False, False, ABSENT, MISSING),
        (False, False, SHIPPED, None),
        (False, False, None, None),
        (True, False, ABSENT, None),
        # Then FlashInfer loads only modules that came with it.
        (True, True, SHIPPED, MISSING),
        (True, True, None, None),
    ],
)
def test_a_flashinfer_module_that_is_not_here_is_named_and_never_compiled_for_the_answer(
    monkeypatch, nvcc, switched_off, raised, why
):
    asked, backend = [], "fa3"

    def load(*given):
        assert os.environ["FLASHINFER_DISABLE_JIT"], "it would compile"
        asked.append(given)
        if raised is not None:
            raise _MissingError(raised)

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", SimpleNamespace(get_batch_prefill_module=load))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", SimpleNamespace(MissingJITCacheError=_MissingError))
    monkeypatch.setattr(attention.shutil, "which", lambda name: "/usr/bin/nvcc" if nvcc else None)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1" if switched_off else "")
    assert attention._not_compiled(backend) == why
    types = (torch.bfloat16,) * 3 + (torch.int32,)
    may_compile = nvcc and not switched_off
    assert asked == ([] if may_compile else [(backend, *types, 64, 64, 0, False, False, False)])
    assert os.environ["FLASHINFER_DISABLE_JIT"] == ("1" if switched_off else "")
