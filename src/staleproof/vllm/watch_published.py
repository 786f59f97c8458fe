"""Which requests hit blocks of the prefix cache that nobody wrote, in a live vLLM.

In the process of the scheduler and on the host only: :class:`staleproof.evidence.PublishedBlocks` is
told what vLLM's block pool publishes, and looks after each ``schedule`` at what the plan really computes.
"""

from __future__ import annotations

from typing import Any

from staleproof.evidence.published import PublishedBlocks, UnwrittenHit
from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target, logger
from staleproof.vllm.patches.published_unwritten import SCHEDULER, unknown, unknown_hash
from staleproof.vllm.standing import registry
from staleproof.vllm.watch import OWNER

POOL = "vllm.v1.core.block_pool"
FULL = ("self", "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size")


class Published:
    """The hooks of one process.

    Attributes:
        blocks: the detector.
        first: the first unwritten hit, which is logged.
    """

    def __init__(self) -> None:
        self.blocks = PublishedBlocks()
        self.first: UnwrittenHit | None = None
        # The scheduler that was looked at, and whether anything is unknown: then nothing is watched.
        self._scheduler: Any = None
        self._left_alone = False

    def _leave(self, why: str | None) -> bool:
        if why is not None and not self._left_alone:
            self._left_alone = True
            logger.warning("staleproof: watch stage published: %s; it is left alone", why)
        return self._left_alone

    def publish(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``BlockPool.cache_full_blocks``."""
        request, blocks, first, last, size = (argument(args, kwargs, i, FULL[i]) for i in range(1, 6))
        name, computed = request.request_id, request.num_computed_tokens
        new = blocks[first:last]
        for end, block in enumerate(() if self._leave(unknown_hash(new)) else new, first + 1):
            if block.block_hash is not None and not block.is_null:
                self.blocks.publish(block.block_id, block.block_hash, name, end * size, computed)
        return result

    def scheduled(self, result: Any, args: Arguments, kwargs: Keywords) -> Any:
        """After ``Scheduler.schedule``."""
        engine = args[0]
        if self._scheduler is not engine:
            self._scheduler = engine
            self._leave(unknown(engine))
        if self._left_alone:
            return result
        requests = engine.requests
        owners = self.blocks.owners
        if owners:
            pool = engine.kv_cache_manager.block_pool.blocks
            computed = {name: requests[name].num_computed_tokens for name in owners if name in requests}
            self.blocks.plan(computed, lambda block: pool[block].block_hash)
        if self.blocks:
            fresh = [new.req_id for new in result.scheduled_new_reqs]
            for name in (*fresh, *result.scheduled_cached_reqs.resumed_req_ids):
                start = requests[name].num_computed_tokens - result.num_scheduled_tokens[name]
                self._read(engine, name, start)
        return result

    def _read(self, engine: Any, name: str, start: int) -> None:
        for of_type in engine.kv_cache_manager.coordinator.single_type_managers:
            blocks = of_type.req_to_blocks[name][: -(-start // of_type.block_size)]
            for hit in self.blocks.read(name, [(block.block_id, block.block_hash) for block in blocks]):
                if self.first is None:
                    self.first = hit
                    logger.warning("staleproof: first unwritten hit of the prefix cache: %s", hit)

    def targets(self) -> list[Target]:
        """The two functions that are watched; their counts are read where the server is asked."""
        registry.of(OWNER).counters |= {
            "published_unwritten_blocks": lambda: self.blocks.published,
            "unwritten_hits": lambda: self.blocks.hits,
        }
        return [
            Target(POOL, "BlockPool.cache_full_blocks", FULL, after=self.publish),
            Target(SCHEDULER, "Scheduler.schedule", ("self",), after=self.scheduled),
        ]
