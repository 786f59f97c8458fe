"""Spies of a hybrid engine: what is in a block when attention gets it, and faults that can be switched on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from staleproof.engine.spies import Rows
from staleproof.evidence import TenancyLog

# Parts of the uptime that requests are counted in.
FIFTHS = 5
# Keys that :func:`whole_tiles` reads at once, as the kernels of FlashAttention do.
TILE = 128
# What linear attention keeps in a block, and what attention reads there.
STATE, KEYS = "state", "keys and values"
# Clock cycles a delayed copy waits for: about 15 ms on an H200, longer than the host needs for a step.
DELAY_CYCLES = 30_000_000


def fifths(flags: Sequence[float]) -> list[int]:
    """The sum of each fifth of a list.

    >>> fifths([True, False] + [False] * 7 + [True])
    [1, 0, 0, 0, 1]
    """
    each = len(flags) // FIFTHS
    return [int(sum(flags[i * each : (i + 1) * each])) for i in range(FIFTHS)]


class Tenants:
    """What the blocks that a step gives to attention hold before that step writes to them.

    Counting is launched on the step's stream and read at the end, so that no step waits for it.

    Attributes:
        zeroing: whether vLLM's zeroing of new blocks runs.
        delay: whether the device is kept busy before each zeroing, so that its copy of ids starts late.
        guard: stands in for the runner's event if it must not wait before the zeroing, but right after.
    """

    def __init__(self) -> None:
        self.zeroing, self.delay = True, False
        self.guard: DeferredEvent | None = None
        self.clear()

    def clear(self) -> None:
        """Forget what was counted, and who had which block."""
        self.log = TenancyLog()
        self.requests: dict[str, int] = {}
        self.counted: list[tuple[str, torch.Tensor]] = []

    def step(self, runner: Any, output: Any) -> None:
        """Count the new blocks of a step; after vLLM's zeroing, before the model runs."""
        self.log.advance()
        given = [(one.req_id, one.block_ids, len(one.prompt_token_ids)) for one in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        given += [(req, ids, 1) for req, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids]
        caches = attention_caches(runner)
        for request, by_group, tokens in given:
            self.requests.setdefault(request, len(self.requests))
            for group, blocks in enumerate(by_group):
                kind = KEYS if group in caches else STATE
                self.log.allocated(blocks, request, kind)
                if kind == KEYS and self.zeroing:
                    self.log.zeroed(set(blocks) & set(output.new_block_ids_to_zero or ()))
                self.log.wrote(blocks, request, kind)
                for block in blocks if group in caches else ():
                    self.counted.append((request, contents(*caches[group], block, tokens)))

    def by_fifth(self) -> dict[str, list[int]]:
        """Blocks given to attention, by fifth of the requests in order of arrival.

        Returns:
            ``given``; of these ``nonzero`` (some byte is not 0), ``nan_in_tail`` (a NaN behind the
            prompt's last token) and ``from_state`` (the tenancy log says: still the state of a layer of
            linear attention).
        """
        rows: dict[str, list[int]] = {
            name: [0] * len(self.requests) for name in ("given", "nonzero", "nan_in_tail", "from_state")
        }
        for request, found in self.counted:
            at = self.requests[request]
            nonzero, nan = found.tolist()
            rows["given"][at] += 1
            rows["nonzero"][at] += nonzero > 0
            rows["nan_in_tail"][at] += nan > 0
        for request, at in self.requests.items():
            suspects = self.log.explain(request)
            rows["from_state"][at] = sum((s.written_as, s.read_as) == (STATE, KEYS) for s in suspects)
        return {name: fifths(counts) for name, counts in rows.items()}


class DeferredEvent:
    """In place of the event that a runner waits for before it reuses its host buffers.

    The wait does nothing: the spies wait behind the zeroing of new blocks instead. So the zeroing has no
    guard, and every other buffer of the runner still has it.

    Args:
        event: the runner's own.
    """

    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        """Return at once."""

    def record(self) -> None:
        """Record the event itself."""
        self.event.record()


def attention_caches(runner: Any) -> dict[int, tuple[torch.Tensor, int, int]]:
    """Number of each KV cache group of attention -> a layer's cache, blocks of the cache, tokens a block."""
    from vllm.v1.kv_cache_interface import MambaSpec

    config = runner.kv_cache_config
    found = {}
    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        cache = runner.compilation_config.static_forward_context[group.layer_names[0]].kv_cache
        if not isinstance(spec, MambaSpec) and isinstance(cache, torch.Tensor):
            found[number] = cache, config.num_blocks, spec.block_size
    return found


def contents(cache: torch.Tensor, blocks: int, tokens_a_block: int, block: int, tokens: int) -> torch.Tensor:
    """How many values of a block are not 0, and how many behind its first tokens are NaN.

    Args:
        cache: of one layer, any layout with an axis of blocks and one of tokens. A backend may cut each
            block into smaller ones of its own.
        blocks: how many blocks the scheduler hands out.
        tokens_a_block: of each of these.
        block: number of one.
        tokens: where its tail begins.

    Returns:
        (2,) int64, on the cache's device; nothing waits for it.

    >>> cache = torch.zeros(2, 12, 8, 1)  # 3 blocks of 32 tokens, each in 4 parts
    >>> cache[1, 9, 5] = float("nan")  # token 13 of block 2
    >>> contents(cache, 3, 32, 2, 13).tolist(), contents(cache, 3, 32, 2, 14).tolist()
    ([1, 1], [1, 0])
    """
    axis = next(i for i, n in enumerate(cache.shape) if n % blocks == 0)
    parts = cache.shape[axis] // blocks
    inside = next(i for i, n in enumerate(cache.shape) if i != axis and n == tokens_a_block // parts)
    one = cache.narrow(axis, block * parts, parts).movedim((axis, inside), (0, 1)).flatten(0, 1)
    # A NaN is not 0.
    return torch.stack([torch.count_nonzero(one), torch.isnan(one[tokens:]).sum()])


def tenants(watch: Rows) -> None:
    """Count what new blocks hold, and put the switches of :class:`Tenants` in place."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import KVBlockZeroer

    watch.tenants = Tenants()
    update, zero = GPUModelRunner._update_states, KVBlockZeroer.zero_block_ids

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        guard = self.prepare_inputs_event
        if isinstance(guard, DeferredEvent) and not scheduler_output.new_block_ids_to_zero:
            guard.event.synchronize()
        result = update(self, scheduler_output)
        watch.tenants.step(self, scheduler_output)
        return result

    def zero_block_ids(self: Any, block_ids: Any) -> None:
        if watch.tenants.delay and block_ids:
            torch.cuda._sleep(DELAY_CYCLES)
        if watch.tenants.zeroing:
            zero(self, block_ids)
        if (guard := watch.tenants.guard) is not None:
            guard.event.synchronize()

    GPUModelRunner._update_states = _update_states
    KVBlockZeroer.zero_block_ids = zero_block_ids


def whole_tiles(watch: Rows) -> None:
    """A fault, to see that the bench notices one: attention that reads whole tiles of keys and values.

    Each request's output is computed again by torch's ``scaled_dot_product_attention`` over its keys
    rounded up to :data:`TILE`, with a mask. The mask makes the weights of later keys 0, and 0 times a NaN
    value is NaN. (vLLM's backends that can run a hybrid model mask at the load.)
    """
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    inner = TritonAttentionImpl.forward

    def forward(self: Any, layer: Any, query: Any, key: Any, value: Any, kv: Any, metadata: Any, *rest: Any,
                **keywords: Any) -> Any:  # fmt: skip
        result = inner(self, layer, query, key, value, kv, metadata, *rest, **keywords)
        if metadata is not None:
            out = keywords["output"] if "output" in keywords else rest[0]
            _attend(query, kv, metadata, self.scale, out)
        return result

    TritonAttentionImpl.forward = forward


def _attend(query: torch.Tensor, kv: torch.Tensor, metadata: Any, scale: float, out: torch.Tensor) -> None:
    """Write the attention of each request over whole tiles into ``out``."""
    keys, values = kv.unbind(1)  # (blocks, tokens a block, kv heads, head dim)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for number, (first, last, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if first == last:
            continue
        blocks = metadata.block_table[number, : -(-length // keys.shape[1])].long()
        until = min(-(-length // TILE) * TILE, len(blocks) * keys.shape[1])
        k, v = (x[blocks].flatten(0, 1)[:until].transpose(0, 1)[None] for x in (keys, values))
        q = query[first:last].view(last - first, -1, k.shape[-1]).transpose(0, 1)[None]
        own = torch.arange(length - (last - first), length, device=q.device)
        mask = torch.arange(until, device=q.device)[None] <= own[:, None]
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[first:last] = found[0].transpose(0, 1).reshape(last - first, *out.shape[1:])


def flashinfer_moe(watch: Rows) -> None:
    """Let FlashInfer load its fused MoE from a module that was compiled before, not compile it for minutes.

    The modules lie in the folder ``STALEPROOF_MOE_MODULES`` (``staleproof moe-module build``).

    Raises:
        RuntimeError: there is none for this release.
    """
    import os
    from pathlib import Path
    from types import SimpleNamespace

    import tvm_ffi
    from flashinfer.fused_moe import core

    folder = Path(os.environ.get("STALEPROOF_MOE_MODULES") or "no folder")
    version = re.escape(__import__("flashinfer").__version__)
    named = re.compile(rf"fused_moe_sm90-{version}-[0-9a-f]+\.so")
    found = [path for path in sorted(folder.glob("*.so")) if named.fullmatch(path.name)]
    if not found:
        raise RuntimeError(f"no module of FlashInfer's fused MoE in {folder}: staleproof moe-module build")
    built = SimpleNamespace(build_and_load=lambda: tvm_ffi.load_module(str(found[0])))
    setattr(core, "gen_cutlass_fused_moe_sm90_module", lambda *_: built)  # noqa: B010, typed otherwise there
