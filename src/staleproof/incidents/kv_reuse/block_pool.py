"""One pool of blocks for attention and Mamba layers: the same bytes, seen in two ways.

A hybrid model keeps one kind of memory. Each raw byte buffer is a row of pages, shared by one
attention layer and by Mamba layers; block id ``b`` is page ``b`` of every buffer, and belongs to
one cache group at a time. What the attention layer sees as keys and values, a Mamba layer saw as
convolution and recurrent state while the block was its own (vLLM ``v1/core/kv_cache_utils.py``).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from staleproof.check import require

# Page 0: unused block-table entries point there, and it is never handed out.
NULL_BLOCK = 0
# What a page is aligned to, in tokens (vLLM: 16; 64 for MLA).
ALIGNMENT = 16


class OutOfBlocks(RuntimeError):
    """More blocks were requested than the pool has free."""


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention layer caches for each token.

    Attributes:
        num_kv_heads: heads of one rank.
        head_dim: elements of a head's key, and of its value.
        dtype: of keys and values.
        kv_outermost: whether the layer uses the shape (2, blocks, ...), like FlashAttention, instead of
            (blocks, 2, ...), like FlashInfer.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_outermost: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes in one layer, key and value."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class MambaSpec:
    """The state a Mamba layer keeps for each sequence, in one block.

    Attributes:
        conv_shape: of the convolution state, e.g. (kernel - 1, channels).
        ssm_shape: of the recurrent state, e.g. (heads, v_dim, k_dim).
        conv_dtype: the model's.
        ssm_dtype: fp32 in the models of this incident.
    """

    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]
    conv_dtype: torch.dtype = torch.bfloat16
    ssm_dtype: torch.dtype = torch.float32

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution state."""
        return math.prod(self.conv_shape) * self.conv_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of both states."""
        return self.conv_bytes + math.prod(self.ssm_shape) * self.ssm_dtype.itemsize

    @classmethod
    def gated_delta_net(cls, *, v_heads: int, k_heads: int, v_dim: int, k_dim: int, kernel: int) -> MambaSpec:
        """State of a Gated DeltaNet layer (vLLM ``mamba_utils.py``)."""
        channels = 2 * k_heads * k_dim + v_heads * v_dim
        return cls((kernel - 1, channels), (v_heads, v_dim, k_dim))


@dataclass(frozen=True)
class Page:
    """One block of one layer, of one size for attention and for Mamba.

    Attributes:
        block_size: tokens an attention block holds.
        page_bytes: bytes of a block.
        mamba_bytes: the bytes of it that a Mamba state fills; the rest is padding.
    """

    block_size: int
    page_bytes: int
    mamba_bytes: int

    @property
    def padding(self) -> int:
        """Bytes of a page that a Mamba layer leaves unused."""
        return self.page_bytes - self.mamba_bytes


def equalise(attention: AttentionSpec, mamba: MambaSpec) -> Page:
    """The page both layers share: attention's block grows until a Mamba state fits.

    After vLLM's ``HybridAttentionMambaModelConfig.verify_and_update_config`` (0.18.1).

    Args:
        attention: the attention layer of one rank.
        mamba: the Mamba layer of the same rank.
    """
    block_size = ALIGNMENT * math.ceil(mamba.state_bytes / (ALIGNMENT * attention.token_bytes))
    return Page(block_size, block_size * attention.token_bytes, mamba.state_bytes)


class KVBuffers:
    """The memory: one raw buffer for each layer position, and views of it.

    Args:
        num_blocks: pages of each buffer, the null block included.
        layers: buffers; each is shared by one attention layer and the Mamba layers beside it.
        attention: the attention layers.
        mamba: the Mamba layers.
        kernel_block_size: tokens in a block of the attention kernel, if that is smaller than the
            manager's block: logical block ``b`` is then ``ratio`` kernel blocks from ``b * ratio`` on.
        device: of the memory.

    Attributes:
        page: the size of a block.
        ratio: kernel blocks a manager's block.
        raw: one (num_blocks, page_bytes) int8 tensor a layer, zero at first.

    Raises:
        ValueError: a kernel block that does not divide the manager's.
    """

    def __init__(
        self,
        num_blocks: int,
        layers: int,
        attention: AttentionSpec,
        mamba: MambaSpec,
        *,
        kernel_block_size: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self.attention_spec, self.mamba_spec = attention, mamba
        self.page = equalise(attention, mamba)
        self.ratio, rest = divmod(self.page.block_size, kernel_block_size)
        divisor = f"a divisor of the block size {self.page.block_size}"
        require(rest == 0, "kernel_block_size", divisor, kernel_block_size)
        self.kernel_block_size, self.num_blocks = kernel_block_size, num_blocks
        self.raw = [
            torch.zeros(num_blocks, self.page.page_bytes, dtype=torch.int8, device=device)
            for _ in range(layers)
        ]

    @property
    def block_dim(self) -> int:
        """Which axis of :meth:`kv_cache` counts kernel blocks."""
        return 1 if self.attention_spec.kv_outermost else 0

    def kv_cache(self, layer: int) -> torch.Tensor:
        """The buffer as the attention layer sees it.

        Returns:
            (kernel blocks, 2, tokens, heads, head_dim), or with ``kv_outermost``
            (2, kernel blocks, tokens, heads, head_dim). The bytes of a block must be contiguous, so the
            second shape has the strides of the first (vLLM ``_update_hybrid_attention_mamba_layout``).
        """
        spec = self.attention_spec
        shape = (self.kernel_block_size, spec.num_kv_heads, spec.head_dim)
        blocks = self.num_blocks * self.ratio
        flat = self.raw[layer].view(-1).view(spec.dtype)
        together = flat.view(blocks, 2, *shape)
        return together.transpose(0, 1) if spec.kv_outermost else together

    def keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (kernel blocks, tokens, heads, head_dim), any layout."""
        keys, values = self.kv_cache(layer).unbind(1 - self.block_dim)
        return keys, values

    def state(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer as a Mamba layer sees it.

        Returns:
            conv (blocks, *conv_shape) and ssm (blocks, *ssm_shape), with the stride of a page.
        """
        spec = self.mamba_spec
        raw = self.raw[layer]
        conv = raw[:, : spec.conv_bytes].view(spec.conv_dtype)
        ssm = raw[:, spec.conv_bytes : spec.state_bytes].view(spec.ssm_dtype)
        return conv.unflatten(1, spec.conv_shape), ssm.unflatten(1, spec.ssm_shape)


def split_block_table(block_table: torch.Tensor, ratio: int) -> torch.Tensor:
    """Kernel blocks of a table of the manager's blocks (virtual block splitting).

    Args:
        block_table: (batch, blocks) of an integer dtype.
        ratio: kernel blocks a manager's block.

    Returns:
        (batch, blocks * ratio), the same dtype.
    """
    within = torch.arange(ratio, dtype=block_table.dtype, device=block_table.device)
    return (block_table[..., None] * ratio + within).flatten(1)


class BlockPool:
    """Which block ids are in use and by how many requests, which are free, and which are cached.

    A freed block goes to the end of the free list and keeps its bytes. If it was cached, it can be
    hit until it is handed out again (after vLLM's ``BlockPool``).

    Args:
        num_blocks: blocks, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out the blocks that have been free longest, and drop them from the prefix cache.

        Raises:
            OutOfBlocks: fewer are free; none is handed out.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
            self._block_of.pop(self._key_of.pop(block, None), None)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a user to blocks found in the prefix cache. They are not new: their bytes are wanted."""
        for block in blocks:
            self.ref_counts[block] += 1
            self._free.pop(block, None)

    def free(self, blocks: Sequence[int]) -> list[int]:
        """Take one user off each of the blocks; returns those that have none left."""
        ended = []
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                ended.append(block)
        return ended

    def cache(self, block: int, key: Hashable) -> None:
        """Put a full block into the prefix cache under ``key``, unless the key has a block already."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def cached(self, key: Hashable) -> int | None:
        """The block cached under ``key``, in use or free, or ``None``."""
        return self._block_of.get(key)
