"""One pool for attention and Mamba: page arithmetic, the shared bytes, and who uses which id."""

import pytest
import torch

from staleproof.incidents.kv_reuse import block_pool
from staleproof.incidents.kv_reuse.block_pool import AttentionSpec, BlockPool, KVBuffers, MambaSpec

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.parametrize(
    ("tp", "dtype", "mamba_bytes", "token_bytes", "block", "page_bytes", "padding"),
    [
        (1, FP8, 4_268_032, 1024, 4176, 4_276_224, 0.19),
        (1, BF16, 4_268_032, 2048, 2096, 4_292_608, 0.58),
        (2, FP8, 2_134_016, 512, 4176, 2_138_112, 0.19),
        (4, FP8, 1_067_008, 512, 2096, 1_073_152, 0.58),
        (8, FP8, 533_504, 512, 1056, 540_672, 1.34),
        (8, BF16, 533_504, 1024, 528, 540_672, 1.34),
    ],
)
def test_the_page_table_of_qwen3_5_397b(tp, dtype, mamba_bytes, token_bytes, block, page_bytes, padding):
    attention, mamba = block_pool.qwen3_5_397b(tp, dtype)
    page = block_pool.equalise(attention, mamba)
    assert attention.token_bytes == token_bytes
    assert page.mamba_bytes == mamba.state_bytes == mamba_bytes
    assert (page.block_size, page.page_bytes) == (block, page_bytes)
    assert page.padding == page_bytes - mamba_bytes
    # Upstream quotes the padding against the Mamba page.
    assert round(100 * page.padding / mamba_bytes, 2) == padding


SMALL = MambaSpec((3, 16), (2, 4, 8))


def _buffers(*, kv_outermost=False, mamba=SMALL, kernel=8, dtype=BF16, device="cpu"):
    spec = AttentionSpec(2, 4, dtype, kv_outermost)
    return KVBuffers(5, 2, spec, mamba, kernel_block_size=kernel, device=device)


def _pages_written(buffers, layer):
    return [page for page, row in enumerate(buffers.raw[layer]) if bool((row != 0).any())]


@pytest.mark.parametrize("kv_outermost", [False, True])
@pytest.mark.parametrize("side", [0, 1])
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


def test_a_block_is_cached_under_one_key_and_so_forgotten_whole():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, "prefix")
    pool.cache(block, "another")
    pool.free([block])
    assert pool.allocate(1) == [block]
    assert [pool.cached(key) for key in ("prefix", "another")] == [None, None]


def test_the_first_block_of_a_key_stays():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.cache(first, "prefix")
    pool.cache(second, "prefix")
    assert pool.cached("prefix") == first
    pool.free([second])
    assert second in pool.allocate(2)
    assert pool.cached("prefix") == first
