"""The hook of incident 1's patch on plain tensors; tests/vllm has it in the real vLLM."""

from types import SimpleNamespace as Space

import pytest
import torch
from made_up import imported

import staleproof.device
from staleproof.vllm.patches import mla_padding as patch
from staleproof.vllm.standing import registry

SEQ_LENS = (7, 0, 3)


def _call(out, lse, device, starts=None, needs_lse=True):
    decode = Space(seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=device))
    if starts is not None:
        decode.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
    impl = Space() if needs_lse is None else Space(need_to_return_lse_for_decode=needs_lse)
    return patch._clear((out, lse), (impl, None, None, Space(decode=decode)), {})


def _nan_rows(out):
    return [row for row, values in enumerate(out.isnan().flatten(1).any(-1).tolist()) if values]


@pytest.mark.parametrize("q_len", [1, 4])
def test_rows_of_an_empty_request(device, q_len):
    out = torch.ones(3 * q_len, 2, 16, device=device)
    out[q_len : 2 * q_len] = torch.nan
    result = _call(out, None, device)
    assert result == (out, None)
    assert not _nan_rows(out)
    assert not out[q_len : 2 * q_len].count_nonzero()
    assert out[:q_len].eq(1).all()
    assert out[2 * q_len :].eq(1).all()


def test_ragged_queries_as_many_rows_as_requests(device):
    # Request 1 is empty and owns no row; counting a row a request would clear row 1, a live one.
    out = torch.ones(3, 2, 16, device=device)
    _call(out, None, device, starts=[0, 2, 2, 3])
    assert out.eq(1).all()
    for lse in (None, torch.ones(5, 2, device=device)):
        out = torch.full((5, 2, 16), torch.nan, device=device)
        out[:3] = 1
        _call(out, lse, device, starts=[0, 2, 2, 3])
        assert out[:3].eq(1).all()
        assert not out[3:].count_nonzero()
    assert lse[:, 0].tolist() == [1.0] * 3 + [-torch.inf] * 2


def test_lse_of_another_dtype_and_of_a_part_of_the_heads(device):
    out = torch.ones(3, 2, 16, device=device)
    half = torch.full((3, 2), 0.5, dtype=torch.bfloat16, device=device)
    part = torch.full((3, 8), 0.5, device=device)[:, :2]
    for lse in (half, part):
        lse[1] = torch.nan
        assert _call(out, lse, device)[1] is lse
        assert lse.tolist() == [[0.5] * 2, [-torch.inf] * 2, [0.5] * 2]
    # Where nobody reads it, it is not touched.
    part[1] = 3.0
    _call(out, part, device, needs_lse=False)
    assert part[1].tolist() == [3.0, 3.0]
    # It is, where the backend does not say who reads it.
    _call(out, part, device, needs_lse=None)
    assert part[1].tolist() == [-torch.inf] * 2


def test_no_row_at_all(device):
    out = torch.empty(0, 2, 16, device=device)
    assert _call(out, None, device)[0] is out


@pytest.mark.parametrize("behind", [(), (5,)])
def test_turboquant_rows(device, behind):
    seq_lens = torch.tensor([*SEQ_LENS, *behind], dtype=torch.int32, device=device)
    metadata = Space(seq_lens=seq_lens)
    # The lengths may be those of a larger batch; the workspace has more heads than the layer.
    out = torch.ones(4, 4, 16, device=device)[:3, :2]
    out[1] = torch.nan
    assert patch._clear_turboquant(out, (None, None, None, metadata), {}) is out
    assert out[:, 0, 0].tolist() == [1.0, 0.0, 1.0]
    assert not _nan_rows(out)
    # Several tokens a request are not expected: nothing is cleared that may be a live row.
    out = torch.full((5, 2, 16), torch.nan, device=device)
    patch._clear_turboquant(out, (None,), {"attn_metadata": metadata})
    assert _nan_rows(out) == [*range(5)]


PLACE = "vllm.v1.attention.ops.triton_decode_attention:_fwd_kernel_stage2"
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def _fwd_kernel_stage2(Mid_O, o, lse, B_Seqlen, D: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, D)
    e_sum = 0.0
    acc = tl.zeros([D], tl.float32)
    for i in range(0, 2):
        if i < tl.load(B_Seqlen + row):
            acc += tl.load(Mid_O + row * D + offs)
            e_sum += 1.0
    tl.store(o + row * D + offs, acc / e_sum)
    tl.store(lse + row, -float("inf") + tl.log(e_sum))
"""


@pytest.fixture(name="vllm")
def vllm_fixture(made_up):
    """A vLLM of a Triton kernel, and of TurboQuant, which imports it by its name."""
    staleproof.device.load_triton()
    text = "from vllm.v1.attention.ops.triton_decode_attention import _fwd_kernel_stage2\n"
    ops = "v1.attention.ops"
    made_up({f"{ops}.triton_decode_attention": KERNEL, f"{ops}.triton_turboquant_decode": text})
    return lambda name: imported(f"{ops}.{name}")


def _stage2(module, device):
    """(out, lse) of vLLM's kernel for requests of 2, 0 and 1 parts, from NaN and from numbers."""
    parts = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    mid = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).to(device)
    mid[2, 3] = torch.nan
    out, lse = torch.full((3, 16), 7.0, device=device), torch.full((3,), 7.0, device=device)
    module._fwd_kernel_stage2[(3,)](mid, out, lse, parts, 16)
    return out, lse


@pytest.mark.parametrize("imported", [False, True], ids=["patched before the import", "after it"])
def test_the_kernel_itself_writes_zeros_into_empty_rows_and_nothing_else_changes(vllm, device, imported):
    mla, *_ = patch.PATCHES
    if imported:
        vllm("triton_turboquant_decode")
    before = _stage2(vllm("triton_decode_attention"), device) if imported else None
    with mla.applied("0.22.1"):
        module = vllm("triton_decode_attention")
        assert registry.targets("mla_padding")[
            "vllm.v1.attention.ops.triton_decode_attention:_fwd_kernel_stage2"
        ]
        out, lse = _stage2(module, device)
        assert out[1].tolist() == [0.0] * 16
        assert lse[1] == -torch.inf
        # A NaN of a live row is no padding and stays.
        assert out[2].isnan().tolist() == [column == 3 for column in range(16)]
        metadata = Space(seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32, device=device))
        late = torch.full((3, 2, 16), torch.nan, device=device)
        vllm("triton_turboquant_decode")
        patch._clear_turboquant(late, (None, None, None, metadata), {})
        # TurboQuant's own name for the kernel is ours too, imported before or not: nothing is left to clear.
        assert vllm("triton_turboquant_decode")._fwd_kernel_stage2 is module._fwd_kernel_stage2
        assert late[1].isnan().all()
    out, lse = _stage2(vllm("triton_decode_attention"), device)
    assert out[1].isnan().all()
    if before is not None:
        live = torch.tensor([0, 2], device=device)
        assert torch.equal(before[0][live].nan_to_num(), out[live].nan_to_num())


def test_a_kernel_that_divides_otherwise_is_left_alone(vllm, tmp_path, device):
    file = tmp_path / "vllm/v1/attention/ops/triton_decode_attention.py"
    file.write_text(KERNEL.replace("acc / e_sum", "acc / (e_sum + 0.0) + 0.0 * (acc / e_sum) + acc / e_sum"))
    mla, *_ = patch.PATCHES
    with mla.applied("0.22.1"):
        module = vllm("triton_decode_attention")
        assert "does not divide by e_sum once" in registry.targets("mla_padding")[PLACE]
        assert not hasattr(module._fwd_kernel_stage2, "staleproof_replaces")


def test_no_python_runs_behind_triton_mla():
    """Its kernel is exchanged once; a hook behind a call would cost the host at each layer and step."""
    at_calls = [target for target in patch.TARGETS if target.swap is None]
    expected = {"cutlass_mla", "flashinfer_mla", "turboquant_attn"}
    assert {target.module.rpartition(".")[2] for target in at_calls} == expected


@pytest.mark.parametrize("dead", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("one_query", [False, True], ids=["tokens, heads, dim", "tokens, 1, heads, dim"])
def test_merge_of_ranks_gets_zeros_for_rows_of_weight_0_alone(device, dead, one_query):
    """Heads are a slice of a larger output, as CUTLASS returns them."""
    memory = torch.full((3, 4, 16), 7.0, device=device)
    out, lses = memory[:, :2], torch.zeros(2, 3, 2, device=device)
    out[1], lses[1, 1], lses[0, 2] = torch.nan, dead, dead
    if one_query:
        out, lses = out.unsqueeze(1), lses.unsqueeze(-1)
    assert patch._clear_gathered((out, lses), {"cp_rank": 1}) is None
    assert not memory[1, :2].any()
    memory[1, :2] = 7
    assert memory.eq(7).all()
