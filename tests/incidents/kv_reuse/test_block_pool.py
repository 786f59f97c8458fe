"""One pool for attention and Mamba: page arithmetic, the shared bytes, and who uses which id."""

import pytest
import torch

from staleproof.incidents.kv_reuse import block_pool
from staleproof.incidents.kv_reuse.block_pool import AttentionSpec, BlockPool, KVBuffers, MambaSpec

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


SMALL = MambaSpec((3, 16), (2, 4, 8))


def _buffers(*, kv_outermost=False, mamba=SMALL, kernel=8, dtype=BF16, device="cpu"):
    spec = AttentionSpec(2, 4, dtype, kv_outermost)
    return KVBuffers(5, 2, spec, mamba, kernel_block_size=kernel, device=device)


def _pages_written(buffers, layer):
    return [page for page, row in enumerate(buffers.raw[layer]) if bool((row != 0).any())]


@pytest.mark.parametrize(("kv_outermost", "side"), [(False, 0), (True, 1)])
def test_a_token_lies_in_the_page_of_its_block_in_both_layouts(device, kv_outermost, side):
    buffers = _buffers(kv_outermost=kv_outermost, device=device)
    assert buffers.ratio == buffers.page.block_size // 8 == 2
    shape = (2, 10, 8, 2, 4) if kv_outermost else (10, 2, 8, 2, 4)
    assert buffers.kv_cache(1).shape == shape
    assert buffers.kv_cache(1).shape[buffers.block_dim] == 10
    # Token 9 of block 3 is token 1 of kernel block 7.
    table = block_pool.split_block_table(torch.tensor([[3]], device=device), buffers.ratio)
    assert table.tolist() == [[6, 7]]
    buffers.keys_and_values(1)[side][table[0, 1], 1] = 1
    assert _pages_written(buffers, 1) == [3]
    assert _pages_written(buffers, 0) == []
    assert int((buffers.raw[1].view(torch.int16) != 0).sum()) == 2 * 4


def test_the_same_bytes_are_a_state_to_one_layer_and_keys_to_another():
    buffers = _buffers()
    conv, ssm = buffers.state(0)
    assert conv.shape == (5, *SMALL.conv_shape)
    assert ssm.shape == (5, *SMALL.ssm_shape)
    assert ssm.dtype == torch.float32
    conv[4], ssm[4] = 1.0, 2.0
    assert _pages_written(buffers, 0) == [4]
    unused = buffers.raw[0][4, buffers.page.mamba_bytes :]
    assert len(unused) == buffers.page.padding > 0
    assert not bool(unused.any())
    # 2.0 in fp32 is 0x40000000: in bf16, a 0 and another 2.
    seen = buffers.kv_cache(0)[8].flatten()[SMALL.conv_bytes // 2 :][:4]
    assert seen.tolist() == [0, 2, 0, 2]


def test_the_block_that_was_free_longest_comes_first_and_never_the_null_block():
    pool = BlockPool(5)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.free([2]) == [2]
    assert pool.free([1]) == [1]
    assert pool.allocate(3) == [4, 2, 1]
    with pytest.raises(block_pool.OutOfBlocks, match="1 blocks asked for, 0 of 5 free"):
        pool.allocate(1)
